//! Refunds.

use semel_payments::problem::{REFUND_EXCEEDS_PAYMENT, REFUND_FAILED};
use serde_json::{Value, json};

use super::operation::Operation;
use super::parts::{amount, currency, id, page, schema};
use crate::problem::Kind;
use crate::refunds::{ALL_REFUNDS, REFUND, REFUNDS};

const TAG: &str = "refunds";

/// Returns their operations and schemas.
pub(super) fn describe() -> (Vec<Operation>, Value) {
    let summary = "Gives money of a payment back; several times, up to its amount.";
    let create = Operation::keyed(REFUNDS, "createRefund", summary, "CreateRefund", example())
        .tag(TAG)
        .takes_id()
        .fails(&[Kind::PaymentInProgress, Kind::NeedsAttention])
        .ends(&[REFUND_EXCEEDS_PAYMENT, REFUND_FAILED])
        .succeeds(201, "It is given back.", &schema("Refund"))
        .leads_to(json!({
            "refund": { "operationId": "getRefund", "parameters": { "id": "$response.body#/id" } },
        }));
    let list = Operation::get(REFUNDS, "listRefunds", "Lists the refunds of a payment, the newest first.")
        .tag(TAG)
        .takes_id()
        .takes("Limit")
        .takes("Cursor")
        .succeeds(200, "A page of them.", &schema("RefundPage"));
    let all = Operation::get(
        ALL_REFUNDS,
        "listAllRefunds",
        "Lists your refunds of all payments, the newest first.",
    )
    .tag(TAG)
    .takes("Limit")
    .takes("Cursor")
    .succeeds(200, "A page of them.", &schema("RefundPage"));
    let find = Operation::get(REFUND, "getRefund", "Returns one of your refunds.")
        .tag(TAG)
        .takes_id()
        .succeeds(200, "The refund.", &schema("Refund"));
    (vec![create, list, all, find], schemas())
}

pub(super) fn example() -> Value {
    json!({ "amount": 250 })
}

fn schemas() -> Value {
    json!({
        "CreateRefund": {
            "type": "object",
            "additionalProperties": false,
            "required": ["amount"],
            "properties": { "amount": amount() },
        },
        "Refund": {
            "type": "object",
            "additionalProperties": false,
            "required": ["id", "payment_id", "status", "amount", "currency"],
            "properties": {
                "id": id(),
                "payment_id": id(),
                "status": { "enum": ["processing", "succeeded", "failed", "refused"] },
                "amount": amount(),
                "currency": currency(),
                "failure_code": { "type": "string", "description": "Why it failed; absent otherwise." },
            },
        },
        "RefundPage": page("refunds", "Refund"),
    })
}
