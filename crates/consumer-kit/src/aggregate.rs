//! The aggregate of an event, for a consumer that takes effect of each aggregate's events in their order.

use semel_core::inbox::order::Place;

/// In which order events take effect.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Ordering {
    /// In none: side by side, in any number of processes, and a failed one after its followers.
    #[default]
    None,
    /// Events of one aggregate one after another, as the queue holds them; different aggregates side by side.
    ///
    /// The broker hands the queue to one process at a time. An event that fails is parked in the database, and so are its
    /// aggregate's events behind it, until it took effect or is dead. An event without an aggregate is handled as with
    /// [`None`](Self::None).
    Aggregate,
}

/// Whether an event is refused that comes after a later version of its aggregate.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum VersionGuard {
    /// It is, where events carry versions: it goes to the dead letters as `stale`.
    #[default]
    On,
    /// It takes effect.
    Off,
}

/// Longest type and longest id of an aggregate whose events are kept in order, in bytes.
const MAX_NAME: usize = 255;

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Aggregate {
    kind: String,
    id: String,
}

impl Aggregate {
    /// Reads which one an event tells, if it tells one; fails where the database cannot hold its name.
    pub(crate) fn of(kind: Option<&str>, id: Option<&str>) -> Result<Option<Self>, Unusable> {
        let (Some(kind), Some(id)) = (kind, id) else { return Ok(None) };
        for name in [kind, id] {
            if !(1..=MAX_NAME).contains(&name.len()) || name.contains('\0') {
                return Err(Unusable);
            }
        }
        Ok(Some(Self { kind: kind.to_owned(), id: id.to_owned() }))
    }

    pub(crate) fn place<'a>(&'a self, consumer: &'a str) -> Place<'a> {
        Place { consumer, kind: &self.kind, id: &self.id }
    }
}

/// An aggregate's name that no row can hold.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the aggregate's type or id is not 1 to {MAX_NAME} bytes long, or holds a zero byte")]
pub(crate) struct Unusable;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_without_a_whole_aggregate_has_none() {
        for (kind, id) in [(None, None), (Some("order"), None), (None, Some("7"))] {
            assert_eq!(Aggregate::of(kind, id), Ok(None));
        }
        assert!(Aggregate::of(Some("order"), Some("7")).unwrap().is_some());
    }

    #[test]
    fn a_name_that_no_row_can_hold_is_unusable() {
        let long = "x".repeat(256);
        for (kind, id) in [("order", ""), ("", "7"), ("order", "7\0"), ("order", long.as_str())] {
            assert_eq!(Aggregate::of(Some(kind), Some(id)), Err(Unusable));
        }
    }
}
