//! Spares a provider that is away: after a few calls in a row without an answer, calls are refused here for a while, but
//! for one that looks whether it is back.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many calls in a row may fail before the breaker opens.
pub(super) const TOLERATED: u32 = 5;
/// How long it stays open before one call may look.
const OPEN_FOR: Duration = Duration::from_secs(1);

/// Why nothing is called while the breaker is open.
pub(super) const SPARED: &str = "the provider has not answered for a while, and is not called";

/// A circuit breaker; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    /// When the next call may look; only while open.
    next_look: Option<Instant>,
}

impl Breaker {
    /// Says whether a call would be let through, without taking the place of the one that looks.
    #[must_use]
    pub fn is_open_for_calls(&self) -> bool {
        let state = self.lock();
        state.next_look.is_none_or(|at| Instant::now() >= at)
    }

    /// Asks to make a call; false while the provider is spared.
    #[must_use]
    pub fn admits(&self) -> bool {
        let mut state = self.lock();
        match state.next_look {
            None => true,
            Some(at) if Instant::now() < at => false,
            Some(_) => {
                // This call looks; the others wait for what it finds, or for another while.
                state.next_look = Some(Instant::now() + OPEN_FOR);
                true
            }
        }
    }

    /// Notes that the provider answered.
    pub fn answered(&self) {
        *self.lock() = State::default();
    }

    /// Notes that it did not.
    pub fn failed(&self) {
        let mut state = self.lock();
        state.failures = state.failures.saturating_add(1);
        if state.failures >= TOLERATED {
            state.next_look = Some(Instant::now() + OPEN_FOR);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_failures_in_a_row_and_closes_with_an_answer() {
        let breaker = Breaker::default();
        for _ in 1..TOLERATED {
            breaker.failed();
            assert!(breaker.admits());
        }
        breaker.failed();
        assert!(!breaker.admits() && !breaker.is_open_for_calls());
        breaker.answered();
        assert!(breaker.admits());
    }

    #[test]
    fn an_answer_in_between_starts_the_count_anew() {
        let breaker = Breaker::default();
        for _ in 0..3 {
            for _ in 1..TOLERATED {
                breaker.failed();
            }
            breaker.answered();
        }
        assert!(breaker.admits());
    }

    #[test]
    fn lets_one_call_look_when_its_time_has_come() {
        let breaker = Breaker::default();
        for _ in 0..TOLERATED {
            breaker.failed();
        }
        breaker.lock().next_look = Some(Instant::now());
        assert!(breaker.admits());
        assert!(!breaker.admits());
    }
}
