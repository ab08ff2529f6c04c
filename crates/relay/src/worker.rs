//! A worker: takes lanes, reads them, publishes in waves, marks what was confirmed.
//!
//! The transaction holds the lanes by advisory locks, and neither a transaction id nor a snapshot while it publishes. It
//! is bounded in events, bytes and time.

use std::collections::BTreeSet;
use std::time::Instant;

use metrics::{counter, histogram};
use semel_broker::{
    Connection as BrokerConnection, Envelope, Message, Outcome, Outgoing, Publisher, topology,
};
use semel_core::database::{self, CALL_LIMIT, within};
use semel_core::failpoint;
use semel_core::lifecycle::{Pass, Work};
use semel_core::outbox::drain::{self, PendingEvent};
use sqlx::{Connection as _, PgConnection};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::error::RelayError;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::metrics as names;
use crate::options::{Config, TopologyMode};
use crate::prober::{Broker, Shared};
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
        self.shared.broker(self.number, Broker::Away);
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
        self.shared.broker(self.number, Broker::Away);
        let name = format!("semel-relay {}", self.number);
        let connection =
            BrokerConnection::open(&self.config.broker, &name).await.map_err(RelayError::Broker)?;
        let there = self.exchange(&connection).await;
        connection.close().await;
        there?;
        let publisher = Publisher::open(&self.config.broker, &name).await.map_err(RelayError::Broker)?;
        self.shared.broker(self.number, Broker::Up);
        Ok(publisher.with_confirm_limit(self.config.confirm_limit))
    }

    /// Makes the exchange, or checks that it is there.
    async fn exchange(&self, connection: &BrokerConnection) -> Result<(), RelayError> {
        let name = &self.config.exchange;
        if self.config.topology == TopologyMode::Declare {
            return topology::declare_exchange(connection, name).await.map_err(RelayError::Broker);
        }
        if topology::exchange_exists(connection, name).await.map_err(RelayError::Broker)? {
            Ok(())
        } else {
            Err(RelayError::NoExchange(name.clone()))
        }
    }

    async fn database(&mut self) -> Result<PgConnection, RelayError> {
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        let mut database = database::connect_with(&self.config.database, "semel-relay worker", &drain::SETTINGS)
            .await
            .map_err(RelayError::database("connecting to the database"))?;
        let read_only = within(CALL_LIMIT, drain::is_read_only(&mut database))
            .await
            .map_err(RelayError::database("asking whether the database takes writes"))?;
        if read_only {
            return Err(RelayError::ReadOnly);
        }
        self.config.suits(&mut database).await?;
        Ok(database)
    }

    /// Runs one batch in a transaction of its own.
    async fn pass(&mut self, waiting: &[i16], publisher: &mut Publisher) -> Result<Pass, RelayError> {
        // Taken out, so that a connection that failed is dropped: that frees its lanes.
        let mut database = self.database().await?;
        let mut tx =
            within(CALL_LIMIT, database.begin()).await.map_err(RelayError::database("beginning a batch"))?;
        let batch = self.batch(&mut tx, waiting, publisher).await?;
        within(CALL_LIMIT, tx.commit()).await.map_err(RelayError::database("committing a batch"))?;
        self.database = Some(database);
        if let Some(error) = batch.broken {
            return Err(RelayError::Broker(error));
        }
        if batch.pass != Pass::Idle {
            self.shared.progress().notify_one();
        }
        Ok(batch.pass)
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
        let lanes = within(CALL_LIMIT, drain::take_lanes(tx, waiting, i64::try_from(share).unwrap_or(1)))
            .await
            .map_err(RelayError::database("taking lanes"))?;
        let Some(count) = i64::try_from(lanes.len()).ok().filter(|&count| count > 0) else {
            return Ok(Batch { pass: Pass::Idle, broken: None });
        };
        let _held = self.shared.hold(lanes.len());
        let per_lane = (i64::from(self.config.batch) / count).max(1);
        let per_lane_bytes = i64::from(self.config.batch_bytes) / count;
        let floors = self.shared.floors();
        let events = within(CALL_LIMIT, drain::read(tx, &lanes, &floors, per_lane, per_lane_bytes))
            .await
            .map_err(RelayError::database("reading lanes"))?;
        histogram!(names::CLAIM).record(claimed.elapsed().as_secs_f64());
        failpoint!(failpoints::AFTER_TAKE);
        let read = events.len();
        if read > 0 {
            histogram!(names::BATCH).record(u32::try_from(read).unwrap_or(u32::MAX));
        }

        let sent = self.publish(publisher, events).await;
        let mut pass = Pass::Idle;
        if !sent.confirmed.is_empty() {
            let latencies = within(CALL_LIMIT, drain::mark(tx, &sent.confirmed))
                .await
                .map_err(RelayError::database("marking confirmed events"))?;
            counter!(names::PUBLISHED).increment(latencies.len() as u64);
            for latency in latencies {
                histogram!(names::LATENCY).record(latency);
            }
            self.shared.progressed();
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
        // Both first: while one of them is away no lane is held.
        let mut publisher = self.publisher().await?;
        if publisher.is_blocked() {
            self.publisher = Some(publisher);
            self.shared.broker(self.number, Broker::Blocked);
            return Err(RelayError::Blocked);
        }
        self.shared.broker(self.number, Broker::Up);
        let waiting = self.shared.waiting();
        let pass =
            if waiting.is_empty() { Ok(Pass::Idle) } else { self.pass(&waiting, &mut publisher).await };
        if publisher.is_usable() {
            // Whatever became of the database, this connection is good.
            self.publisher = Some(publisher);
        } else {
            self.shared.broker(self.number, Broker::Away);
        }
        pass
    }
}

/// What a batch came to.
struct Batch {
    pass: Pass,
    broken: Option<semel_broker::Error>,
}

fn micros(time: OffsetDateTime) -> i64 {
    i64::try_from(time.unix_timestamp_nanos() / 1000).unwrap_or_default()
}
