//! How many lines of the log refused requests may fill.
//!
//! A client can send bad requests faster than a log can be kept. Of each kind of problem so many lines a second are told;
//! the next one of the kind says how many were left out, and the counter of problems counts them all. What is left out is
//! still told at the level `debug`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::problem::Kind;

/// Lines of one kind in one second.
const MOST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);

/// Which lines were told lately.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<HashMap<Kind, Window>>);

#[derive(Debug)]
struct Window {
    began: Instant,
    told: u32,
    left_out: u64,
}

impl Lines {
    /// Says whether one more line of this kind is told, and then how many were left out before it.
    pub(crate) fn take(&self, kind: Kind) -> Option<u64> {
        self.take_at(kind, Instant::now())
    }

    fn take_at(&self, kind: Kind, now: Instant) -> Option<u64> {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = windows.entry(kind).or_insert(Window { began: now, told: 0, left_out: 0 });
        if now.saturating_duration_since(window.began) >= WINDOW {
            (window.began, window.told) = (now, 0);
        }
        if window.told >= MOST {
            window.left_out += 1;
            return None;
        }
        window.told += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_fills_a_few_lines_and_the_next_tells_of_the_rest() {
        let (lines, now) = (Lines::default(), Instant::now());
        let told = (0..1000).filter(|_| lines.take_at(Kind::RequestInvalid, now).is_some()).count();
        assert_eq!(told, 10);
        assert_eq!(lines.take_at(Kind::NotFound, now), Some(0), "another kind is not kept quiet");
        assert_eq!(lines.take_at(Kind::RequestInvalid, now + WINDOW), Some(990));
        assert_eq!(lines.take_at(Kind::RequestInvalid, now + WINDOW), Some(0));
    }
}
