//! Reading the outbox: what a relay asks of the database, statement by statement.
//!
//! A relay owns a lane by an advisory lock that its batch's transaction holds. Skipping locked *lanes* lets relays steal
//! work from each other without two of them ever publishing one aggregate; skipping locked *rows* would not: one takes an
//! aggregate's first event, another its second, and the second goes out first.
//!
//! [`take_lanes`] and [`read`] are two statements on purpose. A statement's snapshot is older than the locks it takes, so
//! one that locks and reads still sees as unpublished what the lane's last owner has just marked.
//!
//! A crash frees the lanes with the connection; what was published and not marked is published again.

use sqlx::PgConnection;
use sqlx::types::Json;
use std::collections::BTreeMap;
use time::OffsetDateTime;
use uuid::Uuid;

/// How many lanes there are.
pub const LANES: i16 = 64;

/// A lane that has events ready to publish, or chains that are due.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LaneHead {
    /// The lane, 0 to 63.
    pub lane: i16,
    /// The id of its oldest event that is ready to publish; none where only chains are due.
    pub id: Option<i64>,
}

/// An event that is ready to publish.
#[derive(Clone, Debug)]
pub struct PendingEvent {
    /// Its stable identity.
    pub event_id: Uuid,
    /// Its place in the order.
    pub id: i64,
    /// Its aggregate's lane.
    pub lane: i16,
    /// What kind of thing changed.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// Its version after the change.
    pub aggregate_version: Option<i64>,
    /// What happened.
    pub event_type: String,
    /// The body, JSON text as stored.
    pub payload: String,
    /// Headers by name.
    pub headers: Json<BTreeMap<String, String>>,
    /// When it was inserted.
    pub created_at: OffsetDateTime,
}

/// Returns the lanes that have events ready to publish, oldest head first, and before them those that only have chains
/// that are due. Takes no lock.
///
/// # Errors
///
/// When the database fails.
pub async fn probe(connection: &mut PgConnection) -> Result<Vec<LaneHead>, sqlx::Error> {
    sqlx::query_as!(
        LaneHead,
        r#"-- outbox_probe
        SELECT lanes.lane::SMALLINT AS "lane!", head.id AS "id?"
        FROM generate_series(0, 63) AS lanes (lane)
        LEFT JOIN LATERAL (
            SELECT outbox.lane, id FROM outbox
            WHERE outbox.lane = lanes.lane AND published_at IS NULL AND held_at IS NULL
            ORDER BY outbox.lane, id LIMIT 1
        ) AS head ON true
        LEFT JOIN LATERAL (
            SELECT outbox_held.lane FROM outbox_held
            WHERE outbox_held.lane = lanes.lane AND next_attempt_at <= statement_timestamp()
            ORDER BY outbox_held.lane, next_attempt_at LIMIT 1
        ) AS due ON true
        WHERE head.lane IS NOT NULL OR due.lane IS NOT NULL
        ORDER BY head.id NULLS FIRST"#
    )
    .fetch_all(connection)
    .await
}

/// Takes, until the transaction ends, at most `limit` of the lanes that nobody holds, in the order given.
///
/// # Errors
///
/// When the database fails.
pub async fn take_lanes(
    connection: &mut PgConnection,
    lanes: &[i16],
    limit: i64,
) -> Result<Vec<i16>, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- outbox_take_lanes
        SELECT lane AS "lane!"
        FROM unnest($1::SMALLINT[]) WITH ORDINALITY AS wanted (lane, position)
        WHERE pg_try_advisory_xact_lock('outbox'::REGCLASS::OID::INT, lane)
        LIMIT $2"#,
        lanes,
        limit
    )
    .fetch_all(connection)
    .await
}

/// Reads the events of lanes that this transaction holds, oldest first: per lane at most `per_lane` events, and no more
/// than `bytes_per_lane` of payload (but always one event).
///
/// # Errors
///
/// When the database fails.
pub async fn read(
    connection: &mut PgConnection,
    lanes: &[i16],
    per_lane: i64,
    bytes_per_lane: i64,
) -> Result<Vec<PendingEvent>, sqlx::Error> {
    sqlx::query_as!(
        PendingEvent,
        r#"-- outbox_read
        SELECT event_id AS "event_id!", id AS "id!", lane AS "lane!", aggregate_type AS "aggregate_type!",
               aggregate_id AS "aggregate_id!", aggregate_version, event_type AS "event_type!", payload AS "payload!",
               headers AS "headers!: Json<BTreeMap<String, String>>", created_at AS "created_at!"
        FROM (
            SELECT due.*, sum(octet_length(payload)) OVER (PARTITION BY lane ORDER BY id) - octet_length(payload) AS before
            FROM unnest($1::SMALLINT[]) AS held (held_lane)
            CROSS JOIN LATERAL (
                SELECT event_id, id, lane, aggregate_type, aggregate_id, aggregate_version, event_type,
                       payload::TEXT AS payload, headers, created_at
                FROM outbox
                WHERE lane = held_lane AND published_at IS NULL AND held_at IS NULL
                ORDER BY lane, id
                LIMIT $2
            ) AS due
        ) AS sized
        WHERE before < $3
        ORDER BY id"#,
        lanes,
        per_lane,
        bytes_per_lane
    )
    .fetch_all(connection)
    .await
}

/// Marks exactly these events as published, in the transaction that holds their lanes.
///
/// Returns, for each that was not marked yet, the seconds from its insertion to now by the database's clock.
///
/// # Errors
///
/// When the database fails.
pub async fn mark(connection: &mut PgConnection, confirmed: &[Uuid]) -> Result<Vec<f64>, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- outbox_mark
        UPDATE outbox SET published_at = clock_timestamp()
        WHERE event_id = ANY($1) AND published_at IS NULL
        RETURNING EXTRACT(EPOCH FROM published_at - created_at)::FLOAT8 AS "latency!""#,
        confirmed
    )
    .fetch_all(connection)
    .await
}

/// Says whether the server is in recovery, where its locks and its rows are not the primary's.
///
/// # Errors
///
/// When the database fails.
pub async fn is_in_recovery(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- outbox_is_in_recovery
        SELECT pg_is_in_recovery() AS "recovering!""#
    )
    .fetch_one(connection)
    .await
}
