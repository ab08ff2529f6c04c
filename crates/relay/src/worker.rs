//! A worker: takes lanes, reads them, publishes in waves, marks what was confirmed.
//!
//! The transaction holds the lanes by advisory locks, and neither a transaction id nor a snapshot while it publishes. It
//! is bounded in events, bytes and time.

use std::collections::BTreeSet;
use std::time::Instant;

use metrics::{counter, gauge, histogram};
use semel_broker::{
    Connection as BrokerConnection, Envelope, Message, Outcome, Outgoing, Publisher, topology,
};
use semel_core::lifecycle::{Pass, Work};
use semel_core::outbox::drain::{self, PendingEvent};
use semel_core::{database, failpoint};
use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::error::RelayError;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::metrics as names;
use crate::options::{Config, TopologyMode};
use crate::prober::Shared;
use crate::waves::{Fate, Waves};

/// Most events of one wave: a channel is used fully by some hundred.
const WAVE: usize = 1000;

/// One worker with its own database connection, broker connection and channel.
#[derive(Debug)]
pub struct Worker {
    config: Config,
    shared: Shared,
    number: u16,
    database: Option<PgConnection>,
    publisher: Option<Publisher>,
}

/// What came of publishing a batch.
struct Sent {
    confirmed: Vec<Uuid>,
    /// Lanes with an event that is not safe.
    failed_lanes: BTreeSet<i16>,
    /// Why the publisher cannot be used any more.
    broken: Option<semel_broker::Error>,
}

impl Worker {
    /// Makes the worker with this number; it connects when it first runs.
    #[must_use]
    pub fn new(config: Config, shared: Shared, number: u16) -> Self {
        Self { config, shared, number, database: None, publisher: None }
    }

    /// Closes its connections.
    pub async fn close(mut self) {
        self.shared.broker(self.number, false);
        if let Some(publisher) = self.publisher.take() {
            publisher.close().await;
        }
        if let Some(database) = self.database.take() {
            let _ = database.close().await;
        }
    }

    async fn publisher(&mut self) -> Result<Publisher, RelayError> {
        if let Some(publisher) = self.publisher.take().filter(Publisher::is_usable) {
            return Ok(publisher);
        }
        self.shared.broker(self.number, false);
        let name = format!("semel-relay {}", self.number);
        if self.config.topology == TopologyMode::Declare {
            let connection =
                BrokerConnection::open(&self.config.broker, &name).await.map_err(RelayError::Broker)?;
            let declared = topology::declare_exchange(&connection, &self.config.exchange).await;
            connection.close().await;
            declared.map_err(RelayError::Broker)?;
        }
        let publisher = Publisher::open(&self.config.broker, &name).await.map_err(RelayError::Broker)?;
        self.shared.broker(self.number, true);
        Ok(publisher.with_confirm_limit(self.config.confirm_limit))
    }

    async fn database(&mut self) -> Result<PgConnection, RelayError> {
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        let mut database = database::connect(&self.config.database, "semel-relay worker")
            .await
            .map_err(RelayError::database("connecting to the database"))?;
        let recovering = drain::is_in_recovery(&mut database)
            .await
            .map_err(RelayError::database("asking whether the database is in recovery"))?;
        if recovering { Err(RelayError::Recovering) } else { Ok(database) }
    }

    /// Takes lanes, publishes what they hold and marks what is safe, inside the transaction that holds them.
    async fn batch(
        &self,
        tx: &mut PgConnection,
        waiting: &[i16],
        publisher: &mut Publisher,
    ) -> Result<Batch, RelayError> {
        let claimed = Instant::now();
        let share = waiting.len().div_ceil(usize::from(self.config.workers));
        let lanes = drain::take_lanes(tx, waiting, i64::try_from(share).unwrap_or(1))
            .await
            .map_err(RelayError::database("taking lanes"))?;
        let Some(count) = i64::try_from(lanes.len()).ok().filter(|&count| count > 0) else {
            return Ok(Batch { pass: Pass::Idle, broken: None });
        };
        let _held = LanesHeld::new(lanes.len());
        let per_lane = (i64::from(self.config.batch) / count).max(1);
        let events = drain::read(tx, &lanes, per_lane, i64::from(self.config.batch_bytes) / count)
            .await
            .map_err(RelayError::database("reading lanes"))?;
        histogram!(names::CLAIM).record(claimed.elapsed().as_secs_f64());
        failpoint!(failpoints::AFTER_TAKE);
        let read = events.len();
        histogram!(names::BATCH).record(u32::try_from(read).unwrap_or(u32::MAX));

        let sent = self.publish(publisher, events).await;
        let mut pass = Pass::Idle;
        if !sent.confirmed.is_empty() {
            let latencies = drain::mark(tx, &sent.confirmed)
                .await
                .map_err(RelayError::database("marking confirmed events"))?;
            counter!(names::PUBLISHED).increment(latencies.len() as u64);
            for latency in latencies {
                histogram!(names::LATENCY).record(latency);
            }
            gauge!(names::LAST_PROGRESS).set(unix_seconds());
            let full = i64::try_from(read).is_ok_and(|read| read >= per_lane);
            pass = if full { Pass::Full } else { Pass::Worked };
        }
        let failed: Vec<i16> = sent.failed_lanes.into_iter().collect();
        self.shared.rest(&failed);
        failpoint!(failpoints::BEFORE_COMMIT);
        Ok(Batch { pass, broken: sent.broken })
    }

    /// Publishes a batch in waves.
    async fn publish(&self, publisher: &mut Publisher, events: Vec<PendingEvent>) -> Sent {
        let began = Instant::now();
        let mut waves = Waves::new(events);
        let mut sent = Sent { confirmed: Vec::new(), failed_lanes: BTreeSet::new(), broken: None };
        while began.elapsed() < self.config.batch_time && sent.broken.is_none() {
            let events = waves.next_wave(WAVE);
            if events.is_empty() {
                break;
            }
            let mut awaited = Vec::with_capacity(events.len());
            let mut wave = Vec::with_capacity(events.len());
            for event in events {
                awaited.push((event.event_id, event.lane));
                wave.push(self.outgoing(event));
            }
            let started = Instant::now();
            let judged = publisher.publish_wave(wave).await;
            histogram!(names::CONFIRM).record(started.elapsed().as_secs_f64());
            let mut fates = Vec::with_capacity(awaited.len());
            for ((event_id, lane), outcome) in awaited.into_iter().zip(&judged.outcomes) {
                counter!(names::OUTCOMES, "outcome" => names::label(outcome)).increment(1);
                fates.push(match outcome {
                    Outcome::Confirmed => Fate::Safe,
                    // Nobody's fault but the connection's; said once, by the pass.
                    Outcome::Unknown { .. } => Fate::Stopped,
                    Outcome::Nacked | Outcome::Returned { .. } | Outcome::Refused { .. } => {
                        tracing::warn!(%event_id, lane, outcome = names::label(outcome), "not published: {outcome:?}");
                        sent.failed_lanes.insert(lane);
                        Fate::Stopped
                    }
                });
            }
            sent.confirmed.extend(waves.settle(&fates));
            sent.broken = judged.broken;
            failpoint!(failpoints::AFTER_CONFIRM);
        }
        sent
    }

    fn outgoing(&self, event: PendingEvent) -> Outgoing {
        // The table's names are bounded so that the key fits; one that does not is refused by the publisher.
        let routing_key = format!("{}.{}", event.aggregate_type, event.event_type);
        let envelope = Envelope {
            event_id: event.event_id,
            event_type: event.event_type,
            aggregate_type: event.aggregate_type,
            aggregate_id: event.aggregate_id,
            aggregate_version: event.aggregate_version,
            outbox_id: event.id,
            created_at_unix_micros: micros(event.created_at),
            source: self.config.source.clone(),
            headers: event.headers.0,
        };
        Outgoing {
            exchange: self.config.exchange.clone(),
            routing_key,
            message: Message::Event { envelope: Box::new(envelope), body: event.payload.into_bytes() },
        }
    }
}

impl Work for Worker {
    type Error = RelayError;

    async fn run_once(&mut self) -> Result<Pass, RelayError> {
        // Both first: while one of them is away no lane is held. Each is taken out, so that one that fails is dropped: the
        // database connection frees its lanes by that.
        let mut publisher = self.publisher().await?;
        gauge!(names::BROKER_BLOCKED).set(if publisher.is_blocked() { 1.0 } else { 0.0 });
        if publisher.is_blocked() {
            self.publisher = Some(publisher);
            self.shared.broker(self.number, false);
            return Err(RelayError::Blocked);
        }
        self.shared.broker(self.number, true);
        let waiting = self.shared.waiting();
        if waiting.is_empty() {
            self.publisher = Some(publisher);
            return Ok(Pass::Idle);
        }
        let mut database = self.database().await?;
        let mut tx = database.begin().await.map_err(RelayError::database("beginning a batch"))?;
        let batch = self.batch(&mut tx, &waiting, &mut publisher).await?;
        tx.commit().await.map_err(RelayError::database("committing a batch"))?;
        self.database = Some(database);
        match batch.broken {
            None => self.publisher = Some(publisher),
            Some(error) => {
                self.shared.broker(self.number, false);
                return Err(RelayError::Broker(error));
            }
        }
        if batch.pass != Pass::Idle {
            self.shared.progress().notify_one();
        }
        Ok(batch.pass)
    }
}

/// What a batch came to.
struct Batch {
    pass: Pass,
    broken: Option<semel_broker::Error>,
}

/// Takes lanes off the gauge again, however the batch ends.
struct LanesHeld(u32);

impl LanesHeld {
    fn new(lanes: usize) -> Self {
        let lanes = u32::try_from(lanes).unwrap_or(u32::MAX);
        gauge!(names::LANES_HELD).increment(lanes);
        Self(lanes)
    }
}

impl Drop for LanesHeld {
    fn drop(&mut self) {
        gauge!(names::LANES_HELD).decrement(self.0);
    }
}

fn micros(time: OffsetDateTime) -> i64 {
    i64::try_from(time.unix_timestamp_nanos() / 1000).unwrap_or_default()
}

fn unix_seconds() -> f64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |age| age.as_secs_f64())
}
