//! The outbox: events written with the change they tell of, and drained by relays.
//!
//! Promise: no event without its change, no change without its event; and within an aggregate, the order of ids is the
//! order of commits, provided that a producer appends *after* it has locked or written the aggregate's own row. The id is
//! drawn by the INSERT, so whoever holds the aggregate's lock draws the higher one.
//!
//! [`append`] is for producers, [`hint`] for those who have committed, [`drain`] and [`held`] for relays, [`operator`] for
//! people, [`retention`] for the reaper, [`sample`] for the gauges.

pub mod drain;
pub mod held;
pub mod hint;
pub mod operator;
pub mod retention;

use metrics::gauge;
use serde_json::{Map, Value};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::{database, metrics as names};
use drain::Floors;

/// An event that is about to be appended. The database refuses what a broker could not carry: names of more than 127
/// bytes, headers over 32 KiB, a payload over 1 MiB.
#[derive(Clone, Debug)]
pub struct NewEvent {
    /// Its stable identity, derived from its cause, see [`crate::derive`].
    pub event_id: Uuid,
    /// What kind of thing changed.
    pub aggregate_type: &'static str,
    /// Which one.
    pub aggregate_id: String,
    /// Its version after the change, if it keeps one.
    pub aggregate_version: Option<i64>,
    /// What happened.
    pub event_type: &'static str,
    /// What a consumer needs to know; `event_id` is added, so that a bare body can be deduplicated.
    pub payload: Map<String, Value>,
    /// W3C `traceparent` of the request that caused it.
    pub trace_context: Option<String>,
}

impl NewEvent {
    /// Returns the payload as it is stored, the event's id included.
    #[must_use]
    pub fn stored_payload(&self) -> Value {
        let mut payload = self.payload.clone();
        payload.insert("event_id".to_owned(), Value::String(self.event_id.to_string()));
        Value::Object(payload)
    }

    /// Returns the headers as they are stored.
    #[must_use]
    pub fn stored_headers(&self) -> Value {
        let mut headers = Map::new();
        if let Some(trace_context) = &self.trace_context {
            headers.insert("traceparent".to_owned(), Value::String(trace_context.clone()));
        }
        Value::Object(headers)
    }
}

/// Appends events, in order, in the caller's transaction; best as its last statement before COMMIT.
///
/// # Errors
///
/// When the database fails or refuses an event; the caller's transaction is then lost, which is the point.
pub async fn append(connection: &mut PgConnection, events: &[NewEvent]) -> Result<(), sqlx::Error> {
    let ids: Vec<Uuid> = events.iter().map(|event| event.event_id).collect();
    let types: Vec<String> = events.iter().map(|event| event.aggregate_type.to_owned()).collect();
    let aggregates: Vec<String> = events.iter().map(|event| event.aggregate_id.clone()).collect();
    let versions: Vec<Option<i64>> = events.iter().map(|event| event.aggregate_version).collect();
    let names: Vec<String> = events.iter().map(|event| event.event_type.to_owned()).collect();
    let payloads: Vec<Value> = events.iter().map(NewEvent::stored_payload).collect();
    let headers: Vec<Value> = events.iter().map(NewEvent::stored_headers).collect();
    sqlx::query!(
        "-- outbox_append
        INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers
        FROM unnest($1::UUID[], $2::TEXT[], $3::TEXT[], $4::BIGINT[], $5::TEXT[], $6::JSONB[], $7::JSONB[])
            WITH ORDINALITY
            AS new (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers, position)
        ORDER BY position",
        &ids,
        &types,
        &aggregates,
        &versions as _,
        &names,
        &payloads,
        &headers
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// The outbox as the gauges show it.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Events ready to publish, counted up to 100,001.
    pub pending: i64,
    /// Age of the oldest of them in seconds; 0 without one.
    pub oldest_pending_age: f64,
    /// Age of the oldest event that is neither published nor dead, in seconds; 0 without one.
    pub oldest_unpublished_age: f64,
    /// Events set aside, counted up to 100,001.
    pub held: i64,
    /// Events given up on, among those set aside; counted up to 100,001 of their own.
    pub dead: i64,
    /// Age of the oldest open transaction of this database in seconds.
    pub transaction_horizon_age: f64,
}

/// Reads the outbox's gauges; cheap at any backlog. Where a long transaction keeps the dead entries of the index, it steps
/// over those that are not below the floors.
///
/// # Errors
///
/// When the database fails.
pub async fn sample(connection: &mut PgConnection, floors: &Floors) -> Result<Sample, sqlx::Error> {
    sqlx::query_as!(
        Sample,
        r#"-- outbox_sample
        WITH lanes AS MATERIALIZED (
            SELECT (place - 1)::SMALLINT AS lane,
                   CASE WHEN pg_postmaster_start_time() = $1::TIMESTAMPTZ THEN id ELSE 0 END AS floor
            FROM unnest($2::BIGINT[]) WITH ORDINALITY AS known (id, place)
        )
        SELECT pending.events AS "pending!", set_aside.held AS "held!", dead.events AS "dead!",
               COALESCE(EXTRACT(EPOCH FROM clock_timestamp() - heads.oldest), 0)::FLOAT8 AS "oldest_pending_age!",
               COALESCE(EXTRACT(EPOCH FROM clock_timestamp() - LEAST(heads.oldest, set_aside.oldest)), 0)::FLOAT8
                   AS "oldest_unpublished_age!",
               COALESCE((
                   SELECT EXTRACT(EPOCH FROM clock_timestamp() - min(xact_start)) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()
               ), 0)::FLOAT8 AS "transaction_horizon_age!"
        FROM (
            SELECT count(*) AS events
            FROM (
                SELECT FROM lanes
                CROSS JOIN LATERAL (
                    SELECT FROM outbox
                    WHERE outbox.lane = lanes.lane AND published_at IS NULL AND held_at IS NULL AND id >= lanes.floor
                    LIMIT 100001
                ) AS of_lane
                LIMIT 100001
            ) AS hot
        ) AS pending, (
            SELECT min(head.created_at) AS oldest
            FROM lanes
            CROSS JOIN LATERAL (
                SELECT created_at FROM outbox
                WHERE outbox.lane = lanes.lane AND published_at IS NULL AND held_at IS NULL AND id >= lanes.floor
                ORDER BY outbox.lane, id LIMIT 1
            ) AS head
        ) AS heads, (
            SELECT count(*) AS held, min(created_at) FILTER (WHERE dead_at IS NULL) AS oldest
            FROM (
                SELECT created_at, dead_at FROM outbox
                WHERE held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL LIMIT 100001
            ) AS aside
        ) AS set_aside, (
            SELECT count(*) AS events
            FROM (SELECT FROM outbox WHERE dead_at IS NOT NULL AND discarded_at IS NULL LIMIT 100001) AS given_up
        ) AS dead"#,
        floors.started(),
        floors.all()
    )
    .fetch_one(connection)
    .await
}

/// Reads the outbox's gauges and sets them.
///
/// # Errors
///
/// When the database fails; a gauge that is not refreshed disappears rather than lies.
#[expect(clippy::cast_precision_loss, reason = "counts of at most 100,001")]
pub async fn report(pool: &PgPool, floors: &Floors) -> Result<Sample, sqlx::Error> {
    let sample = database::call(pool, async |connection| sample(connection, floors).await).await?;
    gauge!(names::OUTBOX_PENDING).set(sample.pending as f64);
    gauge!(names::OUTBOX_HELD).set(sample.held as f64);
    gauge!(names::OUTBOX_DEAD).set(sample.dead as f64);
    gauge!(names::OUTBOX_OLDEST_PENDING).set(sample.oldest_pending_age);
    gauge!(names::OUTBOX_OLDEST_UNPUBLISHED).set(sample.oldest_unpublished_age);
    gauge!(names::TRANSACTION_HORIZON).set(sample.transaction_horizon_age);
    Ok(sample)
}
