//! Events that the broker has confirmed and whose mark is not known to be committed.
//!
//! Without it, a database that refuses to write would have the same events published again for as long as it refuses. A
//! lane's events are marked before anything else of the lane is read, so what was confirmed is not sent again by this
//! process. It is lost in a crash, and bounded; what it does not hold is sent again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// Most events that are remembered.
const LIMIT: usize = 50_000;

/// Confirmed events by lane.
#[derive(Debug, Default)]
pub(crate) struct Unmarked {
    lanes: Mutex<HashMap<i16, Vec<Uuid>>>,
}

impl Unmarked {
    /// Remembers events that were confirmed.
    pub(crate) fn remember(&self, confirmed: impl IntoIterator<Item = (i16, Uuid)>) {
        let mut lanes = self.lanes();
        let mut room = LIMIT.saturating_sub(lanes.values().map(Vec::len).sum());
        for (lane, event_id) in confirmed {
            if room == 0 {
                return;
            }
            room -= 1;
            lanes.entry(lane).or_default().push(event_id);
        }
    }

    /// Returns what is remembered of these lanes.
    pub(crate) fn of(&self, lanes: &[i16]) -> Vec<Uuid> {
        let known = self.lanes();
        lanes.iter().filter_map(|lane| known.get(lane)).flatten().copied().collect()
    }

    /// Forgets these lanes, whose marks are committed.
    pub(crate) fn forget(&self, lanes: &[i16]) {
        let mut known = self.lanes();
        for lane in lanes {
            known.remove(lane);
        }
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<i16, Vec<Uuid>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_by_lane_until_the_lane_is_marked_and_never_more_than_its_limit() {
        let unmarked = Unmarked::default();
        let [a, b] = [Uuid::from_u128(1), Uuid::from_u128(2)];
        unmarked.remember([(1, a), (2, b)]);
        assert_eq!(unmarked.of(&[2, 1, 3]), [b, a]);
        unmarked.forget(&[1]);
        assert_eq!(unmarked.of(&[1, 2]), [b]);
        unmarked.remember((0..2 * LIMIT).map(|_| (1, a)));
        assert_eq!(unmarked.of(&[1]).len(), LIMIT - 1);
    }
}
