//! One charge per key, and what each repeat is answered.

use std::num::NonZeroU32;
use std::sync::Arc;

use semel_core::idempotency::Request;
use semel_core::idempotency::admission::Admission;
use semel_core::idempotency::engine::{self, Answer, Terms};
use semel_core::idempotency::store;
use semel_payments::payments::{self, CreatePayment};
use semel_payments::provider::Answer as Said;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::bed::{
    Bed, RETENTION, body, expect_fresh, made_by, payment, pending, request, scope, seen, succeeded, with_bed,
};
use crate::provider::Call;

#[tokio::test]
async fn a_payment_is_one_charge_one_event_and_one_completed_key() {
    with_bed(async |bed: Bed| {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request = Request { id: Uuid::new_v4(), trace_context: Some(trace.to_owned()) };
        let response = expect_fresh(bed.ask("k", &payment(), &request).await, 201);
        let made = body(&response);
        assert_eq!((made.status.as_str(), made.amount, made.id), ("succeeded", 1250, made_by(&bed, "k")));
        assert!(response.headers.contains(&("location".to_owned(), format!("/v1/payments/{}", made.id))));
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
        assert_eq!((bed.provider.calls(), bed.provider.moved()), (vec![Call::Charge], 1));

        let acme = scope("k").client;
        assert_eq!(payments::find(&bed.pool, &acme, made.id).await.unwrap(), Some(made.clone()));
        assert_eq!(payments::find(&bed.pool, &"other".parse().unwrap(), made.id).await.unwrap(), None);

        let (event_id, aggregate, payload, headers): (Uuid, String, Value, Value) = sqlx::query_as(
            "SELECT event_id, aggregate_type || ' ' || aggregate_id || ' ' || aggregate_version || ' ' || event_type,
                    payload, headers FROM outbox",
        )
        .fetch_one(&bed.pool)
        .await
        .unwrap();
        assert_eq!(aggregate, format!("payment {} 1 PaymentCreated", made.id));
        assert_eq!(headers, json!({ "traceparent": trace }));
        assert_eq!(
            payload,
            json!({
                "event_id": event_id, "payment_id": made.id, "client_id": "acme",
                "reference": "A-1", "amount": 1250, "currency": "EUR",
            })
        );
    })
    .await;
}

#[tokio::test]
async fn what_is_secret_goes_with_the_outcome() {
    with_bed(async |bed: Bed| {
        let stored = async |bed: &Bed| -> (Value, Option<Vec<u8>>, Option<String>) {
            sqlx::query_as("SELECT command, provider_request, provider_reference FROM idempotency_keys")
                .fetch_one(&bed.pool)
                .await
                .unwrap()
        };
        bed.begin_unknown().await;
        let (command, provider_request, _) = stored(&bed).await;
        assert_eq!(command["source"], "tok_visa");
        let [(key, sent)] = bed.provider.sent().try_into().unwrap();
        assert_eq!(provider_request, Some(sent));

        expect_fresh(bed.pay("k").await, 201);
        let (command, provider_request, provider_reference) = stored(&bed).await;
        assert_eq!(command, json!({ "reference": "A-1", "amount": 1250, "currency": "EUR" }));
        assert_eq!((provider_request, provider_reference), (None, Some(format!("ch_{key}"))));
    })
    .await;
}

#[tokio::test]
async fn a_repeat_is_answered_with_the_same_bytes_and_charges_nothing() {
    with_bed(async |bed: Bed| {
        let first = request();
        let Answer::Fresh { response, expires_at } = bed.ask("k", &payment(), &first).await else { panic!() };
        for _ in 0..2 {
            let Answer::Replayed { response: again, expires_at: same, original_request } = bed.pay("k").await
            else {
                panic!()
            };
            assert_eq!((again, same, original_request), (response.clone(), expires_at, first.id));
        }
        assert_eq!((bed.provider.calls().len(), bed.rows().await), (1, (1, 1, 1, 1)));
    })
    .await;
}

#[tokio::test]
async fn a_decline_is_final_and_replayed() {
    with_bed(async |bed: Bed| {
        let declined =
            Said::Declined { reference: Some("ch_no".to_owned()), code: "card_declined".to_owned() };
        bed.provider.say(Call::Charge, declined);
        let response = expect_fresh(bed.pay("k").await, 402);
        let problem: Value = serde_json::from_slice(&response.body).unwrap();
        assert_eq!(problem["type"], "/errors/payment-declined");
        assert_eq!(problem["payment"]["decline_code"], "card_declined");
        assert_eq!(problem["payment"]["id"], made_by(&bed, "k").to_string());
        let again = bed.pay("k").await;
        assert!(matches!(&again, Answer::Replayed { response: same, .. } if *same == response), "{again:?}");
        assert_eq!(bed.provider.calls(), [Call::Charge]);
        assert_eq!(
            bed.seen("k").await,
            seen("declined 1", "completed completed", &["PaymentDeclined"], &["charge declined"])
        );
        let code: String = sqlx::query_scalar("SELECT payload->>'decline_code' FROM outbox")
            .fetch_one(&bed.pool)
            .await
            .unwrap();
        assert_eq!(code, "card_declined");
    })
    .await;
}

#[tokio::test]
async fn of_many_requests_with_one_key_one_charges() {
    with_bed(async |bed: Bed| {
        let barrier = Arc::new(Barrier::new(64));
        let requests: Vec<_> = (0..64)
            .map(|_| {
                let (bed, barrier) = (bed.clone(), Arc::clone(&barrier));
                tokio::spawn(async move {
                    barrier.wait().await;
                    bed.pay("k").await
                })
            })
            .collect();
        let (mut fresh, mut replayed) = (Vec::new(), Vec::new());
        for request in requests {
            match request.await.unwrap() {
                Answer::Fresh { response, .. } => fresh.push(response),
                Answer::Replayed { response, .. } => replayed.push(response),
                Answer::InProgress { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(fresh.len(), 1);
        assert!(replayed.iter().all(|response| *response == fresh[0]), "{replayed:?}");
        assert_eq!((bed.provider.calls().len(), bed.provider.moved()), (1, 1));
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn another_intent_under_the_key_charges_nothing_whether_the_first_is_done_or_not() {
    with_bed(async |bed: Bed| {
        let others: [fn(&mut CreatePayment); 4] = [
            |p| p.amount = 1251,
            |p| p.source = "tok_other".to_owned(),
            |p| p.reference = "A-2".to_owned(),
            |p| p.currency = "USD".to_owned(),
        ];
        bed.begin_unknown().await;
        for done in [false, true] {
            for change in others {
                let mut other = payment();
                change(&mut other);
                let answer = bed.ask("k", &other, &request()).await;
                assert!(matches!(answer, Answer::Mismatch), "{done} {answer:?}");
            }
            if !done {
                assert_eq!(bed.provider.calls(), [Call::Charge]);
                expect_fresh(bed.pay("k").await, 201);
            }
        }
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Charge]);
    })
    .await;
}

#[tokio::test]
async fn what_looks_like_a_card_number_leaves_nothing_behind() {
    with_bed(async |bed: Bed| {
        let card = CreatePayment { source: "4242424242424242".to_owned(), ..payment() };
        let answer = bed.ask("k", &card, &request()).await;
        assert!(matches!(&answer, Answer::Invalid(invalid) if invalid.field == "source"), "{answer:?}");
        assert_eq!((bed.rows().await, bed.provider.calls()), ((0, 0, 0, 0), vec![]));
    })
    .await;
}

#[tokio::test]
async fn nothing_is_begun_while_the_provider_is_away_and_what_is_known_is_answered() {
    with_bed(async |bed: Bed| {
        let response = expect_fresh(bed.pay("known").await, 201);
        bed.provider.close();
        assert!(matches!(bed.pay("k").await, Answer::Unavailable));
        assert_eq!(bed.rows().await, (1, 1, 1, 1));
        let again = bed.pay("known").await;
        assert!(matches!(again, Answer::Replayed { response: same, .. } if same == response));
    })
    .await;
}

#[tokio::test]
async fn another_clients_key_is_another_payment() {
    with_bed(async |bed: Bed| {
        let other = semel_core::idempotency::Scope { client: "other".parse().unwrap(), ..scope("k") };
        let own = body(&expect_fresh(bed.pay("k").await, 201));
        let answer = engine::run(&bed.pool, &bed.operation(), &other, &payment(), &request(), RETENTION)
            .await
            .unwrap();
        let foreign = body(&expect_fresh(answer, 201));
        assert_ne!(own.id, foreign.id);
        let [(first, _), (second, _)] = bed.provider.sent().try_into().unwrap();
        assert_ne!(first, second, "the provider must not take one for the other");
        assert_eq!(bed.provider.moved(), 2);
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_never_charges_again_whether_its_row_is_there_or_not() {
    with_bed(async |bed: Bed| {
        bed.pay("k").await;
        bed.execute(
            "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '25 hours',
                                         expires_at = clock_timestamp() - INTERVAL '1 hour'",
        )
        .await;
        for keys in [1, 0] {
            let answer = bed.pay("k").await;
            assert!(
                matches!(answer, Answer::Expired { resource_id } if resource_id == made_by(&bed, "k")),
                "{answer:?}"
            );
            assert_eq!((bed.rows().await, bed.provider.calls().len()), ((1, 1, keys, 1), 1));
            store::reap_expired(&mut bed.pool.acquire().await.unwrap(), 10).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_database_that_lost_the_payment_asks_for_the_same_charge_and_tells_the_same_event() {
    with_bed(async |bed: Bed| {
        let event = async |bed: &Bed| -> (Uuid, Value) {
            sqlx::query_as("SELECT event_id, payload FROM outbox").fetch_one(&bed.pool).await.unwrap()
        };
        let first = expect_fresh(bed.pay("k").await, 201);
        let told = event(&bed).await;
        bed.execute("TRUNCATE idempotency_keys, payments, refunds, outbox, provider_answers").await;
        // Serial numbers are issued again after a restore.
        bed.execute("ALTER SEQUENCE idempotency_fence RESTART WITH 1000").await;
        assert_eq!(expect_fresh(bed.pay("k").await, 201), first);
        assert_eq!(event(&bed).await, told);
        let [before, after] = bed.provider.sent().try_into().unwrap();
        assert_eq!((before, bed.provider.moved()), (after, 1));
    })
    .await;
}

#[tokio::test]
async fn nothing_is_held_while_the_provider_is_asked() {
    with_bed(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Charge);
        let paying = bed.start_paying("k");
        hold.reached().await;
        assert_eq!(bed.seen("k").await, pending("sent"), "committed before the first byte goes out");
        let open: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
               AND backend_type = 'client backend'",
        )
        .fetch_one(&bed.pool)
        .await
        .unwrap();
        assert_eq!(open, 0);
        hold.release();
        expect_fresh(paying.await.unwrap(), 201);
    })
    .await;
}

#[tokio::test]
async fn a_payment_reads_what_its_client_has_in_progress_once_and_of_other_keys_nothing() {
    with_bed(async |bed: Bed| {
        bed.execute(
            "INSERT INTO idempotency_keys (client_id, operation, key, request_hash, hash_version, command, status,
                 recovery_point, resource_id, request_id, response_code, response_headers, response_body, completed_at, expires_at)
             SELECT 'acme', 'payments.create', 'k' || n, decode(repeat('00', 32), 'hex'), 1, '{}', 'completed', 'completed',
                 gen_random_uuid(), gen_random_uuid(), 201, '[]', '', now(), now() + interval '1 day'
             FROM generate_series(1, 20000) AS n",
        )
        .await;
        bed.execute(
            "INSERT INTO idempotency_keys (client_id, operation, key, request_hash, hash_version, command, status,
                 recovery_point, resource_id, request_id, lease_until)
             SELECT 'acme', 'payments.create', 'p' || n, decode(repeat('00', 32), 'hex'), 1, '{}', 'in_progress', 'sent',
                 gen_random_uuid(), gen_random_uuid(), now()
             FROM generate_series(1, 500) AS n",
        )
        .await;
        let admission = Admission::new(None, NonZeroU32::new(1000));
        let terms = Terms { retention: RETENTION, admission: Some(&admission) };
        let bed = bed.alone();
        let read = async || -> i64 {
            bed.execute("SELECT pg_stat_force_next_flush()").await;
            let read = "SELECT seq_tup_read + (SELECT sum(idx_tup_read)::BIGINT FROM pg_stat_user_indexes
                                               WHERE relname = 'idempotency_keys')
                        FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'";
            sqlx::query_scalar(read).fetch_one(&bed.pool).await.unwrap()
        };
        // Never analysed, and analysed; each often enough for a plan of its own and a general one.
        for (round, sql) in ["SELECT 1", "ANALYZE idempotency_keys"].into_iter().enumerate() {
            bed.execute(sql).await;
            let before = read().await;
            for n in 0..8 {
                let (operation, scope) = (bed.operation(), scope(&format!("fresh-{round}-{n}")));
                let (command, request) = (payment(), request());
                let answer = engine::run(&bed.pool, &operation, &scope, &command, &request, terms).await.unwrap();
                assert!(matches!(answer, Answer::Fresh { .. }), "{answer:?}");
            }
            let each = (read().await - before) / 8;
            assert!((500..750).contains(&each), "{each} entries are read for a payment, after {sql}");
        }
    })
    .await;
}
