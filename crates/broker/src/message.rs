//! What is published: an event, or the copy of a received message.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use crate::envelope::{Envelope, as_text, is_brokers, short, text};

/// The largest body that is sent, in bytes: what RabbitMQ 4 accepts by default (`max_message_size`).
/// A larger one would close the channel, and every message in flight would be unknown.
const MAX_BODY: usize = 16 * 1024 * 1024;

const PERSISTENT: u8 = 2;

/// One message and where it goes.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// The exchange; empty for the default exchange, which routes to the queue of the key's name.
    pub exchange: String,
    /// The routing key.
    pub routing_key: String,
    /// What is sent.
    pub message: Message,
}

/// What is sent.
#[derive(Clone, Debug)]
pub enum Message {
    /// An event.
    Event {
        /// Everything but the payload.
        envelope: Box<Envelope>,
        /// The payload.
        body: Vec<u8>,
    },
    /// A received message, sent on.
    Copy(MessageCopy),
}

impl Outgoing {
    /// An event for an exchange.
    pub fn event(
        exchange: impl Into<String>,
        routing_key: impl Into<String>,
        envelope: Envelope,
        body: Vec<u8>,
    ) -> Self {
        let message = Message::Event { envelope: Box::new(envelope), body };
        Self { exchange: exchange.into(), routing_key: routing_key.into(), message }
    }

    /// The copy of a received message for an exchange.
    pub fn copy(exchange: impl Into<String>, routing_key: impl Into<String>, copy: MessageCopy) -> Self {
        Self { exchange: exchange.into(), routing_key: routing_key.into(), message: Message::Copy(copy) }
    }

    /// What a returned message is recognised by. A copy of a message without id has none either.
    pub(crate) fn id(&self) -> Option<String> {
        match &self.message {
            Message::Event { envelope, .. } => Some(envelope.event_id.to_string()),
            Message::Copy(copy) => copy.properties.message_id().as_ref().map(ToString::to_string),
        }
    }

    /// The copy of a received message for one queue, through the default exchange.
    pub fn copy_to_queue(queue: impl Into<String>, copy: MessageCopy) -> Self {
        Self::copy("", queue, copy)
    }
}

/// A received message as it is sent on, for a retry, a dead letter or a replay.
///
/// It keeps the original's properties, headers and body. Left out is what would make the broker
/// treat the copy other than a plain message: the user id (checked against the connection's), the
/// expiration, `CC` and `BCC` (extra routes), and the broker's own books (`x-death`,
/// `x-delivery-count` and their like). It is persistent even if the original was not.
#[derive(Clone)]
pub struct MessageCopy {
    properties: Box<BasicProperties>,
    headers: BTreeMap<String, HeaderValue>,
    body: Vec<u8>,
}

/// The value of a header that is added to a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderValue {
    /// Text.
    Text(String),
    /// A number.
    Integer(i64),
}

impl From<String> for HeaderValue {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl From<&str> for HeaderValue {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<i64> for HeaderValue {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl MessageCopy {
    pub(crate) fn new(original: &BasicProperties, body: Vec<u8>) -> Self {
        let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
        macro_rules! keep {
            ($($get:ident => $set:ident),*) => {
                $(if let Some(value) = original.$get().clone() {
                    properties = properties.$set(value);
                })*
            };
        }
        keep!(
            content_type => with_content_type,
            content_encoding => with_content_encoding,
            priority => with_priority,
            correlation_id => with_correlation_id,
            reply_to => with_reply_to,
            message_id => with_message_id,
            timestamp => with_timestamp,
            kind => with_type,
            app_id => with_app_id
        );
        if let Some(headers) = original.headers() {
            let kept: BTreeMap<ShortString, AMQPValue> = headers
                .inner()
                .iter()
                .filter(|(name, _)| !is_brokers(name.as_str()))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect();
            properties = properties.with_headers(kept.into());
        }
        Self { properties: Box::new(properties), headers: BTreeMap::new(), body }
    }

    pub(crate) fn properties(&self) -> &BasicProperties {
        &self.properties
    }

    /// Leaves out the original's header of that name.
    #[must_use]
    pub fn without_header(mut self, name: &str) -> Self {
        self.headers.remove(name);
        if let Some(headers) = self.properties.headers().clone() {
            let kept: BTreeMap<ShortString, AMQPValue> = headers
                .inner()
                .iter()
                .filter(|(known, _)| known.as_str() != name)
                .map(|(known, value)| (known.clone(), value.clone()))
                .collect();
            *self.properties = self.properties.with_headers(kept.into());
        }
        self
    }

    /// Adds a header, or replaces the original's header of that name.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<HeaderValue>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sees that it can be published as it is on a connection whose frames hold this many bytes.
    ///
    /// # Errors
    ///
    /// What does not fit.
    pub fn fits(&self, frame_max: usize) -> Result<(), String> {
        fits(&self.encode()?, &self.body, frame_max)
    }

    fn encode(&self) -> Result<BasicProperties, String> {
        let mut headers = self.properties.headers().clone().unwrap_or_default();
        for (name, value) in &self.headers {
            if is_brokers(name) {
                return Err(format!("the header name {name:?} is reserved"));
            }
            let value = match value {
                HeaderValue::Text(value) => text(value),
                HeaderValue::Integer(value) => AMQPValue::LongLongInt(*value),
            };
            headers.insert(short("header name", name.as_str()).map_err(|error| error.to_string())?, value);
        }
        Ok(self.properties.as_ref().clone().with_headers(headers))
    }
}

impl std::fmt::Debug for MessageCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MessageCopy").field("body_bytes", &self.body.len()).finish_non_exhaustive()
    }
}

/// The newest entry of `x-death`: the broker's own account of why it moved a message to another queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    /// `rejected`, `expired`, `maxlen` or `delivery_limit`.
    pub reason: String,
    /// The queue that it was moved from.
    pub queue: Option<String>,
    /// When, in seconds since 1970, UTC.
    pub at_unix_seconds: Option<i64>,
}

impl Death {
    pub(crate) fn latest(properties: &BasicProperties) -> Option<Self> {
        let headers = properties.headers().as_ref()?;
        // The newest one comes first (RabbitMQ documentation, "Dead Letter Exchanges").
        let AMQPValue::FieldArray(deaths) = headers.inner().get("x-death")? else { return None };
        let AMQPValue::FieldTable(death) = deaths.as_slice().first()? else { return None };
        let told = |name: &str| death.inner().get(name).and_then(as_text);
        let at_unix_seconds = match death.inner().get("time") {
            Some(AMQPValue::Timestamp(at)) => i64::try_from(*at).ok(),
            _ => None,
        };
        Some(Self { reason: told("reason")?, queue: told("queue"), at_unix_seconds })
    }
}

/// A message in the protocol's terms.
pub(crate) struct Encoded<'a> {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: &'a [u8],
}

impl<'a> Encoded<'a> {
    /// Encodes, or says why the protocol cannot hold the message. The properties travel in one
    /// frame, and one that is larger than `frame_max` would cost the whole connection.
    pub(crate) fn new(outgoing: &'a Outgoing, frame_max: usize) -> Result<Self, String> {
        let name = |what, value: &str| short(what, value).map_err(|error| error.to_string());
        let exchange = name("exchange", &outgoing.exchange)?;
        let routing_key = name("routing key", &outgoing.routing_key)?;
        let (properties, body) = match &outgoing.message {
            Message::Event { envelope, body } => (envelope.properties()?, body),
            Message::Copy(copy) => (copy.encode()?, &copy.body),
        };
        fits(&properties, body, frame_max)?;
        Ok(Self { exchange, routing_key, properties, body })
    }
}

fn fits(properties: &BasicProperties, body: &[u8], frame_max: usize) -> Result<(), String> {
    let frame = frame_size(properties);
    if frame > frame_max {
        return Err(format!("the headers take {frame} bytes and a frame holds {frame_max}"));
    }
    if body.len() > MAX_BODY {
        return Err(format!("the body is {} bytes long and the limit is {MAX_BODY}", body.len()));
    }
    Ok(())
}

/// An upper bound of the content header frame's size, in bytes.
fn frame_size(properties: &BasicProperties) -> usize {
    // Frame header and end, class, weight, body size, flags, the two octets and the timestamp.
    const FIXED: usize = 7 + 1 + 2 + 2 + 8 + 2 + 2 + 8;
    let names: usize = [
        properties.content_type(),
        properties.content_encoding(),
        properties.correlation_id(),
        properties.reply_to(),
        properties.message_id(),
        properties.kind(),
        properties.app_id(),
    ]
    .into_iter()
    .flatten()
    .map(|name| 1 + name.as_str().len())
    .sum();
    FIXED + names + properties.headers().as_ref().map_or(0, table_size)
}

fn table_size(table: &FieldTable) -> usize {
    4 + table.inner().iter().map(|(name, value)| 1 + name.as_str().len() + value_size(value)).sum::<usize>()
}

fn value_size(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::ShortString(text) => 1 + text.as_str().len(),
        AMQPValue::LongString(text) => 4 + text.len(),
        AMQPValue::ByteArray(bytes) => 4 + bytes.len(),
        AMQPValue::FieldArray(values) => 4 + values.as_slice().iter().map(value_size).sum::<usize>(),
        AMQPValue::FieldTable(table) => table_size(table),
        // Numbers, times and truth values.
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy_of(properties: &BasicProperties) -> BasicProperties {
        MessageCopy::new(properties, Vec::new()).encode().unwrap()
    }

    #[test]
    fn a_copy_leaves_out_what_the_broker_would_act_on() {
        let mut headers = FieldTable::default();
        for name in ["CC", "BCC", "x-death", "x-delivery-count", "x-first-death-queue", "x-last-death-reason"]
        {
            headers.insert(name.into(), text("q"));
        }
        headers.insert("traceparent".into(), text("00-"));
        headers.insert("x-semel-outbox-id".into(), AMQPValue::LongLongInt(4));
        let copy = copy_of(
            &BasicProperties::default()
                .with_message_id("m".into())
                .with_user_id("guest".into())
                .with_expiration("1000".into())
                .with_delivery_mode(1)
                .with_headers(headers),
        );
        assert_eq!(*copy.user_id(), None);
        assert_eq!(*copy.expiration(), None);
        assert_eq!(*copy.delivery_mode(), Some(2));
        assert_eq!(copy.message_id().as_ref().unwrap().as_str(), "m");
        let kept: Vec<_> =
            copy.headers().as_ref().unwrap().inner().keys().map(ShortString::to_string).collect();
        assert_eq!(kept, ["traceparent", "x-semel-outbox-id"]);
    }

    #[test]
    fn tells_the_latest_death() {
        let death = |reason: &str| {
            let mut death = FieldTable::default();
            death.insert("reason".into(), text(reason));
            death.insert("queue".into(), text("q"));
            death.insert("time".into(), AMQPValue::Timestamp(9));
            AMQPValue::FieldTable(death)
        };
        let mut headers = FieldTable::default();
        let deaths = vec![death("delivery_limit"), death("expired")];
        headers.insert("x-death".into(), AMQPValue::FieldArray(deaths.into()));
        let latest = Death::latest(&BasicProperties::default().with_headers(headers)).unwrap();
        assert_eq!(latest.reason, "delivery_limit");
        assert_eq!((latest.queue.as_deref(), latest.at_unix_seconds), (Some("q"), Some(9)));
        assert_eq!(Death::latest(&BasicProperties::default()), None);
    }

    #[test]
    fn a_copy_takes_headers_and_refuses_names_it_cannot() {
        let copy = || MessageCopy::new(&BasicProperties::default(), Vec::new());
        let headers = copy()
            .with_header("reason", "invalid")
            .with_header("attempts", 3)
            .encode()
            .unwrap()
            .headers()
            .clone();
        let headers = headers.unwrap();
        assert_eq!(headers.inner().get("reason"), Some(&text("invalid")));
        assert_eq!(headers.inner().get("attempts"), Some(&AMQPValue::LongLongInt(3)));
        assert!(copy().with_header("x".repeat(256), 1).encode().is_err());
        assert!(copy().with_header("CC", "q").encode().is_err());
    }

    #[test]
    fn refuses_what_does_not_fit() {
        let copy = |header: usize, body: usize| {
            let copy = MessageCopy::new(&BasicProperties::default(), vec![0; body]);
            Outgoing::copy_to_queue("q", copy.with_header("h", "x".repeat(header)))
        };
        assert!(Encoded::new(&copy(100, 10), 4096).is_ok());
        assert!(Encoded::new(&copy(4096, 10), 4096).err().unwrap().contains("a frame holds 4096"));
        assert!(Encoded::new(&copy(100, MAX_BODY), 4096).is_ok());
        assert!(Encoded::new(&copy(100, MAX_BODY + 1), 4096).err().unwrap().contains("the body is"));
        let far = Outgoing { routing_key: "k".repeat(256), ..copy(1, 1) };
        assert!(Encoded::new(&far, 4096).err().unwrap().contains("routing key"));
    }
}
