//! The provider's clock: the machine's, moved by what a test ordered.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use prost_types::Timestamp;
use time::{Duration, OffsetDateTime};

/// How far the clock can be moved either way.
const FARTHEST: Duration = Duration::days(3653);

/// The clock; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// Milliseconds.
    moved: Arc<AtomicI64>,
}

/// All moves together would go beyond ten years.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TooFar;

impl Clock {
    /// Returns what it shows.
    pub(crate) fn now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc() + Duration::milliseconds(self.moved.load(Ordering::SeqCst))
    }

    /// Moves it, in whole milliseconds.
    pub(crate) fn move_by(&self, by: Duration) -> Result<(), TooFar> {
        let by = i64::try_from(by.whole_milliseconds()).map_err(|_| TooFar)?;
        let farthest = FARTHEST.whole_seconds() * 1000;
        let add = |moved: i64| moved.checked_add(by).filter(|sum| (-farthest..=farthest).contains(sum));
        self.moved.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).map(|_| ()).map_err(|_| TooFar)
    }
}

/// As it travels.
pub(crate) fn timestamp(at: OffsetDateTime) -> Timestamp {
    Timestamp { seconds: at.unix_timestamp(), nanos: i32::try_from(at.nanosecond()).unwrap_or(0) }
}

/// As it is computed with; `None` for what is no time.
pub(crate) fn instant(at: &Timestamp) -> Option<OffsetDateTime> {
    let nanos = u32::try_from(at.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    let at = OffsetDateTime::from_unix_timestamp(at.seconds).ok()?;
    at.replace_nanosecond(nanos).ok()
}

/// As it is computed with; `None` for what is no duration.
pub(crate) fn duration(duration: &prost_types::Duration) -> Option<Duration> {
    // The protobuf rules: within ten thousand years, and both parts with the same sign.
    const MOST: i64 = 315_576_000_000;
    let (seconds, nanos) = (duration.seconds, duration.nanos);
    let whole = (-MOST..=MOST).contains(&seconds) && (-999_999_999..=999_999_999).contains(&nanos);
    let one_sign = seconds == 0 || nanos == 0 || (seconds < 0) == (nanos < 0);
    (whole && one_sign).then(|| Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_both_ways_but_not_too_far() {
        let clock = Clock::default();
        clock.move_by(Duration::hours(25)).unwrap();
        assert!(clock.now() - OffsetDateTime::now_utc() > Duration::hours(24));
        clock.move_by(Duration::hours(-30)).unwrap();
        assert!(clock.now() < OffsetDateTime::now_utc());
        assert_eq!(clock.move_by(Duration::days(4000)), Err(TooFar));
        assert_eq!(clock.move_by(Duration::MAX), Err(TooFar));
    }

    #[test]
    fn times_survive_the_wire_and_nonsense_is_none() {
        let now = OffsetDateTime::now_utc();
        assert_eq!(instant(&timestamp(now)), Some(now));
        assert_eq!(instant(&Timestamp { seconds: 0, nanos: -1 }), None);
        assert_eq!(instant(&Timestamp { seconds: i64::MAX, nanos: 0 }), None);
        let wire = |seconds, nanos| duration(&prost_types::Duration { seconds, nanos });
        assert_eq!(wire(1, 500_000_000), Some(Duration::milliseconds(1500)));
        assert_eq!(wire(-1, -500_000_000), Some(Duration::milliseconds(-1500)));
        assert_eq!((wire(1, -1), wire(i64::MAX, 0)), (None, None));
    }
}
