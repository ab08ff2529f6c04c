//! A database and a provider of a test's own, requests to them, and what they left behind.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, DatabaseUrl};
use semel_core::derive;
use semel_core::idempotency::engine::{self, Answer, Operation as _};
use semel_core::idempotency::{Command as _, Request, Scope, StoredResponse};
use semel_core::schema::{self, ENGINE};
use semel_payments::payments::create::MakePayment;
use semel_payments::payments::{CreatePayment, Payment};
use semel_payments::problem::ProblemBase;
use semel_payments::provider::Promises;
use semel_payments::schema::PAYMENTS;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use crate::provider::{Call, Scripted};

/// Until when a condition must hold.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const RETENTION: Duration = Duration::from_hours(24);
const NAMESPACE: &str = "test";

/// A database and a provider.
#[derive(Clone, Debug)]
pub(crate) struct Bed {
    /// Connects like a daemon does, guards included.
    pub(crate) pool: PgPool,
    pub(crate) provider: Scripted,
    address: String,
}

/// What there is of one payment: the only one, or the one of a key.
#[derive(Debug, Eq, PartialEq, sqlx::FromRow)]
pub(crate) struct Seen {
    /// Status and version.
    pub(crate) payment: String,
    /// Status and recovery point.
    pub(crate) key: String,
    /// Types of its events, in order.
    pub(crate) events: Vec<String>,
    /// Call and outcome of what was written down, in order.
    pub(crate) evidence: Vec<String>,
}

impl Bed {
    /// Gives the provider other promises.
    pub(crate) fn promising(&self, promises: Promises) -> Self {
        Self { provider: self.provider.clone().promising(promises), ..self.clone() }
    }

    /// Is given a provider of this name, which has never been asked for anything.
    pub(crate) fn with_provider(&self, name: &'static str, promises: Promises) -> Self {
        Self { provider: Scripted::named(name).promising(promises), ..self.clone() }
    }

    /// Why a person is needed; none where none is.
    pub(crate) async fn for_person(&self, key: &str) -> Option<String> {
        let reason = "SELECT needs_person_reason FROM idempotency_keys WHERE key = $1";
        sqlx::query_scalar(reason).bind(key).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits for locks for as long as a test needs.
    pub(crate) fn patient(&self) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(5)
            .acquire_timeout(DEADLINE)
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute("SET lock_timeout = '60s'").await.map(drop) })
            })
            .connect_lazy(&self.address)
            .unwrap();
        Self { pool, ..self.clone() }
    }

    /// Connects anew, as another process would: it has no connection yet, and no statement is prepared.
    pub(crate) fn anew(&self) -> Self {
        let pool = database::pool(&self.address.parse().unwrap(), "semel-test", 5);
        Self { pool, ..self.clone() }
    }

    /// Has one connection only, so that its statements are of one session.
    pub(crate) fn alone(&self) -> Self {
        let pool = database::pool(&self.address.parse().unwrap(), "semel-test", 1);
        Self { pool, ..self.clone() }
    }

    pub(crate) fn operation(&self) -> MakePayment<Scripted> {
        let problems: ProblemBase = "/errors".parse().unwrap();
        MakePayment::new(NAMESPACE.parse().unwrap(), self.provider.clone(), problems)
    }

    /// Returns the provider's key of the payment that this key makes.
    pub(crate) fn provider_key(key: &str) -> String {
        derive::from_key(&NAMESPACE.parse().unwrap(), &scope(key), "charge").to_string()
    }

    /// Asks for a payment under this key.
    pub(crate) async fn ask(&self, key: &str, command: &CreatePayment, request: &Request) -> Answer {
        engine::run(&self.pool, &self.operation(), &scope(key), command, request, RETENTION).await.unwrap()
    }

    /// Asks for the payment of every test under this key.
    pub(crate) async fn pay(&self, key: &str) -> Answer {
        self.ask(key, &payment(), &request()).await
    }

    /// Does so beside the test.
    pub(crate) fn start_paying(&self, key: &'static str) -> JoinHandle<Answer> {
        let bed = self.clone();
        tokio::spawn(async move { bed.pay(key).await })
    }

    /// Begins a payment under the key `k` whose outcome stays unknown; the provider has done nothing.
    pub(crate) async fn begin_unknown(&self) {
        self.provider.say(Call::Charge, crate::provider::unknown("the answer was lost"));
        let answer = self.pay("k").await;
        assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
    }

    pub(crate) async fn execute(&self, sql: &'static str) -> u64 {
        self.pool.execute(sql).await.unwrap().rows_affected()
    }

    /// Ends the leases, as if their owners were gone for long enough.
    pub(crate) async fn end_leases(&self) {
        self.execute(
            "UPDATE idempotency_keys SET lease_until = clock_timestamp() WHERE status = 'in_progress'",
        )
        .await;
    }

    /// Moves the first send out of the send window.
    pub(crate) async fn pass_the_window(&self) {
        self.execute(
            "UPDATE idempotency_keys SET provider_first_sent_at = provider_first_sent_at - INTERVAL '6 minutes'",
        )
        .await;
    }

    /// Returns what there is of the payment of this key.
    pub(crate) async fn seen(&self, key: &str) -> Seen {
        sqlx::query_as(
            "SELECT p.status || ' ' || p.version AS payment, k.status || ' ' || k.recovery_point AS key,
                    ARRAY(SELECT event_type FROM outbox WHERE aggregate_id = p.payment_id::TEXT ORDER BY id) AS events,
                    ARRAY(SELECT call || ' ' || outcome FROM provider_answers AS a WHERE a.payment_id = p.payment_id
                          ORDER BY answered_at) AS evidence
             FROM payments AS p JOIN idempotency_keys AS k ON k.key = p.idempotency_key
             WHERE p.idempotency_key = $1",
        )
        .bind(key)
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }

    /// Counts payments, events, keys and evidence.
    pub(crate) async fn rows(&self) -> (i64, i64, i64, i64) {
        sqlx::query_as(
            "SELECT (SELECT count(*) FROM payments), (SELECT count(*) FROM outbox),
                    (SELECT count(*) FROM idempotency_keys), (SELECT count(*) FROM provider_answers)",
        )
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }

    /// Waits until a backend waits for a lock that another session holds; returns it.
    pub(crate) async fn until_one_is_blocked(&self) -> i32 {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let blocked: Option<i32> = sqlx::query_scalar(
                "SELECT pid FROM pg_stat_activity
                 WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0 LIMIT 1",
            )
            .fetch_optional(&self.pool)
            .await
            .unwrap();
            if let Some(pid) = blocked {
                return pid;
            }
            assert!(Instant::now() < deadline, "waited {DEADLINE:?} for a statement to wait for a lock");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Ends a backend by force, and waits until it is gone.
    pub(crate) async fn kill(&self, pid: i32) {
        let gone: bool = sqlx::query_scalar("SELECT pg_terminate_backend($1, 20000)")
            .bind(pid)
            .fetch_one(&self.pool)
            .await
            .unwrap();
        assert!(gone, "backend {pid} did not end");
    }
}

pub(crate) fn seen(payment: &str, key: &str, events: &[&str], evidence: &[&str]) -> Seen {
    let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    Seen {
        payment: payment.to_owned(),
        key: key.to_owned(),
        events: owned(events),
        evidence: owned(evidence),
    }
}

/// A payment that succeeded, with this evidence.
pub(crate) fn succeeded(evidence: &[&str]) -> Seen {
    seen("succeeded 1", "completed completed", &["PaymentCreated"], evidence)
}

/// A payment that was rolled back, with this evidence.
pub(crate) fn rolled_back(evidence: &[&str]) -> Seen {
    seen("canceled 1", "completed completed", &["PaymentCanceled"], evidence)
}

/// A payment whose outcome is not known, at this recovery point.
pub(crate) fn pending(recovery_point: &str) -> Seen {
    seen("processing 0", &format!("in_progress {recovery_point}"), &[], &[])
}

/// Checks that the answer is fresh and has this status; returns it.
pub(crate) fn expect_fresh(answer: Answer, code: u16) -> StoredResponse {
    let Answer::Fresh { response, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(response.code, code, "{response:?}");
    response
}

pub(crate) fn expect_unknown(answer: &Answer) {
    let made = |resource_id: &Uuid| !resource_id.is_nil();
    assert!(matches!(answer, Answer::Unknown { resource_id, .. } if made(resource_id)), "{answer:?}");
}

pub(crate) fn body(response: &StoredResponse) -> Payment {
    serde_json::from_slice(&response.body).unwrap()
}

pub(crate) fn payment() -> CreatePayment {
    CreatePayment {
        reference: "A-1".to_owned(),
        amount: 1250,
        currency: "EUR".to_owned(),
        source: "tok_visa".to_owned(),
    }
}

pub(crate) fn request() -> Request {
    Request { id: Uuid::new_v4(), trace_context: None }
}

pub(crate) fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: CreatePayment::OPERATION, key: key.parse().unwrap() }
}

/// Returns the payment's id that this key makes.
pub(crate) fn made_by(bed: &Bed, key: &str) -> Uuid {
    bed.operation().resource_id(&scope(key))
}

/// Runs a test with a database and a provider of its own, and drops the database afterwards.
pub(crate) async fn with_bed(test: impl AsyncFnOnce(Bed)) {
    let server = std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
        "SEMEL_TEST_POSTGRES_URL is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ",
    );
    let name = format!("semel_payments_{}", Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&server).await.unwrap();
    admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
    let address = beside(&server, &name);
    let url: DatabaseUrl = address.parse().unwrap();
    schema::migrate(&url, &[&ENGINE, &PAYMENTS]).await.unwrap();
    let pool = database::pool(&url, "semel-test", 20);
    let bed = Bed { pool, provider: Scripted::new(), address };
    // A test that fails leaves no database behind either.
    let outcome = AssertUnwindSafe(test(bed)).catch_unwind().await;
    admin.execute(sqlx::AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)"))).await.unwrap();
    if let Err(failed) = outcome {
        std::panic::resume_unwind(failed);
    }
}

/// Returns the URL of another database on the same server.
fn beside(server: &str, name: &str) -> String {
    let (place, query) =
        server.split_once('?').map_or((server, String::new()), |(p, q)| (p, format!("?{q}")));
    let (place, _) = place.rsplit_once('/').unwrap();
    format!("{place}/{name}{query}")
}
