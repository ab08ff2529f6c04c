//! What new executions a client may begin.
//!
//! Promise: a known key never meets these limits, so the retry of what was executed is always answered; and no client keeps
//! the others from beginning. What is refused here is stored nowhere, and its key is as unused as before.
//!
//! How: a token bucket per client, in this process's memory, of which an execution that began takes one token; and a bound
//! on how many of a client's keys may be in progress, counted in the database by an index that holds only those.
//!
//! A token is taken once something was written, so that a retry takes none, however many of them are under way. Executions
//! that begin at the same instant may therefore pass the limit together: a bucket that they leave below empty fills up
//! first. The same is true of the keys in progress, whose count is that of the statement's snapshot.
//!
//! It does not share buckets between processes: two of them admit twice as much.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ClientId;

/// Clients whose buckets are remembered; a full bucket is as none.
const MOST_BUCKETS: usize = 10_000;

/// How many executions of one client may begin.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rate {
    /// How long a token takes to come.
    pub every: Duration,
    /// Tokens of a full bucket.
    pub burst: NonZeroU32,
}

/// What new executions a client may begin; by default any.
#[derive(Debug, Default)]
pub struct Admission {
    rate: Option<Rate>,
    in_progress: Option<NonZeroU32>,
    /// When each client's bucket is full again.
    full_at: Mutex<HashMap<ClientId, Instant>>,
}

impl Admission {
    /// Admits this many executions of each client, and this many of its keys in progress; none bounds nothing.
    #[must_use]
    pub fn new(rate: Option<Rate>, in_progress: Option<NonZeroU32>) -> Self {
        Self { rate, in_progress, full_at: Mutex::default() }
    }

    /// Returns how many keys of one client may be in progress.
    pub(super) fn most_in_progress(&self) -> Option<NonZeroU32> {
        self.in_progress
    }

    /// Says whether this client's bucket holds a token.
    ///
    /// # Errors
    ///
    /// How long it takes until there is one.
    pub(super) fn ask(&self, client: &ClientId) -> Result<(), Duration> {
        self.rate.map_or(Ok(()), |rate| self.ask_at(rate, client, Instant::now()))
    }

    /// Takes a token of this client's bucket, whether it holds one or not: an execution began, or may have.
    pub(super) fn take(&self, client: &ClientId) {
        if let Some(rate) = self.rate {
            self.take_at(rate, client, Instant::now());
        }
    }

    fn ask_at(&self, rate: Rate, client: &ClientId, now: Instant) -> Result<(), Duration> {
        let full_at = self.buckets().get(client).copied().unwrap_or(now).max(now);
        let empty = rate.every.saturating_mul(rate.burst.get());
        let wait = (full_at + rate.every - now).saturating_sub(empty);
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    fn take_at(&self, rate: Rate, client: &ClientId, now: Instant) {
        let mut full_at = self.buckets();
        if !full_at.contains_key(client) && full_at.len() >= MOST_BUCKETS {
            full_at.retain(|_, at| *at > now);
            // Still too many: the one that lacks least is forgotten, which gives its client the least too much.
            if full_at.len() >= MOST_BUCKETS {
                let fullest = full_at.iter().min_by_key(|(_, at)| **at).map(|(client, _)| client.clone());
                fullest.map(|client| full_at.remove(&client));
            }
        }
        let then = full_at.get(client).copied().unwrap_or(now).max(now) + rate.every;
        full_at.insert(client.clone(), then);
    }

    fn buckets(&self) -> MutexGuard<'_, HashMap<ClientId, Instant>> {
        self.full_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: u32, burst: u32) -> Rate {
        Rate { every: Duration::from_secs(1) / per_second, burst: burst.try_into().unwrap() }
    }

    fn client(name: &str) -> ClientId {
        name.parse().unwrap()
    }

    /// Takes a token if there is one.
    fn begin_at(admission: &Admission, rate: Rate, client: &ClientId, now: Instant) -> Result<(), Duration> {
        admission.ask_at(rate, client, now)?;
        admission.take_at(rate, client, now);
        Ok(())
    }

    #[test]
    fn a_bucket_holds_its_burst_and_fills_at_its_rate() {
        let (rate, now) = (rate(10, 3), Instant::now());
        let admission = Admission::new(Some(rate), None);
        let begin = |ms: u64| begin_at(&admission, rate, &client("a"), now + Duration::from_millis(ms));
        assert_eq!([begin(0), begin(0), begin(0)], [Ok(()); 3]);
        assert_eq!(begin(0), Err(Duration::from_millis(100)));
        assert_eq!(begin(60), Err(Duration::from_millis(40)), "what was refused took nothing");
        assert_eq!((begin(100), begin(100)), (Ok(()), Err(Duration::from_millis(100))));
        assert_eq!([begin(10_000), begin(10_000), begin(10_000)], [Ok(()); 3], "it never holds more");
        assert!(begin(10_000).is_err());
        assert_eq!(begin_at(&admission, rate, &client("b"), now), Ok(()), "another's is another");
    }

    #[test]
    fn what_began_together_and_was_too_much_is_owed() {
        let (rate, now, acme) = (rate(10, 2), Instant::now(), client("acme"));
        let admission = Admission::new(Some(rate), None);
        for _ in 0..5 {
            admission.take_at(rate, &acme, now);
        }
        let ask = |ms: u64| admission.ask_at(rate, &acme, now + Duration::from_millis(ms));
        assert_eq!((ask(0), ask(399)), (Err(Duration::from_millis(400)), Err(Duration::from_millis(1))));
        assert_eq!(ask(400), Ok(()));
    }

    #[test]
    fn asking_takes_nothing_and_without_a_rate_nothing_is_refused() {
        let (acme, admission) = (client("acme"), Admission::new(Some(rate(1, 1)), None));
        assert_eq!((admission.ask(&acme), admission.ask(&acme)), (Ok(()), Ok(())));
        admission.take(&acme);
        assert!(admission.ask(&acme).is_err());
        let unbounded = Admission::default();
        assert_eq!(unbounded.most_in_progress(), None);
        for _ in 0..1000 {
            unbounded.take(&acme);
        }
        assert_eq!(unbounded.ask(&acme), Ok(()));
    }

    #[test]
    fn remembers_so_many_clients_and_no_more() {
        let (rate, now) = (rate(1, 2), Instant::now());
        let admission = Admission::new(Some(rate), None);
        let begin = |number: usize, seconds: u64| {
            begin_at(&admission, rate, &client(&format!("c{number}")), now + Duration::from_secs(seconds))
        };
        for number in 0..MOST_BUCKETS {
            assert_eq!((begin(number, 0), begin(number, 0)), (Ok(()), Ok(())));
        }
        assert!(begin(0, 0).is_err());
        assert_eq!(begin(MOST_BUCKETS, 0), Ok(()), "one more is admitted, and counted");
        assert_eq!(admission.buckets().len(), MOST_BUCKETS);
        assert_eq!(begin(MOST_BUCKETS + 1, 3), Ok(()));
        assert_eq!(admission.buckets().len(), 1, "full ones go first");
    }
}
