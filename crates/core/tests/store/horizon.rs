//! Who may have drawn an id: what floors rest on.

use semel_core::outbox::drain::{self, Floors, LaneHead};
use sqlx::{Connection as _, Executor as _, PgConnection};

use crate::database::{Database, with_database};

const INSERT: &str = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                      VALUES ('probe', 'a', 'ProbeMade', '{}')";

async fn open_writers(connection: &mut PgConnection) -> usize {
    drain::writers(connection).await.unwrap().open.len()
}

#[tokio::test]
async fn the_position_is_the_last_id_that_was_drawn_whoever_drew_it() {
    with_database(async |db: Database| {
        let mut watch = db.pool.acquire().await.unwrap();
        assert_eq!(drain::position(&mut watch).await.unwrap().last, Some(0));
        db.execute(INSERT).await;
        assert_eq!(drain::position(&mut watch).await.unwrap().last, Some(1));
        let mut writer = db.pool.begin().await.unwrap();
        writer.execute(INSERT).await.unwrap();
        let before = drain::position(&mut watch).await.unwrap();
        writer.rollback().await.unwrap();
        assert_eq!(before.last, Some(2));
        assert_eq!(drain::position(&mut watch).await.unwrap(), before);
        db.execute("ALTER SEQUENCE outbox_id_seq CACHE 5").await;
        assert_eq!(drain::position(&mut watch).await.unwrap().last, None, "sessions have ids in stock");
    })
    .await;
}

#[tokio::test]
async fn writers_are_those_that_may_have_drawn_an_id_and_nobody_else() {
    with_database(async |db: Database| {
        let mut watch = db.pool.acquire().await.unwrap();
        assert_eq!(open_writers(&mut watch).await, 0);
        // It has no transaction id, and no snapshot knows of it.
        let mut undecided = db.pool.begin().await.unwrap();
        undecided.execute("SELECT nextval('outbox_id_seq')").await.unwrap();
        assert_eq!(open_writers(&mut watch).await, 1);
        let mut elsewhere = db.pool.begin().await.unwrap();
        elsewhere.execute("SELECT pg_current_xact_id()").await.unwrap();
        elsewhere.execute("CREATE TABLE other (id BIGSERIAL)").await.unwrap();
        elsewhere.execute("INSERT INTO other DEFAULT VALUES").await.unwrap();
        let mut reader = db.pool.begin().await.unwrap();
        reader.execute("SELECT last_value FROM outbox_id_seq").await.unwrap();
        assert_eq!(open_writers(&mut watch).await, 1, "neither of these has drawn an id");
        // A savepoint that is rolled back gives up no lock: what was drawn in it is drawn.
        let mut sub = db.pool.begin().await.unwrap();
        sub.execute("SAVEPOINT one").await.unwrap();
        sub.execute(INSERT).await.unwrap();
        sub.execute("ROLLBACK TO one").await.unwrap();
        assert_eq!(open_writers(&mut watch).await, 2);
        undecided.rollback().await.unwrap();
        sub.rollback().await.unwrap();
        assert_eq!(open_writers(&mut watch).await, 0);
    })
    .await;
}

#[tokio::test]
async fn floors_leave_out_what_is_below_them_on_the_run_they_name_alone() {
    with_database(async |db: Database| {
        for _ in 0..3 {
            db.execute(INSERT).await;
        }
        let mut connection = db.pool.acquire().await.unwrap();
        let here = drain::position(&mut connection).await.unwrap().run;
        let elsewhere = drain::ServerRun::since(time::OffsetDateTime::UNIX_EPOCH);
        for (run, expected) in [(here, vec![2, 3]), (elsewhere, vec![1, 2, 3])] {
            let mut floors = Floors::on(run);
            floors.raise(&[], 2);
            let probed = drain::probe(&mut connection, &floors).await.unwrap();
            assert_eq!((probed.run, probed.heads.len()), (here, 1));
            let LaneHead { lane, id } = probed.heads[0];
            assert_eq!(id, Some(expected[0]));
            let read = drain::read(&mut connection, &[lane], &floors, 10, i64::MAX).await.unwrap();
            assert_eq!(read.iter().map(|event| event.id).collect::<Vec<_>>(), expected);
        }
    })
    .await;
}

#[tokio::test]
async fn the_servers_patience_is_the_shortest_of_its_limits() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let patience = drain::patience(&mut connection).await.unwrap();
        assert_eq!(patience, Some(std::time::Duration::from_secs(30)), "the guard that we ask for ourselves");
        let mut tx = connection.begin().await.unwrap();
        tx.execute("SET LOCAL idle_in_transaction_session_timeout = 0").await.unwrap();
        assert_eq!(drain::patience(&mut tx).await.unwrap(), None);
    })
    .await;
}
