//! What new executions a client may begin.
//!
//! Promise: a known key never meets these limits, so the retry of what was executed is always answered; and no client keeps
//! the others from beginning. What is refused here is stored nowhere, and its key is as unused as before.
//!
//! How: a token bucket per client, in this process's memory, of which an execution that begins takes one token; and a bound
//! on how many of a client's keys may be in progress, counted in the database by an index that holds only those. The
//! engine asks after its look-ups missed and before it claims.
//!
//! Requests with one key that arrive at once each hold a token until the claim is decided, a second at most; all but one give
//! theirs back. Meanwhile some of them, or the client's other new requests, may be told 429 where they would be told 409 or
//! begin. That is the client's own bucket, nothing is stored, and the retry is answered: to know the one that will claim
//! before it has claimed would take a second register of keys, in memory, beside the table.
//!
//! It does not share buckets between processes: two of them admit twice as much. The count is taken before the claim and not
//! with it, so claims that begin at the same instant may pass it together.

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

    /// Takes a token of this client's bucket.
    ///
    /// # Errors
    ///
    /// How long it takes until there is one.
    pub(super) fn take<'a>(&'a self, client: &'a ClientId) -> Result<Token<'a>, Duration> {
        if let Some(rate) = self.rate {
            self.take_at(rate, client, Instant::now())?;
        }
        Ok(Token { admission: self, client, is_spent: false })
    }

    fn take_at(&self, rate: Rate, client: &ClientId, now: Instant) -> Result<(), Duration> {
        let mut full_at = self.buckets();
        let then = full_at.get(client).copied().unwrap_or(now).max(now) + rate.every;
        let empty = rate.every.saturating_mul(rate.burst.get());
        if let Some(wait) = (then - now).checked_sub(empty).filter(|wait| !wait.is_zero()) {
            return Err(wait);
        }
        if !full_at.contains_key(client) && full_at.len() >= MOST_BUCKETS {
            full_at.retain(|_, at| *at > now);
            // Still too many: the one that lacks least is forgotten, which gives its client the least too much.
            if full_at.len() >= MOST_BUCKETS {
                let fullest = full_at.iter().min_by_key(|(_, at)| **at).map(|(client, _)| client.clone());
                fullest.map(|client| full_at.remove(&client));
            }
        }
        full_at.insert(client.clone(), then);
        Ok(())
    }

    fn give_back(&self, client: &ClientId) {
        let Some(rate) = self.rate else { return };
        if let Some(at) = self.buckets().get_mut(client) {
            *at = at.checked_sub(rate.every).unwrap_or(*at);
        }
    }

    fn buckets(&self) -> MutexGuard<'_, HashMap<ClientId, Instant>> {
        self.full_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to begin one execution; given back unless it is spent.
#[derive(Debug)]
pub(super) struct Token<'a> {
    admission: &'a Admission,
    client: &'a ClientId,
    is_spent: bool,
}

impl Token<'_> {
    /// Says that an execution began, or may have.
    pub(super) fn spend(&mut self) {
        self.is_spent = true;
    }
}

impl Drop for Token<'_> {
    fn drop(&mut self) {
        if !self.is_spent {
            self.admission.give_back(self.client);
        }
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

    #[test]
    fn a_bucket_holds_its_burst_and_fills_at_its_rate() {
        let (rate, now) = (rate(10, 3), Instant::now());
        let admission = Admission::new(Some(rate), None);
        let take = |ms: u64| admission.take_at(rate, &client("a"), now + Duration::from_millis(ms));
        assert_eq!([take(0), take(0), take(0)], [Ok(()); 3]);
        assert_eq!(take(0), Err(Duration::from_millis(100)));
        assert_eq!(take(60), Err(Duration::from_millis(40)), "what was refused took nothing");
        assert_eq!((take(100), take(100)), (Ok(()), Err(Duration::from_millis(100))));
        assert_eq!([take(10_000), take(10_000), take(10_000)], [Ok(()); 3], "it never holds more");
        assert!(take(10_000).is_err());
        assert_eq!(admission.take_at(rate, &client("b"), now), Ok(()), "another's is another");
    }

    #[test]
    fn a_token_that_began_nothing_is_given_back() {
        let (acme, admission) = (client("acme"), Admission::new(Some(rate(1, 1)), None));
        drop(admission.take(&acme).unwrap());
        admission.take(&acme).unwrap().spend();
        assert!(admission.take(&acme).is_err());
        assert_eq!(Admission::default().most_in_progress(), None);
        for _ in 0..1000 {
            Admission::default().take(&acme).unwrap().spend();
        }
    }

    #[test]
    fn remembers_so_many_clients_and_no_more() {
        let (rate, now) = (rate(1, 2), Instant::now());
        let admission = Admission::new(Some(rate), None);
        let take = |number: usize, seconds: u64| {
            admission.take_at(rate, &client(&format!("c{number}")), now + Duration::from_secs(seconds))
        };
        for number in 0..MOST_BUCKETS {
            assert_eq!((take(number, 0), take(number, 0)), (Ok(()), Ok(())));
        }
        assert!(take(0, 0).is_err());
        assert_eq!(take(MOST_BUCKETS, 0), Ok(()), "one more is admitted, and counted");
        assert_eq!(admission.buckets().len(), MOST_BUCKETS);
        assert_eq!(take(MOST_BUCKETS + 1, 3), Ok(()));
        assert_eq!(admission.buckets().len(), 1, "full ones go first");
    }
}
