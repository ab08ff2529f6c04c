//! The expiry sweep against a request under the key that expires.

use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer};
use semel_core::idempotency::{Command as _, Request, Scope};
use semel_core::lifecycle::Work as _;
use semel_payments::orders::{CreateOrder, PlaceOrder};
use semel_reaper::Reaper;
use uuid::Uuid;

use crate::database::{Database, RETENTION, Stuck, with_database};

async fn place(db: &Database, key: &str) -> Answer {
    let operation = PlaceOrder::new("test".parse().unwrap());
    let scope = Scope {
        client: "acme".parse().unwrap(),
        operation: CreateOrder::OPERATION,
        key: key.parse().unwrap(),
    };
    let order = CreateOrder { reference: "A-1".to_owned(), amount: 5, currency: "EUR".to_owned() };
    let request = Request { id: Uuid::new_v4(), trace_context: None };
    engine::run(&db.pool, &operation, &scope, &order, &request, RETENTION).await.unwrap()
}

async fn orders(db: &Database, key: &str) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM orders WHERE idempotency_key = $1")
        .bind(key)
        .fetch_one(&db.pool)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sweep_and_a_retry_never_both_have_their_way() {
    with_database(async |db: Database| {
        Stuck { dead_for: Duration::from_hours(9000), ..Stuck::OLD }.plant(&db, 5).await;
        let rounds: u64 = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 500 } else { 50 };
        let (mut fresh, mut expired) = (0, 0);
        for round in 0..rounds {
            let key = format!("k{round}");
            assert!(matches!(place(&db, &key).await, Answer::Fresh { .. }));
            db.execute(
                "UPDATE idempotency_keys SET completed_at = now() - INTERVAL '1 day', expires_at = clock_timestamp()
                 WHERE status = 'completed'",
            )
            .await;
            // Every other round as if the operation left no row for life, so that only the key tells.
            let leaves_a_row = round % 2 == 0;
            if !leaves_a_row {
                db.execute("DELETE FROM orders").await;
                db.execute("DELETE FROM outbox").await;
            }
            let mut reaper = Reaper::new(db.pool.clone(), 10);
            // Every order of the two, and everything in between.
            let start = |step: u64| tokio::time::sleep(Duration::from_micros(step * 700));
            let (swept, answer) = tokio::join!(
                async {
                    start(round % 5).await;
                    reaper.run_once().await
                },
                async {
                    start(round / 5 % 5).await;
                    place(&db, &key).await
                }
            );
            swept.unwrap();
            match answer {
                Answer::Expired { .. } => {
                    expired += 1;
                    assert_eq!(orders(&db, &key).await, i64::from(leaves_a_row), "410, and nothing was executed");
                }
                Answer::Fresh { response, .. } => {
                    fresh += 1;
                    assert!(!leaves_a_row, "executed twice");
                    assert_eq!(orders(&db, &key).await, 1);
                    let Answer::Replayed { response: again, .. } = place(&db, &key).await else {
                        panic!("the sweep has deleted the key of a fresh execution")
                    };
                    assert_eq!(again, response);
                }
                other => panic!("round {round}: {other:?}"),
            }
        }
        println!("{rounds} rounds: {expired} answered 410, {fresh} were executed afresh");
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys WHERE status = 'in_progress'").await, 5);
    })
    .await;
}
