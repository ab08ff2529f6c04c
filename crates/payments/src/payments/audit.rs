//! The reverse audit of charges.

use semel_core::database;
use sqlx::PgPool;

use crate::audit::{Columns, Suspect};
use crate::provider::ListedMove;

/// Returns what is to be said of those of these succeeded charges that no row accounts for.
pub(crate) async fn orphans(pool: &PgPool, moves: &[ListedMove]) -> Result<Vec<Suspect>, sqlx::Error> {
    let listed = Columns::of(moves);
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Suspect,
            r#"-- payments_orphans
            SELECT listed.place AS "place!", payments.payment_id IS NULL AS "unknown!",
                   COALESCE(payments.status IN ('canceled', 'declined'), FALSE) AS "without!",
                   COALESCE(payments.status = 'succeeded' AND payments.provider_reference <> listed.reference, FALSE)
                       AS "another!"
            FROM unnest($1::TEXT[], $2::TEXT[], $3::BIGINT[], $4::TEXT[])
                WITH ORDINALITY AS listed (key, reference, amount, currency, place)
            LEFT JOIN payments ON payments.provider_key = listed.key COLLATE "C"
            WHERE payments.payment_id IS NULL OR payments.status IN ('canceled', 'declined')
               OR (payments.status = 'succeeded' AND payments.provider_reference <> listed.reference)
               OR payments.amount <> listed.amount OR payments.currency <> listed.currency COLLATE "C"
            ORDER BY listed.place"#,
            &listed.keys,
            &listed.references,
            &listed.amounts,
            &listed.currencies
        )
        .fetch_all(connection)
        .await
    })
    .await
}
