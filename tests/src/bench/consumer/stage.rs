//! A ledger's database, a queue that is filled, and ledgers that drain it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use semel_broker::{BrokerUrl, Envelope, Outcome, Outgoing, Publisher};
use semel_core::schema;
use sqlx::{Executor as _, Row as _};
use uuid::Uuid;

use super::super::Bench;
use super::super::stage::stop;
use super::super::statistics::float;
use super::super::usage::processor_time;
use crate::net::free_port;
use crate::process::{Daemon, binary};
use crate::services::{Database, Vhost};
use crate::system::{READY, Running};

/// Transactions of a ledger at a time, and pgbench's connections.
pub(super) const CONCURRENCY: usize = 8;
/// Messages that the broker sends ahead of each of them.
const AHEAD: usize = 16;
/// Messages of one wave, and how far a message's twin is behind it.
const WAVE: usize = 500;
/// Between looks at a ledger's counters.
const LOOK: Duration = Duration::from_millis(20);

/// How often each message is delivered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sent {
    Once,
    Twice,
}

impl Sent {
    pub(super) const fn times(self) -> usize {
        match self {
            Self::Once => 1,
            Self::Twice => 2,
        }
    }
}

/// What a ledger has done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drained {
    /// Messages per second.
    pub(super) rate: f64,
    /// How many there were.
    pub(super) messages: usize,
    /// Its own processor time, its start included.
    pub(super) processor: Duration,
}

#[derive(Debug)]
pub(super) struct Stage {
    database: Database,
    vhost: Vhost,
    exchange: String,
    queue: String,
}

impl Stage {
    pub(super) async fn build(bench: &Bench) -> Result<Self> {
        let database = bench.services.create_database("bench").await?;
        schema::migrate(&database.url().parse()?, &semel_ledger::SETS).await.context("making the tables")?;
        let vhost = bench.services.create_vhost("bench").await?;
        let (exchange, queue) = (vhost.scoped("semel.events"), vhost.scoped("ledger.bench"));
        let stage = Self { database, vhost, exchange, queue };
        // It makes exchange and queues, as it does at each start.
        stop(&[stage.ledger(bench, 1).await?]).await?;
        Ok(stage)
    }

    /// Where the database is.
    pub(super) fn url(&self) -> String {
        self.database.url()
    }

    /// Gives the database the time that it takes between measurements.
    pub(super) async fn settle(&self) -> Result<()> {
        let mut connection = self.database.connect().await?;
        // Only a superuser may; elsewhere it comes when it comes.
        let _ = connection.execute("CHECKPOINT").await;
        Ok(())
    }

    async fn ledger(&self, bench: &Bench, batch: usize) -> Result<Running> {
        let admin = free_port()?;
        let command = Daemon::command("bench-ledger", binary("semel-ledger")?)
            .env("DATABASE_URL", self.database.url())
            .env("AMQP_URL", self.vhost.url())
            .env("SEMEL_NAMESPACE", "bench")
            .env("SEMEL_EXCHANGE", &self.exchange)
            .env("SEMEL_LEDGER_QUEUE", &self.queue)
            .env("SEMEL_LEDGER_CONCURRENCY", CONCURRENCY.to_string())
            .env("SEMEL_LEDGER_PREFETCH", (CONCURRENCY * AHEAD.max(batch)).to_string())
            .env("SEMEL_LEDGER_BATCH", batch.to_string())
            .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
            .env("SEMEL_LOG_FORMAT", "text")
            .envs(bench.ledger_env.iter().map(|(name, value)| (name, value)));
        let daemon = command.start().await?;
        daemon.wait_ready(admin, READY).await?;
        Ok(Running { daemon, admin, address: None })
    }

    /// Puts the events of so many orders of a client into the queue, each as often as told.
    pub(super) async fn send(&self, client: &str, orders: usize, sent: Sent) -> Result<()> {
        let url: BrokerUrl = self.vhost.url().parse()?;
        let mut publisher = Publisher::open(&url, "bench").await?;
        let mut left = orders;
        while left > 0 {
            let count = left.min(WAVE);
            let wave: Vec<_> = (0..count).map(|_| self.order(client)).collect();
            for _ in 0..sent.times() {
                let told = publisher.publish_wave(wave.clone()).await;
                let is_safe = told.outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed);
                ensure!(is_safe, "the queue did not take all messages: {:?}", told.broken);
            }
            left -= count;
        }
        publisher.close().await;
        Ok(())
    }

    fn order(&self, client: &str) -> Outgoing {
        let (event_id, order_id) = (Uuid::new_v4(), Uuid::new_v4());
        let envelope = Envelope {
            event_id,
            event_type: "OrderPlaced".to_owned(),
            aggregate_type: "order".to_owned(),
            aggregate_id: order_id.to_string(),
            aggregate_version: Some(1),
            outbox_id: 1,
            created_at_unix_micros: 1_790_000_000_000_000,
            source: "bench".to_owned(),
            headers: BTreeMap::from([(
                "traceparent".to_owned(),
                "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
            )]),
        };
        let body = serde_json::json!({
            "order_id": order_id, "client_id": client, "reference": "bench", "amount": 1250, "currency": "EUR",
            "event_id": event_id,
        });
        let body = body.to_string().into_bytes();
        Outgoing::event(self.exchange.as_str(), "order.OrderPlaced", envelope, body)
    }

    /// Has a ledger take so many messages.
    pub(super) async fn drain(&self, bench: &Bench, batch: usize, messages: usize) -> Result<Drained> {
        let ledger = self.ledger(bench, batch).await?;
        let (first, last) = (float(messages) * 0.1, float(messages));
        let mut began = None;
        let mut looks = tokio::time::interval(LOOK);
        let rate = loop {
            looks.tick().await;
            let taken = taken(&ledger).await?;
            let now = Instant::now();
            match began {
                None if taken >= first => began = Some((now, taken)),
                Some((at, before)) if taken >= last => {
                    break (taken - before) / now.duration_since(at).as_secs_f64();
                }
                _ => {}
            }
        };
        let processor = processor_time(ledger.daemon.id().pid())?;
        stop(&[ledger]).await?;
        ensure!(rate.is_finite(), "all messages were taken between two looks");
        Ok(Drained { rate, messages, processor })
    }

    /// Says how what is booked of a client differs from what was sent, if it does.
    pub(super) async fn compare(&self, client: &str, orders: usize) -> Result<Option<String>> {
        let count = "SELECT count(*), count(DISTINCT event_id) FROM ledger_transactions WHERE client_id = $1";
        let mut connection = self.database.connect().await?;
        let row = sqlx::query(count).bind(client).fetch_one(&mut connection).await.context("counting")?;
        let (bookings, events): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let orders = i64::try_from(orders)?;
        let differs = (bookings, events) != (orders, orders);
        Ok(differs.then(|| format!("{orders} orders, {bookings} bookings of {events} events")))
    }
}

/// How many messages a ledger is done with.
async fn taken(ledger: &Running) -> Result<f64> {
    let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", ledger.admin)).await?.text().await?;
    let series = text.lines().filter(|line| line.starts_with(semel_consumer_kit::metrics::MESSAGES));
    Ok(series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}
