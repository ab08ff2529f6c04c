//! What becomes of panics: one line in the log, where the rest of it is.

use std::panic;

/// Logs panics as one line, with the place but without the message, which may quote what a client sent.
///
/// The line stands in the span of the request that panicked, so it carries the request's id.
pub(crate) fn log() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panicked");
    }));
}
