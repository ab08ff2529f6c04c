//! A message's properties as text, so that a copy can be kept outside the broker and made again.
//!
//! The text is JSON that people can read: the properties by their name, and the headers as an object of texts, numbers and truth
//! values. A header of another type stands there as `{"amqp": …}`, in the protocol library's own notation.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::{Map, Value, json};

use crate::envelope::{Received, short, text};
use crate::message::MessageCopy;

/// Why a text is no message's properties.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stored properties of a message cannot be read: {0}")]
pub struct NotStored(String);

const AMQP: &str = "amqp";

type Get = fn(&BasicProperties) -> &Option<ShortString>;
type Set = fn(BasicProperties, ShortString) -> BasicProperties;

/// The properties that are names.
const NAMES: [(&str, Get, Set); 7] = [
    ("content_type", BasicProperties::content_type, BasicProperties::with_content_type),
    ("content_encoding", BasicProperties::content_encoding, BasicProperties::with_content_encoding),
    ("correlation_id", BasicProperties::correlation_id, BasicProperties::with_correlation_id),
    ("reply_to", BasicProperties::reply_to, BasicProperties::with_reply_to),
    ("message_id", BasicProperties::message_id, BasicProperties::with_message_id),
    ("type", BasicProperties::kind, BasicProperties::with_type),
    ("app_id", BasicProperties::app_id, BasicProperties::with_app_id),
];

impl MessageCopy {
    /// All of it but the body.
    ///
    /// # Errors
    ///
    /// When [`from_stored`](Self::from_stored) would not make the same copy of it, as with a number that is none or with tables
    /// in tables without an end.
    pub fn to_stored(&self) -> Result<String, NotStored> {
        let stored = self.to_json();
        let again = Self::from_stored(&stored, Vec::new())?;
        if again.properties() != self.properties() {
            return Err(NotStored("a header would not be what it was".to_owned()));
        }
        Ok(stored)
    }

    fn to_json(&self) -> String {
        let properties = self.properties();
        let mut stored = Map::new();
        for (name, get, _) in NAMES {
            if let Some(value) = get(properties) {
                stored.insert(name.to_owned(), value.as_str().into());
            }
        }
        if let Some(timestamp) = properties.timestamp() {
            stored.insert("timestamp".to_owned(), (*timestamp).into());
        }
        if let Some(priority) = properties.priority() {
            stored.insert("priority".to_owned(), (*priority).into());
        }
        if let Some(headers) = properties.headers() {
            let headers = headers.inner().iter().map(|(name, value)| (name.to_string(), to_json(value)));
            stored.insert("headers".to_owned(), Value::Object(headers.collect()));
        }
        Value::Object(stored).to_string()
    }

    /// Makes the copy again that [`to_stored`](Self::to_stored) was asked of.
    ///
    /// # Errors
    ///
    /// When the text is of another shape.
    pub fn from_stored(stored: &str, body: Vec<u8>) -> Result<Self, NotStored> {
        let failed = |error: &dyn std::fmt::Display| NotStored(error.to_string());
        let stored: Map<String, Value> = serde_json::from_str(stored).map_err(|error| failed(&error))?;
        let mut properties = BasicProperties::default();
        for (name, _, set) in NAMES {
            if let Some(value) = stored.get(name).and_then(Value::as_str) {
                properties = set(properties, short(name, value).map_err(|error| failed(&error))?);
            }
        }
        if let Some(timestamp) = stored.get("timestamp").and_then(Value::as_u64) {
            properties = properties.with_timestamp(timestamp);
        }
        if let Some(priority) = stored.get("priority").and_then(Value::as_u64) {
            properties = properties.with_priority(u8::try_from(priority).map_err(|error| failed(&error))?);
        }
        if let Some(headers) = stored.get("headers").and_then(Value::as_object) {
            let mut table = BTreeMap::new();
            for (name, value) in headers {
                let name = short("header name", name.as_str()).map_err(|error| failed(&error))?;
                table.insert(name, to_amqp(value).map_err(|error| failed(&error))?);
            }
            properties = properties.with_headers(FieldTable::from(table));
        }
        Ok(Self::new(&properties, body))
    }

    /// What the message says about itself, if it is an event.
    #[must_use]
    pub fn received(&self) -> Option<Received> {
        Received::decode(self.properties()).ok()
    }
}

fn to_json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::LongString(text) => match std::str::from_utf8(text.as_bytes()) {
            Ok(text) => text.into(),
            Err(_) => amqp(value),
        },
        AMQPValue::LongLongInt(number) => (*number).into(),
        AMQPValue::Boolean(truth) => (*truth).into(),
        _ => amqp(value),
    }
}

fn amqp(value: &AMQPValue) -> Value {
    json!({ AMQP: value })
}

fn to_amqp(value: &Value) -> Result<AMQPValue, String> {
    match value {
        Value::String(value) => Ok(text(value.as_str())),
        Value::Bool(truth) => Ok(AMQPValue::Boolean(*truth)),
        Value::Number(number) => {
            number.as_i64().map(AMQPValue::LongLongInt).ok_or_else(|| format!("{number} is no header"))
        }
        Value::Object(object) => match object.get(AMQP) {
            Some(value) => serde_json::from_value(value.clone()).map_err(|error| error.to_string()),
            None => Err("an object is no header".to_owned()),
        },
        Value::Null | Value::Array(_) => Err("null or an array is no header".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_makes_the_same_copy_again() {
        let headers = BTreeMap::from([
            ("text".into(), text("ü\0")),
            ("bytes".into(), AMQPValue::LongString(vec![0xff, 0].into())),
            ("number".into(), AMQPValue::LongLongInt(-7)),
            ("short".into(), AMQPValue::ShortShortUInt(7)),
            ("truth".into(), AMQPValue::Boolean(true)),
            ("table".into(), AMQPValue::FieldTable(FieldTable::default())),
        ]);
        let properties = BasicProperties::default()
            .with_message_id("5c29a4bc-7e2f-4d4e-93a1-0f8a3c1f9f10".into())
            .with_content_type("application/json".into())
            .with_type("OrderPlaced".into())
            .with_app_id("test".into())
            .with_timestamp(1_700_000_000)
            .with_priority(3)
            .with_headers(FieldTable::from(headers));
        let copy = MessageCopy::new(&properties, b"\xffbody".to_vec());
        let stored = copy.to_stored().unwrap();
        assert!(stored.contains(r#""number":-7"#) && stored.contains(r#""type":"OrderPlaced""#), "{stored}");
        let again = MessageCopy::from_stored(&stored, b"\xffbody".to_vec()).unwrap();
        assert_eq!(again.properties(), copy.properties());
        assert_eq!(again.received(), copy.received());
        assert!(copy.received().is_some());
    }

    #[test]
    fn what_could_not_be_read_back_is_not_stored() {
        let nested = (0..200).fold(AMQPValue::Boolean(true), |inner, _| {
            AMQPValue::FieldTable(FieldTable::from(BTreeMap::from([("in".into(), inner)])))
        });
        for value in [AMQPValue::Double(f64::NAN), AMQPValue::Float(f32::INFINITY), nested] {
            let headers = BTreeMap::from([("odd".into(), value)]);
            let properties = BasicProperties::default().with_headers(FieldTable::from(headers));
            assert!(MessageCopy::new(&properties, Vec::new()).to_stored().is_err());
        }
    }

    #[test]
    fn another_shape_is_refused() {
        for stored in
            ["", "[]", r#"{"headers":{"x":null}}"#, r#"{"headers":{"x":{"amqp":7}}}"#, r#"{"priority":300}"#]
        {
            assert!(MessageCopy::from_stored(stored, Vec::new()).is_err(), "{stored}");
        }
    }
}
