//! A database, an API over it, and a provider that charges honestly.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use secrecy::ExposeSecret as _;
use semel_core::credentials;
use semel_core::schema::{self, ENGINE};
use semel_payments::schema::PAYMENTS;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, Row as _};

use super::super::Bench;
use super::super::stage::stop;
use super::load::{Answered, Keys, Load};
use crate::net::{free_port, unique_name};
use crate::process::{Daemon, binary};
use crate::provider::read_book;
use crate::services::Database;
use crate::system::{READY, Running, TENANT};

/// Connections of the API's clients, its own to the database, and pgbench's: as many statements at a time on both sides.
pub(super) const CONNECTIONS: usize = 32;

/// How long the API is warmed up: connections to the database, prepared statements, and the credential that it remembers.
const WARM_UP: Duration = Duration::from_secs(1);

/// What is asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Asked {
    Orders,
    Payments,
}

impl Asked {
    pub(super) const fn path(self) -> &'static str {
        match self {
            Self::Orders => "/v1/orders",
            Self::Payments => "/v1/payments",
        }
    }

    const fn body(self) -> &'static str {
        match self {
            Self::Orders => r#"{"reference":"bench","amount":1250,"currency":"EUR"}"#,
            Self::Payments => r#"{"reference":"bench","amount":1250,"currency":"EUR","source":"tok_good"}"#,
        }
    }
}

/// A running API.
#[derive(Debug)]
pub(super) struct Stage {
    database: Database,
    api: Running,
    provider: Running,
    book: PathBuf,
    token: String,
    asked: Asked,
    /// How often it was asked afresh, and has answered.
    made: usize,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // It lies among temporary files.
        let _ = std::fs::remove_file(&self.book);
    }
}

impl Stage {
    pub(super) async fn build(bench: &Bench, asked: Asked) -> Result<Self> {
        let database = bench.services.create_database("bench").await?;
        schema::migrate(&database.url().parse()?, &[&ENGINE, &PAYMENTS])
            .await
            .context("making the tables")?;
        let pool = PgPoolOptions::new().max_connections(1).connect(&database.url()).await?;
        let credential =
            credentials::operator::create(&pool, &TENANT.parse()?, &credentials::Scopes::all()).await?;
        pool.close().await;
        let book = std::env::temp_dir().join(format!("{}.jsonl", unique_name("semel_book")));
        let provider = provider(&book).await?;
        let api = api(bench, &database, &provider).await?;
        let token = credential.token.expose_secret().to_owned();
        let mut stage = Self { database, api, provider, book, token, asked, made: 0 };
        stage.send_fresh("warm-up", WARM_UP).await.context("warming up")?;
        Ok(stage)
    }

    /// Where the database is.
    pub(super) fn url(&self) -> String {
        self.database.url()
    }

    /// The API's process.
    pub(super) fn pid(&self) -> i32 {
        self.api.daemon.id().pid()
    }

    /// Loads the API with new keys that begin so.
    pub(super) async fn send_fresh(&mut self, run: &str, window: Duration) -> Result<Answered> {
        let answered = self.load(window)?.send(&Keys::Fresh(run.to_owned())).await?;
        self.made += answered.count();
        Ok(answered)
    }

    /// Loads the API with the keys that were new in an earlier load.
    pub(super) async fn send_again(
        &self,
        run: &str,
        earlier: &Answered,
        window: Duration,
    ) -> Result<Answered> {
        let keys = Keys::Known(run.to_owned(), earlier.by_connection.clone());
        self.load(window)?.send(&keys).await
    }

    fn load(&self, window: Duration) -> Result<Load> {
        let address = self.api.address.context("no API")?;
        let (path, body) = (self.asked.path(), self.asked.body());
        Ok(Load { address, token: self.token.clone(), path, body, window })
    }

    /// Gives the database the time that it takes between measurements: what one of them leaves to be written, the next one
    /// is not to pay for.
    pub(super) async fn settle(&self) -> Result<()> {
        let mut connection = self.database.connect().await?;
        // Only a superuser may; elsewhere it comes when it comes.
        let _ = connection.execute("CHECKPOINT").await;
        Ok(())
    }

    /// Stops everything, and names what is not as the clients were told.
    pub(super) async fn end(self) -> Result<Vec<String>> {
        let (asked, made) = (self.asked, i64::try_from(self.made)?);
        let rows = match asked {
            Asked::Orders => {
                "SELECT count(*), (SELECT count(*) FROM outbox WHERE aggregate_id IN (
                     SELECT order_id::TEXT FROM orders WHERE idempotency_key NOT LIKE 'pgbench-%'))
                 FROM orders WHERE idempotency_key NOT LIKE 'pgbench-%'"
            }
            Asked::Payments => {
                "SELECT count(*), (SELECT count(*) FROM outbox WHERE aggregate_id IN (
                     SELECT payment_id::TEXT FROM payments WHERE idempotency_key NOT LIKE 'pgbench-%'))
                 FROM payments WHERE idempotency_key NOT LIKE 'pgbench-%' AND status = 'succeeded'"
            }
        };
        let mut connection = self.database.connect().await?;
        let row = sqlx::query(rows).fetch_one(&mut connection).await.context("counting what was made")?;
        let (rows, events): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let mut faults = Vec::new();
        if (rows, events) != (made, made) {
            faults
                .push(format!("{made} were acknowledged, and there are {rows} of them and {events} events"));
        }
        let charged = read_book(&self.book)?.len();
        if asked == Asked::Payments && charged != self.made {
            faults.push(format!("{made} were acknowledged, and the provider has charged {charged} times"));
        }
        stop(std::slice::from_ref(&self.api)).await?;
        stop(std::slice::from_ref(&self.provider)).await?;
        Ok(faults)
    }
}

async fn provider(book: &std::path::Path) -> Result<Running> {
    let (address, admin) = (SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)), free_port()?);
    let command = Daemon::command("bench-provider", binary("semel-provider-sim")?)
        .env("SEMEL_PROVIDER_LISTEN", address.to_string())
        .env("SEMEL_PROVIDER_BOOK", book)
        .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
        .env("SEMEL_LOG_FORMAT", "text");
    let daemon = command.start().await?;
    daemon.wait_ready(admin, READY).await?;
    Ok(Running { daemon, admin, address: Some(address) })
}

async fn api(bench: &Bench, database: &Database, provider: &Running) -> Result<Running> {
    let (address, admin) = (SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)), free_port()?);
    let provider = provider.address.context("no provider")?;
    let command = Daemon::command("bench-api", binary("semel-api")?)
        .env("DATABASE_URL", database.url())
        .env("SEMEL_NAMESPACE", "bench")
        .env("SEMEL_API_LISTEN", address.to_string())
        .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
        .env("SEMEL_PROVIDER_URL", format!("http://{provider}"))
        .env("SEMEL_PROVIDER_HORIZON_HOURS", "0")
        .env("SEMEL_API_DB_CONNECTIONS", CONNECTIONS.to_string())
        // All requests are one client's, as never in life.
        .env("SEMEL_API_CLIENT_CLAIMS_PER_SECOND", "1000000")
        .env("SEMEL_API_CLIENT_CLAIMS_BURST", "1000000")
        .env("SEMEL_LOG_FORMAT", "text")
        .envs(bench.api_env.iter().map(|(name, value)| (name, value)));
    let daemon = command.start().await?;
    daemon.wait_ready(admin, READY).await?;
    Ok(Running { daemon, admin, address: Some(address) })
}
