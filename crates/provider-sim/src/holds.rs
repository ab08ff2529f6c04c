//! Named holds: where calls wait until a test lets them go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use semel_core::lifecycle::Lifecycle;
use tokio_util::sync::CancellationToken;

/// Nobody waits longer.
pub(crate) const LONGEST: Duration = Duration::from_mins(2);
/// How many names are known at most.
const MOST: usize = 1000;

/// The holds; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holds {
    inner: Arc<Mutex<HashMap<String, Hold>>>,
}

#[derive(Debug, Default)]
struct Hold {
    open: CancellationToken,
    waiting: u32,
}

/// There are as many names as there may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TooMany;

/// The process stops: what waited must not go on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stopping;

impl Holds {
    /// Closes a hold, whether or not it was open.
    pub(crate) fn close(&self, name: &str) -> Result<(), TooMany> {
        let mut inner = self.inner();
        if inner.len() >= MOST {
            inner.retain(|_, hold| hold.waiting > 0 || !hold.open.is_cancelled());
        }
        if inner.len() >= MOST && !inner.contains_key(name) {
            return Err(TooMany);
        }
        let hold = inner.entry(name.to_owned()).or_default();
        if hold.open.is_cancelled() {
            hold.open = CancellationToken::new();
        }
        Ok(())
    }

    /// Opens a hold; returns how many wait at it. It stays open until it is closed again.
    pub(crate) fn release(&self, name: &str) -> Result<u32, TooMany> {
        self.close(name)?;
        let inner = self.inner();
        let Some(hold) = inner.get(name) else { return Ok(0) };
        hold.open.cancel();
        Ok(hold.waiting)
    }

    /// Waits until the hold is open, at most for `longest`.
    pub(crate) async fn wait(&self, name: &str, longest: Duration, life: &Lifecycle) -> Result<(), Stopping> {
        let open = {
            let mut inner = self.inner();
            let hold = inner.entry(name.to_owned()).or_default();
            hold.waiting += 1;
            hold.open.clone()
        };
        let result = tokio::select! {
            // An open hold lets go even of those that come while the process stops.
            biased;
            () = open.cancelled() => Ok(()),
            () = life.stopping() => Err(Stopping),
            () = tokio::time::sleep(longest) => Ok(()),
        };
        if let Some(hold) = self.inner().get_mut(name) {
            hold.waiting = hold.waiting.saturating_sub(1);
        }
        result
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, HashMap<String, Hold>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lets_go_when_released_and_stays_open() {
        let (holds, life) = (Holds::default(), Lifecycle::new());
        holds.close("a").unwrap();
        let waiting = tokio::spawn({
            let (holds, life) = (holds.clone(), life.clone());
            async move { holds.wait("a", LONGEST, &life).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(holds.release("a"), Ok(1));
        assert_eq!(waiting.await.unwrap(), Ok(()));
        assert_eq!(holds.wait("a", LONGEST, &life).await, Ok(()));
        assert_eq!(holds.release("a"), Ok(0));
    }

    #[tokio::test(start_paused = true)]
    async fn lets_go_after_the_longest_wait() {
        let (holds, life) = (Holds::default(), Lifecycle::new());
        let began = tokio::time::Instant::now();
        assert_eq!(holds.wait("a", LONGEST, &life).await, Ok(()));
        assert_eq!(began.elapsed().as_secs(), LONGEST.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_ends_the_wait_without_letting_go() {
        let (holds, life) = (Holds::default(), Lifecycle::new());
        life.stop();
        assert_eq!(holds.wait("a", LONGEST, &life).await, Err(Stopping));
    }

    #[test]
    fn names_are_bounded_and_open_ones_make_room() {
        let holds = Holds::default();
        for number in 0..MOST {
            holds.close(&number.to_string()).unwrap();
        }
        assert_eq!(holds.close("one more"), Err(TooMany));
        holds.release("7").unwrap();
        holds.close("one more").unwrap();
    }
}
