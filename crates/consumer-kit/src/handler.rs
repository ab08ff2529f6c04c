//! What a consumer does because of an event.

use std::error::Error as StdError;
use std::future::Future;

use semel_core::database::{Failure, failure, sqlstate};
use serde::de::DeserializeOwned;
use sqlx::PgConnection;

use crate::event::Event;
use crate::told::sqlstates;

/// What a consumer does because of an event, in a transaction that also records the event as processed.
pub trait Handler: Send + Sync + 'static {
    /// What events carry, as JSON. For several event types in one queue take `Box<serde_json::value::RawValue>` and look
    /// at [`Event::event_type`].
    type Payload: DeserializeOwned + Send + 'static;

    /// Takes effect of an event through `tx`, a connection with an open transaction; implement it as an `async fn`.
    ///
    /// Whatever happens outside that transaction may happen again: the handler is called anew whenever the transaction
    /// did not commit. It must not end the transaction itself. Past its time budget it is dropped at its next `await`, so
    /// it must not block its thread.
    ///
    /// # Errors
    ///
    /// [`HandlerError::Transient`] to be called again later, [`HandlerError::Permanent`] to have the message set aside.
    /// Either way nothing of what it wrote remains. An error that stems from a database that cannot work (read-only, full,
    /// shutting down; a table or a permission missing) is neither: the message is kept until that has passed.
    fn handle(
        &self,
        tx: &mut PgConnection,
        event: Event<Self::Payload>,
    ) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

type BoxError = Box<dyn StdError + Send + Sync>;

/// Why a handler did not take effect of an event.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    /// It may work later: something is away, locked or not there yet.
    #[error("the handler failed, and may succeed later")]
    Transient(#[source] BoxError),
    /// It never works: the event is one that this consumer cannot take effect of.
    #[error("the handler refuses the event")]
    Permanent(#[source] BoxError),
}

impl HandlerError {
    /// It may work later. The reason is an error or a text, and tells no secret.
    pub fn transient(reason: impl Into<BoxError>) -> Self {
        Self::Transient(reason.into())
    }

    /// It never works. The reason is an error or a text, and tells no secret.
    pub fn permanent(reason: impl Into<BoxError>) -> Self {
        Self::Permanent(reason.into())
    }

    /// Whether another transaction was in the way, so that an immediate repeat is worth it.
    pub(crate) fn is_conflict(&self) -> bool {
        let Self::Transient(reason) = self else { return false };
        let mut cause: Option<&(dyn StdError + 'static)> = Some(&**reason);
        while let Some(error) = cause {
            if error.downcast_ref().is_some_and(|error| failure(error) == Failure::Conflict) {
                return true;
            }
            cause = error.source();
        }
        false
    }

    /// Whether the database has answered that it cannot work at all, which says nothing of the event: it is read-only, full
    /// or shutting down, or a table or a permission is missing.
    pub(crate) fn is_refusal_to_work(&self) -> bool {
        sqlstates(self).any(|code| {
            ["25006", "42P01", "42501"].contains(&&*code)
                || code.starts_with("53")
                || code.starts_with("57P0")
        })
    }
}

/// Permanent if the database refuses the values: a data exception (class 22) or a violated constraint (class 23). A missing
/// referenced row (23503) is transient, because its own event may come later; so is everything else.
impl From<sqlx::Error> for HandlerError {
    fn from(error: sqlx::Error) -> Self {
        let code = sqlstate(&error).unwrap_or_default();
        let refuses_values = (code.starts_with("22") || code.starts_with("23")) && code != FOREIGN_KEY;
        if refuses_values { Self::permanent(error) } else { Self::transient(error) }
    }
}

const FOREIGN_KEY: &str = "23503";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_is_transient_and_no_conflict() {
        let error = HandlerError::from(sqlx::Error::PoolTimedOut);
        assert!(matches!(error, HandlerError::Transient(_)));
        assert!(!error.is_conflict());
    }

    #[test]
    fn takes_texts_and_errors_as_reasons() {
        let error = HandlerError::permanent("no such account");
        assert_eq!(error.source().unwrap().to_string(), "no such account");
        assert!(matches!(HandlerError::transient(std::fmt::Error), HandlerError::Transient(_)));
    }
}
