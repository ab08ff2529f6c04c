//! Once-only effects of a consumer: a row per consumer and event, in the effect's own transaction.

use sqlx::PgConnection;
use uuid::Uuid;

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
