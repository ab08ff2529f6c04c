//! The expiry sweep against a request under the key that expires, in every order that there is, each order forced: never
//! two executions.

use std::collections::BTreeMap;
use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer, Operation as _};
use semel_core::idempotency::store;
use semel_core::idempotency::{Command as _, Request, Scope};
use semel_core::lifecycle::{Pass, Work as _};
use semel_payments::orders::{CreateOrder, PlaceOrder};
use semel_reaper::Reaper;
use sqlx::{Executor as _, Postgres, Transaction};
use uuid::Uuid;

use crate::database::{Database, RETENTION, Stuck, with_database};

/// When the sweep deletes the key, seen from the request that comes late. Its statement looks the key up, and then inserts it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Sweeps {
    BeforeTheStatement,
    /// The key was not there yet when it was looked up: a twin has made it since, and it is gone already.
    BeforeTheInsert,
    /// The INSERT has met the key, and it is gone before it is read.
    AfterTheLostInsert,
    /// The INSERT waits for the sweep's transaction, which commits.
    WhileTheInsertWaits,
    /// As before, and the transaction is rolled back.
    WhileTheInsertWaitsInVain,
    /// The sweep passes while the statement writes.
    DuringTheWriting,
}

impl Sweeps {
    const ALL: [Self; 6] = [
        Self::BeforeTheStatement,
        Self::BeforeTheInsert,
        Self::AfterTheLostInsert,
        Self::WhileTheInsertWaits,
        Self::WhileTheInsertWaitsInVain,
        Self::DuringTheWriting,
    ];
}

/// Whether the order of the expired key is there, as it is for life, or only its key could tell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outlived {
    ByItsOrder,
    ByNothing,
}

/// Stops the late request's statement between its look-up and its INSERT for as long as somebody holds the lock 7, and
/// counts how often it came there.
const STOP: &str = "
    CREATE SEQUENCE stops MINVALUE 0 START 0;
    SELECT nextval('stops');
    CREATE FUNCTION stop() RETURNS TRIGGER LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM nextval('stops');
        PERFORM pg_advisory_xact_lock_shared(7);
        RETURN NEW;
    END $$;
    CREATE TRIGGER stop BEFORE INSERT ON idempotency_keys FOR EACH ROW WHEN (NEW.trace_context = 'late')
    EXECUTE FUNCTION stop();";

fn place_order() -> PlaceOrder {
    PlaceOrder::new("test".parse().unwrap())
}

fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: CreateOrder::OPERATION, key: key.parse().unwrap() }
}

async fn ask(db: &Database, key: &str, trace_context: Option<&str>) -> Answer {
    let order = CreateOrder { reference: "A-1".to_owned(), amount: 5, currency: "EUR".to_owned() };
    let request = Request { id: Uuid::new_v4(), trace_context: trace_context.map(str::to_owned) };
    engine::run(&db.pool, &place_order(), &scope(key), &order, &request, RETENTION).await.unwrap()
}

/// Executes under a key whose time is over at once.
async fn execute_and_expire(db: &Database, key: &str, outlived: Outlived) {
    let answer = ask(db, key, None).await;
    assert!(matches!(answer, Answer::Fresh { .. }), "{answer:?}");
    let expire =
        "UPDATE idempotency_keys SET completed_at = now() - INTERVAL '1 day', expires_at = clock_timestamp()
                  WHERE key = $1";
    sqlx::query(expire).bind(key).execute(&db.pool).await.unwrap();
    if outlived == Outlived::ByNothing {
        let forget = "WITH gone AS (DELETE FROM orders WHERE idempotency_key = $1 RETURNING order_id)
                      DELETE FROM outbox USING gone WHERE aggregate_id = order_id::TEXT";
        sqlx::query(forget).bind(key).execute(&db.pool).await.unwrap();
    }
}

/// The sweep, whole; it finds this key and no other.
async fn sweep(db: &Database, key: &str) {
    assert!(is_known(db, key).await);
    assert_eq!(Reaper::new(db.pool.clone(), 10).run_once().await.unwrap(), Pass::Worked);
    assert!(!is_known(db, key).await);
}

async fn is_known(db: &Database, key: &str) -> bool {
    let known = "SELECT EXISTS (SELECT FROM idempotency_keys WHERE key = $1)";
    sqlx::query_scalar(known).bind(key).fetch_one(&db.pool).await.unwrap()
}

/// How many orders there are under a key, and events of them.
async fn executions(db: &Database, key: &str) -> (i64, i64) {
    sqlx::query_as(
        "SELECT count(*), (SELECT count(*) FROM outbox WHERE aggregate_id = ANY(array_agg(order_id::TEXT)))
         FROM orders WHERE idempotency_key = $1",
    )
    .bind(key)
    .fetch_one(&db.pool)
    .await
    .unwrap()
}

/// Has the sweep meet the request in this order, and says what the request was answered.
async fn meet(db: &Database, key: &str, sweeps: Sweeps, outlived: Outlived) -> Answer {
    let late = ask(db, key, Some("late"));
    let stops = db.count("SELECT last_value FROM stops").await;
    let answer = match sweeps {
        Sweeps::BeforeTheStatement => {
            execute_and_expire(db, key, outlived).await;
            sweep(db, key).await;
            late.await
        }
        Sweeps::DuringTheWriting => {
            let mut stopped = db.pool.begin().await.unwrap();
            // The key is inserted by then, and its event is not.
            stopped.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
            let passed = async {
                db.until_one_is_blocked().await;
                assert_eq!(Reaper::new(db.pool.clone(), 10).run_once().await.unwrap(), Pass::Idle);
                stopped.rollback().await.unwrap();
            };
            tokio::join!(late, passed).0
        }
        _ => {
            let mut gate = db.pool.begin().await.unwrap();
            gate.execute("SELECT pg_advisory_xact_lock(7)").await.unwrap();
            tokio::join!(late, pass_between(db, key, sweeps, outlived, gate)).0
        }
    };
    let inserts = match (sweeps, outlived) {
        (Sweeps::BeforeTheStatement, Outlived::ByItsOrder) => 0,
        (Sweeps::AfterTheLostInsert, Outlived::ByNothing) => 2,
        _ => 1,
    };
    let stops = db.count("SELECT last_value FROM stops").await - stops;
    assert_eq!(stops, inserts, "{sweeps:?}, {outlived:?}");
    answer
}

/// Passes between the look-up of the late request's statement, which the gate stops, and what comes after it.
async fn pass_between(
    db: &Database,
    key: &str,
    sweeps: Sweeps,
    outlived: Outlived,
    gate: Transaction<'_, Postgres>,
) {
    db.until_one_waits("advisory").await;
    execute_and_expire(db, key, outlived).await;
    if sweeps == Sweeps::BeforeTheInsert {
        sweep(db, key).await;
        return gate.rollback().await.unwrap();
    }
    let mut sweeping = db.pool.begin().await.unwrap();
    if sweeps == Sweeps::AfterTheLostInsert {
        // Granted when the statement is over, before the next one begins.
        let locked = sweeping.execute("LOCK TABLE idempotency_keys IN ACCESS EXCLUSIVE MODE");
        let opened = async {
            db.until_one_waits("relation").await;
            gate.rollback().await.unwrap();
        };
        tokio::join!(locked, opened).0.unwrap();
        assert_eq!(store::reap_expired(&mut sweeping, 10).await.unwrap(), 1);
        return sweeping.commit().await.unwrap();
    }
    assert_eq!(store::reap_expired(&mut sweeping, 10).await.unwrap(), 1);
    gate.rollback().await.unwrap();
    db.until_one_waits("transactionid").await;
    if sweeps == Sweeps::WhileTheInsertWaits {
        sweeping.commit().await.unwrap();
    } else {
        sweeping.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn the_sweep_and_a_retry_never_both_have_their_way() {
    with_database(async |db: Database| {
        let db = db.patient();
        db.execute(STOP).await;
        Stuck { dead_for: Duration::from_hours(9000), ..Stuck::OLD }.plant(&db, 5).await;
        let rounds = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 500 } else { 42 };
        let (mut happened, mut fresh) = (BTreeMap::new(), 0);
        for round in 0..rounds {
            let sweeps = Sweeps::ALL[round % Sweeps::ALL.len()];
            let outlived = if (round / Sweeps::ALL.len()).is_multiple_of(2) {
                Outlived::ByItsOrder
            } else {
                Outlived::ByNothing
            };
            let key = format!("k{round}");
            let answer = meet(&db, &key, sweeps, outlived).await;
            *happened.entry(sweeps).or_insert(0) += 1;
            let is_executed = match sweeps {
                Sweeps::DuringTheWriting => true,
                Sweeps::WhileTheInsertWaitsInVain => false,
                _ => outlived == Outlived::ByNothing,
            };
            let what = format!("round {round}, {sweeps:?}, {outlived:?}: {answer:?}");
            if is_executed {
                fresh += 1;
                let Answer::Fresh { response, .. } = answer else { panic!("{what}") };
                let again = ask(&db, &key, None).await;
                let is_same = matches!(&again, Answer::Replayed { response: same, .. } if *same == response);
                assert!(is_same, "{what}; the sweep has deleted the key of a fresh execution: {again:?}");
                assert_eq!(executions(&db, &key).await, (1, 1), "{what}");
            } else {
                let made = place_order().resource_id(&scope(&key));
                assert!(matches!(answer, Answer::Expired { resource_id } if resource_id == made), "{what}");
                let left = i64::from(outlived == Outlived::ByItsOrder);
                assert_eq!(executions(&db, &key).await, (left, left), "{what}");
            }
            // What is expired and still there is not for the next round's sweep to find.
            db.execute("DELETE FROM idempotency_keys WHERE expires_at <= clock_timestamp()").await;
        }
        println!("{rounds} rounds, {fresh} of them executed afresh: {happened:?}");
        assert_eq!(happened.len(), Sweeps::ALL.len());
        assert!(
            happened.values().all(|&times| times >= 2 && times >= rounds / Sweeps::ALL.len()),
            "{happened:?}"
        );
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys WHERE status = 'in_progress'").await, 5);
    })
    .await;
}
