//! Driving a claimed payment on, from wherever it stands to its end.
//!
//! The same steps for the request that claimed it, for a retry that took it over and for the reaper:
//!
//! 1. Evidence first: a definitive answer that somebody has written down settles. Else, what was begun with another provider is
//!    left to a person: this one knows nothing of it, and its fence proves nothing about the other.
//!
//! Where a charge is prepared first, its reference comes next, for as long as the provider recognises the key: asked for,
//! which moves no money, and committed by itself while the fence is good and nobody is canceling. Only what has a committed
//! reference is ever charged.
//!
//! 2. While the first send is young, and the client not shut out, send the stored request again under the same key: with a
//!    provider that deduplicates, that *is* the look-up.
//! 3. Past that, ask. A definitive answer settles.
//! 4. Anything else: commit that nobody sends any more, then fence. Not found is no proof of absence, since a request may
//!    still be on its way; only the fence is.
//!    Without a reference there is nothing at the provider to fence: nothing was charged, and from here on nobody commits
//!    one.
//! 5. Where the provider has neither, or answers for a day without saying either, a person.

use std::time::Duration;

use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::{LEASE, Proceeded};
use semel_core::idempotency::store::{self, Fence};
use semel_core::{database, failpoint};
use sqlx::{PgConnection, PgPool};

use super::create::MakePayment;
use super::recovery_point::{CANCELING, SENT};
use super::settle::{self, Settled, Verdict};
use crate::evidence::Witness;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::held::{Acquired, Execution, Held};
use crate::metrics::Recovery;
use crate::provider::{Answer, DEADLINE, Fencing, LookUp, MARGIN, Prepared, Provider, StoredCharge};

/// Until when a charge may be begun that was prepared just now, from our own beginning: each of the two calls has its time.
const AFTER_PREPARE: Duration = DEADLINE.saturating_mul(2);

/// Both calls end while the lease lasts, and before the horizon.
const _: () = assert!(AFTER_PREPARE.as_secs() < LEASE.as_secs() && DEADLINE.as_secs() < MARGIN.as_secs());

/// A payment whose key is held.
#[derive(Debug)]
struct Drive<'a, P> {
    operation: &'a MakePayment<P>,
    retention: Duration,
    key: Held<'a>,
    recovery_point: String,
    charge: StoredCharge,
    reference: String,
}

/// A charge that has what it needs to be sent.
#[derive(Debug)]
struct Ready {
    /// With the reference that it was prepared as, where there is one.
    charge: StoredCharge,
    /// Until when a send may be begun, from our own beginning.
    within: Duration,
}

/// Drives the payment on as far as it goes now. Every write names the fence.
pub(crate) async fn proceed<P: Provider>(
    operation: &MakePayment<P>,
    pool: &PgPool,
    scope: &Scope,
    fence: Fence,
    retention: Duration,
) -> Result<Proceeded, sqlx::Error> {
    let acquired = Acquired::now(pool, scope, fence);
    let Some(payment) = load(operation, acquired, retention).await? else { return Ok(Proceeded::Lost) };
    payment.drive().await
}

impl<P: Provider> Execution for Drive<'_, P> {
    type Verdict = Verdict;

    fn key(&self) -> &Held<'_> {
        &self.key
    }

    fn provider(&self) -> &'static str {
        self.operation.provider.name()
    }

    async fn on_record(&self, connection: &mut PgConnection) -> Result<Option<Verdict>, sqlx::Error> {
        settle::on_record(connection, self.key.resource_id).await
    }

    fn verdict(answer: &Answer) -> Option<Verdict> {
        definitive(answer)
    }

    async fn settle(&self, verdict: &Verdict, witness: Witness) -> Result<Proceeded, sqlx::Error> {
        let (key, charge) = (&self.key, &self.charge);
        let settled = Settled {
            scope: key.scope,
            fence: key.fence,
            payment_id: key.resource_id,
            reference: &self.reference,
            amount: charge.amount,
            currency: &charge.currency,
            provider_key: &charge.key,
        };
        let MakePayment { namespace, problems, .. } = self.operation;
        let written =
            settle::settle(key.pool, namespace, problems, &settled, verdict, witness, self.retention).await?;
        failpoint!(failpoints::AFTER_SETTLE);
        let rolled_back = matches!(verdict, Verdict::Fenced);
        Ok(key.settled(written, if rolled_back { Recovery::RolledBack } else { Recovery::Completed }))
    }

    async fn go_on(&self) -> Result<Proceeded, sqlx::Error> {
        match self.recovery_point.as_str() {
            SENT => {
                let may_send = self.may_send().await?;
                match self.prepare().await? {
                    Ok(ready) if may_send => self.send(&ready).await,
                    Ok(ready) => self.ask(&ready.charge).await,
                    Err(proceeded) => Ok(proceeded),
                }
            }
            CANCELING => self.cancel(&self.charge).await,
            other => {
                self.key.leave(&format!("the recovery point {other:?} is not known to this version")).await
            }
        }
    }
}

impl<P: Provider> Drive<'_, P> {
    async fn may_send(&self) -> Result<bool, sqlx::Error> {
        let is_young = self.key.since_first_sent < self.operation.window;
        Ok(is_young && self.key.may_send(self.operation.provider.promises().dedup).await?)
    }

    /// Prepares the charge, where that comes first and has not been done. Returns what it came to when it does not go on.
    ///
    /// Also of a charge that is not sent any more: in a database that lost its tail it may have been, under a reference that
    /// is lost. The same request under the same key gives it back.
    async fn prepare(&self) -> Result<Result<Ready, Proceeded>, sqlx::Error> {
        let (key, promises) = (&self.key, self.operation.provider.promises());
        let is_prepared = promises.look_up != LookUp::ByReference || self.charge.reference.is_some();
        // Past the horizon it would be another charge.
        if is_prepared || !key.is_recognised(promises.dedup) {
            return Ok(Ok(Ready { charge: self.charge.clone(), within: DEADLINE }));
        }
        let prepared = self.operation.provider.prepare(&self.charge, key.began + DEADLINE).await;
        failpoint!(failpoints::AFTER_PREPARE);
        let answer = match prepared {
            Prepared::Reference(reference) => return self.refer(reference).await,
            // As good as fenced.
            Prepared::Never { reason } => {
                tracing::error!(resource = %key.resource_id, "a payment is not prepared, and is rolled back: {reason}");
                return self.fence(&self.charge).await.map(Err);
            }
            Prepared::Answered(answer) => answer,
        };
        let proceeded = match (Self::verdict(&answer), answer) {
            // Without a reference nothing was charged, and what is settled gets none.
            (Some(verdict @ Verdict::Declined { .. }), _) => self.settle(&verdict, Witness::Charge).await,
            (_, Answer::Mismatch { reason }) => key.leave(&reason).await,
            (_, answer) => key.wait(&answer).await,
        };
        proceeded.map(Err)
    }

    /// Commits what the charge was prepared as, by itself: whoever charges it can be asked about, and fenced.
    async fn refer(&self, reference: String) -> Result<Result<Ready, Proceeded>, sqlx::Error> {
        let key = &self.key;
        let referred = database::call(key.pool, async |connection| {
            store::refer(connection, key.scope, key.fence, SENT, &reference).await
        });
        if !referred.await? {
            return Ok(Err(Proceeded::Lost));
        }
        failpoint!(failpoints::AFTER_REFERENCE);
        let charge = StoredCharge { reference: Some(reference), ..self.charge.clone() };
        Ok(Ok(Ready { charge, within: AFTER_PREPARE }))
    }

    async fn send(&self, ready: &Ready) -> Result<Proceeded, sqlx::Error> {
        self.key.count_send();
        failpoint!(failpoints::BEFORE_SEND);
        let not_after = self.key.began + ready.within;
        let answer = self.operation.provider.charge(&ready.charge, not_after).await;
        failpoint!(failpoints::AFTER_ANSWER);
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Charge).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            (None, answer) => self.key.wait(&answer).await,
        }
    }

    async fn ask(&self, charge: &StoredCharge) -> Result<Proceeded, sqlx::Error> {
        if self.operation.provider.promises().look_up == LookUp::None || self.was_never_charged(charge) {
            return self.fence(charge).await;
        }
        let answer = self.operation.provider.get(charge).await;
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Get).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            // A provider that is away would not take the fence either.
            (None, answer @ (Answer::InProgress | Answer::NotExecuted { .. })) => {
                self.key.wait(&answer).await
            }
            (None, _) => self.fence(charge).await,
        }
    }

    /// Whether it needs a reference to be charged, and has none.
    fn was_never_charged(&self, charge: &StoredCharge) -> bool {
        self.operation.provider.promises().look_up == LookUp::ByReference && charge.reference.is_none()
    }

    /// Commits that nobody sends any more, then cancels at the provider.
    async fn fence(&self, charge: &StoredCharge) -> Result<Proceeded, sqlx::Error> {
        let key = &self.key;
        if self.operation.provider.promises().fence == Fencing::None {
            return key.leave("the provider can neither tell what happened nor fence the charge").await;
        }
        let fenced = database::call(key.pool, async |connection| {
            store::advance(connection, key.scope, key.fence, SENT, CANCELING).await
        });
        if !fenced.await? {
            return Ok(Proceeded::Lost);
        }
        failpoint!(failpoints::AFTER_CANCELING);
        self.cancel(charge).await
    }

    async fn cancel(&self, charge: &StoredCharge) -> Result<Proceeded, sqlx::Error> {
        if self.was_never_charged(charge) {
            // A reference is committed at `sent` alone: there will be none, and so no charge.
            return self.settle(&Verdict::Fenced, Witness::Cancel).await;
        }
        let provider = &self.operation.provider;
        let answer = provider.cancel(charge).await;
        failpoint!(failpoints::AFTER_CANCEL);
        if answer == Answer::Fenced {
            return self.settle(&Verdict::Fenced, Witness::Cancel).await;
        }
        // Any other answer to a cancel proves nothing by itself: a second cancel of a fenced charge is an error too.
        let answer = provider.get(charge).await;
        match Self::verdict(&answer) {
            Some(verdict) => self.settle(&verdict, Witness::Get).await,
            None => self.key.wait_while_hopeful(&answer, provider.is_open()).await,
        }
    }
}

/// Returns what a definitive answer says.
pub(crate) fn definitive(answer: &Answer) -> Option<Verdict> {
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
async fn load<'a, P>(
    operation: &'a MakePayment<P>,
    acquired: Acquired<'a>,
    retention: Duration,
) -> Result<Option<Drive<'a, P>>, sqlx::Error> {
    let Acquired { pool, scope, fence, .. } = acquired;
    let row = database::call(pool, async |connection| {
        sqlx::query!(
            r#"-- payments_held
            SELECT k.resource_id, k.recovery_point, k.attempts, k.provider_request AS "provider_request!",
                   k.provider_reference,
                   GREATEST(0, EXTRACT(EPOCH FROM clock_timestamp() - k.provider_first_sent_at) * 1000)::BIGINT
                       AS "since_first_sent_ms!",
                   p.provider, p.provider_key, p.amount, p.currency, p.reference
            FROM idempotency_keys AS k JOIN payments AS p ON p.payment_id = k.resource_id
            WHERE k.client_id = $1 AND k.operation = $2 AND k.key = $3 AND k.status = 'in_progress' AND k.fence = $4"#,
            scope.client.as_str(),
            scope.operation,
            scope.key.as_str(),
            fence.0
        )
        .fetch_optional(connection)
        .await
    });
    Ok(row.await?.map(|row| Drive {
        operation,
        retention,
        key: acquired.held(row.resource_id, row.provider, row.attempts, row.since_first_sent_ms),
        recovery_point: row.recovery_point,
        charge: StoredCharge {
            key: row.provider_key,
            request: row.provider_request,
            amount: row.amount,
            currency: row.currency,
            reference: row.provider_reference,
        },
        reference: row.reference,
    }))
}
