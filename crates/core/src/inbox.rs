//! Once-only effects of a consumer: a row per consumer and event, in the effect's own transaction.
//!
//! [`order`] and [`parked`] are for a consumer that takes effect of an aggregate's events in their order, [`operator`] for people
//! who look at what is parked.

pub mod operator;
pub mod order;
pub mod parked;

use std::time::Duration;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::idempotency::store::interval;
use crate::walk::Blocks;

/// Says whether an event may take effect in this transaction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Recorded {
    /// It had no effect yet: go on.
    First,
    /// It has taken effect: write nothing.
    Duplicate,
}

/// Records that `consumer` takes effect of the event, in the caller's transaction and before the effect.
///
/// A concurrent twin is waited for: the insert blocks on the other's uncommitted row, and this one goes first when the
/// other rolls back. Checking first and inserting later would let both take effect.
///
/// # Errors
///
/// When the database fails, or the twin takes longer than `lock_timeout`.
pub async fn record_once(
    connection: &mut PgConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<Recorded, sqlx::Error> {
    let done = sqlx::query!(
        "-- inbox_record_once
        INSERT INTO processed_events (consumer, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        consumer,
        event_id
    )
    .execute(connection)
    .await?;
    Ok(if done.rows_affected() == 1 { Recorded::First } else { Recorded::Duplicate })
}

/// As [`record_once`], for several events at once, whose ids differ; returns those that had no effect yet.
///
/// The rows are inserted in the order of the ids, so that of two such calls that share events one waits for the other, and
/// neither for ever.
///
/// # Errors
///
/// As [`record_once`].
pub async fn record_all(
    connection: &mut PgConnection,
    consumer: &str,
    event_ids: &[Uuid],
) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- inbox_record_all
        INSERT INTO processed_events (consumer, event_id)
        SELECT $1, event_id FROM unnest($2::UUID[]) AS given (event_id) ORDER BY event_id
        ON CONFLICT DO NOTHING
        RETURNING event_id",
        consumer,
        event_ids
    )
    .fetch_all(connection)
    .await
}

/// When `consumer` took effect of the event, if it did and remembers.
///
/// For people to look at. To decide by it whether to take effect would be a race: [`record_once`] does not have it.
///
/// # Errors
///
/// When the database fails.
pub async fn find(
    connection: &mut PgConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- inbox_find
        SELECT processed_at FROM processed_events WHERE consumer = $1 AND event_id = $2",
        consumer,
        event_id
    )
    .fetch_optional(connection)
    .await
}

/// Forgets events of these blocks that took effect longer than `age` ago, at most `limit`. Returns how many went.
///
/// An event that is delivered once more after that takes effect once more: `age` must exceed the longest redelivery.
///
/// # Errors
///
/// When the database fails.
pub async fn reap(
    connection: &mut PgConnection,
    blocks: Blocks,
    age: Duration,
    limit: i64,
) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "-- inbox_reap
        DELETE FROM processed_events WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM processed_events
            WHERE ctid >= format('(%s,0)', $1::BIGINT)::TID AND ctid < format('(%s,0)', $2::BIGINT)::TID
              AND processed_at < clock_timestamp() - $3::INTERVAL
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
