//! Why a consumer stops, for a while or for good.

use semel_core::database::{self, sqlstate};
use semel_core::disposition::{Disposed, Disposition};
use semel_core::schema::SchemaError;

/// What ended a subscription. [`Consumer::run`](crate::Consumer::run) returns those that do not pass by waiting, and
/// subscribes again after the others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The broker cannot be used.
    #[error(transparent)]
    Broker(#[from] semel_broker::Error),
    /// The database cannot be used, or it is not known whether a transaction committed.
    #[error("cannot {attempted}")]
    Database {
        /// What was attempted, as a verb phrase.
        attempted: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The database answers a handler that it cannot work: it is read-only or full, or a table or a permission is missing.
    #[error("the database cannot work: {told}")]
    Refused {
        /// The handler's error, without what may quote the event.
        told: String,
    },
    /// The database has no tables that this consumer can use.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The copy of a message was not confirmed, so its original was not acknowledged.
    #[error("the copy of a message was not confirmed by queue `{queue}`: {outcome}")]
    Copy {
        /// The queue: a retry queue, or that of the dead letters.
        queue: String,
        /// What became of it instead.
        outcome: String,
    },
    /// There is no queue for the copy of a message, so its original was not acknowledged.
    #[error("the copy of a message was returned, there is no queue `{queue}`: {reason}")]
    Unroutable {
        /// The queue: a retry queue, or that of the dead letters.
        queue: String,
        /// The broker's words.
        reason: String,
    },
    /// As many events are parked as may be.
    #[error("{limit} events are parked, and that is the limit")]
    ParkedFull {
        /// The limit.
        limit: u32,
    },
    /// Events are parked, which only a consumer in the order of [`Ordering::Aggregate`](crate::Ordering::Aggregate) tries again.
    #[error(
        "events of this consumer are parked, and without an order nobody tries them again: run it in the aggregates' order until \
         `parked list` is empty (`parked retry` and `parked discard` hurry that)"
    )]
    StillParked,
    /// A parked event cannot be made into a message again.
    #[error("cannot read parked event {event_id}")]
    Parked {
        /// The event.
        event_id: uuid::Uuid,
        /// Why.
        source: semel_broker::NotStored,
    },
    /// The task of a message ended without a result.
    #[error("the task of a message panicked")]
    Task(#[source] tokio::task::JoinError),
}

impl Disposed for Error {
    fn disposition(&self) -> Disposition {
        let passes = match self {
            Self::Broker(error) => error.disposition() == semel_broker::Disposition::Retry,
            Self::Database { source, .. } | Self::Schema(SchemaError::Database(source)) => {
                // A permission that is missing is waited for, like a table.
                sqlstate(source).as_deref() == Some(INSUFFICIENT_PRIVILEGE)
                    || database::disposition(source) == Disposition::Retry
            }
            Self::Schema(error) => matches!(error, SchemaError::Missing { .. }),
            Self::Refused { .. }
            | Self::Copy { .. }
            | Self::Unroutable { .. }
            | Self::ParkedFull { .. }
            | Self::StillParked
            | Self::Parked { .. }
            | Self::Task(_) => true,
        };
        if passes { Disposition::Retry } else { Disposition::Fail }
    }
}

const INSUFFICIENT_PRIVILEGE: &str = "42501";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_what_comes_back_and_leaves_for_the_rest() {
        let missing = SchemaError::Missing { set: "inbox" };
        let older = SchemaError::TooOld { set: "inbox", found: 1, needed: 2 };
        let away = || sqlx::Error::PoolTimedOut;
        let mismatch = semel_broker::Error::Mismatch {
            object: "queue `q`".to_owned(),
            difference: "x-delivery-limit".to_owned(),
        };
        let canceled = semel_broker::Error::ConsumerCanceled { queue: "q".to_owned() };
        for (error, disposition) in [
            (Error::from(missing), Disposition::Retry),
            (Error::from(older), Disposition::Fail),
            (Error::from(SchemaError::Database(away())), Disposition::Retry),
            (Error::Database { attempted: "commit", source: away() }, Disposition::Retry),
            (Error::from(mismatch), Disposition::Fail),
            (Error::from(canceled), Disposition::Retry),
            (Error::Refused { told: "SQLSTATE 42501".to_owned() }, Disposition::Retry),
        ] {
            assert_eq!(error.disposition(), disposition, "{error}");
        }
    }
}
