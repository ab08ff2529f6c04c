//! One order per key, and what each repeat is answered.

use std::sync::Arc;

use semel_core::idempotency::engine::{self, Answer, Operation as _};
use semel_core::idempotency::store;
use semel_core::idempotency::{ClientId, Request, Scope};
use semel_payments::orders::{self, MAX_AMOUNT, Order};
use serde_json::{Value, json};
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::database::{
    Database, RETENTION, execute, order, place, place_order, request, scope, with_database,
};

#[tokio::test]
async fn an_order_is_one_row_one_event_and_one_completed_key() {
    with_database(async |db: Database| {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request = Request { id: Uuid::new_v4(), trace_context: Some(trace.to_owned()) };
        let answer = engine::run(&db.pool, &place_order(), &scope("k"), &order(1200), &request, RETENTION).await;
        let Ok(Answer::Fresh { response, .. }) = answer else { panic!("{answer:?}") };
        assert_eq!(db.rows().await, (1, 1, 1));

        let made: Order = serde_json::from_slice(&response.body).unwrap();
        assert_eq!((made.amount, made.status.as_str()), (1200, "placed"));
        assert_eq!(response.code, 201);
        assert!(response.headers.contains(&("location".to_owned(), format!("/v1/orders/{}", made.id))));
        let acme: ClientId = "acme".parse().unwrap();
        assert_eq!(orders::find(&db.pool, &acme, made.id).await.unwrap(), Some(made.clone()));
        assert_eq!(orders::find(&db.pool, &"other".parse().unwrap(), made.id).await.unwrap(), None);

        let (event_id, aggregate, payload, headers): (Uuid, String, Value, Value) = sqlx::query_as(
            "SELECT event_id, aggregate_type || ' ' || aggregate_id || ' ' || aggregate_version || ' ' || event_type,
                    payload, headers FROM outbox",
        )
        .fetch_one(&db.pool)
        .await
        .unwrap();
        assert_eq!(aggregate, format!("order {} 1 OrderPlaced", made.id));
        assert_eq!(headers, json!({ "traceparent": trace }));
        assert_eq!(
            payload,
            json!({
                "event_id": event_id, "order_id": made.id, "client_id": "acme",
                "reference": "A-1", "amount": 1200, "currency": "EUR",
            })
        );
    })
    .await;
}

#[tokio::test]
async fn of_many_requests_with_one_key_one_takes_effect() {
    with_database(async |db: Database| {
        let barrier = Arc::new(Barrier::new(64));
        let requests: Vec<_> = (0..64)
            .map(|_| {
                let (pool, barrier) = (db.pool.clone(), Arc::clone(&barrier));
                tokio::spawn(async move {
                    barrier.wait().await;
                    place(&pool, "k", 1200).await
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
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_repeat_is_answered_with_the_same_bytes_and_the_request_that_executed_it() {
    with_database(async |db: Database| {
        let first = request();
        let run = async |request: &Request| {
            engine::run(&db.pool, &place_order(), &scope("k"), &order(1200), request, RETENTION)
                .await
                .unwrap()
        };
        let Answer::Fresh { response, expires_at } = run(&first).await else { panic!() };
        for _ in 0..2 {
            let Answer::Replayed { response: again, expires_at: same, original_request } =
                run(&request()).await
            else {
                panic!()
            };
            assert_eq!((again, same, original_request), (response.clone(), expires_at, first.id));
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn another_intent_under_the_key_changes_nothing() {
    with_database(async |db: Database| {
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Fresh { .. }));
        assert!(matches!(place(&db.pool, "k", 1201).await, Answer::Mismatch));
        assert!(
            matches!(place(&db.pool, "k", -1).await, Answer::Mismatch),
            "also one that is not acceptable"
        );
        assert_eq!(db.rows().await, (1, 1, 1));
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Replayed { .. }));
    })
    .await;
}

#[tokio::test]
async fn another_clients_key_is_another_key() {
    with_database(async |db: Database| {
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Fresh { .. }));
        let other = Scope { client: "other".parse().unwrap(), ..scope("k") };
        let answer =
            engine::run(&db.pool, &place_order(), &other, &order(5), &request(), RETENTION).await.unwrap();
        assert!(matches!(answer, Answer::Fresh { .. }), "{answer:?}");
        assert_eq!(db.rows().await, (2, 2, 2));
    })
    .await;
}

#[tokio::test]
async fn a_command_that_is_not_acceptable_stores_nothing_and_leaves_the_key_free() {
    with_database(async |db: Database| {
        let answer = place(&db.pool, "k", 0).await;
        assert!(matches!(&answer, Answer::Invalid(invalid) if invalid.field == "amount"), "{answer:?}");
        assert_eq!(db.rows().await, (0, 0, 0));
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Fresh { .. }));
    })
    .await;
}

/// A command that today's rules refuse and the database still takes, as one accepted before the rule was made.
const TOO_MUCH_TODAY: i64 = MAX_AMOUNT + 1;

#[tokio::test]
async fn a_known_key_is_replayed_though_its_command_is_not_acceptable_any_more() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        assert!(execute(&mut connection, "k", TOO_MUCH_TODAY, &request()).await.unwrap());
        assert!(matches!(place(&db.pool, "k", TOO_MUCH_TODAY).await, Answer::Replayed { .. }));
        assert!(matches!(place(&db.pool, "k2", TOO_MUCH_TODAY).await, Answer::Invalid(_)));
    })
    .await;
}

const EXPIRE: &str = "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '25 hours',
                                                  expires_at = clock_timestamp() - INTERVAL '1 hour'";

#[tokio::test]
async fn an_expired_key_is_never_executed_again_whether_its_row_is_there_or_not() {
    with_database(async |db: Database| {
        place(&db.pool, "k", 1200).await;
        let made = place_order().resource_id(&scope("k"));
        db.execute(EXPIRE).await;
        for keys in [1, 0] {
            let answer = place(&db.pool, "k", 1200).await;
            assert!(matches!(answer, Answer::Expired { resource_id } if resource_id == made), "{answer:?}");
            assert_eq!(db.rows().await, (1, 1, keys));
            store::reap_expired(&mut db.pool.acquire().await.unwrap(), 10).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_is_told_so_though_its_command_is_not_acceptable_any_more() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        assert!(execute(&mut connection, "k", TOO_MUCH_TODAY, &request()).await.unwrap());
        db.execute("DELETE FROM idempotency_keys").await;
        assert!(matches!(place(&db.pool, "k", TOO_MUCH_TODAY).await, Answer::Expired { .. }));
    })
    .await;
}
