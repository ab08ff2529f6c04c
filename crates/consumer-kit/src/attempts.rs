//! The transactions that run, so that liveness can tell one that is stuck.
//!
//! Each call in them has a limit, so none should ever be. But a handler that blocks its thread cannot be ended, and its
//! consumer would look alive while it does less and less.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(crate) struct Attempts(Mutex<Begun>);

/// When the attempts began, by their number, and so the oldest first.
#[derive(Debug, Default)]
struct Begun {
    next: u64,
    at: BTreeMap<u64, Instant>,
}

/// An attempt that ends when this is dropped.
#[must_use]
pub(crate) struct Attempt<'a> {
    attempts: &'a Attempts,
    number: u64,
}

impl Attempts {
    pub(crate) fn begin(&self) -> Attempt<'_> {
        let mut begun = self.lock();
        let number = begun.next;
        begun.next += 1;
        begun.at.insert(number, Instant::now());
        Attempt { attempts: self, number }
    }

    /// How long the oldest one has been running.
    pub(crate) fn oldest(&self) -> Duration {
        self.lock().at.first_key_value().map(|(_, begun)| begun.elapsed()).unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Begun> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.attempts.lock().at.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_the_oldest_that_runs() {
        let attempts = Attempts::default();
        assert_eq!(attempts.oldest(), Duration::ZERO);
        let first = attempts.begin();
        let second = attempts.begin();
        assert_eq!(attempts.lock().at.first_key_value().map(|(number, _)| *number), Some(first.number));
        assert!(attempts.oldest() > Duration::ZERO);
        drop(first);
        assert_eq!(attempts.lock().at.first_key_value().map(|(number, _)| *number), Some(second.number));
        drop(second);
        assert_eq!(attempts.oldest(), Duration::ZERO);
    }
}
