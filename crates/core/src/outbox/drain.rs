//! Reading the outbox: what a relay asks of the database, statement by statement.
//!
//! A relay owns a lane by an advisory lock that its batch's transaction holds. Skipping locked *lanes* lets relays steal
//! work from each other without two of them ever publishing one aggregate; skipping locked *rows* would not: one takes an
//! aggregate's first event, another its second, and the second goes out first.
//!
//! [`take_lanes`] and [`read`] are two statements on purpose. A statement's snapshot is older than the locks it takes, so
//! one that locks and reads still sees as unpublished what the lane's last owner has just marked.
//!
//! Both [`probe`] and [`read`] begin at [`Floors`]: published events leave dead entries in the hot index, which every read
//! would step over for as long as some transaction keeps them from being cleaned up. [`horizon`] says how floors are known.
//!
//! A crash frees the lanes with the connection; what was published and not marked is published again.

pub mod horizon;

pub use horizon::{Floors, Position, ServerRun, Writers, position, writers};

use sqlx::PgConnection;
use sqlx::types::Json;
use std::collections::BTreeMap;
use std::time::Duration;
use time::OffsetDateTime;
use uuid::Uuid;

/// How many lanes there are.
pub const LANES: i16 = 64;

/// What a relay sets on its connections. Statistics are of when there was next to nothing to publish. By these the planner
/// takes a backlog for a handful of rows, fetches a lane's whole backlog by a bitmap, and sorts it, for each batch.
pub const SETTINGS: [(&str, &str); 3] =
    [("enable_bitmapscan", "off"), ("enable_seqscan", "off"), ("jit", "off")];

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

/// What a probe found.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The server that was asked.
    pub run: ServerRun,
    /// Whether that server takes no writes, so that what it tells is of no use.
    pub read_only: bool,
    /// The lanes that have events ready to publish, oldest head first, and before them those that only have chains that are
    /// due.
    pub heads: Vec<LaneHead>,
}

/// Looks for lanes that have events ready to publish, or chains that are due. Takes no lock.
///
/// # Errors
///
/// When the database fails.
pub async fn probe(connection: &mut PgConnection, floors: &Floors) -> Result<Probed, sqlx::Error> {
    // One row, so that it also tells the run when there is nothing to do.
    let row = sqlx::query!(
        r#"-- outbox_probe
        SELECT pg_postmaster_start_time() AS "run!", current_setting('transaction_read_only')::BOOLEAN AS "read_only!",
               COALESCE(array_agg(found.lane ORDER BY found.id NULLS FIRST), '{}') AS "lanes!",
               COALESCE(array_agg(found.id ORDER BY found.id NULLS FIRST), '{}') AS "ids!: Vec<Option<i64>>"
        FROM (
            SELECT lanes.lane, head.id
            FROM (
                SELECT (place - 1)::SMALLINT AS lane,
                       CASE WHEN pg_postmaster_start_time() = $1::TIMESTAMPTZ THEN id ELSE 0 END AS floor
                FROM unnest($2::BIGINT[]) WITH ORDINALITY AS known (id, place)
            ) AS lanes
            LEFT JOIN LATERAL (
                SELECT outbox.lane, id FROM outbox
                WHERE outbox.lane = lanes.lane AND published_at IS NULL AND held_at IS NULL AND id >= lanes.floor
                ORDER BY outbox.lane, id LIMIT 1
            ) AS head ON true
            LEFT JOIN LATERAL (
                SELECT outbox_held.lane FROM outbox_held
                WHERE outbox_held.lane = lanes.lane AND next_attempt_at <= statement_timestamp()
                ORDER BY outbox_held.lane, next_attempt_at LIMIT 1
            ) AS due ON true
            WHERE head.lane IS NOT NULL OR due.lane IS NOT NULL
        ) AS found"#,
        floors.started(),
        floors.all()
    )
    .fetch_one(connection)
    .await?;
    let heads = row.lanes.into_iter().zip(row.ids).map(|(lane, id)| LaneHead { lane, id }).collect();
    Ok(Probed { run: ServerRun(row.run), read_only: row.read_only, heads })
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

/// Reads the events of lanes that this transaction holds from their floors on, oldest first: per lane at most `per_lane`
/// events, and no more than `bytes_per_lane` of payload (but always one event).
///
/// # Errors
///
/// When the database fails.
pub async fn read(
    connection: &mut PgConnection,
    lanes: &[i16],
    floors: &Floors,
    per_lane: i64,
    bytes_per_lane: i64,
) -> Result<Vec<PendingEvent>, sqlx::Error> {
    let known: Vec<i64> = lanes.iter().map(|&lane| floors.of(lane)).collect();
    sqlx::query_as!(
        PendingEvent,
        r#"-- outbox_read
        SELECT event_id AS "event_id!", id AS "id!", lane AS "lane!", aggregate_type AS "aggregate_type!",
               aggregate_id AS "aggregate_id!", aggregate_version, event_type AS "event_type!", payload AS "payload!",
               headers AS "headers!: Json<BTreeMap<String, String>>", created_at AS "created_at!"
        FROM (
            SELECT due.*, sum(octet_length(payload)) OVER (PARTITION BY lane ORDER BY id) - octet_length(payload) AS before
            FROM (
                SELECT held_lane, CASE WHEN pg_postmaster_start_time() = $4::TIMESTAMPTZ THEN id ELSE 0 END AS floor
                FROM unnest($1::SMALLINT[], $5::BIGINT[]) AS known (held_lane, id)
            ) AS held
            CROSS JOIN LATERAL (
                SELECT event_id, id, lane, aggregate_type, aggregate_id, aggregate_version, event_type,
                       payload::TEXT AS payload, headers, created_at
                FROM outbox
                WHERE lane = held_lane AND published_at IS NULL AND held_at IS NULL AND id >= held.floor
                ORDER BY lane, id
                LIMIT $2
            ) AS due
        ) AS sized
        WHERE before < $3
        ORDER BY id"#,
        lanes,
        per_lane,
        bytes_per_lane,
        floors.started(),
        &known
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
    // In one row: each costs a message of the server's, and its decoding.
    let latencies = sqlx::query_scalar!(
        "-- outbox_mark
        WITH marked AS (
            UPDATE outbox SET published_at = clock_timestamp()
            WHERE event_id = ANY($1) AND published_at IS NULL AND dead_at IS NULL AND discarded_at IS NULL
            RETURNING EXTRACT(EPOCH FROM published_at - created_at)::FLOAT8 AS latency
        )
        SELECT array_agg(latency) FROM marked",
        confirmed
    )
    .fetch_one(connection)
    .await?;
    Ok(latencies.unwrap_or_default())
}

/// Says whether the server takes no writes: a standby, whose locks and rows are not the primary's, or one that is set so.
///
/// # Errors
///
/// When the database fails.
pub async fn is_read_only(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- outbox_is_read_only
        SELECT current_setting('transaction_read_only')::BOOLEAN AS "read_only!""#
    )
    .fetch_one(connection)
    .await
}

/// Returns after how long the server ends a session whose transaction waits for its client, or whose transaction is not
/// over (Postgres 17); none if it never does.
///
/// # Errors
///
/// When the database fails.
pub async fn patience(connection: &mut PgConnection) -> Result<Option<Duration>, sqlx::Error> {
    let shortest = sqlx::query_scalar!(
        "-- outbox_patience
        SELECT min(setting::BIGINT) FROM pg_settings
        WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout') AND setting <> '0'"
    )
    .fetch_one(connection)
    .await?;
    Ok(shortest.map(|milliseconds| Duration::from_millis(milliseconds.unsigned_abs())))
}
