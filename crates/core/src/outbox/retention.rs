//! Deleting events past their retention: published ones, and those that a person discarded.
//!
//! The walk goes by blocks (see [`walk`](crate::walk)), since no index but the hot one may know the events' order. Any
//! other event never goes, whatever its age: not one that waits, nor one that is held or dead.

use std::time::Duration;

use sqlx::PgConnection;

use crate::idempotency::store::interval;
use crate::walk::Blocks;

/// Deletes events of these blocks that were published or discarded longer than `age` ago, at most `limit`. Returns how many
/// went.
///
/// # Errors
///
/// When the database fails.
pub async fn reap_published(
    connection: &mut PgConnection,
    blocks: Blocks,
    age: Duration,
    limit: i64,
) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "-- outbox_reap_published
        DELETE FROM outbox WHERE COALESCE(published_at, discarded_at) IS NOT NULL AND ctid = ANY (ARRAY (
            SELECT ctid FROM outbox
            WHERE ctid >= format('(%s,0)', $1::BIGINT)::TID AND ctid < format('(%s,0)', $2::BIGINT)::TID
              AND COALESCE(published_at, discarded_at) < clock_timestamp() - $3::INTERVAL
            LIMIT $4
            FOR UPDATE SKIP LOCKED
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
