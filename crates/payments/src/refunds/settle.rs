//! The second transaction of a refund: evidence, completed key, refund, payment and event, in one statement.

use std::time::Duration;

use metrics::counter;
use semel_core::database;
use semel_core::derive::{self, Namespace};
use semel_core::idempotency::store::{self, Fence};
use semel_core::idempotency::{Scope, StoredResponse};
use semel_core::outbox::NewEvent;
use serde_json::{Map, json};
use sqlx::types::Json;
use sqlx::{PgConnection, PgExecutor, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{PAYMENT_REFUND_FAILED, PAYMENT_REFUNDED, Refund, location};
use crate::evidence::{self, Heard, Witness};
use crate::metrics::CONTRADICTIONS;
use crate::payments::AGGREGATE_TYPE;
use crate::problem::{self, ProblemBase};

/// A definitive answer about a refund.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The money was given back.
    Succeeded {
        /// The provider's own name for the refund.
        reference: String,
    },
    /// No money was given back, and none will be.
    Failed {
        /// The provider's own name for the attempt.
        reference: Option<String>,
        /// Why.
        code: String,
    },
}

/// What is settled.
#[derive(Clone, Debug)]
pub struct Settled<'a> {
    /// The key's scope.
    pub scope: &'a Scope,
    /// The acquisition under which it was asked.
    pub fence: Fence,
    /// The refund.
    pub refund_id: Uuid,
    /// The payment.
    pub payment_id: Uuid,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: &'a str,
    /// The key that the provider was asked under.
    pub provider_key: &'a str,
}

impl Verdict {
    /// As the evidence has it, whose words are those of all answers.
    pub(crate) const fn outcome(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Failed { .. } => "declined",
        }
    }

    const fn status(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Failed { .. } => "failed",
        }
    }

    const fn event_type(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => PAYMENT_REFUNDED,
            Self::Failed { .. } => PAYMENT_REFUND_FAILED,
        }
    }

    pub(crate) fn reference(&self) -> Option<&str> {
        match self {
            Self::Succeeded { reference } => Some(reference),
            Self::Failed { reference, .. } => reference.as_deref(),
        }
    }

    pub(crate) fn failure_code(&self) -> Option<&str> {
        match self {
            Self::Succeeded { .. } => None,
            Self::Failed { code, .. } => Some(code),
        }
    }

    /// What is given back to what is left of the payment.
    const fn freed(&self, amount: i64) -> i64 {
        match self {
            Self::Succeeded { .. } => 0,
            Self::Failed { .. } => amount,
        }
    }

    /// Says whether a decision is what the provider has said.
    pub(crate) fn agrees_with(&self, decided: &Self) -> bool {
        match (self, decided) {
            (Self::Succeeded { reference: said }, Self::Succeeded { reference: decided }) => said == decided,
            (said, decided) => std::mem::discriminant(said) == std::mem::discriminant(decided),
        }
    }

    /// Returns the response that is stored with the key.
    #[must_use]
    pub fn response(&self, settled: &Settled<'_>, problems: &ProblemBase) -> StoredResponse {
        let refund = Refund {
            id: settled.refund_id,
            payment_id: settled.payment_id,
            status: self.status().to_owned(),
            amount: settled.amount,
            currency: settled.currency.to_owned(),
            failure_code: self.failure_code().map(str::to_owned),
        };
        match self {
            Self::Succeeded { .. } => StoredResponse {
                code: 201,
                headers: vec![
                    ("content-type".to_owned(), "application/json".to_owned()),
                    ("location".to_owned(), location(settled.refund_id)),
                ],
                // A struct of strings and numbers cannot fail to be written.
                body: serde_json::to_vec(&refund).unwrap_or_default(),
            },
            Self::Failed { .. } => problem::about(
                problems,
                problem::REFUND_FAILED,
                "The provider did not make the refund; no money was given back. To try again, use a new Idempotency-Key.",
                &location(settled.refund_id),
                Map::from_iter([("refund".to_owned(), json!(refund))]),
            ),
        }
    }

    fn event(&self, namespace: &Namespace, settled: &Settled<'_>) -> NewEvent {
        let mut payload = Map::new();
        payload.insert("refund_id".to_owned(), json!(settled.refund_id));
        payload.insert("payment_id".to_owned(), json!(settled.payment_id));
        payload.insert("client_id".to_owned(), json!(settled.scope.client.as_str()));
        payload.insert("amount".to_owned(), json!(settled.amount));
        payload.insert("currency".to_owned(), json!(settled.currency));
        if let Some(code) = self.failure_code() {
            payload.insert("failure_code".to_owned(), json!(code));
        }
        NewEvent {
            event_id: derive::from_key(namespace, settled.scope, self.event_type()),
            aggregate_type: AGGREGATE_TYPE,
            aggregate_id: settled.payment_id.to_string(),
            // The payment's next, which its row tells.
            aggregate_version: None,
            event_type: self.event_type(),
            payload,
            trace_context: None,
        }
    }
}

/// Writes a verdict down and settles the refund by it.
///
/// The evidence is written whatever the fence; everything else only while it is good, the refund in processing, and no
/// success on record that the verdict denies. Returns the stored response and until when it is replayed, or none when one of
/// these is not so: somebody else has settled it, or holds it, or the next owner settles it by the success.
///
/// # Errors
///
/// When the database fails; what became of it is then found out by whoever drives the refund on.
pub async fn settle(
    pool: &PgPool,
    namespace: &Namespace,
    problems: &ProblemBase,
    settled: &Settled<'_>,
    verdict: &Verdict,
    witness: Witness,
    retention: Duration,
) -> Result<Option<(StoredResponse, OffsetDateTime)>, sqlx::Error> {
    let settlement = Settlement::of(settled, verdict, witness, namespace, problems, retention);
    let Settled { payment_id, refund_id, .. } = *settled;
    let Some(expires_at) = evidence::settle(pool, &settlement).await? else {
        tell_contradiction(pool, payment_id, refund_id, verdict).await?;
        tell_of_success(pool, payment_id, refund_id, verdict).await?;
        return Ok(None);
    };
    if let Err(error) = tell_of_success(pool, payment_id, refund_id, verdict).await {
        evidence::warn_of_blindness(refund_id, &error);
    }
    Ok(Some((settlement.response, expires_at)))
}

/// Tells of a success on record of what was settled as failed, as for payments.
async fn tell_of_success(
    pool: &PgPool,
    payment_id: Uuid,
    refund_id: Uuid,
    settled_as: &Verdict,
) -> Result<(), sqlx::Error> {
    if matches!(settled_as, Verdict::Succeeded { .. }) {
        return Ok(());
    }
    match database::call(pool, async |connection| on_record(connection, refund_id).await).await? {
        Some(said @ Verdict::Succeeded { .. }) => {
            tell_contradiction(pool, payment_id, refund_id, &said).await
        }
        _ => Ok(()),
    }
}

/// The statement that settles.
pub(super) struct Settlement<'a> {
    settled: &'a Settled<'a>,
    verdict: &'a Verdict,
    witness: Witness,
    response: StoredResponse,
    event: NewEvent,
    retention: Duration,
}

impl<'a> Settlement<'a> {
    pub(super) fn of(
        settled: &'a Settled<'a>,
        verdict: &'a Verdict,
        witness: Witness,
        namespace: &Namespace,
        problems: &ProblemBase,
        retention: Duration,
    ) -> Self {
        let (response, event) = (verdict.response(settled, problems), verdict.event(namespace, settled));
        Self { settled, verdict, witness, response, event, retention }
    }
}

impl evidence::Settlement for Settlement<'_> {
    fn heard(&self) -> Heard<'_> {
        Heard {
            witness: self.witness,
            payment_id: self.settled.payment_id,
            refund_id: Some(self.settled.refund_id),
            provider_key: self.settled.provider_key,
            outcome: self.verdict.outcome(),
            provider_reference: self.verdict.reference(),
            code: self.verdict.failure_code(),
            fence: self.settled.fence,
        }
    }

    async fn write(&self, connection: &mut PgConnection) -> Result<Option<OffsetDateTime>, sqlx::Error> {
        let Self { settled, verdict, witness, response, event, retention } = self;
        sqlx::query_scalar!(
            r#"-- refunds_settle
            WITH evidence AS (
                -- Whatever the fence: no definitive answer is ever thrown away.
                INSERT INTO provider_answers (
                    payment_id, refund_id, provider_key, call, outcome, provider_reference, decline_code, fence
                )
                SELECT $21, $5, $6, $7, $8, $9, $10, $4 WHERE $20
            ), key AS (
                -- Gates everything below: a stale fence, or a refund that is settled, selects nothing.
                UPDATE idempotency_keys
                SET status = 'completed', recovery_point = 'completed', lease_until = NULL, next_check_at = NULL,
                    needs_person_at = NULL, needs_person_reason = NULL, provider_request = NULL, provider_reference = $9,
                    response_code = $11, response_headers = $12, response_body = $13,
                    completed_at = clock_timestamp(), expires_at = clock_timestamp() + $14
                WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4
                  AND resource_id = $5
                  AND EXISTS (SELECT FROM refunds WHERE refund_id = $5 AND status = 'processing')
                  -- Somebody else may have heard of a success meanwhile: the next owner finds it, and settles by it.
                  AND ($8 = 'succeeded' OR NOT EXISTS (
                      SELECT FROM provider_answers WHERE refund_id = $5 AND outcome = 'succeeded'
                  ))
                RETURNING expires_at, trace_context
            ), refund AS (
                UPDATE refunds
                SET status = $15, provider_reference = $9, failure_code = $10, settled_at = clock_timestamp()
                FROM key
                WHERE refund_id = $5 AND status = 'processing'
                RETURNING payment_id, key.trace_context
            ), payment AS (
                -- The event's version and place in the order are those of the payment, whose other refunds may be settled by
                -- others at this time: they wait here.
                UPDATE payments
                SET version = payments.version + 1, refund_reserved = payments.refund_reserved - $22
                FROM refund
                WHERE payments.payment_id = refund.payment_id
                RETURNING payments.payment_id, payments.version, refund.trace_context
            ), told AS (
                INSERT INTO outbox (
                    event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers
                )
                SELECT $16, $17, payment_id::TEXT, version, $18, $19,
                       CASE WHEN trace_context IS NULL THEN '{}'
                            ELSE jsonb_build_object('traceparent', trace_context) END
                FROM payment
            )
            SELECT expires_at AS "expires_at!" FROM key"#,
            settled.scope.client.as_str(),
            settled.scope.operation,
            settled.scope.key.as_str(),
            settled.fence.0,
            settled.refund_id,
            settled.provider_key,
            witness.call().unwrap_or_default(),
            verdict.outcome(),
            verdict.reference(),
            verdict.failure_code(),
            store::code(response),
            Json(&response.headers) as _,
            response.body,
            store::interval(*retention),
            verdict.status(),
            event.event_id,
            event.aggregate_type,
            event.event_type,
            event.stored_payload(),
            witness.call().is_some(),
            settled.payment_id,
            verdict.freed(settled.amount)
        )
        .fetch_optional(connection)
        .await
    }
}

/// Returns where a refund stands; none when there is no such refund.
pub(crate) async fn status<'e>(
    executor: impl PgExecutor<'e>,
    refund_id: Uuid,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- refunds_status
        SELECT status FROM refunds WHERE refund_id = $1",
        refund_id
    )
    .fetch_optional(executor)
    .await
}

/// Money was given back by a refund that a person, or the provider, had called failed: its amount may be given back twice.
/// Or it was not, by one that had been called made: it is with us, and the payer misses it.
pub(crate) async fn tell_contradiction(
    pool: &PgPool,
    payment_id: Uuid,
    refund_id: Uuid,
    verdict: &Verdict,
) -> Result<(), sqlx::Error> {
    let status = database::call(pool, async |connection| status(connection, refund_id).await).await?;
    let said = match (verdict, status.as_deref()) {
        (Verdict::Succeeded { .. }, Some("failed")) => "made a refund that was settled as failed",
        (Verdict::Failed { .. }, Some("succeeded")) => "failed to make a refund that was settled as made",
        _ => return Ok(()),
    };
    counter!(CONTRADICTIONS).increment(1);
    tracing::error!(refund = %refund_id, payment = %payment_id, "the provider has {said}");
    Ok(())
}

/// Looks for a definitive answer about a refund that somebody has written down before.
pub(crate) async fn on_record(
    executor: impl PgExecutor<'_>,
    refund_id: Uuid,
) -> Result<Option<Verdict>, sqlx::Error> {
    let said = evidence::of_refund(executor, refund_id).await?;
    Ok(said.and_then(|said| match (said.outcome.as_str(), said.provider_reference, said.decline_code) {
        ("succeeded", Some(reference), _) => Some(Verdict::Succeeded { reference }),
        ("declined", reference, Some(code)) => Some(Verdict::Failed { reference, code }),
        _ => None,
    }))
}
