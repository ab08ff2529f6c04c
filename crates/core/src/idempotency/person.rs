//! Keys that wait for a person: which they are, how one stands, and taking one to decide about it.
//!
//! Nothing here returns a key's text, the command or a response: a key lets its holder read an answer, and a command may
//! hold a secret. A key is told from another by its hash.

use std::time::Duration;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::store::{Fence, StuckKey, interval};

/// A key that waits for a person.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The account.
    pub client_id: String,
    /// The operation.
    pub operation: String,
    /// The resource that it makes or changes.
    pub resource_id: Uuid,
    /// Where its execution stopped.
    pub recovery_point: String,
    /// Since when it waits.
    pub since: OffsetDateTime,
    /// For how many seconds it has waited.
    pub waited_s: i64,
    /// Why.
    pub reason: String,
}

/// Returns the keys that wait for a person, those that wait longest first, at most `limit`.
///
/// # Errors
///
/// When the database fails.
pub async fn waiting(connection: &mut PgConnection, limit: i64) -> Result<Vec<Waiting>, sqlx::Error> {
    sqlx::query_as!(
        Waiting,
        r#"-- idempotency_waiting_for_person
        SELECT client_id, operation, resource_id, recovery_point, needs_person_at AS "since!",
               EXTRACT(EPOCH FROM clock_timestamp() - needs_person_at)::BIGINT AS "waited_s!",
               needs_person_reason AS "reason!"
        FROM idempotency_keys
        WHERE status = 'in_progress' AND needs_person_at IS NOT NULL
        ORDER BY needs_person_at, client_id, operation, key
        LIMIT $1"#,
        limit
    )
    .fetch_all(connection)
    .await
}

/// How a key stands, for a person to read.
#[derive(Clone, Debug)]
pub struct Standing {
    /// SHA-256 of the key's text, in hex.
    pub key_sha256: String,
    /// `in_progress` or `completed`.
    pub status: String,
    /// How far its execution is known to have come.
    pub recovery_point: String,
    /// The current acquisition.
    pub fence: i64,
    /// Acquisitions so far.
    pub attempts: i32,
    /// Until when its owner is believed to be at work.
    pub lease_until: Option<OffsetDateTime>,
    /// When recovery looks at it again.
    pub next_check_at: Option<OffsetDateTime>,
    /// Since when it waits for a person.
    pub needs_person_at: Option<OffsetDateTime>,
    /// Why it does.
    pub needs_person_reason: Option<String>,
    /// The request that claimed it.
    pub request_id: Uuid,
    /// When its request was first about to be sent to the provider.
    pub provider_first_sent_at: Option<OffsetDateTime>,
    /// Status of the stored response.
    pub response_code: Option<i16>,
    /// When it was claimed first.
    pub created_at: OffsetDateTime,
    /// When its outcome became final.
    pub completed_at: Option<OffsetDateTime>,
    /// From when it is no longer replayed.
    pub expires_at: Option<OffsetDateTime>,
}

/// Returns how a key stands; none when it is not there, or no more.
///
/// # Errors
///
/// When the database fails.
pub async fn standing(
    connection: &mut PgConnection,
    client_id: &str,
    operation: &str,
    key: &str,
) -> Result<Option<Standing>, sqlx::Error> {
    sqlx::query_as!(
        Standing,
        r#"-- idempotency_standing
        SELECT encode(sha256(convert_to(key, 'UTF8')), 'hex') AS "key_sha256!", status, recovery_point, fence, attempts,
               lease_until, next_check_at, needs_person_at, needs_person_reason, request_id, provider_first_sent_at,
               response_code, created_at, completed_at, expires_at
        FROM idempotency_keys
        WHERE client_id = $1 AND operation = $2 AND key = $3"#,
        client_id,
        operation,
        key
    )
    .fetch_optional(connection)
    .await
}

/// Takes the key of a resource that waits for a person, in the transaction that decides about it.
///
/// Returns none when it does not wait. A second decision waits for the first, and then finds that.
///
/// # Errors
///
/// When the database fails.
pub async fn take(
    connection: &mut PgConnection,
    operation: &str,
    resource_id: Uuid,
    lease: Duration,
) -> Result<Option<StuckKey>, sqlx::Error> {
    let row = sqlx::query!(
        "-- idempotency_take_for_person
        UPDATE idempotency_keys
        SET fence = nextval('idempotency_fence'), lease_until = clock_timestamp() + $3, attempts = attempts + 1
        WHERE resource_id = $2 AND operation = $1 AND status = 'in_progress' AND needs_person_at IS NOT NULL
        RETURNING client_id, operation, key, fence",
        operation,
        resource_id,
        interval(lease)
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| StuckKey {
        client_id: row.client_id,
        operation: row.operation,
        key: row.key,
        fence: Fence(row.fence),
    }))
}
