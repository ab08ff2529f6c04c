//! Once-only effects of a consumer.

use semel_core::database::{self, Failure};
use semel_core::inbox::{Recorded, record_all, record_once};
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

#[tokio::test]
async fn of_several_events_those_without_effect_are_told() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let events = [3, 1, 2].map(Uuid::from_u128);
        assert_eq!(record_once(&mut connection, "ledger", events[1]).await.unwrap(), Recorded::First);
        let mut first = record_all(&mut connection, "ledger", &events).await.unwrap();
        first.sort_unstable();
        assert_eq!(first, [events[2], events[0]]);
        assert!(record_all(&mut connection, "ledger", &events).await.unwrap().is_empty());
        assert_eq!(record_all(&mut connection, "mailer", &events).await.unwrap().len(), 3);
    })
    .await;
}

/// In another order one would hold what the other waits for, and the other way round.
#[tokio::test]
async fn two_that_share_events_in_another_order_wait_for_each_other_in_turn() {
    with_database(async |db: Database| {
        let events: Vec<Uuid> = (0..200).map(Uuid::from_u128).collect();
        let reversed: Vec<Uuid> = events.iter().rev().copied().collect();
        for round in 0..20 {
            let consumer = format!("ledger-{round}");
            let record = async |ids: &[Uuid]| {
                let mut tx = db.pool.begin().await.unwrap();
                let first = record_all(&mut tx, &consumer, ids).await.unwrap();
                tx.commit().await.unwrap();
                first.len()
            };
            let (one, other) = tokio::join!(record(&events), record(&reversed));
            assert_eq!((one + other, one.min(other)), (events.len(), 0));
        }
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
