//! Once-only effects of a consumer.

use semel_core::database::{self, Failure};
use semel_core::inbox::{Recorded, record_once};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::database::{Database, with_database};

#[tokio::test]
async fn an_event_takes_effect_once_per_consumer() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let event = Uuid::new_v4();
        assert_eq!(record_once(&mut connection, "ledger", event).await.unwrap(), Recorded::First);
        assert_eq!(record_once(&mut connection, "ledger", event).await.unwrap(), Recorded::Duplicate);
        assert_eq!(record_once(&mut connection, "mailer", event).await.unwrap(), Recorded::First);
        assert_eq!(record_once(&mut connection, "ledger", Uuid::new_v4()).await.unwrap(), Recorded::First);
    })
    .await;
}

/// Starts a twin of an uncommitted effect, and returns once it waits for that.
async fn waiting_twin(db: &Database, event: Uuid) -> JoinHandle<Recorded> {
    let (mut connection, pid): (PgConnection, i32) = db.connect().await;
    connection.execute("SET lock_timeout = '30s'").await.unwrap();
    let twin = tokio::spawn(async move {
        let mut tx = connection.begin().await.unwrap();
        let recorded = record_once(&mut tx, "ledger", event).await.unwrap();
        tx.commit().await.unwrap();
        recorded
    });
    db.until_blocked(pid).await;
    twin
}

#[tokio::test]
async fn a_twin_of_a_committed_effect_is_a_duplicate() {
    with_database(async |db: Database| {
        let event = Uuid::new_v4();
        let mut first = db.pool.begin().await.unwrap();
        assert_eq!(record_once(&mut first, "ledger", event).await.unwrap(), Recorded::First);
        let twin = waiting_twin(&db, event).await;
        first.commit().await.unwrap();
        assert_eq!(twin.await.unwrap(), Recorded::Duplicate);
    })
    .await;
}

#[tokio::test]
async fn a_twin_of_an_effect_that_was_rolled_back_goes_first() {
    with_database(async |db: Database| {
        let event = Uuid::new_v4();
        let mut first = db.pool.begin().await.unwrap();
        assert_eq!(record_once(&mut first, "ledger", event).await.unwrap(), Recorded::First);
        let twin = waiting_twin(&db, event).await;
        first.rollback().await.unwrap();
        assert_eq!(twin.await.unwrap(), Recorded::First);
        assert_eq!(db.count("SELECT count(*) FROM processed_events").await, 1);
    })
    .await;
}

#[tokio::test]
async fn a_twin_does_not_wait_for_ever() {
    with_database(async |db: Database| {
        let event = Uuid::new_v4();
        let mut first = db.pool.begin().await.unwrap();
        record_once(&mut first, "ledger", event).await.unwrap();
        let (mut connection, _) = db.connect().await;
        connection.execute("SET lock_timeout = '10ms'").await.unwrap();
        let error = record_once(&mut connection, "ledger", event).await.unwrap_err();
        assert_eq!(database::failure(&error), Failure::LockTimeout);
        first.rollback().await.unwrap();
    })
    .await;
}
