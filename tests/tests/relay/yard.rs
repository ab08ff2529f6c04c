//! A database with an outbox, a virtual host with a tap, and relays to run over them pass by pass.

use std::time::Duration;

use anyhow::{Context as _, Result};
use semel_core::admin::Health;
use semel_core::lifecycle::{Pass, Work as _};
use semel_core::outbox::held::Policy;
use semel_core::schema::{self, ENGINE};
use semel_relay::{Config, Prober, RelayError, RoutingKey, Shared, TopologyMode, Worker};
use semel_tests::proxy::Proxy;
use semel_tests::services::{Database, Services, Vhost};
use semel_tests::tap::Tap;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

/// Where a test's relays work.
pub(crate) struct Yard {
    pub(crate) database: Database,
    pub(crate) vhost: Vhost,
    pub(crate) exchange: String,
}

impl Yard {
    pub(crate) async fn new() -> Result<Self> {
        Self::on(&Services::from_env()?).await
    }

    /// One that uses these services.
    pub(crate) async fn on(services: &Services) -> Result<Self> {
        let database = services.create_database("relay").await?;
        schema::migrate(&database.url().parse()?, &[&ENGINE]).await?;
        let vhost = services.create_vhost("relay").await?;
        let exchange = vhost.scoped("semel.events");
        Ok(Self { database, vhost, exchange })
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection> {
        self.database.connect().await
    }

    pub(crate) async fn tap(&self, keys: &[&str]) -> Result<Tap> {
        Tap::open(&self.vhost.url(), &self.exchange, &self.vhost.scoped("tap"), keys).await
    }

    pub(crate) fn config(&self, workers: u16) -> Result<Config> {
        Ok(Config {
            database: self.database.url().parse()?,
            listen: self.database.url().parse()?,
            broker: self.vhost.url().parse()?,
            exchange: self.exchange.clone(),
            routing_key: RoutingKey::default(),
            topology: TopologyMode::Declare,
            source: "yard".to_owned(),
            workers,
            batch: 100,
            batch_bytes: 1024 * 1024,
            batch_time: Duration::from_secs(5),
            confirm_limit: Duration::from_secs(15),
            held: Policy {
                shortest: Duration::from_millis(200),
                longest: Duration::from_secs(1),
                max_attempts: 1000,
                skip_dead: Vec::new(),
            },
        })
    }

    /// Inserts one event as any service may.
    pub(crate) async fn insert(
        &self,
        connection: &mut PgConnection,
        aggregate: &str,
        version: i64,
        event_type: &str,
    ) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
             VALUES ('thing', $1, $2, $3, '{\"n\": 1}')",
        )
        .bind(aggregate)
        .bind(version)
        .bind(event_type)
        .execute(connection)
        .await?;
        Ok(())
    }

    /// Inserts versions 1 to `versions` of `aggregates` aggregates, round by round.
    pub(crate) async fn fill(&self, aggregates: i64, versions: i64) -> Result<()> {
        sqlx::query(
            "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
             SELECT 'thing', 'a' || a, v, 'Happened', '{}' FROM generate_series(1, $2) AS v, generate_series(1, $1) AS a
             ORDER BY v",
        )
        .bind(aggregates)
        .bind(versions)
        .execute(&mut self.connect().await?)
        .await?;
        Ok(())
    }

    /// Counts events that meet a condition.
    pub(crate) async fn count(&self, condition: &str) -> Result<i64> {
        let query = format!("SELECT count(*) FROM outbox WHERE {condition}");
        Ok(sqlx::query(AssertSqlSafe(query)).fetch_one(&mut self.connect().await?).await?.try_get(0)?)
    }

    /// Executes statements.
    pub(crate) async fn execute(&self, sql: &str) -> Result<()> {
        self.connect().await?.execute(AssertSqlSafe(sql.to_owned())).await?;
        Ok(())
    }

    /// Declares a queue that is full with one message, and nacks what comes after it, for these keys.
    pub(crate) async fn full_queue(&self, queue: &str, key: &str) -> Result<()> {
        use lapin::options::{QueueBindOptions, QueueDeclareOptions};
        use lapin::types::{AMQPValue, FieldTable};
        let connection =
            lapin::Connection::connect(&self.vhost.url(), lapin::ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(1));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(queue.into(), durable, arguments).await?;
        let exchange = self.exchange.as_str().into();
        let bind = QueueBindOptions::default();
        channel.queue_bind(queue.into(), exchange, key.into(), bind, FieldTable::default()).await?;
        connection.close(200, "done".into()).await?;
        Ok(())
    }

    /// Counts the lanes that are held by anybody.
    pub(crate) async fn lanes_held(&self) -> Result<i64> {
        let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (
                        SELECT oid FROM pg_database WHERE datname = current_database())";
        Ok(sqlx::query(held).fetch_one(&mut self.connect().await?).await?.try_get(0)?)
    }

    /// Tells the time by the database's clock, in seconds.
    pub(crate) async fn now(&self) -> Result<f64> {
        let now = "SELECT EXTRACT(EPOCH FROM clock_timestamp())::FLOAT8";
        Ok(sqlx::query(now).fetch_one(&mut self.connect().await?).await?.try_get(0)?)
    }

    /// Tells how many seconds after a moment of that clock the last event was marked as published.
    pub(crate) async fn last_mark_after(&self, moment: f64) -> Result<f64> {
        let last = "SELECT EXTRACT(EPOCH FROM max(published_at))::FLOAT8 FROM outbox";
        let last: f64 = sqlx::query(last).fetch_one(&mut self.connect().await?).await?.try_get(0)?;
        Ok(last - moment)
    }

    /// Names the server's processes that hold lanes.
    pub(crate) async fn holders(&self) -> Result<std::collections::BTreeSet<i32>> {
        let held = "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (
                        SELECT oid FROM pg_database WHERE datname = current_database())";
        let rows = sqlx::query(held).fetch_all(&mut self.connect().await?).await?;
        Ok(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
    }

    /// Puts a proxy in front of the broker, and returns the URL through it.
    pub(crate) async fn broker_behind_proxy(&self) -> Result<(Proxy, String)> {
        behind_proxy(&self.vhost.url()).await
    }

    /// Puts a proxy in front of the database, and returns the URL through it.
    pub(crate) async fn database_behind_proxy(&self) -> Result<(Proxy, String)> {
        behind_proxy(&self.database.url()).await
    }

    pub(crate) async fn unpublished(&self) -> Result<i64> {
        let query = "SELECT count(*) FROM outbox WHERE published_at IS NULL";
        Ok(sqlx::query(query).fetch_one(&mut self.connect().await?).await?.try_get(0)?)
    }
}

/// Puts a proxy in front of a server, and returns the URL through it.
async fn behind_proxy(url: &str) -> Result<(Proxy, String)> {
    let mut url = reqwest::Url::parse(url)?;
    let target = format!("{}:{}", url.host_str().context("no host")?, url.port().context("no port")?);
    let target = tokio::net::lookup_host(target).await?.next().context("no address")?;
    let proxy = Proxy::start(target).await?;
    url.set_host(Some("127.0.0.1"))?;
    url.set_port(Some(proxy.addr().port())).ok().context("no port in the URL")?;
    Ok((proxy, url.to_string()))
}

/// A relay process's parts, driven by hand.
pub(crate) struct Relay {
    pub(crate) shared: Shared,
    pub(crate) prober: Prober,
    pub(crate) workers: Vec<Worker>,
}

impl Relay {
    pub(crate) fn new(config: &Config) -> Self {
        let shared = Shared::new(Health::default(), config.workers);
        let workers =
            (0..config.workers).map(|number| Worker::new(config.clone(), shared.clone(), number)).collect();
        Self { prober: Prober::new(config.clone(), shared.clone()), workers, shared }
    }

    /// Connects all workers to the broker, without lanes to work on.
    pub(crate) async fn connect(&mut self) -> Result<(), RelayError> {
        for worker in &mut self.workers {
            worker.run_once().await?;
        }
        Ok(())
    }

    /// Probes, and lets the first worker run once.
    pub(crate) async fn pass(&mut self) -> Result<Pass, RelayError> {
        self.prober.run_once().await?;
        self.workers[0].run_once().await
    }

    /// Probes and works, all workers side by side, until a probe finds nothing.
    pub(crate) async fn drain(mut self) -> Result<Self> {
        self.connect().await?;
        let mut rounds = 0;
        loop {
            self.prober.run_once().await?;
            if self.shared.waiting().is_empty() {
                return Ok(self);
            }
            let mut side_by_side = tokio::task::JoinSet::new();
            for mut worker in self.workers.drain(..) {
                side_by_side.spawn(async move {
                    worker.run_once().await?;
                    Ok::<_, RelayError>(worker)
                });
            }
            while let Some(worker) = side_by_side.join_next().await {
                self.workers.push(worker??);
            }
            rounds += 1;
            anyhow::ensure!(rounds < 10_000, "the outbox is never empty");
        }
    }
}

/// The versions of an aggregate's first deliveries, in the order of arrival.
pub(crate) fn first_deliveries(tap: &Tap, aggregate: &str) -> Result<Vec<i64>> {
    let mut seen = std::collections::BTreeSet::new();
    tap.messages()?
        .iter()
        .filter(|message| message.aggregate_id == aggregate && seen.insert(message.event_id))
        .map(|message| message.aggregate_version.context("no version"))
        .collect()
}

/// Waits until the tap has so many different events.
pub(crate) async fn arrived(tap: &Tap, events: usize) -> Result<()> {
    let look = || async move {
        let messages = tap.messages().map_err(|error| error.to_string())?;
        let ids: std::collections::BTreeSet<_> = messages.iter().map(|message| message.event_id).collect();
        if ids.len() >= events { Ok(()) } else { Err(format!("{} of {events}", ids.len())) }
    };
    semel_tests::wait::eventually("events at the tap", Duration::from_mins(1), look).await
}
