//! The reverse audit of refunds.

use semel_core::database;
use sqlx::PgPool;

use crate::audit::{Columns, Suspect};
use crate::provider::ListedMove;

/// Returns what is to be said of those of these succeeded refunds that no row accounts for.
pub(crate) async fn orphans(pool: &PgPool, moves: &[ListedMove]) -> Result<Vec<Suspect>, sqlx::Error> {
    let listed = Columns::of(moves);
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Suspect,
            r#"-- refunds_orphans
            SELECT listed.place AS "place!", refunds.refund_id IS NULL AS "unknown!",
                   COALESCE(refunds.status = 'failed', FALSE) AS "without!",
                   COALESCE(refunds.status = 'succeeded' AND refunds.provider_reference <> listed.reference, FALSE)
                       AS "another!"
            FROM unnest($1::TEXT[], $2::TEXT[], $3::BIGINT[], $4::TEXT[])
                WITH ORDINALITY AS listed (key, reference, amount, currency, place)
            LEFT JOIN refunds ON refunds.provider_key = listed.key COLLATE "C"
            WHERE refunds.refund_id IS NULL OR refunds.status = 'failed'
               OR (refunds.status = 'succeeded' AND refunds.provider_reference <> listed.reference)
               OR refunds.amount <> listed.amount OR refunds.currency <> listed.currency COLLATE "C"
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
