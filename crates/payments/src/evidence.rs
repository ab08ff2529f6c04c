//! Evidence: the definitive answers of the provider, and of people, as they are written down in `provider_answers`.
//!
//! Promise: no definitive answer is thrown away. It is written by the statement that settles by it, whatever the fence; and
//! where that statement cannot be written, alone. Whoever drives the execution on finds it before anybody is asked again.

use semel_core::database::{self, Failure, failure};
use semel_core::disposition::chain;
use semel_core::idempotency::store::Fence;
use sqlx::{PgConnection, PgExecutor, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

/// How often a settlement is tried that was not refused.
const TRIES: u32 = 3;

/// Who said it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Witness {
    /// The provider, answering a charge.
    Charge,
    /// The provider, answering a look-up of a charge.
    Get,
    /// The provider, answering a cancel.
    Cancel,
    /// The provider, answering a refund.
    Refund,
    /// The provider, answering a look-up of a refund.
    GetRefund,
    /// The provider, by itself.
    Webhook,
    /// A person.
    Operator,
    /// The evidence itself: an earlier answer, already written down.
    Evidence,
}

impl Witness {
    /// As the evidence names it; none where it is not written down again.
    pub(crate) const fn call(self) -> Option<&'static str> {
        match self {
            Self::Charge => Some("charge"),
            Self::Get => Some("get"),
            Self::Cancel => Some("cancel"),
            Self::Refund => Some("refund"),
            Self::GetRefund => Some("get_refund"),
            Self::Webhook => Some("webhook"),
            Self::Operator => Some("operator"),
            Self::Evidence => None,
        }
    }
}

/// An answer to be written down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard<'a> {
    pub(crate) witness: Witness,
    pub(crate) payment_id: Uuid,
    /// None when it is about the payment itself.
    pub(crate) refund_id: Option<Uuid>,
    pub(crate) provider_key: &'a str,
    pub(crate) outcome: &'static str,
    pub(crate) provider_reference: Option<&'a str>,
    pub(crate) code: Option<&'a str>,
    /// The acquisition under which it was asked; 0 when nobody asked.
    pub(crate) fence: Fence,
}

/// An answer that was written down.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) outcome: String,
    pub(crate) provider_reference: Option<String>,
    pub(crate) decline_code: Option<String>,
}

/// What settles by an answer: one statement, which writes the answer down too.
pub(crate) trait Settlement: Sync {
    /// What it settles by.
    fn heard(&self) -> Heard<'_>;

    /// Writes it. Returns until when the response is replayed; none when it wrote nothing but evidence.
    fn write(
        &self,
        connection: &mut PgConnection,
    ) -> impl Future<Output = Result<Option<OffsetDateTime>, sqlx::Error>> + Send;
}

/// Writes a settlement, again and on another connection where that may help.
///
/// Where the answer to its commit was lost, the same statement again finds the key completed, and writes nothing but
/// evidence. Where it cannot be written, what was heard is written down alone.
///
/// # Errors
///
/// When it was not written, or that is not known.
pub(crate) async fn settle(
    pool: &PgPool,
    settlement: &impl Settlement,
) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    let mut tries = 1;
    let error = loop {
        match database::call(pool, async |connection| settlement.write(connection).await).await {
            Err(error) if tries < TRIES && failure(&error) != Failure::Refused => tries += 1,
            Err(error) => break error,
            written => return written,
        }
    };
    let heard = settlement.heard();
    if let Err(lost) = database::call(pool, async |connection| append(connection, &heard, None).await).await {
        tracing::error!(
            payment = %heard.payment_id,
            outcome = heard.outcome,
            "an answer of the provider could not be written down: {}",
            chain(&lost)
        );
    }
    Err(error)
}

/// What is settled stays so, though nobody has looked whether the provider has said otherwise meanwhile.
pub(crate) fn warn_of_blindness(id: Uuid, error: &sqlx::Error) {
    tracing::warn!(resource = %id, "whether a success contradicts what was settled was not found out: {}", chain(error));
}

/// Writes an answer down by itself, and with an id once only. Says whether it did.
pub(crate) async fn append(
    executor: impl PgExecutor<'_>,
    heard: &Heard<'_>,
    id: Option<Uuid>,
) -> Result<bool, sqlx::Error> {
    let Some(call) = heard.witness.call() else { return Ok(false) };
    let done = sqlx::query!(
        "-- provider_answers_append
        INSERT INTO provider_answers (
            answer_id, payment_id, refund_id, provider_key, call, outcome, provider_reference, decline_code, fence
        )
        VALUES (COALESCE($9, gen_random_uuid()), $1, $2, $3, $4, $5, $6, $7, $8)
        ON CONFLICT (answer_id) DO NOTHING",
        heard.payment_id,
        heard.refund_id,
        heard.provider_key,
        call,
        heard.outcome,
        heard.provider_reference,
        heard.code,
        heard.fence.0,
        id
    )
    .execute(executor)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Looks for what was written down about a payment itself: a success before anything else, then the oldest.
pub(crate) async fn of_payment(
    executor: impl PgExecutor<'_>,
    payment_id: Uuid,
) -> Result<Option<Said>, sqlx::Error> {
    sqlx::query_as!(
        Said,
        "-- provider_answers_find
        SELECT outcome, provider_reference, decline_code FROM provider_answers
        WHERE payment_id = $1 AND refund_id IS NULL ORDER BY outcome = 'succeeded' DESC, answered_at LIMIT 1",
        payment_id
    )
    .fetch_optional(executor)
    .await
}

/// Looks for what was written down about a refund, in the same order.
pub(crate) async fn of_refund(
    executor: impl PgExecutor<'_>,
    refund_id: Uuid,
) -> Result<Option<Said>, sqlx::Error> {
    sqlx::query_as!(
        Said,
        "-- provider_answers_find_of_refund
        SELECT outcome, provider_reference, decline_code FROM provider_answers
        WHERE refund_id = $1 ORDER BY outcome = 'succeeded' DESC, answered_at LIMIT 1",
        refund_id
    )
    .fetch_optional(executor)
    .await
}
