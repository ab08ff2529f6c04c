//! Why a pass of the relay failed.

use std::time::Duration;

use semel_core::database;
use semel_core::disposition::{Disposed, Disposition};

/// Why a pass of the relay failed.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The database failed. Lanes are free again, and what was published and not marked is published again.
    #[error("{attempted}")]
    Database {
        /// What was attempted.
        attempted: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The server takes no writes: a standby, whose locks and rows are not the primary's, or one that is set so.
    #[error("the database takes no writes, as a standby does: a relay works on the primary only")]
    ReadOnly,
    /// The broker failed; no event is to blame.
    #[error("the broker is away")]
    Broker(#[source] semel_broker::Error),
    /// The exchange is not there, and is not this relay's to make.
    #[error("the exchange {0:?} does not exist: declare it, or set --topology declare")]
    NoExchange(String),
    /// The broker does not let the relay's user write to the exchange.
    #[error("the broker does not let this user write to the exchange {exchange:?}: {reason}")]
    NotAllowed {
        /// The exchange.
        exchange: String,
        /// The broker's words.
        reason: String,
    },
    /// A batch may last longer than the server waits for it: it would be rolled back and repeated for ever.
    #[error(
        "a batch may take {batch:?}, and the server ends it after {patience:?}: lower --batch-seconds or \
         --confirm-seconds, or raise idle_in_transaction_session_timeout (or transaction_timeout)"
    )]
    Impatient {
        /// How long a batch may take.
        batch: Duration,
        /// When the server ends it.
        patience: Duration,
    },
    /// A part of the relay has panicked; the log says where.
    #[error("a part of the relay has panicked")]
    Panicked,
    /// The broker has raised an alarm and takes nothing.
    #[error("the broker is blocked by an alarm and takes no messages")]
    Blocked,
}

impl RelayError {
    pub(crate) fn database(attempted: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { attempted, source }
    }
}

impl Disposed for RelayError {
    fn disposition(&self) -> Disposition {
        match self {
            Self::Database { source, .. } => database::disposition(source),
            Self::Broker(error) => match error.disposition() {
                semel_broker::Disposition::Retry => Disposition::Retry,
                semel_broker::Disposition::Fatal => Disposition::Fail,
            },
            Self::Panicked | Self::Impatient { .. } => Disposition::Fail,
            Self::ReadOnly | Self::Blocked | Self::NoExchange(_) | Self::NotAllowed { .. } => {
                Disposition::Retry
            }
        }
    }
}
