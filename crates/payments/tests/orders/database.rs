//! A database of a test's own, and requests to it.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, DatabaseUrl};
use semel_core::idempotency::engine::{self, Answer, Begun, EngineError, Operation as _};
use semel_core::idempotency::store::NewKey;
use semel_core::idempotency::{Command as _, Request, RequestHash, Scope};
use semel_core::schema::{self, ENGINE};
use semel_payments::orders::{CreateOrder, PlaceOrder};
use semel_payments::schema::PAYMENTS;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::time::Instant;
use uuid::Uuid;

/// Until when a condition must hold.
const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const RETENTION: Duration = Duration::from_hours(24);

#[derive(Clone, Debug)]
pub(crate) struct Database {
    /// Connects like a daemon does, guards included.
    pub(crate) pool: PgPool,
    address: String,
}

impl Database {
    /// Opens a pool whose statements wait for a lock for as long as a test needs.
    pub(crate) fn patient_pool(&self, connections: u32, acquire: Duration) -> PgPool {
        PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(acquire)
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute("SET lock_timeout = '60s'").await.map(drop) })
            })
            .connect_lazy(&self.address)
            .unwrap()
    }

    pub(crate) async fn execute(&self, sql: &'static str) -> u64 {
        self.pool.execute(sql).await.unwrap().rows_affected()
    }

    /// Counts orders, events and keys.
    pub(crate) async fn rows(&self) -> (i64, i64, i64) {
        sqlx::query_as(
            "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox), (SELECT count(*) FROM idempotency_keys)",
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

/// Runs a test in a database of its own, and drops it afterwards.
pub(crate) async fn with_database(test: impl AsyncFnOnce(Database)) {
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
    // A test that fails leaves no database behind either.
    let outcome = AssertUnwindSafe(test(Database { pool, address })).catch_unwind().await;
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

pub(crate) fn place_order() -> PlaceOrder {
    PlaceOrder::new("test".parse().unwrap())
}

pub(crate) fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: CreateOrder::OPERATION, key: key.parse().unwrap() }
}

pub(crate) fn order(amount: i64) -> CreateOrder {
    CreateOrder { reference: "A-1".to_owned(), amount, currency: "EUR".to_owned() }
}

pub(crate) fn request() -> Request {
    Request { id: Uuid::new_v4(), trace_context: None }
}

/// Asks for an order of this amount under this key.
pub(crate) async fn try_to_place(pool: &PgPool, key: &str, amount: i64) -> Result<Answer, EngineError> {
    engine::run(pool, &place_order(), &scope(key), &order(amount), &request(), RETENTION).await
}

/// Asks for an order of this amount under this key, where the engine is not expected to fail.
pub(crate) async fn place(pool: &PgPool, key: &str, amount: i64) -> Answer {
    try_to_place(pool, key, amount).await.unwrap()
}

/// Executes an order as the engine does once it has decided to; returns whether it was written.
pub(crate) async fn execute(
    connection: &mut PgConnection,
    key: &str,
    amount: i64,
    request: &Request,
) -> Result<bool, sqlx::Error> {
    let (operation, scope, command) = (place_order(), scope(key), order(amount));
    let resource_id = operation.resource_id(&scope);
    let encoded = serde_json::to_value(&command).unwrap();
    let new = NewKey {
        scope: &scope,
        hash: RequestHash::of(&command).unwrap(),
        command: &encoded,
        resource_id,
        request,
    };
    let begun = operation.begin(connection, &new, &command, &RETENTION.into()).await?;
    Ok(matches!(begun, Some(Begun::Completed { .. })))
}
