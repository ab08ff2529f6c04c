//! Everything that the broker routed under known keys: a queue of our own beside the consumers'.
//!
//! Bound to the known routing keys one by one, never to `#`: that would make every message routable and hide the
//! unroutable ones.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow, ensure};
use semel_broker::inspect::{QueueKind, declare_plain_queue};
use semel_broker::{
    BrokerUrl, Connection, Envelope, Message, Outcome, Outgoing, Publisher, Subscription, topology,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::JoinHandle;
use uuid::Uuid;

/// A message as it was routed.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Tapped {
    /// The event.
    pub event_id: Uuid,
    /// What happened.
    pub event_type: String,
    /// What kind of thing it happened to.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// The aggregate's version.
    pub aggregate_version: Option<i64>,
    /// The event's place in its outbox.
    pub outbox_id: i64,
    /// The body.
    pub payload: Value,
    /// The event's own headers.
    pub headers: BTreeMap<String, String>,
}

/// A queue that collects what is routed, in the order of arrival.
#[derive(Debug)]
pub struct Tap {
    messages: Arc<Mutex<Vec<Tapped>>>,
    collecting: JoinHandle<()>,
    failed: Arc<Mutex<Option<String>>>,
}

impl Tap {
    /// Declares exchange and queue, binds the keys, and begins to collect.
    ///
    /// # Errors
    ///
    /// The broker does not answer or refuses.
    pub async fn open(url: &str, exchange: &str, queue: &str, keys: &[&str]) -> Result<Self> {
        let url: BrokerUrl = url.parse()?;
        let connection = Connection::open(&url, "semel-bed tap").await?;
        topology::declare_exchange(&connection, exchange).await?;

        declare_plain_queue(&connection, queue, QueueKind::Classic, exchange, keys).await?;
        connection.close().await;
        let mut subscription = Subscription::open(&url, "semel-bed tap", queue, 1000).await?;
        let (messages, failed) =
            (Arc::<Mutex<Vec<Tapped>>>::default(), Arc::<Mutex<Option<String>>>::default());
        let (kept, failure) = (Arc::clone(&messages), Arc::clone(&failed));
        let collecting = tokio::spawn(async move {
            loop {
                let taken = match subscription.next().await {
                    Ok(delivery) => {
                        let tapped = tapped(&delivery);
                        // One that is lost comes again, as a repeat.
                        let _ = delivery.ack().await;
                        tapped
                    }
                    Err(error) => Err(error.into()),
                };
                match taken {
                    Ok(message) => lock(&kept).push(message),
                    Err(error) => {
                        *lock(&failure) = Some(format!("{error:#}"));
                        return;
                    }
                }
            }
        });
        Ok(Self { messages, collecting, failed })
    }

    /// Returns what has arrived so far, in order, duplicates included.
    ///
    /// # Errors
    ///
    /// The tap has broken since it was opened, so that messages may be missing.
    pub fn messages(&self) -> Result<Vec<Tapped>> {
        match &*lock(&self.failed) {
            Some(reason) => Err(anyhow!("the tap broke: {reason}")),
            None => Ok(lock(&self.messages).clone()),
        }
    }

    /// How many messages of an aggregate type have arrived.
    #[must_use]
    pub fn count(&self, aggregate_type: &str) -> usize {
        lock(&self.messages).iter().filter(|message| message.aggregate_type == aggregate_type).count()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.collecting.abort();
    }
}

fn tapped(delivery: &semel_broker::Delivery) -> Result<Tapped> {
    let envelope = delivery.envelope.as_ref().map_err(|error| anyhow!("{error}"))?;
    let missing = || format!("event {} arrived without its envelope", envelope.event_id);
    Ok(Tapped {
        event_id: envelope.event_id,
        event_type: envelope.event_type.clone().with_context(missing)?,
        aggregate_type: envelope.aggregate_type.clone().with_context(missing)?,
        aggregate_id: envelope.aggregate_id.clone().with_context(missing)?,
        aggregate_version: envelope.aggregate_version,
        outbox_id: envelope.outbox_id.with_context(missing)?,
        payload: serde_json::from_slice(&delivery.body).with_context(missing)?,
        headers: envelope.headers.clone(),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a second copy of a routed event into a queue, past the exchange, as a broker may deliver one twice.
///
/// # Errors
///
/// The broker does not confirm it.
pub async fn send_again(url: &str, queue: &str, message: &Tapped) -> Result<()> {
    let url: BrokerUrl = url.parse()?;
    let mut publisher = Publisher::open(&url, "semel-bed").await?;
    let envelope = Envelope {
        event_id: message.event_id,
        event_type: message.event_type.clone(),
        aggregate_type: message.aggregate_type.clone(),
        aggregate_id: message.aggregate_id.clone(),
        aggregate_version: message.aggregate_version,
        outbox_id: message.outbox_id,
        created_at_unix_micros: 0,
        source: "semel-bed".to_owned(),
        headers: message.headers.clone(),
    };
    let copy = Message::Event { envelope: Box::new(envelope), body: serde_json::to_vec(&message.payload)? };
    // The default exchange routes to the queue of that name.
    let copy = Outgoing { exchange: String::new(), routing_key: queue.to_owned(), message: copy };
    let wave = publisher.publish_wave(vec![copy]).await;
    publisher.close().await;
    ensure!(wave.outcomes == [Outcome::Confirmed], "not confirmed: {:?}", wave.outcomes);
    Ok(())
}
