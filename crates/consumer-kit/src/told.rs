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
            // `chain` has made one line of it.
            line = replaced(&line, error.message(), &code_and_constraint(error));
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
    std::iter::successors(Some(error), |error| error.source())
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
    let secret = secret.replace(['\n', '\r'], " ");
    if secret.is_empty() { line.to_owned() } else { line.replace(&secret, by) }
}
