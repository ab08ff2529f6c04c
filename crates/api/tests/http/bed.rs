//! A database and a server of a test's own.

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use secrecy::ExposeSecret as _;
use semel_api::{Api, Door, Settings};
use semel_core::credentials::{self, Scopes};
use semel_core::database::{self, DatabaseUrl};
use semel_core::lifecycle::Lifecycle;
use semel_core::schema::{self, ENGINE};
use semel_payments::payments::create::MakePayment;
use semel_payments::problem::ProblemBase;
use semel_payments::provider::Dedup;
use semel_payments::provider::grpc::GrpcProvider;
use semel_payments::schema::PAYMENTS;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, Postgres, Transaction};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::client::Ask;
use crate::provider::Provider;

/// Until when a condition must hold.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A database of a test's own.
#[derive(Clone, Debug)]
pub(crate) struct Database {
    pub(crate) pool: PgPool,
    address: String,
}

impl Database {
    /// Connects anew, as another process would: it has no connection yet, and no statement is prepared.
    pub(crate) fn anew(&self) -> Self {
        let pool = database::pool(&self.address.parse().unwrap(), "semel-test", 5);
        Self { pool, ..self.clone() }
    }

    pub(crate) async fn execute(&self, sql: &'static str) {
        self.pool.execute(sql).await.unwrap();
    }

    /// Returns the address of its server.
    pub(crate) async fn server(&self) -> SocketAddr {
        let options = self.pool.connect_options();
        let mut found = tokio::net::lookup_host((options.get_host(), options.get_port())).await.unwrap();
        found.next().unwrap()
    }

    /// Returns the password in its URL; nothing where there is none.
    pub(crate) fn password(&self) -> String {
        let (_, rest) = self.address.split_once("://").unwrap();
        let user = rest.split_once('@').map_or("", |(user, _)| user);
        user.split_once(':').map_or(String::new(), |(_, password)| password.to_owned())
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

    /// Takes a lock that keeps orders from being written, but not from being looked up.
    pub(crate) async fn stop_writes(&self) -> Transaction<'static, Postgres> {
        let mut tx = self.pool.begin().await.unwrap();
        tx.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
        tx
    }

    /// Waits until a backend waits for a lock that another session holds; returns it.
    pub(crate) async fn until_one_is_blocked(&self) -> i32 {
        until("a statement to wait for a lock", async || {
            sqlx::query_scalar(
                "SELECT pid FROM pg_stat_activity
                 WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0 LIMIT 1",
            )
            .fetch_optional(&self.pool)
            .await
            .unwrap()
        })
        .await
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

    /// Makes a credential of a client, and the client where it is new; returns the token.
    pub(crate) async fn token(&self, client: &str) -> String {
        self.token_for(client, &[]).await
    }

    /// As [`Database::token`], for nothing but these scopes.
    pub(crate) async fn token_for(&self, client: &str, scopes: &[&str]) -> String {
        let scopes = Scopes::only(scopes.iter().map(|&scope| scope.to_owned()));
        let client = client.parse().unwrap();
        let created = credentials::operator::create(&self.pool, &client, &scopes).await.unwrap();
        created.token.expose_secret().to_owned()
    }

    /// Starts a server over this database, whose statements wait for locks for as long as a test needs.
    pub(crate) async fn serve(&self) -> Server {
        let pool = PgPoolOptions::new()
            .max_connections(10)
            .acquire_timeout(Duration::from_secs(3))
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute("SET lock_timeout = '60s'").await.map(drop) })
            })
            .connect_lazy(&self.address)
            .unwrap();
        Server::start(pool, self.token("acme").await).await
    }

    /// Starts a server over this database that makes payments through a provider, with a daemon's own pool.
    pub(crate) async fn serve_payments(&self, provider: &Provider) -> Server {
        let token = self.token("acme").await;
        Server::start_with(self.pool.clone(), token, Some(provider)).await
    }

    /// Starts a server over this database whose API and door are a test's own.
    pub(crate) async fn serve_changed(
        &self,
        provider: Option<&Provider>,
        change: impl FnOnce(Api) -> Api,
        door: Door,
    ) -> Server {
        let token = self.token("acme").await;
        let server = Server::start_changed(self.pool.clone(), token, provider, change, door).await;
        server.api.open();
        server
    }

    /// Starts a server over this database with a daemon's own pool.
    pub(crate) async fn serve_guarded(&self) -> Server {
        Server::start(self.pool.clone(), self.token("acme").await).await
    }
}

/// A server of a test's own.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) api: Api,
    pub(crate) life: Lifecycle,
    /// A token of the client `acme`.
    pub(crate) token: String,
}

impl Server {
    /// Starts a server over a pool, open from the start.
    pub(crate) async fn start(pool: PgPool, token: String) -> Self {
        Self::start_with(pool, token, None).await
    }

    async fn start_with(pool: PgPool, token: String, provider: Option<&Provider>) -> Self {
        let server = Self::start_closed_with(pool, token, provider).await;
        server.api.open();
        server
    }

    /// Starts a server that has not met a usable database yet.
    pub(crate) async fn start_closed(pool: PgPool, token: String) -> Self {
        Self::start_closed_with(pool, token, None).await
    }

    async fn start_closed_with(pool: PgPool, token: String, provider: Option<&Provider>) -> Self {
        Self::start_changed(pool, token, provider, |api| api, Door::default()).await
    }

    async fn start_changed(
        pool: PgPool,
        token: String,
        provider: Option<&Provider>,
        change: impl FnOnce(Api) -> Api,
        door: Door,
    ) -> Self {
        let life = Lifecycle::new();
        let settings = Settings {
            namespace: "test".parse().unwrap(),
            key_retention: Duration::from_hours(24),
            problem_base: ProblemBase::DEFAULT.parse().unwrap(),
        };
        let mut api = Api::new(pool, settings.clone(), life.clone());
        if let Some(provider) = provider {
            let port = GrpcProvider::new(&provider.url(), Dedup::ForEver).unwrap();
            api = api.with_payments(MakePayment::new(settings.namespace, port.into(), settings.problem_base));
        }
        let api = change(api);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        life.spawn(semel_api::serve(listener, door, api.clone(), life.clone()));
        Self { address, api, life, token }
    }

    /// Begins a POST of an order of this amount under this key, by the client `acme`.
    pub(crate) fn order(&self, key: &str, amount: i64) -> Ask {
        self.post(format!(r#"{{"reference":"A-1","amount":{amount},"currency":"EUR"}}"#))
            .header("Idempotency-Key", key)
    }

    /// Begins a POST of a payment of this amount under this key, by the client `acme`.
    pub(crate) fn payment(&self, key: &str, amount: i64) -> Ask {
        let body = format!(r#"{{"reference":"A-1","amount":{amount},"currency":"EUR","source":"tok_visa"}}"#);
        self.post_to("/v1/payments", body).header("Idempotency-Key", key)
    }

    /// Begins a POST of this body to the orders, by the client `acme` and without a key.
    pub(crate) fn post(&self, body: impl AsRef<[u8]>) -> Ask {
        self.post_to("/v1/orders", body)
    }

    /// Begins a POST of this body, by the client `acme` and without a key.
    pub(crate) fn post_to(&self, path: &str, body: impl AsRef<[u8]>) -> Ask {
        Ask::new("POST", path)
            .header("Authorization", format!("Bearer {}", self.token))
            .header("Content-Type", "application/json")
            .body(body)
    }

    /// Begins a GET by the client `acme`.
    pub(crate) fn get(&self, path: &str) -> Ask {
        Ask::new("GET", path).header("Authorization", format!("Bearer {}", self.token))
    }
}

/// Looks again and again until there is something to see.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Runs a test with a database of its own, and drops it afterwards.
pub(crate) async fn with_database(test: impl AsyncFnOnce(Database)) {
    let server = std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
        "SEMEL_TEST_POSTGRES_URL is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ",
    );
    let name = format!("semel_api_{}", uuid::Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&server).await.unwrap();
    admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
    let address = beside(&server, &name);
    let url: DatabaseUrl = address.parse().unwrap();
    schema::migrate(&url, &[&ENGINE, &PAYMENTS]).await.unwrap();
    let pool = database::pool(&url, "semel-test", 10);
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
