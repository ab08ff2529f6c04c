//! A payment as a person sees it, and as a person settles it.

use semel_core::database;
use semel_core::idempotency::person;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::settle::{Settled, Settlement, Verdict};
use crate::evidence::{Settlement as _, Witness};
use crate::operator::{Desk, Dossier, Evidence, Taken};

/// A payment as a person sees it.
#[derive(Clone, Debug)]
pub struct Record {
    /// The account.
    pub client_id: String,
    /// The operation that created it.
    pub operation: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// In minor units; what refunds have taken of it.
    pub refund_reserved: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// `processing`, `succeeded`, `declined` or `canceled`.
    pub status: String,
    /// The provider that it was begun with.
    pub provider: String,
    /// The key that the provider was asked under.
    pub provider_key: String,
    /// The provider's own name for the charge.
    pub provider_reference: Option<String>,
    /// Why it was declined.
    pub decline_code: Option<String>,
    /// When it was asked for.
    pub created_at: OffsetDateTime,
    /// When its outcome was written.
    pub settled_at: Option<OffsetDateTime>,
}

/// Returns all that is known of a payment; none when there is no such payment.
///
/// # Errors
///
/// When the database fails.
pub async fn show(pool: &PgPool, payment_id: Uuid) -> Result<Option<Dossier<Record>>, sqlx::Error> {
    database::call(pool, async |connection| dossier(connection, payment_id).await).await
}

async fn dossier(
    connection: &mut PgConnection,
    payment_id: Uuid,
) -> Result<Option<Dossier<Record>>, sqlx::Error> {
    let row = sqlx::query!(
        "-- payments_show
        SELECT client_id, operation, idempotency_key, reference, amount, refund_reserved, currency, status, provider, provider_key,
               provider_reference, decline_code, created_at, settled_at
        FROM payments WHERE payment_id = $1",
        payment_id
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let key = person::standing(connection, &row.client_id, &row.operation, &row.idempotency_key).await?;
    let evidence = sqlx::query_as!(
        Evidence,
        "-- provider_answers_show
        SELECT call, outcome, provider_reference, decline_code, fence, answered_at FROM provider_answers
        WHERE payment_id = $1 AND refund_id IS NULL ORDER BY answered_at LIMIT 100",
        payment_id
    )
    .fetch_all(&mut *connection)
    .await?;
    let record = Record {
        client_id: row.client_id,
        operation: row.operation,
        reference: row.reference,
        amount: row.amount,
        refund_reserved: row.refund_reserved,
        currency: row.currency,
        status: row.status,
        provider: row.provider,
        provider_key: row.provider_key,
        provider_reference: row.provider_reference,
        decline_code: row.decline_code,
        created_at: row.created_at,
        settled_at: row.settled_at,
    };
    Ok(Some(Dossier { record, key, evidence }))
}

/// Returns the provider that a payment was begun with.
pub(crate) async fn provider(
    connection: &mut PgConnection,
    payment_id: Uuid,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- payments_provider
        SELECT provider FROM payments WHERE payment_id = $1",
        payment_id
    )
    .fetch_optional(connection)
    .await
}

/// Settles a payment as a person has decided; false when there is nothing to settle.
pub(crate) async fn write(
    desk: &Desk,
    tx: &mut PgConnection,
    taken: &Taken,
    verdict: &Verdict,
) -> Result<bool, sqlx::Error> {
    let payment = sqlx::query!(
        "-- payments_to_settle
        SELECT reference, amount, currency, provider_key FROM payments WHERE payment_id = $1",
        taken.id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let Some(payment) = payment else { return Ok(false) };
    let settled = Settled {
        scope: &taken.scope,
        fence: taken.fence,
        payment_id: taken.id,
        reference: &payment.reference,
        amount: payment.amount,
        currency: &payment.currency,
        provider_key: &payment.provider_key,
    };
    let (namespace, problems, retention) = (&desk.namespace, &desk.problems, desk.retention);
    let settlement = Settlement::of(&settled, verdict, Witness::Operator, namespace, problems, retention);
    Ok(settlement.write(tx).await?.is_some())
}
