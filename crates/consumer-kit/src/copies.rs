//! Copies of messages that leave their queue, for a while or for good, and that they arrive before the original is
//! acknowledged.
//!
//! A copy says what its original went through, so that it survives the way through a retry queue: RabbitMQ counts the
//! deliveries of a copy anew, and ignores an `x-death` that it has not written itself.

use std::time::Duration;

use semel_broker::{BrokerUrl, Delivery, HeaderValue, MessageCopy, Outcome, Outgoing, Publisher, Topology};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Mutex;

use crate::builder::Settings;
use crate::error::Error;

/// The headers that a retried message and a dead letter carry beside the original's own.
pub mod headers {
    /// How often its handling was attempted.
    pub const ATTEMPTS: &str = "x-semel-attempts";
    /// When it failed first, in RFC 3339, by the consumer's clock.
    pub const FIRST_FAILED_AT: &str = "x-semel-first-failed-at";
    /// When it failed last, in RFC 3339, by the consumer's clock.
    pub const FAILED_AT: &str = "x-semel-failed-at";
    /// The exchange that the original was published to.
    pub const EXCHANGE: &str = "x-semel-exchange";
    /// The routing key that the original was published with.
    pub const ROUTING_KEY: &str = "x-semel-routing-key";
    /// What the decoder or the handler said last, at most 1 KiB.
    pub const ERROR: &str = "x-semel-error";
    /// Of a dead letter: why, `invalid`, `permanent`, `exhausted` or `stale`.
    pub const REASON: &str = "x-semel-dead-reason";
    /// Of a dead letter: the consumer that gave up.
    pub const CONSUMER: &str = "x-semel-dead-consumer";
}

/// Longest error text that a copy carries, in bytes: all headers of a message share one frame.
const MAX_ERROR: usize = 1024;

/// Why a message is given up on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reason {
    /// It is no event, or not of the expected shape.
    Invalid,
    /// The handler refuses it.
    Permanent,
    /// It failed as often as it may.
    Exhausted,
    /// A later event of its aggregate took effect before it.
    Stale,
}

impl Reason {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Permanent => "permanent",
            Self::Exhausted => "exhausted",
            Self::Stale => "stale",
        }
    }
}

/// Where a copy goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum To {
    /// To the queue that holds it back for this long.
    Retry(Duration),
    /// To the dead letters.
    Dead(Reason),
}

/// What became of the copy of a message.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Copied {
    /// The broker has it.
    Safe,
    /// With these headers the message does not fit into the protocol, or the broker does not take it.
    TooLarge {
        /// What does not fit.
        reason: String,
    },
}

/// How often handling this message has failed before; of a dead letter that was put back, since then.
pub(crate) fn failures(delivery: &Delivery) -> u32 {
    if delivery.header(headers::REASON).is_some() {
        return 0;
    }
    match delivery.header(headers::ATTEMPTS) {
        Some(HeaderValue::Integer(count)) => u32::try_from(count.max(0)).unwrap_or(u32::MAX),
        Some(HeaderValue::Text(_)) | None => 0,
    }
}

/// A message that a copy is made of, and what it went through before.
pub(crate) struct Original {
    pub(crate) copy: MessageCopy,
    /// How often handling it has failed before.
    pub(crate) failures: u32,
    /// When it failed first, if it failed before.
    pub(crate) first_failed_at: Option<String>,
    /// Where it was published to at first.
    pub(crate) exchange: String,
    /// The key it was published with at first.
    pub(crate) routing_key: String,
}

impl From<&Delivery> for Original {
    fn from(delivery: &Delivery) -> Self {
        let failures = failures(delivery);
        let told = |name| match delivery.header(name) {
            Some(HeaderValue::Text(text)) => Some(text),
            _ => None,
        };
        // A copy that comes back was published to the queue: by the broker from a retry queue, by a replay from the dead letters.
        Self {
            copy: delivery.copy(),
            failures,
            first_failed_at: told(headers::FIRST_FAILED_AT).filter(|_| failures > 0),
            exchange: told(headers::EXCHANGE).unwrap_or_else(|| delivery.exchange.clone()),
            routing_key: told(headers::ROUTING_KEY).unwrap_or_else(|| delivery.routing_key.clone()),
        }
    }
}

/// The way to the retry queues and to `<queue>.dead`, on a connection of its own that is opened when it is first needed.
pub(crate) struct Copies {
    broker: BrokerUrl,
    consumer: String,
    topology: Topology,
    publisher: Mutex<Option<Publisher>>,
}

impl Copies {
    pub(crate) fn new(broker: &BrokerUrl, settings: &Settings) -> Self {
        Self {
            broker: broker.clone(),
            consumer: settings.name.clone(),
            topology: settings.topology.clone(),
            publisher: Mutex::default(),
        }
    }

    /// How long a message waits that has failed this often before.
    pub(crate) fn delay(&self, failures: u32) -> Duration {
        let delays = &self.topology.retry_delays;
        let tier = usize::try_from(failures).unwrap_or(usize::MAX).min(delays.len().saturating_sub(1));
        delays.get(tier).copied().unwrap_or_default()
    }

    /// Publishes a copy that tells what was said last, and returns when the broker has it safe, or when there can be no such
    /// copy.
    ///
    /// Its caller must not be dropped meanwhile: that would break the publisher.
    pub(crate) async fn publish(&self, original: &Original, to: To, error: &str) -> Result<Copied, Error> {
        let copy = told(original, error);
        let (queue, copy) = match to {
            To::Retry(delay) => (self.topology.retry_queue(delay), copy),
            To::Dead(reason) => {
                let letter = copy
                    .with_header(headers::REASON, reason.label())
                    .with_header(headers::CONSUMER, self.consumer.as_str());
                (self.topology.dead_queue(), letter)
            }
        };
        self.send(queue, copy).await
    }

    /// Publishes a dead letter that tells nothing, for one that has no room for it.
    pub(crate) async fn bury_as_it_is(&self, original: &Original) -> Result<Copied, Error> {
        self.send(self.topology.dead_queue(), original.copy.clone()).await
    }

    async fn send(&self, queue: String, copy: MessageCopy) -> Result<Copied, Error> {
        let mut slot = self.publisher.lock().await;
        if slot.as_ref().is_some_and(Publisher::is_blocked) {
            return Err(Error::Copy { queue, outcome: "not sent, an alarm blocks the broker".to_owned() });
        }
        let mut publisher = match slot.take().filter(Publisher::is_usable) {
            Some(publisher) => publisher,
            None => Publisher::open(&self.broker, &format!("{} copies", self.consumer)).await?,
        };
        let wave = publisher.publish_wave(vec![Outgoing::copy_to_queue(queue.as_str(), copy)]).await;
        // One that is blocked learns when the alarm is over; a new one would not know that there is one.
        if publisher.is_usable() || publisher.is_blocked() {
            *slot = Some(publisher);
        }
        let outcome = match wave.outcomes.into_iter().next() {
            Some(Outcome::Confirmed) => return Ok(Copied::Safe),
            Some(Outcome::Refused { reason }) => return Ok(Copied::TooLarge { reason }),
            Some(Outcome::Returned { reason }) => return Err(Error::Unroutable { queue, reason }),
            Some(Outcome::Unconfirmed) => "not confirmed in time".to_owned(),
            Some(Outcome::Unknown { reason }) => format!("unknown, {reason}"),
            Some(Outcome::Nacked) => "not taken".to_owned(),
            None => "not sent".to_owned(),
        };
        Err(Error::Copy { queue, outcome })
    }

    pub(crate) async fn close(&self) {
        if let Some(publisher) = self.publisher.lock().await.take() {
            publisher.close().await;
        }
    }
}

/// A copy that tells what the message went through, this failure included.
fn told(original: &Original, error: &str) -> MessageCopy {
    let now = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
    original
        .copy
        .clone()
        .without_header(headers::REASON)
        .without_header(headers::CONSUMER)
        .with_header(headers::ATTEMPTS, i64::from(original.failures) + 1)
        .with_header(headers::FIRST_FAILED_AT, original.first_failed_at.as_ref().unwrap_or(&now).as_str())
        .with_header(headers::EXCHANGE, original.exchange.as_str())
        .with_header(headers::ROUTING_KEY, original.routing_key.as_str())
        .with_header(headers::FAILED_AT, now)
        .with_header(headers::ERROR, shortened(error))
}

/// Without zero bytes, which no text of the database may hold.
pub(crate) fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// As much of it as a copy carries.
pub(crate) fn shortened(error: &str) -> &str {
    &error[..error.floor_char_boundary(MAX_ERROR)]
}
