//! What people see of parked events, and what they decide about them.

use std::time::Duration;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::idempotency::store::interval;

/// Which parked events are meant: those that all of this holds for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Filter {
    /// Parked because they `failed`, `behind` another or when they were `redelivered`; for any, if none is named.
    pub reason: Option<String>,
    /// Of this type.
    pub event_type: Option<String>,
    /// Of aggregates of this type.
    pub aggregate_type: Option<String>,
    /// Of the aggregate of this id.
    pub aggregate_id: Option<String>,
    /// Parked before that long.
    pub older_than: Option<Duration>,
}

/// A parked event, but for its payload.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// Its place in the order.
    pub parked_id: i64,
    /// The event.
    pub event_id: Uuid,
    /// What kind of thing it happened to.
    pub aggregate_type: String,
    /// Which one it happened to.
    pub aggregate_id: String,
    /// The aggregate's version, where it is told.
    pub aggregate_version: Option<i64>,
    /// What happened, where it is told.
    pub event_type: Option<String>,
    /// `failed`, `behind` or `redelivered`.
    pub reason: String,
    /// What the handler said last.
    pub error: Option<String>,
    /// How often its handling was begun.
    pub attempts: i32,
    /// When it was parked.
    pub parked_at: OffsetDateTime,
    /// When its handling failed first.
    pub first_failed_at: Option<OffsetDateTime>,
    /// When its handling failed last.
    pub last_failed_at: Option<OffsetDateTime>,
    /// When it is tried next; none while it waits behind another.
    pub next_attempt_at: Option<OffsetDateTime>,
    /// The size of its payload in bytes.
    pub payload_bytes: i32,
}

/// Lists the consumer's parked events by aggregate and in their order, behind `after`, at most `limit`.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    connection: &mut PgConnection,
    consumer: &str,
    filter: &Filter,
    after: Option<&Waiting>,
    limit: i64,
) -> Result<Vec<Waiting>, sqlx::Error> {
    sqlx::query_as!(
        Waiting,
        r#"-- parked_list
        SELECT parked_id, event_id, aggregate_type, aggregate_id, aggregate_version, event_type, reason, error, attempts,
               parked_at, first_failed_at, last_failed_at, next_attempt_at, octet_length(payload) AS "payload_bytes!"
        FROM parked_events
        WHERE consumer = $1
          AND ($2::TEXT IS NULL OR reason = $2)
          AND ($3::TEXT IS NULL OR event_type = $3)
          AND ($4::TEXT IS NULL OR aggregate_type = $4)
          AND ($5::TEXT IS NULL OR aggregate_id = $5)
          AND ($6::INTERVAL IS NULL OR parked_at < clock_timestamp() - $6)
          AND ($7::TEXT IS NULL OR (aggregate_type, aggregate_id, parked_id) > ($7, $8::TEXT, $9::BIGINT))
        ORDER BY aggregate_type, aggregate_id, parked_id
        LIMIT $10"#,
        consumer,
        filter.reason.as_deref(),
        filter.event_type.as_deref(),
        filter.aggregate_type.as_deref(),
        filter.aggregate_id.as_deref(),
        filter.older_than.map(interval) as _,
        after.map(|row| row.aggregate_type.as_str()),
        after.map(|row| row.aggregate_id.as_str()),
        after.map(|row| row.parked_id),
        limit
    )
    .fetch_all(connection)
    .await
}

/// Finds one parked event of the consumer.
///
/// # Errors
///
/// When the database fails.
pub async fn find(
    connection: &mut PgConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<Option<Waiting>, sqlx::Error> {
    sqlx::query_as!(
        Waiting,
        r#"-- parked_find
        SELECT parked_id, event_id, aggregate_type, aggregate_id, aggregate_version, event_type, reason, error, attempts,
               parked_at, first_failed_at, last_failed_at, next_attempt_at, octet_length(payload) AS "payload_bytes!"
        FROM parked_events
        WHERE consumer = $1 AND event_id = $2"#,
        consumer,
        event_id
    )
    .fetch_optional(connection)
    .await
}

/// Reads the payload of a parked event.
///
/// # Errors
///
/// When the database fails.
pub async fn payload(connection: &mut PgConnection, parked_id: i64) -> Result<Option<Vec<u8>>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- parked_payload
        SELECT payload FROM parked_events WHERE parked_id = $1",
        parked_id
    )
    .fetch_optional(connection)
    .await
}

/// Makes a parked event due at once, as if it had never been tried. Says whether it is there and first of its aggregate: one
/// behind another has nothing to retry. Whoever is trying it at the time finds that it is not theirs any more.
///
/// # Errors
///
/// When the database fails.
pub async fn retry(connection: &mut PgConnection, parked_id: i64) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- parked_retry
        UPDATE parked_events SET next_attempt_at = clock_timestamp(), attempts = 0
        WHERE parked_id = $1 AND next_attempt_at IS NOT NULL",
        parked_id
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}
