//! One line on the standard error stream for each step that may take seconds.

use std::fmt::Display;
use std::future::Future;
use std::io::Write as _;
use std::time::Instant;

use anyhow::Result;

/// Where progress is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// On the standard error stream.
    Stderr,
    /// Nowhere.
    Silent,
}

impl Progress {
    /// Says one line.
    pub fn say(self, line: impl Display) {
        if self == Self::Stderr {
            // A closed stream is no reason to fail what is being reported on.
            let _ = writeln!(std::io::stderr().lock(), "semel-bed: {line}");
        }
    }

    /// Awaits one long step; says when it begins, and how long it took.
    ///
    /// # Errors
    ///
    /// Those of the step.
    pub async fn step<T>(self, what: &str, step: impl Future<Output = Result<T>>) -> Result<T> {
        let began = Instant::now();
        self.say(format_args!("{what} …"));
        let outcome = step.await;
        let verdict = if outcome.is_ok() { "" } else { ", failed" };
        self.say(format_args!("{what}: {:.1} s{verdict}", began.elapsed().as_secs_f64()));
        outcome
    }
}
