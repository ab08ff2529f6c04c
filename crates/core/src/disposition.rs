//! What a loop does about an error.

use std::error::Error;
use std::fmt::Write as _;

/// What a loop does about an error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Disposition {
    /// Passing: wait with backoff and try again.
    Retry,
    /// Not passing without a person: leave, saying why.
    Fail,
}

/// An error that knows what a loop does about it.
pub trait Disposed: Error + Send + Sync + 'static {
    /// Returns what a loop does about it.
    fn disposition(&self) -> Disposition;
}

/// Renders an error and its sources in one line, outermost first.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        // Some libraries repeat their source in their own text.
        if !line.contains(&text) {
            let _ = write!(line, ": {text}");
        }
        source = cause.source();
    }
    line.replace(['\n', '\r'], " ")
}
