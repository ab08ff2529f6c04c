//! Hints: at once, not too many, and none that is the last one is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use semel_core::lifecycle::Lifecycle;
use semel_core::outbox::hint::{self, CHANNEL, Hints};
use sqlx::postgres::PgListener;
use tokio::sync::Notify;

use crate::database::{Database, with_database};

const SOON: Duration = Duration::from_secs(10);

async fn soon<T>(what: &str, awaited: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, awaited).await.unwrap_or_else(|_| panic!("waited for {what}"))
}

async fn terminate(db: &Database, application: &str) {
    let terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                     WHERE application_name = $1 AND datname = current_database()";
    let ended: i64 = sqlx::query_scalar(terminate).bind(application).fetch_one(&db.pool).await.unwrap();
    assert_eq!(ended, 1, "connections of {application}");
}

#[tokio::test]
async fn a_hint_wakes_whoever_listens() {
    with_database(async |db: Database| {
        let (life, wake) = (Lifecycle::new(), Arc::new(Notify::new()));
        let hints = Hints::start(db.url.clone(), "hint-test", &life);
        let listening = {
            let (url, wake, life) = (db.url.clone(), Arc::clone(&wake), life.clone());
            tokio::spawn(async move { hint::listen(&url, "listen-test", &wake, &life).await })
        };
        soon("the beginning", wake.notified()).await;
        hints.give();
        soon("the hint", wake.notified()).await;

        // The listener's connection dies, and it listens again; what was missed meanwhile is covered by a wake-up.
        terminate(&db, "listen-test").await;
        soon("the new beginning", wake.notified()).await;
        hints.give();
        soon("a hint to the new connection", wake.notified()).await;

        // The sender's connection dies: what it would have told is told over another one.
        terminate(&db, "hint-test").await;
        hints.give();
        soon("a hint from the new connection", wake.notified()).await;
        life.stop();
        soon("the listener to end", listening).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_thousand_hints_are_a_few_and_the_last_one_is_among_them() {
    with_database(async |db: Database| {
        let mut listener = PgListener::connect_with(&db.pool).await.unwrap();
        listener.listen(CHANNEL).await.unwrap();
        let hints = Hints::start(db.url.clone(), "hint-test", &Lifecycle::new());
        hints.give();
        soon("the first", listener.recv()).await.unwrap();
        let began = Instant::now();
        for _ in 0..1000 {
            hints.give();
            tokio::task::yield_now().await;
        }
        let (mut heard, mut last) = (0_u128, Duration::ZERO);
        // More than a hint's distance after the last one was given, there is none left.
        while let Ok(hint) = tokio::time::timeout(Duration::from_millis(500), listener.recv()).await {
            hint.unwrap();
            (heard, last) = (heard + 1, began.elapsed());
        }
        let most = last.as_millis() / 10 + 2;
        assert!(heard >= 1 && heard <= most, "{heard} hints, at most {most} allowed");
        hints.give();
        soon("one after a pause", listener.recv()).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn nobody_waits_for_a_hint_to_a_database_that_is_away() {
    let url = "postgres://semel:secret@127.0.0.1:1/nowhere".parse().unwrap();
    let (life, wake) = (Lifecycle::new(), Notify::new());
    let hints = Hints::start(url, "hint-test", &life);
    for _ in 0..100 {
        hints.give();
    }
    let url = "postgres://semel:secret@127.0.0.1:1/nowhere".parse().unwrap();
    life.stop();
    soon("the listener to stop", Box::pin(hint::listen(&url, "listen-test", &wake, &life))).await;
}
