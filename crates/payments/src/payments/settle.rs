//! The second transaction of a payment: evidence, completed key, payment and event, in one statement.

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

use super::{AGGREGATE_TYPE, PAYMENT_CANCELED, PAYMENT_CREATED, PAYMENT_DECLINED, Payment};
use crate::evidence::{self, Heard, Witness};
use crate::metrics::CONTRADICTIONS;
use crate::problem::{self, ProblemBase};

/// A definitive answer about a payment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The money has moved.
    Succeeded {
        /// The provider's own name for the charge.
        reference: String,
    },
    /// No money has moved.
    Declined {
        /// The provider's own name for the attempt.
        reference: Option<String>,
        /// Why.
        code: String,
    },
    /// No charge can ever succeed.
    Fenced,
}

/// What is settled.
#[derive(Clone, Debug)]
pub struct Settled<'a> {
    /// The key's scope.
    pub scope: &'a Scope,
    /// The acquisition under which it was asked.
    pub fence: Fence,
    /// The payment.
    pub payment_id: Uuid,
    /// The client's own name for it.
    pub reference: &'a str,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: &'a str,
    /// The key that the provider was asked under.
    pub provider_key: &'a str,
}

impl Verdict {
    pub(crate) const fn outcome(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Declined { .. } => "declined",
            Self::Fenced => "fenced",
        }
    }

    const fn status(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Declined { .. } => "declined",
            Self::Fenced => "canceled",
        }
    }

    const fn event_type(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => PAYMENT_CREATED,
            Self::Declined { .. } => PAYMENT_DECLINED,
            Self::Fenced => PAYMENT_CANCELED,
        }
    }

    pub(crate) fn reference(&self) -> Option<&str> {
        match self {
            Self::Succeeded { reference } => Some(reference),
            Self::Declined { reference, .. } => reference.as_deref(),
            Self::Fenced => None,
        }
    }

    pub(crate) fn decline_code(&self) -> Option<&str> {
        match self {
            Self::Declined { code, .. } => Some(code),
            Self::Succeeded { .. } | Self::Fenced => None,
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
        let payment = Payment {
            id: settled.payment_id,
            status: self.status().to_owned(),
            reference: settled.reference.to_owned(),
            amount: settled.amount,
            currency: settled.currency.to_owned(),
            decline_code: self.decline_code().map(str::to_owned),
        };
        let members = Map::from_iter([("payment".to_owned(), json!(payment))]);
        match self {
            Self::Succeeded { .. } => StoredResponse {
                code: 201,
                headers: vec![
                    ("content-type".to_owned(), "application/json".to_owned()),
                    ("location".to_owned(), location(settled.payment_id)),
                ],
                // A struct of strings and numbers cannot fail to be written.
                body: serde_json::to_vec(&payment).unwrap_or_default(),
            },
            Self::Declined { .. } => problem::about(
                problems,
                problem::PAYMENT_DECLINED,
                "The provider declined the payment; no money moved. Another source needs another Idempotency-Key.",
                &location(settled.payment_id),
                members,
            ),
            Self::Fenced => problem::about(
                problems,
                problem::PAYMENT_ROLLED_BACK,
                "The provider's answer was lost and the payment was canceled there; no money moved, and none can. To pay, \
                 ask again with a new Idempotency-Key.",
                &location(settled.payment_id),
                members,
            ),
        }
    }

    fn event(&self, namespace: &Namespace, settled: &Settled<'_>) -> NewEvent {
        let mut payload = Map::new();
        payload.insert("payment_id".to_owned(), json!(settled.payment_id));
        payload.insert("client_id".to_owned(), json!(settled.scope.client.as_str()));
        payload.insert("reference".to_owned(), json!(settled.reference));
        payload.insert("amount".to_owned(), json!(settled.amount));
        payload.insert("currency".to_owned(), json!(settled.currency));
        if let Some(code) = self.decline_code() {
            payload.insert("decline_code".to_owned(), json!(code));
        }
        NewEvent {
            event_id: derive::from_key(namespace, settled.scope, self.event_type()),
            aggregate_type: AGGREGATE_TYPE,
            aggregate_id: settled.payment_id.to_string(),
            aggregate_version: Some(1),
            event_type: self.event_type(),
            payload,
            trace_context: None,
        }
    }
}

fn location(payment_id: Uuid) -> String {
    format!("/v1/payments/{payment_id}")
}

/// Writes a verdict down and settles the payment by it.
///
/// The evidence is written whatever the fence; everything else only while it is good, the payment in processing, and no
/// success on record that the verdict denies. Returns the stored response and until when it is replayed, or none when one of
/// these is not so: somebody else has settled it, or holds it, or the next owner settles it by the success.
///
/// # Errors
///
/// When the database fails; what became of it is then found out by whoever drives the payment on.
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
    let Some(expires_at) = evidence::settle(pool, &settlement).await? else {
        tell_contradiction(pool, settled.payment_id, verdict).await?;
        tell_of_success(pool, settled.payment_id, verdict).await?;
        return Ok(None);
    };
    if let Err(error) = tell_of_success(pool, settled.payment_id, verdict).await {
        evidence::warn_of_blindness(settled.payment_id, &error);
    }
    Ok(Some((settlement.response, expires_at)))
}

/// Tells of a success on record of what was settled otherwise: one that was committed while the statement that settled was at
/// work is not seen by it, and whoever wrote it down saw nothing settled.
async fn tell_of_success(pool: &PgPool, payment_id: Uuid, settled_as: &Verdict) -> Result<(), sqlx::Error> {
    if matches!(settled_as, Verdict::Succeeded { .. }) {
        return Ok(());
    }
    match database::call(pool, async |connection| on_record(connection, payment_id).await).await? {
        Some(said @ Verdict::Succeeded { .. }) => tell_contradiction(pool, payment_id, &said).await,
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
            refund_id: None,
            provider_key: self.settled.provider_key,
            outcome: self.verdict.outcome(),
            provider_reference: self.verdict.reference(),
            code: self.verdict.decline_code(),
            fence: self.settled.fence,
        }
    }

    async fn write(&self, connection: &mut PgConnection) -> Result<Option<OffsetDateTime>, sqlx::Error> {
        let Self { settled, verdict, witness, response, event, retention } = self;
        sqlx::query_scalar!(
            r#"-- payments_settle
            WITH evidence AS (
                -- Whatever the fence: no definitive answer is ever thrown away.
                INSERT INTO provider_answers (
                    payment_id, provider_key, call, outcome, provider_reference, decline_code, fence
                )
                SELECT $5, $6, $7, $8, $9, $10, $4 WHERE $20
            ), key AS (
                -- Gates everything below: a stale fence, or a payment that is settled, selects nothing.
                UPDATE idempotency_keys
                SET status = 'completed', recovery_point = 'completed', lease_until = NULL, next_check_at = NULL,
                    needs_person_at = NULL, needs_person_reason = NULL,
                    command = command - 'source', provider_request = NULL, provider_reference = $9,
                    response_code = $11, response_headers = $12, response_body = $13,
                    completed_at = clock_timestamp(), expires_at = clock_timestamp() + $14
                WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4
                  AND resource_id = $5
                  AND EXISTS (SELECT FROM payments WHERE payment_id = $5 AND status = 'processing')
                  -- Somebody else may have heard of a success meanwhile: the next owner finds it, and settles by it.
                  AND ($8 = 'succeeded' OR NOT EXISTS (
                      SELECT FROM provider_answers WHERE payment_id = $5 AND refund_id IS NULL AND outcome = 'succeeded'
                  ))
                RETURNING expires_at, trace_context
            ), payment AS (
                UPDATE payments
                SET status = $15, version = version + 1, provider_reference = $9, decline_code = $10,
                    settled_at = clock_timestamp()
                FROM key
                WHERE payment_id = $5 AND status = 'processing'
                RETURNING payment_id, version, key.trace_context
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
            settled.payment_id,
            settled.provider_key,
            witness.call().unwrap_or_default(),
            verdict.outcome(),
            verdict.reference(),
            verdict.decline_code(),
            store::code(response),
            Json(&response.headers) as _,
            response.body,
            store::interval(*retention),
            verdict.status(),
            event.event_id,
            event.aggregate_type,
            event.event_type,
            event.stored_payload(),
            witness.call().is_some()
        )
        .fetch_optional(connection)
        .await
    }
}

/// Returns where a payment stands; none when there is no such payment.
pub(crate) async fn status<'e>(
    executor: impl PgExecutor<'e>,
    payment_id: Uuid,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- payments_status
        SELECT status FROM payments WHERE payment_id = $1",
        payment_id
    )
    .fetch_optional(executor)
    .await
}

/// A charge of a payment that was rolled back: what the fence rules out has happened.
pub(crate) async fn tell_contradiction(
    pool: &PgPool,
    payment_id: Uuid,
    verdict: &Verdict,
) -> Result<(), sqlx::Error> {
    if !matches!(verdict, Verdict::Succeeded { .. }) {
        return Ok(());
    }
    let status = database::call(pool, async |connection| status(connection, payment_id).await).await?;
    if status.is_some_and(|status| status == "canceled" || status == "declined") {
        counter!(CONTRADICTIONS).increment(1);
        tracing::error!(
            payment = %payment_id,
            "the provider has charged a payment that was settled without a charge: refund it at the provider"
        );
    }
    Ok(())
}

/// Looks for a definitive answer that somebody has written down before.
pub(crate) async fn on_record(
    executor: impl PgExecutor<'_>,
    payment_id: Uuid,
) -> Result<Option<Verdict>, sqlx::Error> {
    let said = evidence::of_payment(executor, payment_id).await?;
    Ok(said.and_then(|said| match (said.outcome.as_str(), said.provider_reference, said.decline_code) {
        ("succeeded", Some(reference), _) => Some(Verdict::Succeeded { reference }),
        ("declined", reference, Some(code)) => Some(Verdict::Declined { reference, code }),
        ("fenced", _, _) => Some(Verdict::Fenced),
        _ => None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn settled(scope: &Scope) -> Settled<'_> {
        Settled {
            scope,
            fence: Fence(1),
            payment_id: Uuid::from_u128(7),
            reference: "A-1",
            amount: 1250,
            currency: "EUR",
            provider_key: "p",
        }
    }

    #[test]
    fn each_verdict_has_its_final_response() {
        let scope = Scope {
            client: "acme".parse().unwrap(),
            operation: "payments.create",
            key: "k".parse().unwrap(),
        };
        let base: ProblemBase = "/errors".parse().unwrap();
        let cases = [
            (Verdict::Succeeded { reference: "ch_1".to_owned() }, 201, None),
            (
                Verdict::Declined { reference: None, code: "card_declined".to_owned() },
                402,
                Some("/errors/payment-declined"),
            ),
            (Verdict::Fenced, 424, Some("/errors/payment-rolled-back")),
        ];
        for (verdict, code, kind) in cases {
            let response = verdict.response(&settled(&scope), &base);
            assert_eq!(response.code, code);
            let body: Value = serde_json::from_slice(&response.body).unwrap();
            assert_eq!(body.get("type").and_then(Value::as_str), kind, "{body}");
            let payment = if kind.is_some() { &body["payment"] } else { &body };
            assert_eq!(payment["status"], verdict.status());
            assert_eq!(payment["amount"], 1250);
        }
    }
}
