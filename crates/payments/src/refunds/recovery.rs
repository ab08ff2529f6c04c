//! Driving a claimed refund on, from wherever it stands to its end: for the request that claimed it, a retry, the reaper.
//!
//! 1. Evidence first: a definitive answer that somebody has written down settles. Else, what another provider was paid is left
//!    to a person, since none but that one can give it back.
//! 2. While the first send is young, send the stored request again under the same key.
//! 3. Past that, ask. Where that tells nothing, send the stored request again for as long as the provider recognises its key
//!    and its client is not shut out: with a provider that deduplicates it has no other effect than the first.
//! 4. Past that, a person. Not found is no proof that nothing was given back, and there is no fence to make it true; so the
//!    amount stays taken.

use std::time::Duration;

use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::{LEASE, Proceeded};
use semel_core::idempotency::store::Fence;
use semel_core::{database, failpoint};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::settle::{self, Settled, Verdict};
use crate::evidence::Witness;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::held::{Acquired, Execution, Held};
use crate::metrics::Recovery;
use crate::payments::create::MakePayment;
use crate::payments::recovery_point::SENT;
use crate::provider::{Answer, DEADLINE, LookUp, MARGIN, Provider, StoredRefund};

/// Until when a refund may be begun that is sent after a look-up, from our own beginning: each of the two calls has its time.
const AFTER_LOOK_UP: Duration = DEADLINE.saturating_mul(2);

/// Both calls end while the lease lasts, and before the horizon.
const _: () = assert!(AFTER_LOOK_UP.as_secs() < LEASE.as_secs() && DEADLINE.as_secs() < MARGIN.as_secs());

/// A refund whose key is held.
#[derive(Debug)]
struct Drive<'a, P> {
    operation: &'a MakePayment<P>,
    retention: Duration,
    key: Held<'a>,
    recovery_point: String,
    payment_id: Uuid,
    stored: StoredRefund,
}

/// Drives the refund on as far as it goes now. Every write names the fence.
pub(crate) async fn proceed<P: Provider>(
    operation: &MakePayment<P>,
    pool: &PgPool,
    scope: &Scope,
    fence: Fence,
    retention: Duration,
) -> Result<Proceeded, sqlx::Error> {
    let acquired = Acquired::now(pool, scope, fence);
    let Some(refund) = load(operation, acquired, retention).await? else { return Ok(Proceeded::Lost) };
    refund.drive().await
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
        let (key, stored) = (&self.key, &self.stored);
        let settled = Settled {
            scope: key.scope,
            fence: key.fence,
            refund_id: key.resource_id,
            payment_id: self.payment_id,
            amount: stored.amount,
            currency: &stored.currency,
            provider_key: &stored.key,
        };
        let MakePayment { namespace, problems, .. } = self.operation;
        let written =
            settle::settle(key.pool, namespace, problems, &settled, verdict, witness, self.retention).await?;
        failpoint!(failpoints::REFUND_AFTER_SETTLE);
        Ok(key.settled(written, Recovery::Completed))
    }

    async fn go_on(&self) -> Result<Proceeded, sqlx::Error> {
        let key = &self.key;
        if self.recovery_point != SENT {
            let point = &self.recovery_point;
            return key.leave(&format!("the recovery point {point:?} is not known to this version")).await;
        }
        let promises = self.operation.provider.promises();
        let may_send = key.may_send(promises.dedup).await?;
        let is_young = key.since_first_sent < self.operation.window;
        match (may_send, promises.look_up) {
            (true, _) if is_young => self.send(DEADLINE).await,
            (_, LookUp::ByKey | LookUp::ByReference) => self.ask(may_send).await,
            (true, LookUp::None) => self.send(DEADLINE).await,
            (false, LookUp::None) => {
                key.leave("the provider cannot tell what happened, and the refund must not be sent again")
                    .await
            }
        }
    }
}

impl<P: Provider> Drive<'_, P> {
    /// Sends the stored request, which the provider may begin until `within` of our own beginning.
    async fn send(&self, within: Duration) -> Result<Proceeded, sqlx::Error> {
        self.key.count_send();
        failpoint!(failpoints::REFUND_BEFORE_SEND);
        let not_after = self.key.began + within;
        let provider = &self.operation.provider;
        let answer = provider.refund(&self.stored, not_after).await;
        failpoint!(failpoints::REFUND_AFTER_ANSWER);
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::Refund).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            (None, answer) => self.key.wait_while_hopeful(&answer, provider.is_open()).await,
        }
    }

    async fn ask(&self, may_send: bool) -> Result<Proceeded, sqlx::Error> {
        let provider = &self.operation.provider;
        let answer = provider.get_refund(&self.stored).await;
        match (Self::verdict(&answer), answer) {
            (Some(verdict), _) => self.settle(&verdict, Witness::GetRefund).await,
            (None, Answer::Mismatch { reason }) => self.key.leave(&reason).await,
            // Under way, or away: that ends by itself.
            (None, answer @ (Answer::InProgress | Answer::NotExecuted { .. })) => {
                self.key.wait(&answer).await
            }
            // The look-up may have taken all of its time. The margin of the horizon is longer than that.
            (None, _) if may_send => self.send(AFTER_LOOK_UP).await,
            (None, Answer::NotFound) => {
                self.key.leave("the provider does not know of the refund, which must not be sent again").await
            }
            (None, answer) => self.key.wait_while_hopeful(&answer, provider.is_open()).await,
        }
    }
}

/// Returns what a definitive answer says.
pub(crate) fn definitive(answer: &Answer) -> Option<Verdict> {
    match answer {
        Answer::Succeeded { reference } => Some(Verdict::Succeeded { reference: reference.clone() }),
        Answer::Declined { reference, code } => {
            Some(Verdict::Failed { reference: reference.clone(), code: code.clone() })
        }
        // There is no fence for a refund: whatever says so says nothing.
        Answer::Fenced
        | Answer::InProgress
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
            r#"-- refunds_held
            SELECT k.resource_id, k.recovery_point, k.attempts, k.provider_request AS "provider_request!",
                   GREATEST(0, EXTRACT(EPOCH FROM clock_timestamp() - k.provider_first_sent_at) * 1000)::BIGINT
                       AS "since_first_sent_ms!",
                   r.payment_id, p.provider, r.provider_key AS "provider_key!", r.amount, r.currency
            FROM idempotency_keys AS k JOIN refunds AS r ON r.refund_id = k.resource_id
                 JOIN payments AS p ON p.payment_id = r.payment_id
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
        payment_id: row.payment_id,
        stored: StoredRefund {
            key: row.provider_key,
            request: row.provider_request,
            amount: row.amount,
            currency: row.currency,
        },
    }))
}
