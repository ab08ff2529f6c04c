//! A dead letter as people see it, and which of them are meant.

use std::fmt;
use std::time::Duration;

use semel_broker::{Delivery, HeaderValue};
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, PrimitiveDateTime};
use uuid::Uuid;

use crate::copies::headers;

/// What a dead letter tells, but for its payload.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Letter {
    /// Its place among the dead letters that nobody held; the oldest has 1.
    pub position: usize,
    /// The message's own id, as it stands.
    pub message_id: Option<String>,
    /// The event's id, if it is one.
    pub event_id: Option<Uuid>,
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
    /// Why it is dead: the kit's word (`invalid`, `permanent`, `exhausted`, `stale`), or the broker's (`delivery_limit`, `rejected`, …).
    pub reason: String,
    /// What the decoder or the handler said last. Of an invalid message it may quote the payload.
    pub error: Option<String>,
    /// How often its handling was attempted.
    pub attempts: Option<i64>,
    /// When it failed first.
    pub first_failed_at: Option<OffsetDateTime>,
    /// When it failed last, or was moved here.
    pub failed_at: Option<OffsetDateTime>,
    /// The exchange that the original was published to.
    pub exchange: Option<String>,
    /// The routing key that the original was published with.
    pub routing_key: Option<String>,
    /// The consumer that gave up.
    pub consumer: Option<String>,
    /// W3C `traceparent` of what caused it.
    pub trace_context: Option<String>,
    /// The payload's size.
    pub payload_bytes: usize,
}

impl Letter {
    pub(super) fn read(position: usize, delivery: &Delivery) -> Self {
        let text = |name: &str| match delivery.header(name)? {
            HeaderValue::Text(text) => Some(text),
            HeaderValue::Integer(number) => Some(number.to_string()),
        };
        let instant = |name: &str| OffsetDateTime::parse(&text(name)?, &Rfc3339).ok();
        let received = delivery.envelope.as_ref().ok();
        let death = delivery.death();
        let of_death = |seconds: i64| OffsetDateTime::from_unix_timestamp(seconds).ok();
        let moved_at = death.as_ref().and_then(|death| death.at_unix_seconds).and_then(of_death);
        let told = text(headers::REASON);
        Self {
            position,
            message_id: delivery.message_id().map(str::to_owned),
            event_id: received.map(|received| received.event_id),
            event_type: received.and_then(|received| received.event_type.clone()),
            aggregate_type: received.and_then(|received| received.aggregate_type.clone()),
            aggregate_id: received.and_then(|received| received.aggregate_id.clone()),
            aggregate_version: received.and_then(|received| received.aggregate_version),
            created_at: received.and_then(|received| received.created_at_unix_micros).and_then(|micros| {
                OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1_000).ok()
            }),
            // The broker's account, where the consumer had no say.
            reason: told.or_else(|| death.map(|death| death.reason)).unwrap_or_else(|| UNTOLD.to_owned()),
            error: text(headers::ERROR),
            attempts: match delivery.header(headers::ATTEMPTS) {
                Some(HeaderValue::Integer(attempts)) => Some(attempts),
                _ => None,
            },
            first_failed_at: instant(headers::FIRST_FAILED_AT).or(moved_at),
            failed_at: moved_at.or_else(|| instant(headers::FAILED_AT)),
            exchange: text(headers::EXCHANGE),
            routing_key: text(headers::ROUTING_KEY),
            consumer: text(headers::CONSUMER),
            trace_context: received.and_then(|received| received.headers.get("traceparent").cloned()),
            payload_bytes: delivery.body.len(),
        }
    }

    /// What it is called by: the message's id, or that it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.message_id.as_deref().unwrap_or("without id")
    }

    /// Since when its event may have taken effect. `None`: nobody knows.
    pub(super) fn oldest_effect(&self) -> Option<OffsetDateTime> {
        self.created_at.or(self.first_failed_at)
    }
}

/// The time that long before; the earliest one that can be told, if there is none.
pub(super) fn before(now: OffsetDateTime, age: Duration) -> OffsetDateTime {
    let earlier = time::Duration::try_from(age).ok().and_then(|age| now.checked_sub(age));
    earlier.unwrap_or(PrimitiveDateTime::MIN.assume_utc())
}

/// The reason of a letter that tells none.
const UNTOLD: &str = "untold";

/// Which letters are meant: those that all of this holds for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Filter {
    /// Dead for one of these reasons; for any, if there is none.
    pub reasons: Vec<String>,
    /// Of this type.
    pub event_type: Option<String>,
    /// Of aggregates of this type.
    pub aggregate_type: Option<String>,
    /// Of the aggregate of this id.
    pub aggregate_id: Option<String>,
    /// Failed last before that long.
    pub older_than: Option<Duration>,
    /// Failed last within that time.
    pub newer_than: Option<Duration>,
}

impl Filter {
    pub(super) fn takes(&self, letter: &Letter, now: OffsetDateTime) -> bool {
        let is = |wanted: &Option<String>, there: &Option<String>| wanted.is_none() || wanted == there;
        // What tells no time is neither old nor new.
        let failed = |holds: &dyn Fn(OffsetDateTime) -> bool| letter.failed_at.is_some_and(holds);
        (self.reasons.is_empty() || self.reasons.contains(&letter.reason))
            && is(&self.event_type, &letter.event_type)
            && is(&self.aggregate_type, &letter.aggregate_type)
            && is(&self.aggregate_id, &letter.aggregate_id)
            && self.older_than.is_none_or(|age| failed(&|at| at < before(now, age)))
            && self.newer_than.is_none_or(|age| failed(&|at| at >= before(now, age)))
    }
}

/// One letter.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Which {
    /// The message of this id.
    Id(String),
    /// The one at this place, as [`Letter::position`] tells it.
    Position(usize),
}

impl Which {
    pub(super) fn is(&self, letter: &Letter) -> bool {
        match self {
            Self::Id(id) => letter.message_id.as_ref() == Some(id),
            Self::Position(position) => letter.position == *position,
        }
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => f.write_str(id),
            Self::Position(position) => write!(f, "at place {position}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter() -> Letter {
        Letter {
            position: 1,
            message_id: Some("m".to_owned()),
            event_id: None,
            event_type: Some("OrderPlaced".to_owned()),
            aggregate_type: Some("order".to_owned()),
            aggregate_id: Some("7".to_owned()),
            aggregate_version: None,
            created_at: None,
            reason: "permanent".to_owned(),
            error: None,
            attempts: Some(1),
            first_failed_at: None,
            failed_at: Some(OffsetDateTime::UNIX_EPOCH),
            exchange: None,
            routing_key: None,
            consumer: None,
            trace_context: None,
            payload_bytes: 0,
        }
    }

    #[test]
    fn a_filter_takes_what_all_of_it_holds_for() {
        let now = OffsetDateTime::UNIX_EPOCH + Duration::from_mins(10);
        let all = Filter::default;
        let name = |name: &str| Some(name.to_owned());
        for (filter, takes) in [
            (all(), true),
            (Filter { reasons: vec!["invalid".to_owned(), "permanent".to_owned()], ..all() }, true),
            (Filter { reasons: vec!["invalid".to_owned()], ..all() }, false),
            (Filter { event_type: name("OrderPlaced"), aggregate_id: name("7"), ..all() }, true),
            (Filter { event_type: name("OrderPlaced"), aggregate_id: name("8"), ..all() }, false),
            (Filter { aggregate_type: name("payment"), ..all() }, false),
            (Filter { older_than: Some(Duration::from_mins(9)), ..all() }, true),
            (Filter { older_than: Some(Duration::from_mins(11)), ..all() }, false),
            (Filter { older_than: Some(Duration::MAX), ..all() }, false),
            (Filter { newer_than: Some(Duration::MAX), ..all() }, true),
            (Filter { newer_than: Some(Duration::from_mins(11)), ..all() }, true),
            (Filter { newer_than: Some(Duration::from_mins(9)), ..all() }, false),
        ] {
            assert_eq!(filter.takes(&letter(), now), takes, "{filter:?}");
        }
        let untold = Letter { failed_at: None, ..letter() };
        for age in [Duration::ZERO, Duration::from_hours(1)] {
            assert!(!Filter { older_than: Some(age), ..all() }.takes(&untold, now));
            assert!(!Filter { newer_than: Some(age), ..all() }.takes(&untold, now));
        }
    }
}
