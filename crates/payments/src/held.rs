//! A held key: what whoever drives an execution on does with it, whatever is executed.
//!
//! Promise: every write names the fence, and nothing here completes a key or frees it. A key is looked at again later, or
//! left to a person.

use std::time::{Duration, SystemTime};

use semel_core::credentials;
use semel_core::database::{self, Failure, failure};
use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::Proceeded;
use semel_core::idempotency::store::{self, Fence};
use sqlx::PgPool;
use uuid::Uuid;

use crate::metrics::Recovery;
use crate::provider::{Answer, Dedup};

/// A person is asked after so long since the first send, and so many acquisitions: hours of asking, with the waits between
/// them, so that a reaper which was away for a day does not give up at its first question.
const GIVE_UP: (Duration, u32) = (Duration::from_hours(24), 1000);
/// The longest wait before an execution is looked at again.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// How often a settlement is tried whose commit is unknown.
const TRIES: u32 = 3;

/// The key of an execution, held by its fence.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    pub(crate) pool: &'a PgPool,
    pub(crate) scope: &'a Scope,
    pub(crate) fence: Fence,
    /// Before the fence was seen to be good. What is sent by a process that slept since then must not start any more: by now
    /// the provider may have forgotten key and fence.
    pub(crate) began: SystemTime,
    pub(crate) resource_id: Uuid,
    /// Acquisitions so far, this one included.
    pub(crate) attempts: u32,
    pub(crate) since_first_sent: Duration,
}

impl Held<'_> {
    /// Whether the stored request may be sent, or sent again: under its key it can have no other effect than the first
    /// send, and its client may still ask for one.
    pub(crate) async fn may_send(&self, dedup: Dedup) -> Result<bool, sqlx::Error> {
        let recognised = match dedup {
            Dedup::ForEver | Dedup::For(_) => self.is_recognised(dedup),
            // One send, ever: the first.
            Dedup::None => self.attempts == 1,
        };
        // The first send is that of a request which was let in just now.
        Ok(recognised
            && (self.attempts == 1 || !credentials::is_shut_out(self.pool, &self.scope.client).await?))
    }

    /// Whether a provider with such a horizon still recognises the key.
    pub(crate) fn is_recognised(&self, dedup: Dedup) -> bool {
        dedup.is_clear_of_horizon(self.since_first_sent)
    }

    /// Counts that the stored request is sent again, if it is.
    pub(crate) fn count_send(&self) {
        if self.attempts > 1 {
            Recovery::Resent.count();
        }
    }

    /// Counts what recovery came to, if this was one.
    pub(crate) fn count(&self, recovery: Recovery) {
        if self.attempts > 1 {
            recovery.count();
        }
    }

    /// Whether it has been asked about for so long that asking on is no use.
    pub(crate) fn is_hopeless(&self) -> bool {
        let (age, attempts) = GIVE_UP;
        self.since_first_sent >= age && self.attempts >= attempts
    }

    /// Gives the key up until later: not known yet.
    pub(crate) async fn wait(&self, answer: &Answer) -> Result<Proceeded, sqlx::Error> {
        let retry_after = Duration::from_secs(1 << self.attempts.min(4)).min(LONGEST_WAIT);
        let held = database::call(self.pool, async |connection| {
            store::postpone(connection, self.scope, self.fence, retry_after).await
        });
        if !held.await? {
            return Ok(Proceeded::Lost);
        }
        Recovery::Waiting.count();
        tracing::warn!(
            operation = self.scope.operation,
            resource = %self.resource_id,
            attempt = self.attempts,
            retry_in_s = retry_after.as_secs(),
            "an outcome is not known yet: {answer:?}"
        );
        Ok(Proceeded::Waiting { retry_after })
    }

    /// Leaves the key to a person.
    pub(crate) async fn leave(&self, reason: &str) -> Result<Proceeded, sqlx::Error> {
        let held = database::call(self.pool, async |connection| {
            store::leave_to_person(connection, self.scope, self.fence, reason).await
        });
        if !held.await? {
            return Ok(Proceeded::Lost);
        }
        Recovery::NeedsPerson.count();
        tracing::error!(
            operation = self.scope.operation,
            resource = %self.resource_id,
            "an outcome needs a person: {reason}"
        );
        Ok(Proceeded::NeedsPerson)
    }
}

/// How often a settlement was tried. Where the answer to its commit was lost, the same statement again finds the key
/// completed, and writes nothing but evidence.
#[derive(Debug, Default)]
pub(crate) struct Tries(u32);

impl Tries {
    /// Says whether it is to be tried again after this error.
    pub(crate) fn is_worth_another(&mut self, error: &sqlx::Error) -> bool {
        self.0 += 1;
        self.0 < TRIES
            && matches!(failure(error), Failure::Unknown | Failure::Conflict | Failure::LockTimeout)
    }
}
