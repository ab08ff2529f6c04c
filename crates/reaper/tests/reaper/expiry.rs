//! The expiry sweep against a request under the key that expires, in every order that there is, each order forced: never
//! two executions.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer, Begun, Operation};
use semel_core::idempotency::store::{self, LookedUp, NewKey};
use semel_core::idempotency::{Command as _, Request, Scope};
use semel_core::lifecycle::{Pass, Work as _};
use semel_payments::orders::{CreateOrder, PlaceOrder};
use semel_reaper::Reaper;
use sqlx::{Executor as _, PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::database::{Database, RETENTION, Stuck, with_database};

/// When the sweep deletes the key, seen from the request that comes late.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Sweeps {
    BeforeTheLookUp,
    /// The key was not there yet when the request looked it up: a twin has made it since, and it is gone already.
    BeforeTheClaim,
    /// The request's INSERT has met the key, and it is gone before it is read.
    AfterTheLostClaim,
    /// The request's INSERT waits for the sweep's transaction, which commits.
    WhileTheClaimWaits,
    /// As before, and the transaction is rolled back.
    WhileTheClaimWaitsInVain,
    /// The sweep passes while the request's own statement is at work.
    DuringTheClaim,
}

impl Sweeps {
    const ALL: [Self; 6] = [
        Self::BeforeTheLookUp,
        Self::BeforeTheClaim,
        Self::AfterTheLostClaim,
        Self::WhileTheClaimWaits,
        Self::WhileTheClaimWaitsInVain,
        Self::DuringTheClaim,
    ];
}

/// Whether the order of the expired key is there, as it is for life, or only its key could tell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outlived {
    ByItsOrder,
    ByNothing,
}

fn place_order() -> PlaceOrder {
    PlaceOrder::new("test".parse().unwrap())
}

fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: CreateOrder::OPERATION, key: key.parse().unwrap() }
}

async fn ask<O: Operation<Command = CreateOrder>>(db: &Database, operation: &O, key: &str) -> Answer {
    let order = CreateOrder { reference: "A-1".to_owned(), amount: 5, currency: "EUR".to_owned() };
    let request = Request { id: Uuid::new_v4(), trace_context: None };
    engine::run(&db.pool, operation, &scope(key), &order, &request, RETENTION).await.unwrap()
}

/// Executes under a key whose time is over at once.
async fn execute_and_expire(db: &Database, key: &str, outlived: Outlived) {
    let answer = ask(db, &place_order(), key).await;
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

/// An order that is placed as ever, and between whose steps a twin executes and the sweep deletes.
struct Interrupted<'a> {
    db: &'a Database,
    key: &'a str,
    sweeps: Sweeps,
    outlived: Outlived,
    /// What became true on the way.
    saw: Mutex<Saw>,
}

#[derive(Debug, Default)]
struct Saw {
    /// The twin was there, and the key was gone in the end.
    swept: bool,
    /// The sweep's transaction has deleted the key, and is not over.
    sweeping: Option<Transaction<'static, Postgres>>,
    claims: usize,
    lost: usize,
}

impl Interrupted<'_> {
    fn saw<T>(&self, note: impl FnOnce(&mut Saw) -> T) -> T {
        note(&mut self.saw.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn twin(&self) {
        execute_and_expire(self.db, self.key, self.outlived).await;
    }

    async fn sweep(&self) {
        sweep(self.db, self.key).await;
        self.saw(|saw| saw.swept = true);
    }
}

impl Operation for Interrupted<'_> {
    type Command = CreateOrder;

    fn resource_id(&self, scope: &Scope) -> Uuid {
        place_order().resource_id(scope)
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        place_order().look_up(connection, scope).await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreateOrder,
        retention: Duration,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let is_first = self.saw(|saw| {
            saw.claims += 1;
            saw.claims == 1
        });
        match self.sweeps {
            Sweeps::BeforeTheClaim if is_first => {
                self.twin().await;
                self.sweep().await;
            }
            Sweeps::AfterTheLostClaim if is_first => self.twin().await,
            Sweeps::WhileTheClaimWaits | Sweeps::WhileTheClaimWaitsInVain if is_first => {
                self.twin().await;
                let mut sweeping = self.db.pool.begin().await?;
                assert_eq!(store::reap_expired(&mut sweeping, 10).await?, 1);
                self.saw(|saw| saw.sweeping = Some(sweeping));
            }
            _ => {}
        }
        let begun = place_order().begin(connection, key, command, retention).await?;
        if begun.is_none() {
            self.saw(|saw| saw.lost += 1);
            if self.sweeps == Sweeps::AfterTheLostClaim && is_first {
                self.sweep().await;
            }
        }
        Ok(begun)
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        place_order().lifetime_constraints()
    }
}

/// Has the sweep meet the request in this order, and says what the request was answered.
async fn meet(db: &Database, key: &str, sweeps: Sweeps, outlived: Outlived) -> Answer {
    let request = Interrupted { db, key, sweeps, outlived, saw: Mutex::default() };
    let answer = match sweeps {
        Sweeps::BeforeTheLookUp => {
            request.twin().await;
            request.sweep().await;
            ask(db, &request, key).await
        }
        Sweeps::BeforeTheClaim | Sweeps::AfterTheLostClaim => ask(db, &request, key).await,
        Sweeps::WhileTheClaimWaits | Sweeps::WhileTheClaimWaitsInVain => {
            let waited = async {
                db.until_one_is_blocked().await;
                let sweeping = request.saw(|saw| saw.sweeping.take()).expect("the sweep holds the key");
                if sweeps == Sweeps::WhileTheClaimWaits {
                    sweeping.commit().await.unwrap();
                } else {
                    sweeping.rollback().await.unwrap();
                }
            };
            tokio::join!(ask(db, &request, key), waited).0
        }
        Sweeps::DuringTheClaim => {
            let mut stopped = db.pool.begin().await.unwrap();
            // The key is inserted by then, and its event is not.
            stopped.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
            let passed = async {
                db.until_one_is_blocked().await;
                assert_eq!(Reaper::new(db.pool.clone(), 10).run_once().await.unwrap(), Pass::Idle);
                stopped.rollback().await.unwrap();
            };
            tokio::join!(ask(db, &request, key), passed).0
        }
    };
    let saw = request.saw(std::mem::take);
    let (claims, lost) = match (sweeps, outlived) {
        (Sweeps::BeforeTheLookUp, Outlived::ByItsOrder) => (0, 0),
        (Sweeps::AfterTheLostClaim, _) => (2, 1),
        (Sweeps::WhileTheClaimWaitsInVain, _) => (1, 1),
        _ => (1, 0),
    };
    assert_eq!((saw.claims, saw.lost), (claims, lost), "{sweeps:?}, {outlived:?}");
    let is_whole =
        matches!(sweeps, Sweeps::BeforeTheLookUp | Sweeps::BeforeTheClaim | Sweeps::AfterTheLostClaim);
    assert_eq!(saw.swept, is_whole, "{sweeps:?}");
    answer
}

#[tokio::test]
async fn the_sweep_and_a_retry_never_both_have_their_way() {
    with_database(async |db: Database| {
        let db = db.patient();
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
                Sweeps::DuringTheClaim => true,
                Sweeps::WhileTheClaimWaitsInVain => false,
                _ => outlived == Outlived::ByNothing,
            };
            let what = format!("round {round}, {sweeps:?}, {outlived:?}: {answer:?}");
            if is_executed {
                fresh += 1;
                let Answer::Fresh { response, .. } = answer else { panic!("{what}") };
                let again = ask(&db, &place_order(), &key).await;
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
