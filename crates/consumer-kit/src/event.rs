//! The event as a handler sees it.

use std::fmt;

use semel_broker::Received;
use semel_core::trace::TraceContext;
use serde::de::DeserializeOwned;
use time::OffsetDateTime;
use uuid::Uuid;

/// An event that is about to take effect.
///
/// Only id and payload are certain, because a message may come from any producer; one from Semel's relay has everything
/// but what its producer left out.
#[derive(Clone)]
#[non_exhaustive]
pub struct Event<T> {
    /// Its stable identity, by which it is deduplicated.
    pub id: Uuid,
    /// What happened.
    pub event_type: Option<String>,
    /// The kind of thing it happened to.
    pub aggregate_type: Option<String>,
    /// Which one it happened to.
    pub aggregate_id: Option<String>,
    /// The aggregate's version after the event.
    pub aggregate_version: Option<i64>,
    /// When the event was written.
    pub created_at: Option<OffsetDateTime>,
    /// W3C `traceparent` to hand on with what follows from this event: the trace of what caused it, and a span of its own in it,
    /// which is a new one at each attempt. `None` where the event has none.
    pub trace_context: Option<String>,
    /// What it tells.
    pub payload: T,
}

impl<T> Event<T> {
    /// Makes an event of which only this is known, to test a handler with.
    pub fn new(id: Uuid, payload: T) -> Self {
        Self {
            id,
            event_type: None,
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: None,
            created_at: None,
            trace_context: None,
            payload,
        }
    }

    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> Event<U> {
        Event {
            id: self.id,
            event_type: self.event_type,
            aggregate_type: self.aggregate_type,
            aggregate_id: self.aggregate_id,
            aggregate_version: self.aggregate_version,
            created_at: self.created_at,
            trace_context: self.trace_context,
            payload: change(self.payload),
        }
    }
}

impl<T: DeserializeOwned> Event<T> {
    /// Reads the payload, which is JSON.
    pub(crate) fn decode(received: &Received, body: &[u8]) -> Result<Self, serde_json::Error> {
        let created_at = received
            .created_at_unix_micros
            .and_then(|micros| OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1_000).ok());
        Ok(Self {
            id: received.event_id,
            event_type: received.event_type.clone(),
            aggregate_type: received.aggregate_type.clone(),
            aggregate_id: received.aggregate_id.clone(),
            aggregate_version: received.aggregate_version,
            created_at,
            trace_context: trace(received).map(|parent| parent.child().to_string()),
            payload: serde_json::from_slice(body)?,
        })
    }
}

/// The trace that the message's event belongs to; a malformed one is as none.
pub(crate) fn trace(received: &Received) -> Option<TraceContext> {
    received.headers.get("traceparent")?.parse().ok()
}

/// Without the payload, which belongs into no log.
impl<T> fmt::Debug for Event<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("id", &self.id)
            .field("event_type", &self.event_type)
            .field("aggregate_type", &self.aggregate_type)
            .field("aggregate_id", &self.aggregate_id)
            .field("aggregate_version", &self.aggregate_version)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(serde::Deserialize)]
    struct Paid {
        amount: i64,
    }

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn received() -> Received {
        Received {
            event_id: Uuid::from_u128(7),
            event_type: Some("Paid".to_owned()),
            aggregate_type: None,
            aggregate_id: None,
            aggregate_version: Some(3),
            outbox_id: None,
            created_at_unix_micros: Some(1_500_000),
            source: None,
            headers: BTreeMap::from([("traceparent".to_owned(), TRACE.to_owned())]),
        }
    }

    #[test]
    fn carries_what_the_message_says_and_ignores_unknown_fields() {
        let event = Event::<Paid>::decode(&received(), br#"{"amount":5,"event_id":"x"}"#).unwrap();
        assert_eq!((event.id, event.payload.amount), (Uuid::from_u128(7), 5));
        assert_eq!(event.created_at.unwrap().unix_timestamp_nanos(), 1_500_000_000);
        let (parent, span): (TraceContext, TraceContext) =
            (TRACE.parse().unwrap(), event.trace_context.unwrap().parse().unwrap());
        assert_eq!(span.trace_id(), parent.trace_id());
        assert_ne!(span.span_id(), parent.span_id());
        assert_eq!(event.aggregate_version, Some(3));
    }

    #[test]
    fn a_payload_of_another_shape_is_no_event() {
        for body in [&b""[..], b"{}", b"[]", b"\xff", br#"{"amount":"5"}"#, br#"{"amount":5} {}"#] {
            assert!(Event::<Paid>::decode(&received(), body).is_err(), "{body:?}");
        }
    }

    #[test]
    fn a_malformed_trace_is_none() {
        let headers = BTreeMap::from([("traceparent".to_owned(), TRACE.to_uppercase())]);
        let event = Event::<Paid>::decode(&Received { headers, ..received() }, br#"{"amount":5}"#);
        assert_eq!(event.unwrap().trace_context, None);
    }

    #[test]
    fn a_time_out_of_range_is_absent() {
        let far = Received { created_at_unix_micros: Some(i64::MAX), ..received() };
        assert_eq!(Event::<Paid>::decode(&far, br#"{"amount":5}"#).unwrap().created_at, None);
    }

    #[test]
    fn shows_no_payload() {
        let event = Event::<serde_json::Value>::decode(&received(), br#"{"card":"4242"}"#).unwrap();
        assert!(!format!("{event:?}").contains("4242"));
    }
}
