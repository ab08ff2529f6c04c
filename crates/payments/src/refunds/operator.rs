//! A refund as a person sees it, and as a person settles it.

use semel_core::database;
use semel_core::idempotency::person;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::settle::{Settled, Settlement, Verdict};
use crate::evidence::{Settlement as _, Witness};
use crate::operator::{Desk, Dossier, Evidence, Taken};

/// A refund as a person sees it.
#[derive(Clone, Debug)]
pub struct Record {
    /// The payment whose money it gives back.
    pub payment_id: Uuid,
    /// The account.
    pub client_id: String,
    /// The operation that created it.
    pub operation: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// `processing`, `succeeded`, `failed` or `refused`.
    pub status: String,
    /// The key that the provider was asked under; none where it was not asked.
    pub provider_key: Option<String>,
    /// The provider's own name for the refund.
    pub provider_reference: Option<String>,
    /// Why it failed.
    pub failure_code: Option<String>,
    /// When it was asked for.
    pub created_at: OffsetDateTime,
    /// When its outcome was written.
    pub settled_at: Option<OffsetDateTime>,
}

/// Returns all that is known of a refund; none when there is no such refund.
///
/// # Errors
///
/// When the database fails.
pub async fn show(pool: &PgPool, refund_id: Uuid) -> Result<Option<Dossier<Record>>, sqlx::Error> {
    database::call(pool, async |connection| dossier(connection, refund_id).await).await
}

async fn dossier(
    connection: &mut PgConnection,
    refund_id: Uuid,
) -> Result<Option<Dossier<Record>>, sqlx::Error> {
    let row = sqlx::query!(
        "-- refunds_show
        SELECT payment_id, client_id, operation, idempotency_key, amount, currency, status, provider_key, provider_reference,
               failure_code, created_at, settled_at
        FROM refunds WHERE refund_id = $1",
        refund_id
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let key = person::standing(connection, &row.client_id, &row.operation, &row.idempotency_key).await?;
    let evidence = sqlx::query_as!(
        Evidence,
        "-- provider_answers_show_of_refund
        SELECT call, outcome, provider_reference, decline_code, fence, answered_at FROM provider_answers
        WHERE refund_id = $1 ORDER BY answered_at LIMIT 100",
        refund_id
    )
    .fetch_all(&mut *connection)
    .await?;
    let record = Record {
        payment_id: row.payment_id,
        client_id: row.client_id,
        operation: row.operation,
        amount: row.amount,
        currency: row.currency,
        status: row.status,
        provider_key: row.provider_key,
        provider_reference: row.provider_reference,
        failure_code: row.failure_code,
        created_at: row.created_at,
        settled_at: row.settled_at,
    };
    Ok(Some(Dossier { record, key, evidence }))
}

/// Returns the provider of the payment that a refund is of.
pub(crate) async fn provider(
    connection: &mut PgConnection,
    refund_id: Uuid,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- refunds_provider
        SELECT p.provider FROM refunds AS r JOIN payments AS p ON p.payment_id = r.payment_id WHERE r.refund_id = $1",
        refund_id
    )
    .fetch_optional(connection)
    .await
}

/// Settles a refund as a person has decided; false when there is nothing to settle.
pub(crate) async fn write(
    desk: &Desk,
    tx: &mut PgConnection,
    taken: &Taken,
    verdict: &Verdict,
) -> Result<bool, sqlx::Error> {
    let refund = sqlx::query!(
        r#"-- refunds_to_settle
        SELECT payment_id, amount, currency, provider_key AS "provider_key!" FROM refunds
        WHERE refund_id = $1 AND provider_key IS NOT NULL"#,
        taken.id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let Some(refund) = refund else { return Ok(false) };
    let settled = Settled {
        scope: &taken.scope,
        fence: taken.fence,
        refund_id: taken.id,
        payment_id: refund.payment_id,
        amount: refund.amount,
        currency: &refund.currency,
        provider_key: &refund.provider_key,
    };
    let (namespace, problems, retention) = (&desk.namespace, &desk.problems, desk.retention);
    let settlement = Settlement::of(&settled, verdict, Witness::Operator, namespace, problems, retention);
    Ok(settlement.write(tx).await?.is_some())
}
