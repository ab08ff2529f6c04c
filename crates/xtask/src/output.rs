//! What the commands tell their user. Everything goes to stderr: stdout belongs to the programs that are run.
#![expect(clippy::print_stderr, reason = "a command speaks to the person who typed it")]

use std::time::{Duration, Instant};

use anyhow::Error;

/// Says one line.
pub(crate) fn say(line: &str) {
    eprintln!("{line}");
}

/// Announces a long step, does it, and says how long it took.
pub(crate) fn step<T>(label: &str, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    eprintln!("==> {label}");
    let start = Instant::now();
    let result = work();
    let outcome = if result.is_ok() { "done" } else { "failed" };
    eprintln!("==> {label}: {outcome} in {}", seconds(start.elapsed()));
    result
}

/// Reports what kept a command from its work, with its causes.
pub(crate) fn failure(error: &Error) {
    eprintln!("error: {error:#}");
}

/// Says that a test does not run, so that it is counted as skipped.
#[cfg(test)]
pub(crate) fn skip(test: &str, why: &str) {
    use std::io::Write as _;
    // Written, not printed: what a test that passes has printed is not shown.
    let _ = writeln!(std::io::stdout(), "\nskipped: {test}: {why}");
}

/// A duration as people read it: `0.4 s`, `93 s`.
pub(crate) fn seconds(time: Duration) -> String {
    let precision = usize::from(time < Duration::from_secs(10));
    format!("{:.precision$} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_tenths_only_where_they_matter() {
        assert_eq!(seconds(Duration::from_millis(420)), "0.4 s");
        assert_eq!(seconds(Duration::from_millis(93_400)), "93 s");
    }
}
