//! A refund that the provider told of by itself.

use semel_core::idempotency::store::Fence;
use semel_core::idempotency::{Command as _, Scope};
use sqlx::PgConnection;
use uuid::Uuid;

use super::CreateRefund;

/// A refund, by the provider's key.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) refund_id: Uuid,
    pub(crate) payment_id: Uuid,
    pub(crate) amount: i64,
    pub(crate) currency: String,
    /// The provider's own name for the charge that it is of.
    pub(crate) charge: Option<String>,
    /// The provider's own name for it, once it is settled.
    pub(crate) reference: Option<String>,
    /// The scope of its key, and the key's last acquisition, while it is in processing.
    pub(crate) open: Option<(Scope, Fence)>,
}

/// Finds the refund of which the provider was asked under this key.
pub(crate) async fn find(
    connection: &mut PgConnection,
    provider_key: &str,
) -> Result<Option<Told>, sqlx::Error> {
    let row = sqlx::query!(
        r#"-- refunds_told_of
        SELECT r.refund_id, r.payment_id, r.client_id, r.idempotency_key, r.amount, r.currency, r.status,
               r.provider_reference AS reference, p.provider_reference AS charge, k.fence AS "fence?"
        FROM refunds AS r JOIN payments AS p ON p.payment_id = r.payment_id
        LEFT JOIN idempotency_keys AS k
            ON k.client_id = r.client_id AND k.operation = r.operation AND k.key = r.idempotency_key
        WHERE r.provider_key = $1"#,
        provider_key
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| {
        let scope = || {
            let (client, key) = (row.client_id.parse().ok()?, row.idempotency_key.parse().ok()?);
            Some(Scope { client, operation: CreateRefund::OPERATION, key })
        };
        let is_open = row.status == "processing";
        Told {
            refund_id: row.refund_id,
            payment_id: row.payment_id,
            open: scope().zip(row.fence.map(Fence)).filter(|_| is_open),
            amount: row.amount,
            currency: row.currency,
            charge: row.charge,
            reference: row.reference,
        }
    }))
}
