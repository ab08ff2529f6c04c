//! Deleting evidence past its retention; payments and refunds themselves stay, since a key's use is remembered for life.

use std::time::Duration;

use semel_core::idempotency::store::interval;
use semel_core::walk::Blocks;
use sqlx::PgConnection;

/// Deletes evidence of these blocks that is older than `age` and whose payment or refund is settled, at most `limit`. Returns how
/// many went.
///
/// # Errors
///
/// When the database fails.
pub async fn reap_evidence(
    connection: &mut PgConnection,
    blocks: Blocks,
    age: Duration,
    limit: i64,
) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "-- provider_answers_reap
        DELETE FROM provider_answers WHERE ctid = ANY (ARRAY (
            SELECT answers.ctid FROM provider_answers AS answers
            WHERE answers.ctid >= format('(%s,0)', $1::BIGINT)::TID AND answers.ctid < format('(%s,0)', $2::BIGINT)::TID
              AND answers.answered_at < clock_timestamp() - $3::INTERVAL
              AND EXISTS (
                SELECT FROM payments WHERE payments.payment_id = answers.payment_id AND payments.status <> 'processing'
              )
              AND (answers.refund_id IS NULL OR EXISTS (
                SELECT FROM refunds WHERE refunds.refund_id = answers.refund_id AND refunds.status <> 'processing'
              ))
            LIMIT $4
            FOR UPDATE OF answers SKIP LOCKED
        ))",
        blocks.first,
        blocks.end,
        interval(age),
        limit
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected())
}
