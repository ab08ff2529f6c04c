//! A database of a test's own, and what lies in it.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, DatabaseUrl};
use semel_core::schema::{self, ENGINE, INBOX, MigrationSet};
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
    pub(crate) address: String,
}

impl Database {
    /// Opens another pool, like another process.
    pub(crate) fn another_pool(&self, connections: u32) -> PgPool {
        database::pool(&self.address.parse().unwrap(), "semel-test", connections)
    }

    /// Waits for locks for as long as a test needs.
    pub(crate) fn patient(&self) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(10)
            .acquire_timeout(DEADLINE)
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute("SET lock_timeout = '60s'").await.map(drop) })
            })
            .connect_lazy(&self.address)
            .unwrap();
        Self { pool, ..self.clone() }
    }

    /// Waits until a backend waits for a lock that another session holds.
    pub(crate) async fn until_one_is_blocked(&self) {
        self.until_one_waits("%").await;
    }

    /// Waits until a backend waits for a lock of this kind, a pattern for `pg_locks.locktype`, that another session holds.
    pub(crate) async fn until_one_waits(&self, kind: &str) {
        let deadline = Instant::now() + DEADLINE;
        let waiting = "SELECT EXISTS (
                           SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
                           WHERE NOT granted AND locktype LIKE $1 AND datname = current_database()
                       )";
        while !sqlx::query_scalar::<_, bool>(waiting).bind(kind).fetch_one(&self.pool).await.unwrap() {
            assert!(
                Instant::now() < deadline,
                "waited {DEADLINE:?} for a statement to wait for a lock: {kind}"
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) async fn execute(&self, sql: &'static str) -> u64 {
        self.pool.execute(sql).await.unwrap().rows_affected()
    }

    pub(crate) async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    pub(crate) async fn texts(&self, sql: &'static str) -> Vec<String> {
        sqlx::query_scalar(sql).fetch_all(&self.pool).await.unwrap()
    }
}

/// Runs a test in a database with all tables, and drops it afterwards.
pub(crate) async fn with_database(test: impl AsyncFnOnce(Database)) {
    with_sets(&[&ENGINE, &PAYMENTS, &INBOX], test).await;
}

/// Runs a test in a database with these tables, and drops it afterwards.
pub(crate) async fn with_sets(sets: &[&MigrationSet], test: impl AsyncFnOnce(Database)) {
    let server = std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
        "SEMEL_TEST_POSTGRES_URL is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ",
    );
    let name = format!("semel_reaper_{}", Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&server).await.unwrap();
    admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
    let address = beside(&server, &name);
    let url: DatabaseUrl = address.parse().unwrap();
    schema::migrate(&url, sets).await.unwrap();
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

/// Payments whose owner is gone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stuck {
    pub(crate) client: &'static str,
    pub(crate) operation: &'static str,
    pub(crate) recovery_point: &'static str,
    /// How long ago the request went out first.
    pub(crate) sent_ago: Duration,
    /// How long ago the lease ended.
    pub(crate) dead_for: Duration,
}

impl Stuck {
    /// Sent a minute ago, within the send window.
    pub(crate) const YOUNG: Self = Self {
        client: "acme",
        operation: "payments.create",
        recovery_point: "sent",
        sent_ago: Duration::from_mins(1),
        dead_for: Duration::from_secs(30),
    };
    /// Sent an hour ago, past the send window.
    pub(crate) const OLD: Self = Self { sent_ago: Duration::from_hours(1), ..Self::YOUNG };
    /// About to be fenced when its owner went.
    pub(crate) const CANCELING: Self = Self { recovery_point: "canceling", ..Self::OLD };

    /// Plants so many of them, under the provider's keys `acme-0`, `acme-1`, … and the clients' keys `secret-acme-0`, ….
    pub(crate) async fn plant(self, db: &Database, count: i32) {
        sqlx::query(
            "WITH keys AS (
                INSERT INTO idempotency_keys (
                    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
                    status, recovery_point, lease_until, provider_key, provider_request, provider_first_sent_at, created_at
                )
                SELECT $1, $2, 'secret-' || name, decode(repeat('07', 32), 'hex'), 1, '{\"source\": \"tok_s3cret\"}',
                       gen_random_uuid(), gen_random_uuid(), 'in_progress', $3, now() - $5, name, 'order', now() - $4,
                       now() - $4
                FROM (SELECT $1 || '-' || n AS name FROM generate_series(0, $6 - 1) AS n) AS names
                RETURNING *
            )
            INSERT INTO payments (
                payment_id, client_id, operation, idempotency_key, reference, amount, currency, status, provider, provider_key,
                created_at
            )
            SELECT resource_id, client_id, operation, key, 'A-1', 1250, 'EUR', 'processing', 'desk', provider_key, created_at
            FROM keys",
        )
        .bind(self.client)
        .bind(self.operation)
        .bind(self.recovery_point)
        .bind(self.sent_ago)
        .bind(self.dead_for)
        .bind(count)
        .execute(&db.pool)
        .await
        .unwrap();
    }
}

/// Returns status of the payment, its key's status, its response and its events, of the payment with this provider key.
pub(crate) async fn outcome(db: &Database, provider_key: &str) -> (String, String, Option<i16>, Vec<String>) {
    sqlx::query_as(
        "SELECT p.status, k.status, k.response_code,
                ARRAY(SELECT event_type FROM outbox WHERE aggregate_id = p.payment_id::TEXT)
         FROM payments AS p JOIN idempotency_keys AS k ON k.resource_id = p.payment_id WHERE p.provider_key = $1",
    )
    .bind(provider_key)
    .fetch_one(&db.pool)
    .await
    .unwrap()
}

pub(crate) async fn payment_of(db: &Database, provider_key: &str) -> Uuid {
    sqlx::query_scalar("SELECT payment_id FROM payments WHERE provider_key = $1")
        .bind(provider_key)
        .fetch_one(&db.pool)
        .await
        .unwrap()
}
