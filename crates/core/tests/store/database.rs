//! A database of a test's own, and waiting for what happens in it.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, DatabaseUrl};
use semel_core::schema::{self, ENGINE, INBOX, MigrationSet};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::time::Instant;

/// Until when a condition must hold.
const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub(crate) struct Database {
    pub(crate) url: DatabaseUrl,
    /// Connects like a daemon does, guards included.
    pub(crate) pool: PgPool,
}

impl Database {
    /// Opens one more connection, outside the pool, with its backend's id.
    pub(crate) async fn connect(&self) -> (PgConnection, i32) {
        let mut connection = database::connect(&self.url, "semel-test").await.unwrap();
        let pid = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await.unwrap();
        (connection, pid)
    }

    pub(crate) async fn execute(&self, sql: &'static str) -> u64 {
        self.pool.execute(sql).await.unwrap().rows_affected()
    }

    pub(crate) async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until the backend waits for a lock that another session holds.
    pub(crate) async fn until_blocked(&self, pid: i32) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let blocked: bool = sqlx::query_scalar("SELECT cardinality(pg_blocking_pids($1)) > 0")
                .bind(pid)
                .fetch_one(&self.pool)
                .await
                .unwrap();
            if blocked {
                return;
            }
            assert!(Instant::now() < deadline, "waited {DEADLINE:?} for backend {pid} to wait for a lock");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Runs a test in a database of its own with the engine's and the inbox's tables, and drops the database afterwards.
pub(crate) async fn with_database(test: impl AsyncFnOnce(Database)) {
    with_sets(&[&ENGINE, &INBOX], test).await;
}

/// Runs a test in a database of its own with the tables of these sets, and drops the database afterwards.
pub(crate) async fn with_sets(sets: &[&MigrationSet], test: impl AsyncFnOnce(Database)) {
    let server = std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
        "SEMEL_TEST_POSTGRES_URL is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ",
    );
    let name = format!("semel_core_{}", uuid::Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&server).await.unwrap();
    admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
    let url: DatabaseUrl = beside(&server, &name).parse().unwrap();
    if !sets.is_empty() {
        schema::migrate(&url, sets).await.unwrap();
    }
    let pool = database::pool(&url, "semel-test", 40);
    // A test that fails leaves no database behind either.
    let outcome = AssertUnwindSafe(test(Database { url, pool })).catch_unwind().await;
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
