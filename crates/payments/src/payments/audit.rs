//! The reverse audit: what the provider says it charged, against the payments.

use semel_core::database;
use sqlx::PgPool;

use crate::provider::ListedCharge;

/// Why a charge is nobody's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Orphan {
    /// No payment was ever asked for under its key.
    NoPayment,
    /// Its payment was settled without a charge.
    SettledWithout,
    /// Its payment was settled by another charge: the provider has charged twice.
    SettledByAnother,
}

/// Returns those of these succeeded charges that belong to no payment.
///
/// A payment is committed before its request goes out, so a charge that was listed before this is asked cannot precede
/// its payment.
///
/// # Errors
///
/// When the database fails.
pub async fn orphans(
    pool: &PgPool,
    charges: Vec<ListedCharge>,
) -> Result<Vec<(ListedCharge, Orphan)>, sqlx::Error> {
    let (keys, references): (Vec<_>, Vec<_>) =
        charges.iter().map(|charge| (charge.key.clone(), charge.reference.clone())).unzip();
    let rows = database::call(pool, async |connection| {
        sqlx::query!(
            r#"-- payments_orphans
        SELECT listed.place AS "place!", payments.payment_id IS NULL AS "unknown!",
               COALESCE(payments.status IN ('canceled', 'declined'), FALSE) AS "without!"
        FROM unnest($1::TEXT[], $2::TEXT[]) WITH ORDINALITY AS listed (key, reference, place)
        LEFT JOIN payments ON payments.provider_key = listed.key COLLATE "C"
        WHERE payments.payment_id IS NULL OR payments.status IN ('canceled', 'declined')
           OR (payments.status = 'succeeded' AND payments.provider_reference <> listed.reference)
        ORDER BY listed.place"#,
            &keys,
            &references
        )
        .fetch_all(connection)
        .await
    })
    .await?;
    let mut charges: Vec<_> = charges.into_iter().map(Some).collect();
    let found = rows.into_iter().filter_map(|row| {
        let place = usize::try_from(row.place).ok()?.checked_sub(1)?;
        let why = match (row.unknown, row.without) {
            (true, _) => Orphan::NoPayment,
            (false, true) => Orphan::SettledWithout,
            (false, false) => Orphan::SettledByAnother,
        };
        Some((charges.get_mut(place)?.take()?, why))
    });
    Ok(found.collect())
}
