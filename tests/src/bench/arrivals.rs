//! The consumer of a measurement: takes everything out of the queue, notes when it came, and audits it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use futures_util::StreamExt as _;
use lapin::options::BasicConsumeOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, Consumer};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::audit::Audit;
use super::pipe::{Pipe, close};
use crate::wait::eventually;

/// What is kept of each message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Keep {
    /// Its place in its aggregate, for the audit.
    Order,
    /// And when it first arrived.
    Times,
    /// Only when it first arrived: it is no event.
    TimesAlone,
}

/// A consumer in the background.
#[derive(Debug)]
pub(crate) struct Arrivals {
    state: Arc<Mutex<State>>,
    connection: Connection,
    consuming: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    audit: Audit,
    times: HashMap<Uuid, Instant>,
    failed: Option<String>,
}

impl Arrivals {
    /// Begins to consume.
    pub(crate) async fn open(pipe: &Pipe, keep: Keep) -> Result<Self> {
        let (connection, channel) = pipe.channel().await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let consumer = channel
            .basic_consume(pipe.queue.as_str().into(), "bench".into(), options, FieldTable::default())
            .await
            .context("consuming")?;
        let state = Arc::<Mutex<State>>::default();
        let consuming = tokio::spawn(consume(consumer, Arc::clone(&state), keep));
        Ok(Self { state, connection, consuming })
    }

    /// Waits until so many different events have arrived.
    pub(crate) async fn wait_for(&self, events: usize, limit: Duration) -> Result<()> {
        let what = format!("{events} events at the consumer");
        let look = || async {
            let state = lock(&self.state);
            match &state.failed {
                Some(reason) => Ok(Err(anyhow!("the consumer failed: {reason}"))),
                None if state.audit.events.max(state.times.len()) >= events => Ok(Ok(())),
                None => Err(state.audit.events.max(state.times.len())),
            }
        };
        eventually(&what, limit, look).await.flatten()
    }

    /// How many different events have arrived.
    pub(crate) fn count(&self) -> usize {
        lock(&self.state).audit.events
    }

    /// When each message first arrived.
    pub(crate) fn times(&self) -> HashMap<Uuid, Instant> {
        lock(&self.state).times.clone()
    }

    /// What has arrived so far.
    pub(crate) fn audit(&self) -> Audit {
        lock(&self.state).audit.clone()
    }

    /// Ends it, and returns what has arrived.
    pub(crate) async fn close(self) -> Audit {
        self.consuming.abort();
        close(&self.connection).await;
        self.audit()
    }
}

/// Takes everything out of the queue, and says what is wrong with it: `expected` events were written.
pub(crate) async fn audited(pipe: &Pipe, expected: usize, limit: Duration) -> Result<Audit> {
    let arrivals = Arrivals::open(pipe, Keep::Order).await?;
    // What never comes is for the audit to tell.
    let waited = arrivals.wait_for(expected, limit).await;
    let audit = arrivals.close().await;
    if audit.events == 0 && expected > 0 {
        waited?;
    }
    Ok(audit)
}

async fn consume(mut consumer: Consumer, state: Arc<Mutex<State>>, keep: Keep) {
    let reason = loop {
        let delivery = match consumer.next().await {
            Some(Ok(delivery)) => delivery,
            Some(Err(error)) => break error.to_string(),
            None => break "the broker canceled it".to_owned(),
        };
        let now = Instant::now();
        let mut state = lock(&state);
        if keep != Keep::Order {
            match identity(&delivery.properties) {
                Some(id) => _ = state.times.entry(id).or_insert(now),
                None => break "a message has no id".to_owned(),
            }
        }
        if keep != Keep::TimesAlone {
            match place(&delivery.properties) {
                Some((aggregate, version)) => state.audit.arrived(&aggregate, version),
                None => break "a message does not tell its aggregate and version".to_owned(),
            }
        }
    };
    lock(&state).failed = Some(reason);
}

fn identity(properties: &BasicProperties) -> Option<Uuid> {
    Uuid::try_parse(properties.message_id().as_ref()?.as_str()).ok()
}

fn place(properties: &BasicProperties) -> Option<(String, usize)> {
    let headers = properties.headers().as_ref()?.inner();
    let AMQPValue::LongString(aggregate) = headers.get("x-semel-aggregate-id")? else { return None };
    let AMQPValue::LongLongInt(version) = headers.get("x-semel-aggregate-version")? else { return None };
    Some((aggregate.to_string(), usize::try_from(*version).ok()?))
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
