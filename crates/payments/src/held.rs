//! A held key: what whoever drives an execution on does with it, whatever is executed.
//!
//! Promise: every write names the fence, and nothing here completes a key or frees it. A key is looked at again later, or
//! left to a person.

use std::time::{Duration, SystemTime};

use semel_core::credentials;
use semel_core::database;
use semel_core::idempotency::engine::Proceeded;
use semel_core::idempotency::store::{self, Fence};
use semel_core::idempotency::{Scope, StoredResponse};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::evidence::Witness;
use crate::metrics::Recovery;
use crate::provider::{Answer, Dedup};

/// A person is asked after so long since the first send, and so many acquisitions: hours of asking, with the waits between
/// them, so that a reaper which was away for a day does not give up at its first question.
const GIVE_UP: (Duration, u32) = (Duration::from_hours(24), 1000);
/// The longest wait before an execution is looked at again.
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// What is driven on by whoever holds its key.
pub(crate) trait Execution: Sync {
    /// A definitive answer about it.
    type Verdict: Send + Sync;

    fn key(&self) -> &Held<'_>;

    /// Returns the name of the provider that would be asked.
    fn provider(&self) -> &'static str;

    /// Looks for a definitive answer that somebody has written down.
    fn on_record(
        &self,
        connection: &mut PgConnection,
    ) -> impl Future<Output = Result<Option<Self::Verdict>, sqlx::Error>> + Send;

    /// Returns what a definitive answer says.
    fn verdict(answer: &Answer) -> Option<Self::Verdict>;

    /// Writes a verdict down and settles by it.
    fn settle(
        &self,
        verdict: &Self::Verdict,
        witness: Witness,
    ) -> impl Future<Output = Result<Proceeded, sqlx::Error>> + Send;

    /// Goes on from the recovery point, where nothing is on record.
    fn go_on(&self) -> impl Future<Output = Result<Proceeded, sqlx::Error>> + Send;

    /// Drives on as far as it goes now. Evidence first; and nobody but the provider that it was begun with is asked, sent
    /// anything, or believed to have fenced it.
    fn drive(&self) -> impl Future<Output = Result<Proceeded, sqlx::Error>> + Send {
        async {
            let key = self.key();
            if key.attempts > 1
                && let Some(verdict) =
                    database::call(key.pool, async |connection| self.on_record(connection).await).await?
            {
                return self.settle(&verdict, Witness::Evidence).await;
            }
            let (theirs, ours) = (&key.provider, self.provider());
            if theirs != ours {
                let reason =
                    format!("it was begun with the provider {theirs}, and this is {ours}: ask there");
                return key.leave(&reason).await;
            }
            self.go_on().await
        }
    }
}

/// A key that was acquired, before it is known what it stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquired<'a> {
    pub(crate) pool: &'a PgPool,
    pub(crate) scope: &'a Scope,
    pub(crate) fence: Fence,
    began: SystemTime,
}

impl<'a> Acquired<'a> {
    /// Must be made before it is asked whether the fence is good.
    pub(crate) fn now(pool: &'a PgPool, scope: &'a Scope, fence: Fence) -> Self {
        Self { pool, scope, fence, began: SystemTime::now() }
    }

    /// Holds the key, whose row is as read: the fence is good.
    pub(crate) fn held(
        self,
        resource_id: Uuid,
        provider: String,
        attempts: i32,
        since_first_sent_ms: i64,
    ) -> Held<'a> {
        let Self { pool, scope, fence, began } = self;
        let since_first_sent = Duration::from_millis(u64::try_from(since_first_sent_ms).unwrap_or_default());
        let attempts = u32::try_from(attempts).unwrap_or(u32::MAX);
        Held { pool, scope, fence, began, resource_id, provider, attempts, since_first_sent }
    }
}

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
    /// The name of the provider that its charge was begun with.
    pub(crate) provider: String,
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

    /// Says what a settlement came to, and counts it if this was recovery. One that wrote nothing is somebody else's.
    pub(crate) fn settled(
        &self,
        written: Option<(StoredResponse, OffsetDateTime)>,
        recovery: Recovery,
    ) -> Proceeded {
        let Some((response, expires_at)) = written else { return Proceeded::Lost };
        if self.attempts > 1 {
            recovery.count();
        }
        Proceeded::Completed { response, expires_at }
    }

    /// Waits as [`wait`](Self::wait) does; or leaves the key to a person, when it was asked about for so long that asking on
    /// is no use.
    ///
    /// That is not so while the answer says that it ends by itself, nor while the provider does not answer anybody.
    pub(crate) async fn wait_while_hopeful(
        &self,
        answer: &Answer,
        answers_others: bool,
    ) -> Result<Proceeded, sqlx::Error> {
        let (age, attempts) = GIVE_UP;
        let ends_by_itself = matches!(answer, Answer::InProgress | Answer::NotExecuted { .. });
        let is_hopeless = self.since_first_sent >= age && self.attempts >= attempts;
        if is_hopeless && !ends_by_itself && answers_others {
            let reason = format!("the provider was asked for a day, and has told nothing: {answer:?}");
            return self.leave(&reason).await;
        }
        self.wait(answer).await
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
