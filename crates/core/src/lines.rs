//! How many lines of the log others may fill.
//!
//! Whoever sends requests can send bad ones faster than a log can be kept. Of each kind so many lines a second are told, and
//! the next one of the kind says how many were left out. Whoever counts, counts them all; what is left out is for the level
//! `debug`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of one kind in one second.
const MOST: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);

/// Which lines of which kind were told lately. The kinds are few: each is remembered for good.
#[derive(Debug)]
pub struct Lines<K>(Mutex<HashMap<K, Window>>);

impl<K> Default for Lines<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

#[derive(Debug)]
struct Window {
    began: Instant,
    told: u32,
    left_out: u64,
}

impl<K: Eq + Hash> Lines<K> {
    /// Says whether one more line of this kind is told, and then how many were left out before it.
    #[must_use]
    pub fn take(&self, kind: K) -> Option<u64> {
        self.take_at(kind, Instant::now())
    }

    fn take_at(&self, kind: K, now: Instant) -> Option<u64> {
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
        let told = (0..1000).filter(|_| lines.take_at("invalid", now).is_some()).count();
        assert_eq!(told, 10);
        assert_eq!(lines.take_at("not found", now), Some(0), "another kind is not kept quiet");
        assert_eq!(lines.take_at("invalid", now + WINDOW), Some(990));
        assert_eq!(lines.take_at("invalid", now + WINDOW), Some(0));
    }
}
