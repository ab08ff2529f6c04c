//! How a key stands.

use semel_core::idempotency::Command as _;
use semel_payments::orders::CreateOrder;
use semel_payments::payments::CreatePayment;
use semel_payments::refunds::CreateRefund;
use serde_json::{Value, json};

use super::Payments;
use super::operation::Operation;
use super::parts::{id, schema};
use crate::keys::KEYS;
use crate::problem::Kind;

/// Returns their operation and schema.
pub(super) fn describe(payments: Payments) -> (Vec<Operation>, Value) {
    let mut operations = vec![CreateOrder::OPERATION];
    if payments == Payments::Made {
        operations.extend([CreatePayment::OPERATION, CreateRefund::OPERATION]);
    }
    let find = Operation::get(
        KEYS,
        "getIdempotencyKey",
        "Tells how a key of yours stands, for whoever lost the request and has the key.",
    )
    .tag("idempotency keys")
    .takes_one_of("operation", "The operation that the key was used for.", &operations)
    .takes("IdempotencyKey")
    .fails(&[Kind::KeyMissing, Kind::KeyInvalid])
    .succeeds(200, "How it stands.", &schema("IdempotencyKey"));
    let key = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["operation", "state", "resource_id", "location"],
        "properties": {
            "operation": { "enum": operations },
            "state": { "enum": ["in_progress", "needs_attention", "completed", "expired"] },
            "resource_id": id(),
            "location": { "type": "string", "description": "Path of the resource." },
            "request_id": id(),
            "status": { "type": "integer", "minimum": 200, "maximum": 499, "description": "Of the stored answer." },
            "expires_at": { "type": "string", "format": "date-time", "description": "Until when that is replayed." },
        },
    });
    (vec![find], json!({ "IdempotencyKey": key }))
}
