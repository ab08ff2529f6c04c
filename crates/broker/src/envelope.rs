//! What an event carries besides its payload, as AMQP properties and headers.
//!
//! | where | what |
//! |---|---|
//! | `message_id` | event id |
//! | `type` | event type |
//! | `content_type` | `application/json` |
//! | `timestamp` | when the event was written, in seconds |
//! | `app_id` | source |
//! | `delivery_mode` | 2, persistent |
//! | `cloudEvents_id`, `_source`, `_type`, `_subject`, `_time`, `_specversion` | CloudEvents 1.0, binary mode |
//! | `x-semel-outbox-id`, `x-semel-aggregate-type`, `-id`, `-version` | the event's place in its outbox |
//! | any other header | the event's own, such as `traceparent` |
//!
//! Encoding is strict, because what the protocol cannot hold must fail one event and not the
//! channel. Decoding is tolerant, because a message may come from any producer: only a message id
//! that is a UUID is required.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

const CONTENT_TYPE: &str = "application/json";
const SPEC_VERSION: &str = "1.0";
const PERSISTENT: u8 = 2;

const CLOUD_EVENTS: &str = "cloudEvents_";
const CLOUD_EVENTS_ID: &str = "cloudEvents_id";
const CLOUD_EVENTS_SOURCE: &str = "cloudEvents_source";
const CLOUD_EVENTS_SPECVERSION: &str = "cloudEvents_specversion";
const CLOUD_EVENTS_SUBJECT: &str = "cloudEvents_subject";
const CLOUD_EVENTS_TIME: &str = "cloudEvents_time";
const CLOUD_EVENTS_TYPE: &str = "cloudEvents_type";

const OURS: &str = "x-semel-";
const OUTBOX_ID: &str = "x-semel-outbox-id";
const AGGREGATE_TYPE: &str = "x-semel-aggregate-type";
const AGGREGATE_ID: &str = "x-semel-aggregate-id";
const AGGREGATE_VERSION: &str = "x-semel-aggregate-version";

/// Everything about an event but its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The event's stable identity; consumers deduplicate by it.
    pub event_id: Uuid,
    /// What happened, such as `payment.succeeded`.
    pub event_type: String,
    /// The kind of thing it happened to.
    pub aggregate_type: String,
    /// Which one it happened to.
    pub aggregate_id: String,
    /// The aggregate's version after the event, if its producer counts versions.
    pub aggregate_version: Option<i64>,
    /// The event's place in its outbox.
    pub outbox_id: i64,
    /// When the event was written, in microseconds since 1970, UTC.
    pub created_at_unix_micros: i64,
    /// The application that publishes; also the `CloudEvents` source.
    pub source: String,
    /// The event's own headers; `traceparent` and `tracestate` are among them.
    pub headers: BTreeMap<String, String>,
}

/// What a received message says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The event's stable identity.
    pub event_id: Uuid,
    /// What happened.
    pub event_type: Option<String>,
    /// The kind of thing it happened to.
    pub aggregate_type: Option<String>,
    /// Which one it happened to.
    pub aggregate_id: Option<String>,
    /// The aggregate's version after the event.
    pub aggregate_version: Option<i64>,
    /// The event's place in its outbox.
    pub outbox_id: Option<i64>,
    /// When the event was written, in microseconds since 1970, UTC.
    pub created_at_unix_micros: Option<i64>,
    /// The application that published.
    pub source: Option<String>,
    /// The event's own text headers. Ours, the broker's and those of `CloudEvents` are not among
    /// them, so that they can be passed on with an event that follows from this one.
    pub headers: BTreeMap<String, String>,
}

/// Why a received message is no event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It has no `message_id`.
    #[error("the message has no message_id")]
    NoMessageId,
    /// Its `message_id` is no UUID.
    #[error("the message_id {0:?} is not a UUID")]
    MessageIdNotUuid(String),
}

/// A name that exceeds the 255 bytes the protocol has for names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} is {bytes} bytes long and RabbitMQ holds 255")]
pub struct NameTooLong {
    what: &'static str,
    bytes: usize,
}

/// A name in the protocol's own type, whose other constructors panic when it is too long.
pub(crate) fn short(what: &'static str, value: impl Into<String>) -> Result<ShortString, NameTooLong> {
    let value = value.into();
    let bytes = value.len();
    ShortString::try_new(value).map_err(|_| NameTooLong { what, bytes })
}

pub(crate) fn text(value: impl Into<String>) -> AMQPValue {
    AMQPValue::LongString(value.into().into())
}

impl Envelope {
    /// The properties to publish, or why the protocol cannot hold them.
    pub(crate) fn properties(&self) -> Result<BasicProperties, String> {
        let id = self.event_id.to_string();
        let (seconds, time) = self.created_at()?;

        let mut headers = BTreeMap::new();
        for (name, value) in &self.headers {
            if is_reserved(name) {
                return Err(format!("the header name {name:?} is reserved"));
            }
            headers.insert(named("header name", name)?, text(value));
        }
        for (name, value) in [
            (CLOUD_EVENTS_ID, text(&id)),
            (CLOUD_EVENTS_SOURCE, text(&self.source)),
            (CLOUD_EVENTS_SPECVERSION, text(SPEC_VERSION)),
            (CLOUD_EVENTS_SUBJECT, text(format!("{}/{}", self.aggregate_type, self.aggregate_id))),
            (CLOUD_EVENTS_TIME, text(time)),
            (CLOUD_EVENTS_TYPE, text(&self.event_type)),
            (OUTBOX_ID, AMQPValue::LongLongInt(self.outbox_id)),
            (AGGREGATE_TYPE, text(&self.aggregate_type)),
            (AGGREGATE_ID, text(&self.aggregate_id)),
        ] {
            headers.insert(name.into(), value);
        }
        if let Some(version) = self.aggregate_version {
            headers.insert(AGGREGATE_VERSION.into(), AMQPValue::LongLongInt(version));
        }

        Ok(BasicProperties::default()
            .with_message_id(named("message id", &id)?)
            .with_type(named("event type", &self.event_type)?)
            .with_content_type(CONTENT_TYPE.into())
            .with_timestamp(seconds)
            .with_app_id(named("source", &self.source)?)
            .with_delivery_mode(PERSISTENT)
            .with_headers(FieldTable::from(headers)))
    }

    fn created_at(&self) -> Result<(u64, String), String> {
        let micros = self.created_at_unix_micros;
        let seconds = u64::try_from(micros.div_euclid(1_000_000));
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1_000)
            .ok()
            .and_then(|time| time.format(&Rfc3339).ok());
        match (seconds, time) {
            (Ok(seconds), Some(time)) => Ok((seconds, time)),
            _ => Err(format!("the creation time of {micros} µs lies outside the years 1970 to 9999")),
        }
    }
}

fn named(what: &'static str, value: &str) -> Result<ShortString, String> {
    short(what, value).map_err(|error| error.to_string())
}

/// Header names that mean something to the broker or are written by us. An event that could set
/// `CC` would route itself anywhere, and with a value of the wrong type it would close the channel.
pub(crate) fn is_reserved(name: &str) -> bool {
    name.starts_with(CLOUD_EVENTS) || name.starts_with(OURS) || is_brokers(name)
}

/// Header names that the broker acts on or keeps its own books in.
pub(crate) fn is_brokers(name: &str) -> bool {
    ["CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count", "x-delay"].contains(&name)
        || name.starts_with("x-first-death-")
        || name.starts_with("x-last-death-")
}

impl Received {
    /// Reads what is there.
    pub(crate) fn decode(properties: &BasicProperties) -> Result<Self, DecodeError> {
        let id = properties.message_id().as_ref().ok_or(DecodeError::NoMessageId)?;
        let event_id =
            Uuid::try_parse(id.as_str()).map_err(|_| DecodeError::MessageIdNotUuid(id.to_string()))?;
        // Stands for no id, and would make one event of all that carry it.
        if event_id.is_nil() {
            return Err(DecodeError::NoMessageId);
        }

        let empty = FieldTable::default();
        let headers = properties.headers().as_ref().unwrap_or(&empty);
        let get = |name: &str| headers.inner().get(name);
        let texts = |name: &str| get(name).and_then(as_text);
        let owned = |name: &Option<ShortString>| name.as_ref().map(ToString::to_string);

        Ok(Self {
            event_id,
            event_type: owned(properties.kind()).or_else(|| texts(CLOUD_EVENTS_TYPE)),
            aggregate_type: texts(AGGREGATE_TYPE),
            aggregate_id: texts(AGGREGATE_ID),
            aggregate_version: get(AGGREGATE_VERSION).and_then(as_integer),
            outbox_id: get(OUTBOX_ID).and_then(as_integer),
            created_at_unix_micros: texts(CLOUD_EVENTS_TIME).and_then(|time| unix_micros(&time)).or_else(
                || properties.timestamp().and_then(|s| i64::try_from(s).ok()?.checked_mul(1_000_000)),
            ),
            source: owned(properties.app_id()).or_else(|| texts(CLOUD_EVENTS_SOURCE)),
            headers: headers
                .inner()
                .iter()
                .filter(|(name, _)| !is_reserved(name.as_str()))
                .filter_map(|(name, value)| Some((name.to_string(), as_text(value)?)))
                .collect(),
        })
    }
}

fn unix_micros(rfc3339: &str) -> Option<i64> {
    let time = OffsetDateTime::parse(rfc3339, &Rfc3339).ok()?;
    i64::try_from(time.unix_timestamp_nanos() / 1_000).ok()
}

/// A text value; bytes that are no UTF-8 are replaced.
pub(crate) fn as_text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => Some(text.to_string()),
        AMQPValue::ShortString(text) => Some(text.to_string()),
        _ => None,
    }
}

/// An integer of any width; other producers may also write one as text.
pub(crate) fn as_integer(value: &AMQPValue) -> Option<i64> {
    match value {
        AMQPValue::ShortShortInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortShortUInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortUInt(n) => Some(i64::from(*n)),
        AMQPValue::LongInt(n) => Some(i64::from(*n)),
        AMQPValue::LongUInt(n) => Some(i64::from(*n)),
        AMQPValue::LongLongInt(n) => Some(*n),
        other => as_text(other)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests;
