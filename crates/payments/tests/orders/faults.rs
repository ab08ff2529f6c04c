//! Orders while the database makes trouble: nothing is half there, nothing is there twice.

use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer, EngineError, Operation as _};
use semel_payments::orders;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, Postgres, Transaction};

use crate::database::{
    Database, RETENTION, execute, order, place, place_order, request, scope, try_to_place, with_database,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Takes a lock that keeps orders from being written, but not from being looked up.
async fn stop_writes(db: &Database) -> Transaction<'static, Postgres> {
    let mut tx = db.pool.begin().await.unwrap();
    tx.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
    tx
}

#[tokio::test]
async fn an_order_whose_event_is_refused_leaves_nothing_and_its_key_free() {
    with_database(async |db: Database| {
        db.execute("ALTER TABLE outbox ADD CONSTRAINT outbox_refuses_all CHECK (FALSE)").await;
        let refused = try_to_place(&db.pool, "k", 1200).await;
        assert!(matches!(refused, Err(EngineError::Refused { .. })), "{refused:?}");
        assert_eq!(db.rows().await, (0, 0, 0));
        db.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_refuses_all").await;
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Fresh { .. }));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_lost_connection_is_settled_by_asking_again() {
    with_database(async |db: Database| {
        let stopped = stop_writes(&db).await;
        let pool = db.patient_pool(5, PATIENCE);
        let waiting = tokio::spawn(async move { place(&pool, "k", 1200).await });
        let first = db.until_one_is_blocked().await;
        db.kill(first).await;
        let second = db.until_one_is_blocked().await;
        assert_ne!(first, second, "it asks on another connection");
        stopped.rollback().await.unwrap();
        let answer = waiting.await.unwrap();
        assert!(matches!(answer, Answer::Fresh { .. }), "{answer:?}");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn an_outcome_that_cannot_be_settled_is_unknown_until_a_retry_settles_it() {
    with_database(async |db: Database| {
        let stopped = stop_writes(&db).await;
        let pool = db.patient_pool(5, PATIENCE);
        let waiting = tokio::spawn(async move { place(&pool, "k", 1200).await });
        while !waiting.is_finished() {
            let pid = tokio::select! {
                pid = db.until_one_is_blocked() => pid,
                () = until_finished(&waiting) => break,
            };
            db.kill(pid).await;
        }
        let answer = waiting.await.unwrap();
        let made = place_order().resource_id(&scope("k"));
        assert!(matches!(answer, Answer::Unknown { resource_id, .. } if resource_id == made), "{answer:?}");
        stopped.rollback().await.unwrap();
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Fresh { .. } | Answer::Replayed { .. }));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

async fn until_finished<T>(task: &tokio::task::JoinHandle<T>) {
    while !task.is_finished() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_recognised_as_ones_own() {
    with_database(async |db: Database| {
        let request = request();
        // The first attempt of this very request: it committed, and its answer never arrived.
        assert!(execute(&mut db.pool.acquire().await.unwrap(), "k", 1200, &request).await.unwrap());
        let answer =
            engine::run(&db.pool, &place_order(), &scope("k"), &order(1200), &request, RETENTION).await;
        assert!(matches!(answer, Ok(Answer::Fresh { .. })), "{answer:?}");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_request_waits_for_its_twin_and_is_answered_with_its_outcome() {
    with_database(async |db: Database| {
        for commits in [true, false] {
            let (key, first) = (if commits { "committed" } else { "rolled-back" }, request());
            let mut twin = db.pool.begin().await.unwrap();
            assert!(execute(&mut twin, key, 1200, &first).await.unwrap());
            let pool = db.patient_pool(5, PATIENCE);
            let waiting = tokio::spawn(async move { place(&pool, key, 1200).await });
            db.until_one_is_blocked().await;
            if commits {
                twin.commit().await.unwrap();
            } else {
                twin.rollback().await.unwrap();
            }
            match waiting.await.unwrap() {
                Answer::Replayed { original_request, .. } => assert!(commits && original_request == first.id),
                Answer::Fresh { .. } => assert!(!commits),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(db.rows().await, (2, 2, 2));
    })
    .await;
}

#[tokio::test]
async fn a_twin_that_takes_long_is_in_progress() {
    with_database(async |db: Database| {
        let mut twin = db.pool.begin().await.unwrap();
        assert!(execute(&mut twin, "k", 1200, &request()).await.unwrap());
        // The pool's own guard: it gives up waiting after a second, so that a slow key holds no connection for long.
        let answer = place(&db.pool, "k", 1200).await;
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        twin.commit().await.unwrap();
        assert!(matches!(place(&db.pool, "k", 1200).await, Answer::Replayed { .. }));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn without_a_free_connection_nothing_is_executed() {
    with_database(async |db: Database| {
        let pool = db.patient_pool(1, Duration::from_millis(20));
        let held = loop {
            // The first connection may take longer to open than the pool's patience.
            if let Ok(connection) = pool.acquire().await {
                break connection;
            }
        };
        assert!(matches!(place(&pool, "k", 1200).await, Answer::Unavailable));
        assert_eq!(db.rows().await, (0, 0, 0));
        drop(held);
    })
    .await;
}

#[tokio::test]
async fn a_database_that_is_away_or_read_only_is_unavailable() {
    with_database(async |db: Database| {
        let nowhere = PgPoolOptions::new()
            .acquire_timeout(Duration::from_millis(200))
            .connect_lazy("postgres://nobody@127.0.0.1:1/nothing")
            .unwrap();
        assert!(matches!(place(&nowhere, "k", 1200).await, Answer::Unavailable));

        let standby = db.patient_pool(1, PATIENCE);
        standby.execute("SET default_transaction_read_only = on").await.unwrap();
        assert!(matches!(place(&standby, "k", 1200).await, Answer::Unavailable));
        assert_eq!(db.rows().await, (0, 0, 0));
        let made = place_order().resource_id(&scope("k"));
        assert_eq!(orders::find(&db.pool, &scope("k").client, made).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn a_server_that_turns_read_only_does_not_settle_an_earlier_attempt() {
    with_database(async |db: Database| {
        let stopped = stop_writes(&db).await;
        let pool = db.patient_pool(5, PATIENCE);
        let waiting = tokio::spawn(async move { place(&pool, "k", 1200).await });
        let first = db.until_one_is_blocked().await;
        // For connections that are opened from now on, as after a failover.
        db.execute(
            "DO $$ BEGIN
                EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database());
            END $$",
        )
        .await;
        db.kill(first).await;
        db.until_one_is_blocked().await;
        stopped.rollback().await.unwrap();
        let answer = waiting.await.unwrap();
        assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
    })
    .await;
}
