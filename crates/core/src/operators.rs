//! The rows of `operator_actions`: what a person did by command, and why.

use std::time::Duration;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::idempotency::store::interval;
use crate::walk::Blocks;

/// What a person does.
#[derive(Clone, Copy, Debug)]
pub struct Action<'a> {
    /// Who, 1 to 255 bytes.
    pub actor: &'a str,
    /// Which command, 1 to 127 bytes.
    pub action: &'a str,
    /// On what, 1 to 1024 bytes.
    pub subject: &'a str,
    /// Why, 1 to 4096 bytes.
    pub reason: &'a str,
}

/// Records an action, in the transaction of what it does. Returns the entry's identity.
///
/// # Errors
///
/// When the database fails, or refuses a text by its length.
pub async fn record(connection: &mut PgConnection, action: &Action<'_>) -> Result<Uuid, sqlx::Error> {
    sqlx::query_scalar!(
        "-- operator_actions_record
        INSERT INTO operator_actions (actor, action, subject, reason) VALUES ($1, $2, $3, $4) RETURNING action_id",
        action.actor,
        action.action,
        action.subject,
        action.reason
    )
    .fetch_one(connection)
    .await
}

/// What a person does to many things at once.
#[derive(Clone, Copy, Debug)]
pub struct Deeds<'a> {
    /// Who, 1 to 255 bytes.
    pub actor: &'a str,
    /// Which command, 1 to 127 bytes.
    pub action: &'a str,
    /// On what, each 1 to 1024 bytes.
    pub subjects: &'a [String],
    /// Why, 1 to 4096 bytes.
    pub reason: &'a str,
}

/// Records an action on each of its subjects, in the transaction of what it does.
///
/// # Errors
///
/// When the database fails, or refuses a text by its length.
pub async fn record_all(connection: &mut PgConnection, deeds: &Deeds<'_>) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- operator_actions_record_all
        INSERT INTO operator_actions (actor, action, subject, reason)
        SELECT $1, $2, subject, $4 FROM unnest($3::TEXT[]) AS subjects (subject)",
        deeds.actor,
        deeds.action,
        deeds.subjects,
        deeds.reason
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Deletes entries of these blocks that are older than `age`, at most `limit`. Returns how many went.
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
        "-- operator_actions_reap
        DELETE FROM operator_actions WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM operator_actions
            WHERE ctid >= format('(%s,0)', $1::BIGINT)::TID AND ctid < format('(%s,0)', $2::BIGINT)::TID
              AND acted_at < clock_timestamp() - $3::INTERVAL
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
