//! Orders.

use serde_json::{Value, json};

use super::operation::Operation;
use super::parts::{amount, currency, id, page, reference, schema};
use crate::orders::{ORDER, ORDERS};

const TAG: &str = "orders";

/// Returns their operations and schemas.
pub(super) fn describe() -> (Vec<Operation>, Value) {
    let create = Operation::keyed(ORDERS, "createOrder", "Places an order.", "CreateOrder", example())
        .tag(TAG)
        .succeeds(201, "It is placed.", &schema("Order"))
        .leads_to(json!({
            "order": { "operationId": "getOrder", "parameters": { "id": "$response.body#/id" } },
            "key": {
                "operationId": "getIdempotencyKey",
                "parameters": {
                    "operation": "orders.create",
                    "header.Idempotency-Key": "$request.header.Idempotency-Key",
                },
            },
        }));
    let list = Operation::get(ORDERS, "listOrders", "Lists your orders, the newest first.")
        .tag(TAG)
        .takes("Limit")
        .takes("Cursor")
        .succeeds(200, "A page of them.", &schema("OrderPage"));
    let find = Operation::get(ORDER, "getOrder", "Returns one of your orders.").tag(TAG).takes_id().succeeds(
        200,
        "The order.",
        &schema("Order"),
    );
    (vec![create, list, find], schemas())
}

pub(super) fn example() -> Value {
    json!({ "reference": "A-1", "amount": 1250, "currency": "EUR" })
}

fn schemas() -> Value {
    json!({
        "CreateOrder": {
            "type": "object",
            "additionalProperties": false,
            "required": ["reference", "amount", "currency"],
            "properties": { "reference": reference(), "amount": amount(), "currency": currency() },
        },
        "Order": {
            "type": "object",
            "additionalProperties": false,
            "required": ["id", "status", "reference", "amount", "currency"],
            "properties": {
                "id": id(),
                "status": { "enum": ["placed"] },
                "reference": reference(),
                "amount": amount(),
                "currency": currency(),
            },
        },
        "OrderPage": page("orders", "Order"),
    })
}
