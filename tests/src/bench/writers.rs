//! Producers at a steady rate: plain INSERTs, as any service may send them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use lapin::Channel;
use lapin::options::ConfirmSelectOptions;
use semel_core::lifecycle::Lifecycle;
use semel_core::outbox::hint::Hints;
use sqlx::PgConnection;
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval};
use uuid::Uuid;

use super::pipe::{AGGREGATE_TYPE, EVENT_TYPE, Pipe, Template, close, confirmed};
use super::stage::Stage;

/// How many connections write side by side.
const WRITERS: usize = 4;

/// How fast, for how long, and of how many aggregates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Statements per second, of all connections together.
    pub(crate) per_second: u32,
    /// Events of one statement, all of different aggregates.
    pub(crate) per_statement: usize,
    pub(crate) aggregates: usize,
    pub(crate) duration: Duration,
}

/// When each event was sent to the database, or each message to the broker; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sent {
    times: Arc<Mutex<HashMap<Uuid, Instant>>>,
    over: Arc<AtomicBool>,
}

impl Sent {
    /// What was sent so far.
    pub(crate) fn times(&self) -> HashMap<Uuid, Instant> {
        self.lock().clone()
    }

    /// How many were sent so far.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Asks the writers to stop before their time.
    pub(crate) fn enough(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    fn note(&self, id: Uuid) {
        self.lock().insert(id, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Instant>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Load {
    /// Writes into the outbox of a stage until it is over, or was [`enough`](Sent::enough), and hints at it as the API does.
    pub(crate) async fn write(self, stage: &Stage, sent: &Sent) -> Result<()> {
        let life = Lifecycle::new();
        let hints = Hints::start(stage.url().parse()?, "semel-bench hints", &life);
        let mut writers = JoinSet::new();
        for number in 0..WRITERS {
            writers.spawn(self.writer(number, stage.connect().await?, sent.clone(), hints.clone()));
        }
        all(writers).await
    }

    /// Publishes to a pipe as the writers insert: the floor of their latency.
    pub(crate) async fn publish(self, pipe: &Pipe, template: &Template, sent: &Sent) -> Result<()> {
        let (connection, _) = pipe.channel().await?;
        let mut publishers = JoinSet::new();
        for _ in 0..WRITERS {
            let channel = connection.create_channel().await.context("opening a channel")?;
            let confirms = channel.confirm_select(ConfirmSelectOptions::default());
            confirms.await.context("asking for confirms")?;
            publishers.spawn(self.publisher(channel, template.at(pipe), sent.clone()));
        }
        all(publishers).await?;
        close(&connection).await;
        Ok(())
    }

    /// One connection, with aggregates of its own: so their versions follow their ids.
    async fn writer(
        self,
        number: usize,
        mut connection: PgConnection,
        sent: Sent,
        hints: Hints,
    ) -> Result<()> {
        let (statements, mut ticks) = self.share();
        let mut versions = vec![0_i64; (self.aggregates / WRITERS).max(self.per_statement)];
        let mut next = 0;
        for _ in 0..statements {
            ticks.tick().await;
            if sent.over.load(Ordering::Relaxed) {
                break;
            }
            let mut batch = Vec::with_capacity(self.per_statement);
            for _ in 0..self.per_statement {
                next = (next + 1) % versions.len();
                versions[next] += 1;
                let aggregate = format!("w{number}-{next}");
                batch.push(Event { id: Uuid::new_v4(), aggregate, version: versions[next] });
            }
            for event in &batch {
                sent.note(event.id);
            }
            insert(&mut connection, &batch, EVENT_TYPE).await?;
            hints.give();
        }
        Ok(())
    }

    async fn publisher(self, channel: Channel, template: Template, sent: Sent) -> Result<()> {
        let (statements, mut ticks) = self.share();
        for _ in 0..statements {
            ticks.tick().await;
            let id = Uuid::new_v4();
            sent.note(id);
            confirmed(template.send(&channel, id).await?).await?;
        }
        Ok(())
    }

    /// How many statements one connection sends, and when.
    fn share(self) -> (u128, Interval) {
        let writers = u32::try_from(WRITERS).unwrap_or(1);
        let period = Duration::from_secs(1) * writers / self.per_second.max(1);
        let mut ticks = interval(period);
        // A statement that is late makes the next ones follow at once: the load stays what was asked for.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        (self.duration.as_nanos() / period.as_nanos().max(1), ticks)
    }
}

async fn all(mut tasks: JoinSet<Result<()>>) -> Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.context("a writer panicked")??;
    }
    Ok(())
}

/// An event to insert.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) id: Uuid,
    pub(crate) aggregate: String,
    pub(crate) version: i64,
}

/// Inserts events in one statement.
pub(crate) async fn insert(connection: &mut PgConnection, events: &[Event], event_type: &str) -> Result<()> {
    let ids: Vec<Uuid> = events.iter().map(|event| event.id).collect();
    let aggregates: Vec<&str> = events.iter().map(|event| event.aggregate.as_str()).collect();
    let versions: Vec<i64> = events.iter().map(|event| event.version).collect();
    sqlx::query(
        r#"INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
        SELECT id, $4, aggregate, version, $5,
               jsonb_build_object('order_id', id, 'client_id', 'acme', 'reference', 'A-1', 'amount', 1250, 'currency', 'EUR',
                                  'event_id', id),
               '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
        FROM unnest($1::UUID[], $2::TEXT[], $3::BIGINT[]) AS new (id, aggregate, version)"#,
    )
    .bind(ids)
    .bind(aggregates)
    .bind(versions)
    .bind(AGGREGATE_TYPE)
    .bind(event_type)
    .execute(connection)
    .await
    .context("inserting events")?;
    Ok(())
}
