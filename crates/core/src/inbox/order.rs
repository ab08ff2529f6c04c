//! Effects of an aggregate's events in their order: what a transaction locks and looks at before, and writes after.
//!
//! It promises that of one aggregate's events at most one is at work per consumer, in whatever process, and that one which
//! comes after a later one is seen to. [`lock`] comes first, in a statement of its own: [`look`] is then younger than the lock
//! and sees what its last holder has committed.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::idempotency::store::interval;
use crate::walk::Blocks;

/// An aggregate as one consumer sees it.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The consumer's name.
    pub consumer: &'a str,
    /// What kind of thing it is, 1 to 255 bytes.
    pub kind: &'a str,
    /// Which one, 1 to 255 bytes.
    pub id: &'a str,
}

impl Place<'_> {
    /// What the lock's number is made of. The lengths keep `("a", "bc")` and `("ab", "c")` apart; two aggregates that share a
    /// number only wait for each other.
    fn name(&self) -> String {
        format!("{}:{}:{}:{}{}", self.consumer.len(), self.kind.len(), self.consumer, self.kind, self.id)
    }
}

/// What is known of an event and its aggregate.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Standing {
    /// The event took effect.
    pub is_processed: bool,
    /// The event is parked.
    pub is_parked: bool,
    /// Events of the aggregate are parked.
    pub has_parked: bool,
    /// The aggregate's last version that took effect, where versions are told.
    pub last_version: Option<i64>,
}

/// Waits until this transaction alone may take effect of the aggregate's events, at most for its `lock_timeout`.
///
/// # Errors
///
/// When the database fails, or the holder takes longer.
pub async fn lock(connection: &mut PgConnection, place: Place<'_>) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- inbox_lock
        SELECT pg_advisory_xact_lock(hashtextextended($1, 0))",
        place.name()
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Looks at where an event and its aggregate stand, behind the [`lock`].
///
/// # Errors
///
/// When the database fails.
pub async fn look(
    connection: &mut PgConnection,
    place: Place<'_>,
    event_id: Uuid,
) -> Result<Standing, sqlx::Error> {
    sqlx::query_as!(
        Standing,
        r#"-- inbox_look
        SELECT EXISTS (SELECT FROM processed_events WHERE consumer = $1 AND event_id = $4) AS "is_processed!",
               EXISTS (SELECT FROM parked_events WHERE consumer = $1 AND event_id = $4) AS "is_parked!",
               EXISTS (
                   SELECT FROM parked_events WHERE consumer = $1 AND aggregate_type = $2 AND aggregate_id = $3
               ) AS "has_parked!",
               (
                   SELECT version FROM aggregate_versions
                   WHERE consumer = $1 AND aggregate_type = $2 AND aggregate_id = $3
               ) AS last_version"#,
        place.consumer,
        place.kind,
        place.id,
        event_id
    )
    .fetch_one(connection)
    .await
}

/// Notes the version that takes effect in this transaction; a lower one than before changes nothing.
///
/// # Errors
///
/// When the database fails.
pub async fn advance(
    connection: &mut PgConnection,
    place: Place<'_>,
    version: i64,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- inbox_advance
        INSERT INTO aggregate_versions (consumer, aggregate_type, aggregate_id, version) VALUES ($1, $2, $3, $4)
        ON CONFLICT (consumer, aggregate_type, aggregate_id) DO UPDATE
        SET version = excluded.version, effect_at = excluded.effect_at
        WHERE aggregate_versions.version <= excluded.version",
        place.consumer,
        place.kind,
        place.id,
        version
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Forgets versions of these blocks that took effect longer than `age` ago, at most `limit`. Returns how many went.
///
/// An event of the aggregate that comes late after that takes effect: `age` must exceed the longest redelivery.
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
        "-- inbox_reap_versions
        DELETE FROM aggregate_versions WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM aggregate_versions
            WHERE ctid >= format('(%s,0)', $1::BIGINT)::TID AND ctid < format('(%s,0)', $2::BIGINT)::TID
              AND effect_at < clock_timestamp() - $3::INTERVAL
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
