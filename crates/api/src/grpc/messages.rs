//! What is answered over HTTP, as messages.

use prost_types::Timestamp;
use semel_payments::{orders, payments, refunds};
use semel_proto::payments::v1;
use time::OffsetDateTime;

use crate::keys::Told;

pub(crate) fn order(order: orders::Order) -> v1::Order {
    let orders::Order { id, status, reference, amount, currency } = order;
    let status = v1::order::Status::from_str_name(&named("STATUS", &status)).unwrap_or_default();
    v1::Order { id: id.to_string(), status: status.into(), reference, amount, currency }
}

pub(crate) fn payment(payment: payments::Payment) -> v1::Payment {
    let payments::Payment { id, status, reference, amount, currency, decline_code } = payment;
    let status = v1::payment::Status::from_str_name(&named("STATUS", &status)).unwrap_or_default();
    v1::Payment { id: id.to_string(), status: status.into(), reference, amount, currency, decline_code }
}

pub(crate) fn refund(refund: refunds::Refund) -> v1::Refund {
    let refunds::Refund { id, payment_id, status, amount, currency, failure_code } = refund;
    let status = v1::refund::Status::from_str_name(&named("STATUS", &status)).unwrap_or_default();
    v1::Refund {
        id: id.to_string(),
        payment_id: payment_id.to_string(),
        status: status.into(),
        amount,
        currency,
        failure_code,
    }
}

pub(crate) fn key(told: &Told) -> v1::IdempotencyKey {
    let state = v1::idempotency_key::State::from_str_name(&named("STATE", told.state)).unwrap_or_default();
    v1::IdempotencyKey {
        operation: told.operation.to_owned(),
        state: state.into(),
        resource_id: told.resource_id.to_string(),
        request_id: told.request_id.map(|id| id.to_string()),
        http_status: told.status.map(u32::from),
        expires_at: told.expires_at.map(timestamp),
    }
}

/// `placed` as the interface names it, `STATUS_PLACED`.
fn named(prefix: &str, name: &str) -> String {
    format!("{prefix}_{}", name.to_ascii_uppercase())
}

fn timestamp(instant: OffsetDateTime) -> Timestamp {
    // Below a second, and so within 32 bits.
    let nanos = i32::try_from(instant.nanosecond()).unwrap_or_default();
    Timestamp { seconds: instant.unix_timestamp(), nanos }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn every_way_a_resource_stands_has_its_number() {
        let order_of = |status: &str| {
            let order = orders::Order {
                id: Uuid::nil(),
                status: status.to_owned(),
                reference: "r".to_owned(),
                amount: 1,
                currency: "EUR".to_owned(),
            };
            super::order(order).status()
        };
        assert_eq!(order_of("placed"), v1::order::Status::Placed);
        assert_eq!(order_of("newer"), v1::order::Status::Unspecified);
        for (status, number) in [
            ("processing", v1::payment::Status::Processing),
            ("succeeded", v1::payment::Status::Succeeded),
            ("declined", v1::payment::Status::Declined),
            ("canceled", v1::payment::Status::Canceled),
        ] {
            let payment = payments::Payment {
                id: Uuid::nil(),
                status: status.to_owned(),
                reference: "r".to_owned(),
                amount: 1,
                currency: "EUR".to_owned(),
                decline_code: None,
            };
            assert_eq!(super::payment(payment).status(), number, "{status}");
        }
        for (status, number) in [
            ("processing", v1::refund::Status::Processing),
            ("succeeded", v1::refund::Status::Succeeded),
            ("failed", v1::refund::Status::Failed),
            ("refused", v1::refund::Status::Refused),
        ] {
            let refund = refunds::Refund {
                id: Uuid::nil(),
                payment_id: Uuid::nil(),
                status: status.to_owned(),
                amount: 1,
                currency: "EUR".to_owned(),
                failure_code: None,
            };
            assert_eq!(super::refund(refund).status(), number, "{status}");
        }
    }
}
