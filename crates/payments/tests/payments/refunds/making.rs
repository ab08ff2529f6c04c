//! One refund per key, never more than the payment, and what each repeat is answered.

use semel_core::idempotency::Request;
use semel_core::idempotency::engine::{self, Answer, Hindrance};
use semel_payments::page::Page;
use semel_payments::provider::Answer as Said;
use semel_payments::refunds::{self, CreateRefund};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{made_by, open, refund_of, scope, seen, succeeded};
use crate::bed::{Bed, RETENTION, expect_fresh, expect_unknown, request, with_bed};
use crate::provider::{Call, unknown};

const REFUSED: &str = "SELECT count(*) FROM refunds WHERE status = 'refused'";

/// Checks that a refusal is stored and replayed, byte for byte.
async fn expect_refused(bed: &Bed, key: &str, payment: Uuid, amount: i64) {
    let first = request();
    let stored = expect_fresh(bed.refund_as(key, payment, amount, &first).await, 409);
    let problem: Value = serde_json::from_slice(&stored.body).unwrap();
    let id = made_by(bed, key);
    assert_eq!(problem["type"], "/errors/refund-exceeds-payment");
    assert_eq!(
        problem["refund"],
        json!({ "id": id, "payment_id": payment, "status": "refused", "amount": amount, "currency": "EUR" })
    );
    assert!(stored.headers.contains(&("location".to_owned(), format!("/v1/refunds/{id}"))));
    let Answer::Replayed { response, original_request, .. } = bed.refund(key, payment, amount).await else {
        panic!("not stored")
    };
    assert_eq!((response, original_request), (stored, first.id));
}

#[tokio::test]
async fn a_refund_is_one_row_one_event_of_its_payment_and_one_completed_key() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request = Request { id: Uuid::new_v4(), trace_context: Some(trace.to_owned()) };
        let response = expect_fresh(bed.refund_as("r", payment, 500, &request).await, 201);
        let made = refund_of(&response);
        assert_eq!((made.status.as_str(), made.amount, made.payment_id), ("succeeded", 500, payment));
        assert_eq!((made.id, made.currency.as_str()), (made_by(&bed, "r"), "EUR"));
        assert!(response.headers.contains(&("location".to_owned(), format!("/v1/refunds/{}", made.id))));
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
        assert_eq!((bed.provider.calls(), bed.provider.given()), (vec![Call::Charge, Call::Refund], 500));
        let [(charge_key, _)] = bed.provider.sent().try_into().unwrap();
        let [(key, sent)] = bed.provider.refunds().try_into().unwrap();
        assert_eq!(sent, format!("{charge_key} ch_{charge_key} 500").into_bytes());
        assert_ne!(key, charge_key);

        let (event_id, aggregate, payload, headers): (Uuid, String, Value, Value) = sqlx::query_as(
            "SELECT event_id, aggregate_type || ' ' || aggregate_id || ' ' || aggregate_version || ' ' || event_type,
                    payload, headers FROM outbox ORDER BY id DESC LIMIT 1",
        )
        .fetch_one(&bed.pool)
        .await
        .unwrap();
        assert_eq!(aggregate, format!("payment {payment} 2 PaymentRefunded"));
        assert_eq!(headers, json!({ "traceparent": trace }));
        assert_eq!(
            payload,
            json!({
                "event_id": event_id, "refund_id": made.id, "payment_id": payment, "client_id": "acme",
                "amount": 500, "currency": "EUR",
            })
        );
        let kept: (Value, Option<Vec<u8>>) =
            sqlx::query_as("SELECT command, provider_request FROM idempotency_keys WHERE key = 'r'")
                .fetch_one(&bed.pool)
                .await
                .unwrap();
        assert_eq!(kept, (json!({ "payment_id": payment, "amount": 500 }), None));
    })
    .await;
}

#[tokio::test]
async fn a_refund_is_found_by_its_client_alone() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let mut made = Vec::new();
        for key in ["1", "2", "3"] {
            made.push(refund_of(&expect_fresh(bed.refund(key, payment, 100).await, 201)));
        }
        let (acme, other) = (scope("r").client, "other".parse().unwrap());
        assert_eq!(refunds::find(&bed.pool, &acme, made[0].id).await.unwrap(), Some(made[0].clone()));
        assert_eq!(refunds::find(&bed.pool, &other, made[0].id).await.unwrap(), None);

        let page = Page { limit: 2, after: None };
        let (first, next) = refunds::list(&bed.pool, &acme, payment, page).await.unwrap();
        assert_eq!(first, [made[2].clone(), made[1].clone()]);
        let (second, end) =
            refunds::list(&bed.pool, &acme, payment, Page { limit: 2, after: next }).await.unwrap();
        assert_eq!((second, end), (vec![made[0].clone()], None));
        assert_eq!(refunds::list(&bed.pool, &other, payment, page).await.unwrap().0, []);
    })
    .await;
}

#[tokio::test]
async fn a_repeat_is_answered_with_the_same_bytes_and_gives_nothing_back() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let first = request();
        let stored = expect_fresh(bed.refund_as("r", payment, 500, &first).await, 201);
        for _ in 0..2 {
            let Answer::Replayed { response, original_request, .. } = bed.refund("r", payment, 500).await
            else {
                panic!()
            };
            assert_eq!((response, original_request), (stored.clone(), first.id));
        }
        assert_eq!((bed.provider.given(), bed.seen_refund("r").await.taken), (500, 500));
    })
    .await;
}

#[tokio::test]
async fn several_refunds_use_a_payment_up_and_what_is_not_left_is_refused_for_good() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        expect_refused(&bed, "too-much", payment, 1251).await;
        expect_fresh(bed.refund("r1", payment, 500).await, 201);
        expect_refused(&bed, "still-too-much", payment, 751).await;
        expect_fresh(bed.refund("r2", payment, 750).await, 201);
        expect_refused(&bed, "nothing-left", payment, 1).await;
        assert_eq!(bed.seen_refund("nothing-left").await, seen("refused", "completed completed", &[], 1250));
        assert_eq!((bed.provider.given(), bed.count(REFUSED).await), (1250, 3));
        let expected = [(1, "PaymentCreated"), (2, "PaymentRefunded"), (3, "PaymentRefunded")]
            .map(|(version, kind)| (version, kind.to_owned()));
        assert_eq!(bed.events_of(payment).await, expected);
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_never_refunds_again_whatever_came_of_it() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        expect_fresh(bed.refund("made", payment, 500).await, 201);
        expect_fresh(bed.refund("refused", payment, 1000).await, 409);
        for gone in [
            "UPDATE idempotency_keys SET completed_at = now() - INTERVAL '2 days', expires_at = now() - INTERVAL '1 day'",
            "DELETE FROM idempotency_keys",
        ] {
            bed.execute(gone).await;
            for (key, amount) in [("made", 500), ("refused", 1000)] {
                let answer = bed.refund(key, payment, amount).await;
                let made = made_by(&bed, key);
                assert!(matches!(answer, Answer::Expired { resource_id } if resource_id == made), "{answer:?}");
            }
        }
        assert_eq!(bed.provider.given(), 500);
    })
    .await;
}

#[tokio::test]
async fn of_a_payment_that_moved_no_money_nothing_is_left() {
    with_bed(async |bed: Bed| {
        bed.provider.say(Call::Charge, Said::Declined { reference: None, code: "card_declined".to_owned() });
        expect_fresh(bed.pay("declined").await, 402);
        bed.provider.say(Call::Charge, Said::Fenced);
        expect_fresh(bed.pay("canceled").await, 424);
        for key in ["declined", "canceled"] {
            expect_refused(&bed, key, crate::bed::made_by(&bed, key), 1).await;
        }
        assert!(bed.provider.refunds().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_payment_without_an_outcome_is_waited_for_and_nothing_is_stored_meanwhile() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        let (payment, before) = (crate::bed::made_by(&bed, "k"), bed.rows().await);
        // Even what is more than it could ever be: what is stored is final, and it may still be canceled.
        for amount in [500, 2000] {
            let answer = bed.refund("r", payment, amount).await;
            assert!(matches!(answer, Answer::Hindered(Hindrance::Passing { .. })), "{answer:?}");
        }
        assert_eq!((bed.rows().await, bed.count("SELECT count(*) FROM refunds").await), (before, 0));
        expect_fresh(bed.pay("k").await, 201);
        expect_fresh(bed.refund("r", payment, 500).await, 201);
    })
    .await;
}

#[tokio::test]
async fn a_payment_of_nobody_or_of_another_client_is_not_there_and_nothing_is_stored() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let before = bed.rows().await;
        let answer = bed.refund("r", Uuid::new_v4(), 500).await;
        assert!(matches!(answer, Answer::Hindered(Hindrance::Missing)), "{answer:?}");
        let other = semel_core::idempotency::Scope { client: "other".parse().unwrap(), ..scope("r") };
        let command = CreateRefund { payment_id: payment, amount: 500 };
        let answer = engine::run(&bed.pool, &bed.refunds(), &other, &command, &request(), RETENTION).await;
        assert!(matches!(answer, Ok(Answer::Hindered(Hindrance::Missing))), "{answer:?}");
        assert_eq!((bed.rows().await, bed.count("SELECT count(*) FROM refunds").await), (before, 0));
        expect_fresh(bed.refund("r", payment, 500).await, 201);
    })
    .await;
}

#[tokio::test]
async fn another_payment_or_amount_under_the_key_is_another_intent() {
    with_bed(async |bed: Bed| {
        let (payment, another) = (bed.paid("p").await, bed.paid("q").await);
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert!(matches!(bed.refund("r", payment, 501).await, Answer::Mismatch));
        assert!(matches!(bed.refund("r", another, 500).await, Answer::Mismatch));
        assert!(matches!(bed.refund("r", Uuid::new_v4(), 500).await, Answer::Mismatch));
        assert_eq!(bed.provider.given(), 500);
    })
    .await;
}

#[tokio::test]
async fn a_refund_that_the_provider_fails_to_make_is_final_and_gives_its_amount_back() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let reference = Some("re_no".to_owned());
        bed.provider.say(Call::Refund, Said::Declined { reference, code: "account_closed".to_owned() });
        let stored = expect_fresh(bed.refund("r", payment, 1250).await, 402);
        let problem: Value = serde_json::from_slice(&stored.body).unwrap();
        assert_eq!(problem["type"], "/errors/refund-failed");
        assert_eq!(problem["refund"]["failure_code"], "account_closed");
        let expected = seen("failed", "completed completed", &["refund declined"], 0);
        assert_eq!(bed.seen_refund("r").await, expected);
        let Answer::Replayed { response, .. } = bed.refund("r", payment, 1250).await else { panic!() };
        assert_eq!(response, stored);

        expect_fresh(bed.refund("again", payment, 1250).await, 201);
        let expected = [(1, "PaymentCreated"), (2, "PaymentRefundFailed"), (3, "PaymentRefunded")]
            .map(|(version, kind)| (version, kind.to_owned()));
        assert_eq!(bed.events_of(payment).await, expected);
    })
    .await;
}

#[tokio::test]
async fn nothing_is_begun_while_the_provider_is_spared_and_what_is_known_is_answered() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        bed.provider.close();
        assert!(matches!(bed.refund("other", payment, 500).await, Answer::Unavailable));
        assert!(matches!(bed.refund("r", payment, 500).await, Answer::Replayed { .. }));
        assert_eq!(bed.seen_refund("r").await.taken, 500);
    })
    .await;
}

#[tokio::test]
async fn a_database_that_lost_its_tail_asks_for_the_same_refund_under_the_same_key() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let first = refund_of(&expect_fresh(bed.refund("r", payment, 500).await, 201));
        let event = "SELECT event_id FROM outbox ORDER BY id DESC LIMIT 1";
        let told: Uuid = sqlx::query_scalar(event).fetch_one(&bed.pool).await.unwrap();
        bed.execute("DELETE FROM idempotency_keys WHERE key = 'r'").await;
        bed.execute("DELETE FROM refunds").await;
        bed.execute("DELETE FROM provider_answers WHERE refund_id IS NOT NULL").await;
        bed.execute("DELETE FROM outbox WHERE event_type = 'PaymentRefunded'").await;
        bed.execute("UPDATE payments SET refund_reserved = 0, version = 1").await;

        assert_eq!(refund_of(&expect_fresh(bed.refund("r", payment, 500).await, 201)), first);
        let [once, again] = bed.provider.refunds().try_into().unwrap();
        assert_eq!((once, bed.provider.given()), (again, 500));
        let told_again: Uuid = sqlx::query_scalar(event).fetch_one(&bed.pool).await.unwrap();
        assert_eq!(told_again, told);
    })
    .await;
}

#[tokio::test]
async fn what_is_open_counts_as_taken() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        bed.provider.say(Call::Refund, unknown("the answer was lost"));
        expect_unknown(&bed.refund("r", payment, 1000).await);
        assert_eq!(bed.seen_refund("r").await, open(1000));
        expect_refused(&bed, "other", payment, 251).await;
        expect_fresh(bed.refund("rest", payment, 250).await, 201);
        expect_fresh(bed.refund("r", payment, 1000).await, 201);
        assert_eq!(bed.provider.given(), 1250);
    })
    .await;
}
