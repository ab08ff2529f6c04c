//! A payment that the provider told of by itself.

use semel_core::idempotency::store::Fence;
use semel_core::idempotency::{Command as _, Scope};
use sqlx::PgConnection;
use uuid::Uuid;

use super::CreatePayment;

/// A payment, by the provider's key.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) payment_id: Uuid,
    pub(crate) amount: i64,
    pub(crate) currency: String,
    /// The provider's own name for the charge, as far as it is known.
    pub(crate) reference: Option<String>,
    /// The scope of its key, and the key's last acquisition, while it is in processing.
    pub(crate) open: Option<(Scope, Fence)>,
}

/// Finds the payment of which the provider was asked under this key.
pub(crate) async fn find(
    connection: &mut PgConnection,
    provider_key: &str,
) -> Result<Option<Told>, sqlx::Error> {
    let row = sqlx::query!(
        r#"-- payments_told_of
        SELECT p.payment_id, p.client_id, p.idempotency_key, p.amount, p.currency, p.status,
               COALESCE(p.provider_reference, k.provider_reference) AS reference, k.fence AS "fence?"
        FROM payments AS p
        LEFT JOIN idempotency_keys AS k
            ON k.client_id = p.client_id AND k.operation = p.operation AND k.key = p.idempotency_key
        WHERE p.provider_key = $1"#,
        provider_key
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| {
        let scope = || {
            let (client, key) = (row.client_id.parse().ok()?, row.idempotency_key.parse().ok()?);
            Some(Scope { client, operation: CreatePayment::OPERATION, key })
        };
        let is_open = row.status == "processing";
        Told {
            payment_id: row.payment_id,
            open: scope().zip(row.fence.map(Fence)).filter(|_| is_open),
            amount: row.amount,
            currency: row.currency,
            reference: row.reference,
        }
    }))
}
