//! Exchanges, queues and bindings.
//!
//! ```text
//! exchange                    topic, durable
//!   └ queue                   quorum; delivery limit, dead letters at least once
//!        ├ <queue>.retry.5s … one fixed time to live each, back to <queue> through the default exchange
//!        └ <queue>.dead       quorum, no limit
//! ```
//!
//! Declaring is idempotent. It runs on a channel of its own, because the broker closes the channel
//! over a difference, and says [`Error::Mismatch`] then: RabbitMQ changes no existing queue.
//! Whatever refuses a message refuses it to the publisher (`overflow=reject-publish`), and dead
//! letters move at least once: with the broker's defaults both would lose messages silently.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ExchangeKind};

use crate::connection::{ANSWER_LIMIT, CLOSE_LIMIT, Connection, REPLY_SUCCESS};
use crate::envelope::{short, text};
use crate::error::{ACCESS_REFUSED, Error, PRECONDITION_FAILED, within};

/// How often a message may be delivered before the broker gives up on it, unless configured.
pub const DEFAULT_DELIVERY_LIMIT: u32 = 20;

/// The delivery limit of `.dead` queues. RabbitMQ 4 has a default of 20, after which a message
/// that people looked at and put back would be dropped; "none" cannot be written on 3.10.
const UNREACHABLE_LIMIT: i64 = 1_000_000_000;

/// What one consumer needs from the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The exchange that events are published to.
    pub exchange: String,
    /// The queue, `<service>.<subscription>`.
    pub queue: String,
    /// Patterns of routing keys that the queue wants, such as `payment.*`.
    pub bindings: Vec<String>,
    /// How often a message may be delivered before it goes to the dead letters.
    pub delivery_limit: u32,
    /// The delays of the retry queues.
    pub retry_delays: Vec<Duration>,
    /// Who may consume at a time.
    pub consumers: Consumers,
}

/// Who may consume a queue at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consumers {
    /// Any number side by side.
    #[default]
    Competing,
    /// One, and another when that one is gone; the broker decides.
    SingleActive,
}

impl Topology {
    /// A queue for competing consumers with the default delivery limit and no retry queues.
    pub fn new(exchange: impl Into<String>, queue: impl Into<String>, bindings: Vec<String>) -> Self {
        Self {
            exchange: exchange.into(),
            queue: queue.into(),
            bindings,
            delivery_limit: DEFAULT_DELIVERY_LIMIT,
            retry_delays: Vec::new(),
            consumers: Consumers::default(),
        }
    }

    /// The queue of the dead letters.
    #[must_use]
    pub fn dead_queue(&self) -> String {
        dead_queue(&self.queue)
    }

    /// The queue that holds a message back for `delay`.
    #[must_use]
    pub fn retry_queue(&self, delay: Duration) -> String {
        retry_queue(&self.queue, delay)
    }

    /// Every queue with its arguments, in the order in which they must come to be.
    fn queues(&self) -> Vec<(String, FieldTable)> {
        let mut queues = vec![(self.dead_queue(), quorum([("x-delivery-limit", UNREACHABLE_LIMIT.into())]))];
        let mut main = vec![("x-delivery-limit", i64::from(self.delivery_limit).into())];
        main.extend(dead_letters_to(self.dead_queue()));
        if self.consumers == Consumers::SingleActive {
            main.push(("x-single-active-consumer", AMQPValue::Boolean(true)));
        }
        queues.push((self.queue.clone(), quorum(main)));
        for delay in &self.retry_delays {
            let ttl = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
            let mut retry = vec![("x-message-ttl", ttl.into())];
            retry.extend(dead_letters_to(self.queue.clone()));
            queues.push((self.retry_queue(*delay), quorum(retry)));
        }
        queues
    }
}

/// `<queue>.dead`.
#[must_use]
pub fn dead_queue(queue: &str) -> String {
    format!("{queue}.dead")
}

/// `<queue>.retry.<delay>`, such as `ledger.payments.retry.5s`.
#[must_use]
pub fn retry_queue(queue: &str, delay: Duration) -> String {
    let millis = delay.as_millis();
    let (number, unit) = match millis {
        0 => (0, "s"),
        _ if millis.is_multiple_of(3_600_000) => (millis / 3_600_000, "h"),
        _ if millis.is_multiple_of(60_000) => (millis / 60_000, "m"),
        _ if millis.is_multiple_of(1_000) => (millis / 1_000, "s"),
        _ => (millis, "ms"),
    };
    format!("{queue}.retry.{number}{unit}")
}

/// Declares the exchange, the queues and the bindings.
///
/// Bindings that exist and are not named any more are left alone.
///
/// # Errors
///
/// [`Error::Mismatch`] if something exists with other settings.
pub async fn declare(connection: &Connection, topology: &Topology) -> Result<(), Error> {
    declare_exchange(connection, &topology.exchange).await?;
    let channel = connection.channel().await?;
    for (queue, arguments) in topology.queues() {
        declare_queue(&channel, &queue, arguments, Existence::Made).await?;
    }
    // Last, so that nothing is routed before there is a place for its dead letters.
    for key in &topology.bindings {
        bind(&channel, &topology.exchange, &topology.queue, key).await?;
    }
    close(&channel).await
}

/// Checks that the exchange and the queues exist with the settings that [`declare`] would give
/// them, and makes nothing. The protocol offers no look at bindings.
///
/// A user without the permission to configure a queue can see only that it exists.
///
/// # Errors
///
/// [`Error::Failed`] with reply code 404 if something is missing, [`Error::Mismatch`] if it differs.
pub async fn verify(connection: &Connection, topology: &Topology) -> Result<(), Error> {
    let channel = connection.channel().await?;
    let options = ExchangeDeclareOptions { passive: true, durable: true, ..Default::default() };
    exchange(&channel, &topology.exchange, options).await?;
    for (queue, arguments) in topology.queues() {
        declare_queue(&channel, &queue, FieldTable::default(), Existence::Expected).await?;
        // It exists, so an active declaration makes nothing and compares. A refusal closes its channel.
        let scratch = connection.channel().await?;
        match declare_queue(&scratch, &queue, arguments, Existence::Made).await {
            Ok(()) => close(&scratch).await?,
            Err(error) if error.reply_code() == Some(ACCESS_REFUSED) => {}
            Err(error) => return Err(error),
        }
    }
    close(&channel).await
}

/// Declares the durable topic exchange alone, for a publisher in development.
///
/// # Errors
///
/// [`Error::Mismatch`] if it exists with other settings.
pub async fn declare_exchange(connection: &Connection, name: &str) -> Result<(), Error> {
    let channel = connection.channel().await?;
    exchange(&channel, name, ExchangeDeclareOptions { durable: true, ..Default::default() }).await?;
    close(&channel).await
}

async fn exchange(channel: &Channel, name: &str, options: ExchangeDeclareOptions) -> Result<(), Error> {
    let object = format!("exchange `{name}`");
    let name = short("exchange name", name)?;
    let declaration = channel.exchange_declare(name, ExchangeKind::Topic, options, FieldTable::default());
    within(ANSWER_LIMIT, &format!("declare {object}"), declaration)
        .await
        .map_err(|error| explain(error, object))
}

/// Whether a declaration makes what it names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existence {
    Made,
    Expected,
}

pub(crate) async fn declare_queue(
    channel: &Channel,
    name: &str,
    arguments: FieldTable,
    existence: Existence,
) -> Result<(), Error> {
    let object = format!("queue `{name}`");
    let options = QueueDeclareOptions {
        durable: true,
        passive: existence == Existence::Expected,
        ..QueueDeclareOptions::default()
    };
    let declaration = channel.queue_declare(short("queue name", name)?, options, arguments);
    within(ANSWER_LIMIT, &format!("declare {object}"), declaration)
        .await
        .map(|_| ())
        .map_err(|error| explain(error, object))
}

pub(crate) async fn bind(channel: &Channel, exchange: &str, queue: &str, key: &str) -> Result<(), Error> {
    let attempted = format!("bind queue `{queue}` to exchange `{exchange}` with `{key}`");
    let binding = channel.queue_bind(
        short("queue name", queue)?,
        short("exchange name", exchange)?,
        short("binding key", key)?,
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    within(ANSWER_LIMIT, &attempted, binding).await
}

pub(crate) async fn close(channel: &Channel) -> Result<(), Error> {
    within(CLOSE_LIMIT, "close a channel", channel.close(REPLY_SUCCESS, "OK".into())).await
}

/// Arguments of a quorum queue.
pub(crate) fn quorum(more: impl IntoIterator<Item = (&'static str, AMQPValue)>) -> FieldTable {
    let mut arguments: BTreeMap<ShortString, AMQPValue> =
        more.into_iter().map(|(name, value)| (name.into(), value)).collect();
    arguments.insert("x-queue-type".into(), text("quorum"));
    arguments.into()
}

/// Dead letters go to `queue` through the default exchange, and leave only when they have arrived.
/// Without `reject-publish` the broker ignores the strategy.
fn dead_letters_to(queue: String) -> [(&'static str, AMQPValue); 4] {
    [
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(queue)),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ]
}

/// Turns the broker's refusal of a difference into one that says what to do.
fn explain(error: Error, object: String) -> Error {
    match &error {
        Error::Failed { source, .. } if source.reply_code() == Some(PRECONDITION_FAILED) => {
            let words = source.reply_text().unwrap_or_default();
            let difference = words.strip_prefix("PRECONDITION_FAILED - ").unwrap_or(&words).to_owned();
            Error::Mismatch { object, difference }
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_retry_queues_after_their_delay() {
        for (delay, name) in [
            (Duration::from_secs(5), "a.b.retry.5s"),
            (Duration::from_mins(1), "a.b.retry.1m"),
            (Duration::from_mins(10), "a.b.retry.10m"),
            (Duration::from_hours(1), "a.b.retry.1h"),
            (Duration::from_secs(90), "a.b.retry.90s"),
            (Duration::from_millis(1_500), "a.b.retry.1500ms"),
            (Duration::ZERO, "a.b.retry.0s"),
        ] {
            assert_eq!(retry_queue("a.b", delay), name);
        }
    }
}
