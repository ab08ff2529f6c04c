//! The reverse audit: what the provider says it charged and gave back, against the payments and their refunds.

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
    /// More of it was given back than its payment's refunds took.
    RefundedBeyond,
}

/// Returns those of these succeeded charges that belong to no payment, or of which more was given back than refunds took.
///
/// Payment and refund are committed before their requests go out, so what was listed before this is asked cannot precede
/// them.
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
    let refunded: Vec<_> = charges.iter().map(|charge| charge.refunded).collect();
    let rows = database::call(pool, async |connection| {
        sqlx::query!(
            r#"-- payments_orphans
        SELECT listed.place AS "place!", payments.payment_id IS NULL AS "unknown!",
               COALESCE(payments.status IN ('canceled', 'declined'), FALSE) AS "without!",
               COALESCE(payments.provider_reference <> listed.reference, FALSE) AS "another!"
        FROM unnest($1::TEXT[], $2::TEXT[], $3::BIGINT[]) WITH ORDINALITY AS listed (key, reference, refunded, place)
        LEFT JOIN payments ON payments.provider_key = listed.key COLLATE "C"
        WHERE payments.payment_id IS NULL OR payments.status IN ('canceled', 'declined')
           OR (payments.status = 'succeeded' AND payments.provider_reference <> listed.reference)
           OR payments.refund_reserved < listed.refunded
        ORDER BY listed.place"#,
            &keys,
            &references,
            &refunded
        )
        .fetch_all(connection)
        .await
    })
    .await?;
    let mut charges: Vec<_> = charges.into_iter().map(Some).collect();
    let found = rows.into_iter().filter_map(|row| {
        let place = usize::try_from(row.place).ok()?.checked_sub(1)?;
        let why = match (row.unknown, row.without, row.another) {
            (true, ..) => Orphan::NoPayment,
            (false, true, _) => Orphan::SettledWithout,
            (false, false, true) => Orphan::SettledByAnother,
            (false, false, false) => Orphan::RefundedBeyond,
        };
        Some((charges.get_mut(place)?.take()?, why))
    });
    Ok(found.collect())
}
