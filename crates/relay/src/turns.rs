//! Long waves of chains: one at a time in a process, and few of them while none is answered.
//!
//! A wave of chains that lead to a silent queue lasts as long as it may, and its lanes wait for it. However many chains there
//! are, no more than one worker waits for long, and after a wave of which nothing was confirmed none does for eight times as
//! long as that took. A broker that is slow confirms something of a long wave: the next may follow at once.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many times as long as a long wave without an answer no other one begins.
const PAUSE: u32 = 8;

/// Whether a long wave may begin.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Free,
    Taken,
    FreeAt(Instant),
}

/// The right to a long wave. Dropped without a word, its wave counts as one that was not answered.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    began: Instant,
    was_answered: bool,
}

impl Turns {
    /// Takes the turn, if it is nobody's and the pause is over.
    pub(crate) fn take(&self) -> Option<Turn<'_>> {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> Option<Turn<'_>> {
        let mut state = self.state();
        match *state {
            State::Taken => return None,
            State::FreeAt(moment) if now < moment => return None,
            State::Free | State::FreeAt(_) => *state = State::Taken,
        }
        Some(Turn { turns: self, began: now, was_answered: false })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn<'_> {
    /// Gives it back after a wave of which something was confirmed.
    pub(crate) fn answered(mut self) {
        self.was_answered = true;
    }

    fn pause(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began) * PAUSE
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        *self.turns.state() =
            if self.was_answered { State::Free } else { State::FreeAt(now + self.pause(now)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_the_next_at_once_after_an_answer() {
        let turns = Turns::default();
        let turn = turns.take().unwrap();
        assert!(turns.take().is_none());
        turn.answered();
        assert!(turns.take().is_some());
    }

    #[test]
    fn none_for_eight_times_as_long_as_one_that_was_not_answered() {
        let turns = Turns::default();
        // As if it had begun 15 s ago.
        let began = Instant::now();
        let mut turn = turns.take_at(began).unwrap();
        turn.began = began.checked_sub(Duration::from_secs(15)).unwrap();
        drop(turn);
        assert!(turns.take_at(began + Duration::from_secs(119)).is_none());
        assert!(turns.take_at(began + Duration::from_mins(3)).is_some());
    }
}
