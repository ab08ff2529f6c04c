//! What a handler's error may tell, in a log and in a dead letter's headers.
//!
//! The text of a database's error may quote the values that it is about, and so the event. Of such an error only the
//! SQLSTATE and the constraint are told, also where another error's text quotes it.

use std::borrow::Cow;
use std::error::Error as StdError;

use semel_core::disposition::chain;
use sqlx::error::DatabaseError;
use sqlx::postgres::PgDatabaseError;

/// Renders an error and its sources in one line, outermost first, as [`chain`] does.
pub(crate) fn told(error: &(dyn StdError + 'static)) -> String {
    let mut line = chain(error);
    for cause in causes(error) {
        if let Some(error) = as_database_error(cause) {
            // Its text is its message, and for some a place in the server's source.
            for text in [error.to_string().as_str(), error.message()] {
                line = replaced(&line, text, &code_and_constraint(error));
            }
        } else if let Some(error) = cause.downcast_ref::<sqlx::Error>()
            && quotes_a_value(error)
        {
            line = replaced(&line, &error.to_string(), "a value cannot be encoded or decoded");
            for source in causes(error).skip(1) {
                line = replaced(&line, &source.to_string(), "…");
            }
        }
    }
    line
}

/// The SQLSTATEs among an error and its sources.
pub(crate) fn sqlstates<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = Cow<'a, str>> {
    causes(error).filter_map(as_database_error).filter_map(DatabaseError::code)
}

fn causes<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// A wrapper that is transparent shows only the source of its own source.
fn as_database_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a dyn DatabaseError> {
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return error.as_database_error();
    }
    if let Some(error) = error.downcast_ref::<Box<dyn DatabaseError>>() {
        return Some(&**error);
    }
    error.downcast_ref::<PgDatabaseError>().map(|error| error as &dyn DatabaseError)
}

fn code_and_constraint(error: &dyn DatabaseError) -> String {
    let code = error.code().unwrap_or_default();
    match error.constraint() {
        Some(constraint) => format!("SQLSTATE {code}, constraint `{constraint}`"),
        None => format!("SQLSTATE {code}"),
    }
}

fn quotes_a_value(error: &sqlx::Error) -> bool {
    matches!(
        error,
        sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Decode(_)
            | sqlx::Error::Encode(_)
            | sqlx::Error::InvalidArgument(_)
    )
}

fn replaced(line: &str, secret: &str, by: &str) -> String {
    // As in what `chain` makes.
    let secret = secret.replace(['\n', '\r'], " ");
    if secret.is_empty() { line.to_owned() } else { line.replace(&secret, by) }
}

#[cfg(test)]
mod tests {
    use sqlx::error::ErrorKind;

    use super::*;
    use crate::handler::HandlerError;

    /// Stands for the driver's own, which only a server can make.
    #[derive(Debug, thiserror::Error)]
    #[error("{message}")]
    struct Answer {
        code: &'static str,
        message: &'static str,
        constraint: Option<&'static str>,
    }

    impl DatabaseError for Answer {
        fn message(&self) -> &str {
            self.message
        }

        fn code(&self) -> Option<Cow<'_, str>> {
            Some(self.code.into())
        }

        fn constraint(&self) -> Option<&str> {
            self.constraint
        }

        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }

        fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
            self
        }

        fn as_error_mut(&mut self) -> &mut (dyn StdError + Send + Sync + 'static) {
            self
        }

        fn into_error(self: Box<Self>) -> Box<dyn StdError + Send + Sync + 'static> {
            self
        }
    }

    fn answer(code: &'static str) -> sqlx::Error {
        let message = "invalid input syntax for type integer: \"4242\"";
        sqlx::Error::Database(Box::new(Answer { code, message, constraint: Some("cards_pkey") }))
    }

    #[derive(Debug, thiserror::Error)]
    enum Booking {
        #[error("cannot book order 7: {0}")]
        Quoting(#[source] sqlx::Error),
        #[error(transparent)]
        Transparent(sqlx::Error),
    }

    #[test]
    fn of_a_database_error_only_code_and_constraint_are_told() {
        for error in [
            HandlerError::from(answer("22P02")),
            HandlerError::transient(Booking::Quoting(answer("22P02"))),
            HandlerError::permanent(Booking::Transparent(answer("22P02"))),
        ] {
            let told = told(&error);
            assert!(!told.contains("4242"), "{told}");
            assert!(told.contains("SQLSTATE 22P02, constraint `cards_pkey`"), "{told}");
        }
        let quoting = HandlerError::transient(Booking::Quoting(answer("22P02")));
        assert!(told(&quoting).contains("cannot book order 7"));
    }

    #[test]
    fn a_value_that_cannot_be_decoded_is_not_told() {
        let decode = sqlx::Error::Decode("invalid digit in 4242".into());
        let told = told(&HandlerError::transient(Booking::Quoting(decode)));
        assert!(!told.contains("4242"), "{told}");
        assert!(told.contains("cannot book order 7: a value cannot be encoded or decoded"), "{told}");
    }

    #[test]
    fn what_quotes_no_value_is_told() {
        let told = told(&HandlerError::transient(sqlx::Error::PoolTimedOut));
        assert!(told.contains("pool timed out"), "{told}");
        assert!(super::told(&HandlerError::permanent("no such account")).contains("no such account"));
    }

    #[test]
    fn a_database_that_cannot_work_is_recognised_through_wrappers() {
        for code in ["25006", "53100", "53300", "57P01", "57P03", "42P01", "42501"] {
            assert!(HandlerError::from(answer(code)).is_refusal_to_work(), "{code}");
            assert!(
                HandlerError::permanent(Booking::Transparent(answer(code))).is_refusal_to_work(),
                "{code}"
            );
        }
        for code in ["22P02", "23505", "40001", "42703", "57014", "P0001"] {
            assert!(!HandlerError::from(answer(code)).is_refusal_to_work(), "{code}");
        }
        assert!(!HandlerError::transient("the bank is closed").is_refusal_to_work());
    }
}
