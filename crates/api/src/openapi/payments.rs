//! Payments.

use semel_payments::problem::{PAYMENT_DECLINED, PAYMENT_ROLLED_BACK};
use serde_json::{Value, json};

use super::operation::Operation;
use super::parts::{amount, currency, id, page, reference, schema};
use crate::payments::{PAYMENT, PAYMENTS};
use crate::problem::Kind;

const TAG: &str = "payments";

/// Returns their operations and schemas.
pub(super) fn describe() -> (Vec<Operation>, Value) {
    let create = Operation::keyed(PAYMENTS, "createPayment", "Makes a payment.", "CreatePayment", example())
        .tag(TAG)
        .fails(&[Kind::NeedsAttention])
        .ends(&[PAYMENT_DECLINED, PAYMENT_ROLLED_BACK])
        .succeeds(201, "It is made.", &schema("Payment"))
        .leads_to(json!({
            "payment": { "operationId": "getPayment", "parameters": { "id": "$response.body#/id" } },
            "key": {
                "operationId": "getIdempotencyKey",
                "parameters": {
                    "operation": "payments.create",
                    "header.Idempotency-Key": "$request.header.Idempotency-Key",
                },
            },
        }));
    let list = Operation::get(PAYMENTS, "listPayments", "Lists your payments, the newest first.")
        .tag(TAG)
        .takes("Limit")
        .takes("Cursor")
        .succeeds(200, "A page of them.", &schema("PaymentPage"));
    let find = Operation::get(PAYMENT, "getPayment", "Returns one of your payments.")
        .tag(TAG)
        .takes_id()
        .succeeds(200, "The payment.", &schema("Payment"));
    (vec![create, list, find], schemas())
}

pub(super) fn example() -> Value {
    json!({ "reference": "A-1", "amount": 1250, "currency": "EUR", "source": "tok_visa" })
}

fn schemas() -> Value {
    json!({
        "CreatePayment": {
            "type": "object",
            "additionalProperties": false,
            "required": ["reference", "amount", "currency", "source"],
            "properties": {
                "reference": reference(),
                "amount": amount(),
                "currency": currency(),
                "source": {
                    "type": "string",
                    "pattern": "^[!-~]{1,255}$",
                    "description": "The provider's token of what to charge; never a card number, which is refused.",
                },
            },
        },
        "Payment": {
            "type": "object",
            "additionalProperties": false,
            "required": ["id", "status", "reference", "amount", "currency"],
            "properties": {
                "id": id(),
                "status": { "enum": ["processing", "succeeded", "declined", "canceled"] },
                "reference": reference(),
                "amount": amount(),
                "currency": currency(),
                "decline_code": { "type": "string", "description": "Why it was declined; absent otherwise." },
            },
        },
        "PaymentPage": page("payments", "Payment"),
    })
}
