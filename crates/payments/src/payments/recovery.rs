//! Driving a claimed payment on, from wherever it stands to its end.
//!
//! The same steps for the request that claimed it, for a retry that took it over and for the reaper:
//!
//! 1. Evidence first: a definitive answer that somebody has written down settles.
//! 2. While the first send is young, and the client not shut out, send the stored request again under the same key: with a
//!    provider that deduplicates, that *is* the look-up.
//! 3. Past that, ask. A definitive answer settles.
//! 4. Anything else: commit that nobody sends any more, then fence. Not found is no proof of absence, since a request may
//!    still be on its way; only the fence is.
//! 5. Where the provider has neither, or answers for a day without saying either, a person.

use std::time::{Duration, SystemTime};

use semel_core::database;
use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::Proceeded;
use semel_core::idempotency::store::{self, Fence};
use semel_core::{credentials, failpoint};
use sqlx::PgPool;
use uuid::Uuid;

use super::create::MakePayment;
use super::recovery_point::{CANCELING, SENT};
use super::settle::{self, Settled, Verdict, Witness};
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::metrics::Recovery;
use crate::provider::{Answer, DEADLINE, Dedup, Fencing, LookUp, Provider, StoredCharge};

/// What is kept clear of a provider's horizon, beside its deadline.
pub const MARGIN: Duration = Duration::from_mins(1);
/// A person is asked after so long since the first send, and so many acquisitions: hours of asking, with the waits between
/// them, so that a reaper which was away for a day does not give up at its first question.
const GIVE_UP: (Duration, u32) = (Duration::from_hours(24), 1000);
/// The longest wait before a payment is looked at again.
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// Says whether all sends of a window this long stay clear of the horizon behind which the provider forgets a key.
#[must_use]
pub fn is_clear_of_horizon(window: Duration, dedup: Dedup) -> bool {
    match dedup {
        Dedup::For(horizon) => window + DEADLINE + MARGIN < horizon,
        Dedup::ForEver | Dedup::None => true,
    }
}

/// A payment whose key is held.
#[derive(Debug)]
struct Held {
    payment_id: Uuid,
    recovery_point: String,
    attempts: u32,
    since_first_sent: Duration,
    charge: StoredCharge,
    reference: String,
}

/// Drives the payment on as far as it goes now. Every write names the fence.
pub(crate) async fn proceed<P: Provider>(
    operation: &MakePayment<P>,
    pool: &PgPool,
    scope: &Scope,
    fence: Fence,
    retention: Duration,
) -> Result<Proceeded, sqlx::Error> {
    let began = SystemTime::now();
    let Some(held) = load(pool, scope, fence).await? else { return Ok(Proceeded::Lost) };
    Drive { operation, pool, scope, fence, retention, began, held }.run().await
}

struct Drive<'a, P> {
    operation: &'a MakePayment<P>,
    pool: &'a PgPool,
    scope: &'a Scope,
    fence: Fence,
    retention: Duration,
    /// Before the fence was seen to be good. What is sent by a process that slept since then must not start any more: by now
    /// the provider may have forgotten key and fence.
    began: SystemTime,
    held: Held,
}

impl<P: Provider> Drive<'_, P> {
    async fn run(&self) -> Result<Proceeded, sqlx::Error> {
        if self.held.attempts > 1
            && let Some(verdict) =
                database::call(self.pool, async |c| settle::evidence(c, self.held.payment_id).await).await?
        {
            return self.settle(&verdict, Witness::Evidence).await;
        }
        match self.held.recovery_point.as_str() {
            SENT if self.may_send().await? => self.send().await,
            SENT => self.ask().await,
            CANCELING => self.cancel().await,
            other => self.leave(&format!("the recovery point {other:?} is not known to this version")).await,
        }
    }

    /// Whether the stored request is sent again: it can have no other effect than the first send, and its client may
    /// still ask for one.
    async fn may_send(&self) -> Result<bool, sqlx::Error> {
        if !self.is_recognised() {
            return Ok(false);
        }
        // The first send is that of a request which was let in just now.
        Ok(self.held.attempts == 1 || !credentials::is_shut_out(self.pool, &self.scope.client).await?)
    }

    fn is_recognised(&self) -> bool {
        let age = self.held.since_first_sent;
        let recognised = match self.operation.provider.promises().dedup {
            dedup @ (Dedup::ForEver | Dedup::For(_)) => is_clear_of_horizon(age, dedup),
            // One send, ever: the first.
            Dedup::None => self.held.attempts == 1,
        };
        recognised && age < self.operation.window
    }

    async fn send(&self) -> Result<Proceeded, sqlx::Error> {
        if self.held.attempts > 1 {
            Recovery::Resent.count();
        }
        failpoint!(failpoints::BEFORE_SEND);
        let answer = self.operation.provider.charge(&self.held.charge, self.began + DEADLINE).await;
        failpoint!(failpoints::AFTER_ANSWER);
        match answer {
            Answer::Mismatch { reason } => self.leave(&reason).await,
            answer => match definitive(&answer) {
                Some(verdict) => self.settle(&verdict, Witness::Charge).await,
                None => self.wait(&answer).await,
            },
        }
    }

    async fn ask(&self) -> Result<Proceeded, sqlx::Error> {
        if self.operation.provider.promises().look_up == LookUp::None {
            return self.fence().await;
        }
        let answer = self.operation.provider.get(&self.held.charge).await;
        match answer {
            // A provider that is away would not take the fence either.
            Answer::InProgress | Answer::NotExecuted { .. } => self.wait(&answer).await,
            Answer::Mismatch { reason } => self.leave(&reason).await,
            answer => match definitive(&answer) {
                Some(verdict) => self.settle(&verdict, Witness::Get).await,
                None => self.fence().await,
            },
        }
    }

    /// Commits that nobody sends any more, then cancels at the provider.
    async fn fence(&self) -> Result<Proceeded, sqlx::Error> {
        if self.operation.provider.promises().fence == Fencing::None {
            return self.leave("the provider can neither tell what happened nor fence the charge").await;
        }
        let fenced = database::call(self.pool, async |connection| {
            store::advance(connection, self.scope, self.fence, SENT, CANCELING).await
        });
        if !fenced.await? {
            return Ok(Proceeded::Lost);
        }
        failpoint!(failpoints::AFTER_CANCELING);
        self.cancel().await
    }

    async fn cancel(&self) -> Result<Proceeded, sqlx::Error> {
        let answer = self.operation.provider.cancel(&self.held.charge).await;
        failpoint!(failpoints::AFTER_CANCEL);
        if answer == Answer::Fenced {
            return self.settle(&Verdict::Fenced, Witness::Cancel).await;
        }
        // Any other answer to a cancel proves nothing by itself: a second cancel of a fenced charge is an error too.
        let answer = self.operation.provider.get(&self.held.charge).await;
        match (definitive(&answer), &answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Get).await,
            // Under way, or away: that ends by itself.
            (None, Answer::InProgress | Answer::NotExecuted { .. }) => self.wait(&answer).await,
            // One that is spared has stopped answering, for all payments.
            (None, _) if self.is_hopeless() && self.operation.provider.is_open() => {
                self.leave(&format!("the provider was asked for a day, and has told nothing: {answer:?}"))
                    .await
            }
            (None, _) => self.wait(&answer).await,
        }
    }

    fn is_hopeless(&self) -> bool {
        let (age, attempts) = GIVE_UP;
        self.held.since_first_sent >= age && self.held.attempts >= attempts
    }

    async fn settle(&self, verdict: &Verdict, witness: Witness) -> Result<Proceeded, sqlx::Error> {
        let settled = Settled {
            scope: self.scope,
            fence: self.fence,
            payment_id: self.held.payment_id,
            reference: &self.held.reference,
            amount: self.held.charge.amount,
            currency: &self.held.charge.currency,
            provider_key: &self.held.charge.key,
        };
        let operation = self.operation;
        let written = settle::settle(
            self.pool,
            &operation.namespace,
            &operation.problems,
            &settled,
            verdict,
            witness,
            self.retention,
        )
        .await?;
        failpoint!(failpoints::AFTER_SETTLE);
        let Some((response, expires_at)) = written else { return Ok(Proceeded::Lost) };
        if self.held.attempts > 1 {
            let rolled_back = matches!(verdict, Verdict::Fenced);
            if rolled_back { Recovery::RolledBack } else { Recovery::Completed }.count();
        }
        Ok(Proceeded::Completed { response, expires_at })
    }

    /// Gives the key up until later: not known yet.
    async fn wait(&self, answer: &Answer) -> Result<Proceeded, sqlx::Error> {
        let retry_after = Duration::from_secs(1 << self.held.attempts.min(4)).min(LONGEST_WAIT);
        let held = database::call(self.pool, async |connection| {
            store::postpone(connection, self.scope, self.fence, retry_after).await
        });
        if !held.await? {
            return Ok(Proceeded::Lost);
        }
        Recovery::Waiting.count();
        tracing::warn!(
            payment = %self.held.payment_id,
            attempt = self.held.attempts,
            retry_in_s = retry_after.as_secs(),
            "a payment's outcome is not known yet: {answer:?}"
        );
        Ok(Proceeded::Waiting { retry_after })
    }

    /// Leaves the key to a person.
    async fn leave(&self, reason: &str) -> Result<Proceeded, sqlx::Error> {
        let held = database::call(self.pool, async |connection| {
            store::leave_to_person(connection, self.scope, self.fence, reason).await
        });
        if !held.await? {
            return Ok(Proceeded::Lost);
        }
        Recovery::NeedsPerson.count();
        tracing::error!(payment = %self.held.payment_id, "a payment needs a person: {reason}");
        Ok(Proceeded::NeedsPerson)
    }
}

/// Returns what a definitive answer says.
fn definitive(answer: &Answer) -> Option<Verdict> {
    match answer {
        Answer::Succeeded { reference } => Some(Verdict::Succeeded { reference: reference.clone() }),
        Answer::Declined { reference, code } => {
            Some(Verdict::Declined { reference: reference.clone(), code: code.clone() })
        }
        Answer::Fenced => Some(Verdict::Fenced),
        Answer::InProgress
        | Answer::NotFound
        | Answer::NotExecuted { .. }
        | Answer::Unknown { .. }
        | Answer::Mismatch { .. } => None,
    }
}

/// Loads what the fence's owner drives on; none when the fence is stale.
async fn load(pool: &PgPool, scope: &Scope, fence: Fence) -> Result<Option<Held>, sqlx::Error> {
    let row = database::call(pool, async |connection| {
sqlx::query!(
        r#"-- payments_held
        SELECT k.resource_id, k.recovery_point, k.attempts, k.provider_request AS "provider_request!",
               GREATEST(0, EXTRACT(EPOCH FROM clock_timestamp() - k.provider_first_sent_at) * 1000)::BIGINT
                   AS "since_first_sent_ms!",
               p.provider_key, p.amount, p.currency, p.reference
        FROM idempotency_keys AS k JOIN payments AS p ON p.payment_id = k.resource_id
        WHERE k.client_id = $1 AND k.operation = $2 AND k.key = $3 AND k.status = 'in_progress' AND k.fence = $4"#,
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0
    )
    .fetch_optional(connection).await })
.await?;
    Ok(row.map(|row| Held {
        payment_id: row.resource_id,
        recovery_point: row.recovery_point,
        attempts: u32::try_from(row.attempts).unwrap_or(u32::MAX),
        since_first_sent: Duration::from_millis(u64::try_from(row.since_first_sent_ms).unwrap_or_default()),
        charge: StoredCharge {
            key: row.provider_key,
            request: row.provider_request,
            amount: row.amount,
            currency: row.currency,
        },
        reference: row.reference,
    }))
}
