//! Tests that the services at hand do not allow, said so that `cargo xtask test` counts them as skipped.

use std::io::Write as _;

/// What the line begins with.
pub const SKIPPED: &str = "skipped: ";

/// Says that a test does not run, and why.
///
/// # Errors
///
/// When nothing can be said.
pub fn skip(test: &str, why: &str) -> std::io::Result<()> {
    // Written, not printed: what a test that passes has printed is not shown.
    writeln!(std::io::stdout(), "\n{SKIPPED}{test}: {why}")
}
