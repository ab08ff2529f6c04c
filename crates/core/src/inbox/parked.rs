//! The rows of `parked_events`: an event that failed, and its aggregate's events behind it, in order.
//!
//! It promises that of an aggregate at most the first row is due: [`park`] makes a row due that finds no other, [`remove`] the
//! next one. Both need the aggregate's [`lock`](super::order::lock). An attempt is counted by [`claim`], which commits before
//! the handler runs; until [`fail`] or [`excuse`] says when the next one is, the row is due again after the claim's lease, for
//! its process may have ended.

use std::time::Duration;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::order::Place;
use crate::idempotency::store::interval;

/// An event to park.
#[derive(Clone, Copy, Debug)]
pub struct NewParked<'a> {
    /// The event.
    pub event_id: Uuid,
    /// Its aggregate's version, where it is told.
    pub version: Option<i64>,
    /// What happened, where it is told.
    pub event_type: Option<&'a str>,
    /// The exchange that its message was published to.
    pub exchange: &'a str,
    /// The routing key that its message was published with.
    pub routing_key: &'a str,
    /// The message's properties and headers, as JSON.
    pub properties: &'a str,
    /// The message's body.
    pub payload: &'a [u8],
    /// Why it is parked.
    pub reason: Reason<'a>,
}

/// Why an event is parked.
#[derive(Clone, Copy, Debug)]
pub enum Reason<'a> {
    /// Its handling failed.
    Failed(Failure<'a>),
    /// An earlier event of its aggregate is parked.
    Behind,
    /// It was delivered before, and nobody knows what became of it: it may be one that ends its process.
    Redelivered,
}

impl<'a> Reason<'a> {
    const fn label(self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::Behind => "behind",
            Self::Redelivered => "redelivered",
        }
    }

    const fn failure(self) -> Option<Failure<'a>> {
        match self {
            Self::Failed(failure) => Some(failure),
            Self::Behind | Self::Redelivered => None,
        }
    }
}

/// A failed attempt.
#[derive(Clone, Copy, Debug)]
pub struct Failure<'a> {
    /// What was said of it, at most 1,024 bytes.
    pub error: &'a str,
    /// How many attempts there have been, this one included.
    pub attempts: i32,
    /// How long until the next one.
    pub retry_in: Duration,
}

/// An event that is parked, and claimed by whoever holds this.
#[derive(Clone, Debug)]
pub struct Parked {
    /// Its place in the order.
    pub parked_id: i64,
    /// The event.
    pub event_id: Uuid,
    /// What kind of thing it happened to.
    pub aggregate_type: String,
    /// Which one it happened to.
    pub aggregate_id: String,
    /// The exchange that its message was published to.
    pub exchange: String,
    /// The routing key that its message was published with.
    pub routing_key: String,
    /// The message's properties and headers, as JSON.
    pub properties: String,
    /// The message's body.
    pub payload: Vec<u8>,
    /// How often its handling was begun, this attempt included.
    pub attempts: i32,
    /// When its handling failed first.
    pub first_failed_at: Option<OffsetDateTime>,
}

/// Parks an event behind those of its aggregate that are parked, or as the first one. The aggregate is locked.
///
/// # Errors
///
/// When the database fails.
pub async fn park(
    connection: &mut PgConnection,
    place: Place<'_>,
    event: &NewParked<'_>,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- parked_park
        INSERT INTO parked_events (
            consumer, aggregate_type, aggregate_id, event_id, aggregate_version, event_type, exchange, routing_key,
            properties, payload, reason, error, attempts, first_failed_at, last_failed_at, next_attempt_at
        )
        SELECT $1, $2, $3, $4, $5, $6, $7, $8,
               $9::TEXT::JSON, $10, $14, $11::TEXT, $12,
               CASE WHEN $14 = 'failed' THEN clock_timestamp() END,
               CASE WHEN $14 = 'failed' THEN clock_timestamp() END,
               CASE WHEN NOT EXISTS (
                   SELECT FROM parked_events WHERE consumer = $1 AND aggregate_type = $2 AND aggregate_id = $3
               ) THEN clock_timestamp() + $13::INTERVAL END",
        place.consumer,
        place.kind,
        place.id,
        event.event_id,
        event.version,
        event.event_type,
        event.exchange,
        event.routing_key,
        event.properties,
        event.payload,
        event.reason.failure().map(|failure| failure.error),
        event.reason.failure().map_or(0, |failure| failure.attempts),
        interval(event.reason.failure().map(|failure| failure.retry_in).unwrap_or_default()),
        event.reason.label()
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Says whether at least this many events of the consumer are parked.
///
/// # Errors
///
/// When the database fails.
pub async fn is_full(connection: &mut PgConnection, consumer: &str, limit: i64) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- parked_is_full
        SELECT count(*) >= $2 AS "is_full!" FROM (SELECT FROM parked_events WHERE consumer = $1 LIMIT $2) AS counted"#,
        consumer,
        limit
    )
    .fetch_one(connection)
    .await
}

/// Whether the end of an event's last attempt is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Suspicion {
    /// It is.
    None,
    /// It is not: the event may be one that ends its process, and with it what is handled beside it.
    Suspect,
}

/// Says whether there are suspects among the events that are due.
///
/// # Errors
///
/// When the database fails.
pub async fn has_suspect(connection: &mut PgConnection, consumer: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- parked_has_suspect
        SELECT EXISTS (
            SELECT FROM parked_events WHERE consumer = $1 AND is_under_way AND next_attempt_at <= now()
        ) AS "has_suspect!""#,
        consumer
    )
    .fetch_one(connection)
    .await
}

/// Takes events that are due, the longest due first, counts an attempt at each, and makes them due again after `lease`.
///
/// # Errors
///
/// When the database fails.
pub async fn claim(
    connection: &mut PgConnection,
    consumer: &str,
    suspicion: Suspicion,
    lease: Duration,
    limit: i64,
) -> Result<Vec<Parked>, sqlx::Error> {
    sqlx::query_as!(
        Parked,
        r#"-- parked_claim
        WITH due AS (
            SELECT parked_id FROM parked_events
            WHERE consumer = $1 AND is_under_way = $4 AND next_attempt_at <= now()
            ORDER BY next_attempt_at
            LIMIT $3
            FOR UPDATE SKIP LOCKED
        )
        UPDATE parked_events
        SET attempts = attempts + 1, is_under_way = true, next_attempt_at = clock_timestamp() + $2::INTERVAL
        FROM due
        WHERE parked_events.parked_id = due.parked_id
        RETURNING parked_events.parked_id, event_id, aggregate_type, aggregate_id, exchange, routing_key,
                  properties::TEXT AS "properties!", payload, attempts, first_failed_at"#,
        consumer,
        interval(lease),
        limit,
        suspicion == Suspicion::Suspect
    )
    .fetch_all(connection)
    .await
}

/// Says whether nobody has claimed or removed the event since this attempt was counted.
///
/// # Errors
///
/// When the database fails.
pub async fn is_held(
    connection: &mut PgConnection,
    parked_id: i64,
    attempts: i32,
) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- parked_is_held
        SELECT EXISTS (SELECT FROM parked_events WHERE parked_id = $1 AND attempts = $2) AS "is_held!""#,
        parked_id,
        attempts
    )
    .fetch_one(connection)
    .await
}

/// Keeps the event to whoever counted this attempt for another `lease`. Says whether nobody has claimed or removed it since.
///
/// # Errors
///
/// When the database fails.
pub async fn hold(
    connection: &mut PgConnection,
    parked_id: i64,
    attempts: i32,
    lease: Duration,
) -> Result<bool, sqlx::Error> {
    let held = sqlx::query!(
        "-- parked_hold
        UPDATE parked_events SET next_attempt_at = clock_timestamp() + $3::INTERVAL
        WHERE parked_id = $1 AND attempts = $2 AND is_under_way",
        parked_id,
        attempts,
        interval(lease)
    )
    .execute(connection)
    .await?;
    Ok(held.rows_affected() == 1)
}

/// How many events of a consumer are parked, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backlog {
    /// How many.
    pub events: i64,
    /// For how long the longest one has been, in seconds; 0 where there are none.
    pub oldest_seconds: f64,
}

/// Counts what is parked.
///
/// # Errors
///
/// When the database fails.
pub async fn backlog(connection: &mut PgConnection, consumer: &str) -> Result<Backlog, sqlx::Error> {
    sqlx::query_as!(
        Backlog,
        r#"-- parked_backlog
        SELECT count(*) AS "events!",
               coalesce(extract(EPOCH FROM clock_timestamp() - min(parked_at)), 0)::FLOAT8 AS "oldest_seconds!"
        FROM parked_events WHERE consumer = $1"#,
        consumer
    )
    .fetch_one(connection)
    .await
}

/// Removes an event, and makes the next one of its aggregate due. The aggregate is locked. Says whether it was there.
///
/// # Errors
///
/// When the database fails.
pub async fn remove(
    connection: &mut PgConnection,
    place: Place<'_>,
    parked_id: i64,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- parked_remove
        DELETE FROM parked_events WHERE parked_id = $1",
        parked_id
    )
    .execute(&mut *connection)
    .await?;
    sqlx::query!(
        "-- parked_promote
        UPDATE parked_events SET next_attempt_at = clock_timestamp()
        WHERE next_attempt_at IS NULL AND parked_id = (
            SELECT min(parked_id) FROM parked_events
            WHERE consumer = $1 AND aggregate_type = $2 AND aggregate_id = $3
        )",
        place.consumer,
        place.kind,
        place.id
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Notes that the attempt failed, and when the next one is. Nothing if somebody else has claimed the event since.
///
/// # Errors
///
/// When the database fails.
pub async fn fail(
    connection: &mut PgConnection,
    parked_id: i64,
    failure: Failure<'_>,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- parked_fail
        UPDATE parked_events
        SET reason = 'failed', error = $3, is_under_way = false, last_failed_at = clock_timestamp(),
            first_failed_at = coalesce(first_failed_at, clock_timestamp()),
            next_attempt_at = clock_timestamp() + $4::INTERVAL
        WHERE parked_id = $1 AND attempts = $2",
        parked_id,
        failure.attempts,
        failure.error,
        interval(failure.retry_in)
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Takes an attempt back that said nothing of the event, and says when the next one is. Nothing if somebody else has claimed
/// the event since.
///
/// # Errors
///
/// When the database fails.
pub async fn excuse(
    connection: &mut PgConnection,
    parked_id: i64,
    attempts: i32,
    retry_in: Duration,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- parked_excuse
        UPDATE parked_events
        SET attempts = attempts - 1, is_under_way = false, next_attempt_at = clock_timestamp() + $3::INTERVAL
        WHERE parked_id = $1 AND attempts = $2",
        parked_id,
        attempts,
        interval(retry_in)
    )
    .execute(connection)
    .await
    .map(drop)
}
