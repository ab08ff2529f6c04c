//! The database's end of a measurement: an outbox that is filled, and real relays that drain it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_core::schema::{self, ENGINE};
use sqlx::{Executor as _, PgConnection, Row as _};

use super::Bench;
use super::pipe::{AGGREGATE_TYPE, EVENT_TYPE, Pipe};
use crate::net::free_port;
use crate::process::{Daemon, binary};
use crate::services::Database;
use crate::system::{READY, Running};
use crate::wait::eventually;

/// How many aggregates the events of a backlog belong to.
pub(crate) const AGGREGATES: i64 = 1_000;
/// How many events in a row belong to one of them.
pub(crate) const BURST: i64 = 10;

/// An outbox, and the pipe that it is drained into.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) database: Database,
    pub(crate) pipe: Pipe,
    relay_env: Vec<(String, String)>,
}

impl Stage {
    pub(crate) async fn build(bench: &Bench) -> Result<Self> {
        let database = bench.services.create_database("bench").await?;
        schema::migrate(&database.url().parse()?, &[&ENGINE]).await.context("making the outbox")?;
        let pipe = Pipe::lay(&bench.services).await?;
        Ok(Self { database, pipe, relay_env: bench.relay_env.clone() })
    }

    /// Where the outbox is.
    pub(crate) fn url(&self) -> String {
        self.database.url()
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection> {
        self.database.connect().await
    }

    /// Writes so many events of [`AGGREGATES`] aggregates, in bursts of [`BURST`], and leaves the table as a server that
    /// had the time would.
    pub(crate) async fn fill(&self, events: i64) -> Result<()> {
        let mut connection = self.connect().await?;
        sqlx::query(
            r#"INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
            SELECT $4, 'a' || n / $2 % $1, n / ($1 * $2) * $2 + n % $2 + 1, $5,
                   jsonb_build_object('order_id', md5(n::TEXT), 'client_id', 'acme', 'reference', 'A-' || n,
                                      'amount', n % 10000 + 1, 'currency', 'EUR', 'event_id', md5('e' || n)),
                   '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
            FROM generate_series(0::BIGINT, $3 - 1) AS n ORDER BY n"#,
        )
        .bind(AGGREGATES)
        .bind(BURST)
        .bind(events)
        .bind(AGGREGATE_TYPE)
        .bind(EVENT_TYPE)
        .execute(&mut connection)
        .await
        .context("filling the outbox")?;
        connection.execute("VACUUM (ANALYZE) outbox").await.context("analysing the outbox")?;
        // Only a superuser may; elsewhere it comes when it comes.
        let _ = connection.execute("CHECKPOINT").await;
        Ok(())
    }

    /// Starts a relay and waits until it is ready.
    pub(crate) async fn relay(&self, name: &str) -> Result<Running> {
        let admin = free_port()?;
        let command = Daemon::command(name, binary("semel-relay")?)
            .env("DATABASE_URL", self.database.url())
            .env("AMQP_URL", self.pipe.vhost.url())
            .env("SEMEL_EXCHANGE", &self.pipe.exchange)
            .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
            .env("SEMEL_LOG_FORMAT", "text")
            .envs(self.relay_env.iter().map(|(name, value)| (name, value)));
        let daemon = command.start().await?;
        daemon.wait_ready(admin, READY).await?;
        Ok(Running { daemon, admin, address: None })
    }

    /// Waits until these relays have marked so many events together. Asks them, since asking the database would slow it.
    pub(crate) async fn drained(&self, relays: &[Running], events: i64, limit: Duration) -> Result<()> {
        let look = || async {
            let mut published = 0.0;
            for relay in relays {
                let metric = relay.metric(semel_relay::metrics::PUBLISHED, "").await;
                published += metric.map_err(|error| format!("{error:#}"))?;
            }
            if published >= float(events) { Ok(()) } else { Err(format!("{published} published")) }
        };
        eventually(&format!("{events} events to be marked as published"), limit, look).await
    }

    /// Events per second from the mark of the `from`th event to that of the `to`th, by the database's clock.
    pub(crate) async fn rate(&self, from: i64, to: i64) -> Result<f64> {
        let marks = "SELECT count(*), EXTRACT(EPOCH FROM
                max(published_at) FILTER (WHERE nth = $2) - max(published_at) FILTER (WHERE nth = $1))::FLOAT8
            FROM (SELECT published_at, row_number() OVER (ORDER BY published_at) AS nth
                  FROM outbox WHERE published_at IS NOT NULL) AS marks";
        let mut connection = self.connect().await?;
        let row = sqlx::query(marks).bind(from).bind(to).fetch_one(&mut connection).await;
        let row = row.context("reading the marks")?;
        let (count, seconds): (i64, Option<f64>) = (row.try_get(0)?, row.try_get(1)?);
        ensure!(count >= to, "{count} events are marked as published, of {to}");
        let seconds = seconds.filter(|&seconds| seconds > 0.0).context("the marks are all of one moment")?;
        Ok(float(to - from) / seconds)
    }

    /// Events per second of a drain of `events` events, without its first and its last tenth.
    ///
    /// At the first mark the workers' first batches are done, and none are under way at the last: from the one to the
    /// other the rate would look too high, the more the larger the batches are.
    pub(crate) async fn drain_rate(&self, events: i64) -> Result<f64> {
        self.rate(events / 10, events - events / 10).await
    }
}

/// Asks relays to stop, and waits until they have.
pub(crate) async fn stop(relays: &[Running]) -> Result<()> {
    for relay in relays {
        relay.daemon.terminate()?;
    }
    for relay in relays {
        let status = relay.daemon.wait_exit(Duration::from_secs(30)).await?;
        ensure!(status.success(), "{} left with {status}", relay.daemon.name());
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark lie far below 2^53")]
fn float(count: i64) -> f64 {
    count as f64
}
