//! Waiting on conditions.
//!
//! A wait has a deadline, and one that fails says what was waited for, for how long, and what was
//! seen last. Nothing here sleeps for a fixed time: the condition is asked again every few
//! milliseconds, and a probe that hangs is cut off at the deadline.

use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// The shortest and the longest pause between two looks at a condition.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// What one look at a condition says: the value waited for, or what was seen instead.
///
/// Implemented for `Option` (nothing to tell) and for `Result`, whose error is what was seen.
pub trait Observation {
    /// What the wait is for.
    type Value;

    /// Gives the value, or a description of what was seen instead.
    ///
    /// # Errors
    ///
    /// The condition does not hold yet.
    fn into_value(self) -> Result<Self::Value, Option<String>>;
}

impl<T> Observation for Option<T> {
    type Value = T;

    fn into_value(self) -> Result<T, Option<String>> {
        self.ok_or(None)
    }
}

impl<T, E: Debug> Observation for Result<T, E> {
    type Value = T;

    fn into_value(self) -> Result<T, Option<String>> {
        self.map_err(|seen| Some(format!("{seen:?}")))
    }
}

/// Looks at a condition until it holds, and returns its value.
///
/// `what` completes the sentence "waited 5 s for …".
///
/// # Errors
///
/// The condition did not hold within the deadline; the message says what was seen last.
pub async fn eventually<P, F>(
    what: &str,
    deadline: Duration,
    mut probe: P,
) -> Result<<F::Output as Observation>::Value>
where
    P: FnMut() -> F,
    F: Future,
    F::Output: Observation,
{
    let until = Instant::now() + deadline;
    let mut pause = PAUSE.0;
    let mut seen = None;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, probe()).await.map(Observation::into_value) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(instead)) => seen = instead.or(seen),
            Err(_) => seen = seen.or_else(|| Some("no answer to the last look".to_owned())),
        }
        if Instant::now() + pause >= until {
            let deadline = deadline.as_secs_f64();
            match seen {
                Some(seen) => bail!("waited {deadline} s for {what}; seen last: {seen}"),
                None => bail!("waited {deadline} s for {what}"),
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn returns_the_value_once_it_is_there() {
        let looks = Cell::new(0);
        let value = eventually("the third look", Duration::from_secs(5), || {
            looks.set(looks.get() + 1);
            let look = looks.get();
            async move { (look == 3).then_some(look) }
        });
        assert_eq!(value.await.unwrap(), 3);
    }

    #[tokio::test]
    async fn says_what_was_waited_for_and_seen_last() {
        let never = eventually("rain", Duration::from_millis(20), || async { Err::<(), _>("sun") });
        assert_eq!(never.await.unwrap_err().to_string(), "waited 0.02 s for rain; seen last: \"sun\"");
    }

    #[tokio::test]
    async fn cuts_off_a_look_that_hangs() {
        let hung = eventually("an answer", Duration::from_millis(20), std::future::pending::<Option<()>>);
        assert!(hung.await.unwrap_err().to_string().contains("no answer to the last look"));
    }
}
