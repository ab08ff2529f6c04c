//! Messages that are given up on: what they carry, and that they arrive before the original is acknowledged.

use semel_broker::{BrokerUrl, Delivery, MessageCopy, Outcome, Outgoing, Publisher};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Mutex;

use crate::builder::Settings;
use crate::error::Error;

/// The headers that a dead letter carries beside the original's own.
pub mod headers {
    /// Why: `invalid`, `permanent` or `exhausted`.
    pub const REASON: &str = "x-semel-dead-reason";
    /// What the decoder or the handler said, at most 1 KiB.
    pub const ERROR: &str = "x-semel-dead-error";
    /// The consumer that gave up.
    pub const CONSUMER: &str = "x-semel-dead-consumer";
    /// How often the message was delivered.
    pub const ATTEMPTS: &str = "x-semel-dead-attempts";
    /// The exchange that the original was published to.
    pub const EXCHANGE: &str = "x-semel-dead-exchange";
    /// The routing key that the original was published with.
    pub const ROUTING_KEY: &str = "x-semel-dead-routing-key";
    /// When, in RFC 3339, by the consumer's clock.
    pub const FAILED_AT: &str = "x-semel-dead-failed-at";
}

/// Longest error text that a dead letter carries, in bytes: all headers of a message share one frame.
const MAX_ERROR: usize = 1024;

/// Why a message is given up on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Reason {
    /// It is no event, or not of the expected shape.
    Invalid,
    /// The handler refuses it.
    Permanent,
    /// It failed at each delivery that the limit allows.
    Exhausted,
}

impl Reason {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Permanent => "permanent",
            Self::Exhausted => "exhausted",
        }
    }
}

/// What became of the copy of a message that is given up on.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Copied {
    /// The broker has it.
    Safe,
    /// With the headers of a dead letter the message does not fit into the protocol.
    TooLarge {
        /// What does not fit.
        reason: String,
    },
}

/// The way to `<queue>.dead`, on a connection of its own that is opened when it is first needed.
pub(crate) struct DeadLetters {
    broker: BrokerUrl,
    consumer: String,
    queue: String,
    publisher: Mutex<Option<Publisher>>,
}

impl DeadLetters {
    pub(crate) fn new(broker: &BrokerUrl, settings: &Settings) -> Self {
        Self {
            broker: broker.clone(),
            consumer: settings.name.clone(),
            queue: settings.topology.dead_queue(),
            publisher: Mutex::default(),
        }
    }

    /// Publishes a copy of the message, and returns when the broker has it safe, or when there can be no such copy.
    ///
    /// Its caller must not be dropped meanwhile: that would break the publisher.
    pub(crate) async fn publish(
        &self,
        delivery: &Delivery,
        reason: Reason,
        error: &str,
    ) -> Result<Copied, Error> {
        let letter = address(delivery.copy(), &Particulars::of(delivery, &self.consumer, reason, error));
        let mut slot = self.publisher.lock().await;
        let mut publisher = match slot.take().filter(Publisher::is_usable) {
            Some(publisher) => publisher,
            None => Publisher::open(&self.broker, &format!("{} dead letters", self.consumer)).await?,
        };
        let wave = publisher.publish_wave(vec![Outgoing::copy_to_queue(self.queue.as_str(), letter)]).await;
        if publisher.is_usable() {
            *slot = Some(publisher);
        }
        let outcome = match wave.outcomes.into_iter().next() {
            Some(Outcome::Confirmed) => return Ok(Copied::Safe),
            Some(Outcome::Refused { reason }) => return Ok(Copied::TooLarge { reason }),
            Some(Outcome::Returned { reason }) => format!("returned, {reason}"),
            Some(Outcome::Unknown { reason }) => format!("unknown, {reason}"),
            Some(Outcome::Unconfirmed) => "not confirmed in time".to_owned(),
            Some(Outcome::Nacked) => "not taken".to_owned(),
            None => "not sent".to_owned(),
        };
        Err(Error::DeadLetter { queue: self.queue.clone(), outcome })
    }

    pub(crate) async fn close(&self) {
        if let Some(publisher) = self.publisher.lock().await.take() {
            publisher.close().await;
        }
    }
}

/// What a dead letter says beside what the original said.
struct Particulars<'a> {
    reason: Reason,
    error: &'a str,
    consumer: &'a str,
    attempts: i64,
    exchange: &'a str,
    routing_key: &'a str,
    failed_at: OffsetDateTime,
}

impl<'a> Particulars<'a> {
    fn of(delivery: &'a Delivery, consumer: &'a str, reason: Reason, error: &'a str) -> Self {
        Self {
            reason,
            error: &error[..error.floor_char_boundary(MAX_ERROR)],
            consumer,
            attempts: delivery.delivery_count.unwrap_or(0).saturating_add(1),
            exchange: &delivery.exchange,
            routing_key: &delivery.routing_key,
            failed_at: OffsetDateTime::now_utc(),
        }
    }
}

fn address(copy: MessageCopy, particulars: &Particulars<'_>) -> MessageCopy {
    let failed_at = particulars.failed_at.format(&Rfc3339).unwrap_or_default();
    copy.with_header(headers::REASON, particulars.reason.label())
        .with_header(headers::ERROR, particulars.error)
        .with_header(headers::CONSUMER, particulars.consumer)
        .with_header(headers::ATTEMPTS, particulars.attempts)
        .with_header(headers::EXCHANGE, particulars.exchange)
        .with_header(headers::ROUTING_KEY, particulars.routing_key)
        .with_header(headers::FAILED_AT, failed_at)
}
