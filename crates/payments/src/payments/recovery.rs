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

use std::time::Duration;

use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::Proceeded;
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
use crate::provider::{Answer, DEADLINE, Fencing, LookUp, Provider, StoredCharge};

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
            SENT if self.may_send().await? => self.send().await,
            SENT => self.ask().await,
            CANCELING => self.cancel().await,
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

    async fn send(&self) -> Result<Proceeded, sqlx::Error> {
        self.key.count_send();
        failpoint!(failpoints::BEFORE_SEND);
        let not_after = self.key.began + DEADLINE;
        let answer = self.operation.provider.charge(&self.charge, not_after).await;
        failpoint!(failpoints::AFTER_ANSWER);
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Charge).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            (None, answer) => self.key.wait(&answer).await,
        }
    }

    async fn ask(&self) -> Result<Proceeded, sqlx::Error> {
        if self.operation.provider.promises().look_up == LookUp::None {
            return self.fence().await;
        }
        let answer = self.operation.provider.get(&self.charge).await;
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Get).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            // A provider that is away would not take the fence either.
            (None, answer @ (Answer::InProgress | Answer::NotExecuted { .. })) => {
                self.key.wait(&answer).await
            }
            (None, _) => self.fence().await,
        }
    }

    /// Commits that nobody sends any more, then cancels at the provider.
    async fn fence(&self) -> Result<Proceeded, sqlx::Error> {
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
        self.cancel().await
    }

    async fn cancel(&self) -> Result<Proceeded, sqlx::Error> {
        let provider = &self.operation.provider;
        let answer = provider.cancel(&self.charge).await;
        failpoint!(failpoints::AFTER_CANCEL);
        if answer == Answer::Fenced {
            return self.settle(&Verdict::Fenced, Witness::Cancel).await;
        }
        // Any other answer to a cancel proves nothing by itself: a second cancel of a fenced charge is an error too.
        let answer = provider.get(&self.charge).await;
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
        .fetch_optional(connection)
        .await
    });
    Ok(row.await?.map(|row| Drive {
        operation,
        retention,
        key: acquired.held(row.resource_id, row.attempts, row.since_first_sent_ms),
        recovery_point: row.recovery_point,
        charge: StoredCharge {
            key: row.provider_key,
            request: row.provider_request,
            amount: row.amount,
            currency: row.currency,
        },
        reference: row.reference,
    }))
}
