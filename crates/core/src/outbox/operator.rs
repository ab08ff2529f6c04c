//! What a person sees of events that are set aside, and decides about them.
//!
//! A decision is made in a transaction that holds the events' lane, as a relay's batch does, so that neither of them acts
//! on what the other is changing. It repeats the state that it was made for, and leaves an audit entry per event; without
//! the entry nothing is decided. A crash before COMMIT leaves all as it was.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::held::{self, Aggregate};
use crate::database;
use crate::idempotency::store::interval;
use crate::operators::{self, Deeds};

/// How an event that is set aside stands.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum State {
    /// It failed and is tried again.
    Held,
    /// It has not failed; it waits behind another event of its aggregate.
    Waiting,
    /// It was given up on.
    Dead,
}

impl State {
    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Waiting => "waiting",
            Self::Dead => "dead",
        }
    }
}

/// Which events are meant: those to which all of it applies.
#[derive(Clone, Debug)]
pub struct Filter {
    /// In one of these states.
    pub states: Vec<State>,
    /// Of aggregates of this type.
    pub aggregate_type: Option<String>,
    /// Of aggregates of this id.
    pub aggregate_id: Option<String>,
    /// Of this type.
    pub event_type: Option<String>,
    /// Set aside for longer than this.
    pub older_than: Option<Duration>,
}

/// An event that is set aside.
#[derive(Clone, Debug)]
pub struct SetAside {
    /// Its identity.
    pub event_id: Uuid,
    /// Its place in the order.
    pub id: i64,
    /// Its lane.
    pub lane: i16,
    /// What kind of thing changed.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// What happened.
    pub event_type: String,
    /// `held`, `waiting` or `dead`.
    pub state: String,
    /// Failed attempts.
    pub attempts: i32,
    /// Why the latest failed.
    pub last_error: Option<String>,
    /// When it was inserted.
    pub created_at: OffsetDateTime,
    /// Seconds since it was set aside.
    pub held_s: i64,
    /// Whether later events of its aggregate went past it.
    pub is_skipped: bool,
}

/// Reads set-aside events in the order of aggregates, and of ids within each: at most `limit`, behind `after`.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    connection: &mut PgConnection,
    filter: &Filter,
    after: Option<&SetAside>,
    limit: i64,
) -> Result<Vec<SetAside>, sqlx::Error> {
    let states = names(&filter.states);
    sqlx::query_as!(
        SetAside,
        r#"-- outbox_list_set_aside
        SELECT event_id, id, lane, aggregate_type, aggregate_id, event_type, state AS "state!", attempts, last_error,
               created_at, EXTRACT(EPOCH FROM clock_timestamp() - held_at)::BIGINT AS "held_s!",
               skipped_at IS NOT NULL AS "is_skipped!"
        FROM outbox
        CROSS JOIN LATERAL (
            SELECT CASE WHEN dead_at IS NOT NULL THEN 'dead' WHEN first_error IS NOT NULL THEN 'held' ELSE 'waiting' END
        ) AS standing (state)
        WHERE held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL
          AND state = ANY ($1)
          AND ($2::TEXT IS NULL OR aggregate_type = $2)
          AND ($3::TEXT IS NULL OR aggregate_id = $3)
          AND ($4::TEXT IS NULL OR event_type = $4)
          AND ($5::INTERVAL IS NULL OR held_at < clock_timestamp() - $5::INTERVAL)
          AND (aggregate_type, aggregate_id, id) > ($6::TEXT COLLATE "C", $7::TEXT COLLATE "C", $8::BIGINT)
        ORDER BY aggregate_type, aggregate_id, id
        LIMIT $9"#,
        &states,
        filter.aggregate_type.as_deref(),
        filter.aggregate_id.as_deref(),
        filter.event_type.as_deref(),
        filter.older_than.map(interval),
        after.map_or("", |event| event.aggregate_type.as_str()),
        after.map_or("", |event| event.aggregate_id.as_str()),
        after.map_or(0, |event| event.id),
        limit
    )
    .fetch_all(connection)
    .await
}

fn names(states: &[State]) -> Vec<String> {
    states.iter().map(|state| state.name().to_owned()).collect()
}

/// All that is kept of an event, but for its payload and headers.
#[derive(Clone, Debug)]
pub struct Dossier {
    /// Its identity.
    pub event_id: Uuid,
    /// Its place in the order.
    pub id: i64,
    /// Its lane.
    pub lane: i16,
    /// What kind of thing changed.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// Its version after the change.
    pub aggregate_version: Option<i64>,
    /// What happened.
    pub event_type: String,
    /// `published`, `discarded`, `dead`, `held`, `waiting`, or `ready`, which is not set aside.
    pub state: String,
    /// Size of its payload.
    pub payload_bytes: i32,
    /// Failed attempts.
    pub attempts: i32,
    /// Why the first failed.
    pub first_error: Option<String>,
    /// Why the latest failed.
    pub last_error: Option<String>,
    /// When it was inserted.
    pub created_at: OffsetDateTime,
    /// When the broker had it.
    pub published_at: Option<OffsetDateTime>,
    /// Since when it is set aside.
    pub held_at: Option<OffsetDateTime>,
    /// When it was given up on.
    pub dead_at: Option<OffsetDateTime>,
    /// When later events went past it.
    pub skipped_at: Option<OffsetDateTime>,
    /// When a person decided that it is never sent.
    pub discarded_at: Option<OffsetDateTime>,
    /// Who did.
    pub discarded_by: Option<String>,
    /// Why.
    pub discard_reason: Option<String>,
    /// When its aggregate's first set-aside event is tried again, if it is.
    pub next_attempt_at: Option<OffsetDateTime>,
    /// That first event.
    pub first_of_chain: Option<Uuid>,
    /// Set-aside events of its aggregate behind it, counted up to 1,001.
    pub waiting_behind: i64,
}

/// Reads an event.
///
/// # Errors
///
/// When the database fails.
pub async fn show(connection: &mut PgConnection, event_id: Uuid) -> Result<Option<Dossier>, sqlx::Error> {
    sqlx::query_as!(
        Dossier,
        r#"-- outbox_show
        SELECT event.event_id AS "event_id!", event.id AS "id!", event.lane AS "lane!",
               event.aggregate_type AS "aggregate_type!", event.aggregate_id AS "aggregate_id!", aggregate_version,
               event_type AS "event_type!",
               CASE WHEN published_at IS NOT NULL THEN 'published' WHEN discarded_at IS NOT NULL THEN 'discarded'
                    WHEN event.dead_at IS NOT NULL THEN 'dead' WHEN held_at IS NULL THEN 'ready'
                    WHEN first_error IS NOT NULL THEN 'held' ELSE 'waiting' END AS "state!",
               octet_length(payload::TEXT) AS "payload_bytes!", attempts AS "attempts!", first_error, last_error,
               created_at AS "created_at!", published_at, held_at, event.dead_at, skipped_at, discarded_at, discarded_by,
               discard_reason,
               NULLIF(next_attempt_at, 'infinity') AS "next_attempt_at?", first.event_id AS "first_of_chain?",
               behind.events AS "waiting_behind!"
        FROM outbox AS event
        LEFT JOIN outbox_held AS chain
            ON chain.aggregate_type = event.aggregate_type AND chain.aggregate_id = event.aggregate_id
        LEFT JOIN LATERAL (
            SELECT other.event_id FROM outbox AS other
            WHERE other.aggregate_type = event.aggregate_type AND other.aggregate_id = event.aggregate_id
              AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL AND skipped_at IS NULL
            ORDER BY other.aggregate_type, other.aggregate_id, other.id LIMIT 1
        ) AS first ON true
        CROSS JOIN LATERAL (
            SELECT count(*) AS events
            FROM (
                SELECT FROM outbox AS other
                WHERE other.aggregate_type = event.aggregate_type AND other.aggregate_id = event.aggregate_id
                  AND other.id > event.id
                  AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL AND skipped_at IS NULL
                ORDER BY other.aggregate_type, other.aggregate_id, other.id LIMIT 1001
            ) AS later
        ) AS behind
        WHERE event.event_id = $1"#,
        event_id
    )
    .fetch_optional(connection)
    .await
}

/// What is decided.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// They are tried again, at once, as if they had never failed.
    Retry,
    /// They are never sent.
    Discard,
}

/// A decision about events of one lane.
#[derive(Clone, Copy, Debug)]
pub struct Decision<'a> {
    /// What is decided.
    pub verdict: Verdict,
    /// For events in one of these states; retrying leaves out those that only wait, which have nothing to retry.
    pub states: &'a [State],
    /// Who decides.
    pub actor: &'a str,
    /// By which command.
    pub action: &'a str,
    /// Why.
    pub reason: &'a str,
}

/// Waits for a lane, at most for `wait`, and holds it until the transaction ends. Returns whether it was free in time.
///
/// # Errors
///
/// When the database fails. Either way without the lane, the transaction is to be rolled back.
pub async fn take_lane(
    connection: &mut PgConnection,
    lane: i16,
    wait: Duration,
) -> Result<bool, sqlx::Error> {
    // The connection's own limits are those of statements that wait for nobody.
    let limit = format!("{}ms", wait.as_millis());
    sqlx::query!(
        r#"-- outbox_wait_for_lane
        SELECT set_config('lock_timeout', $1, true) AS "lock!", set_config('statement_timeout', '0', true) AS "statement!""#,
        limit
    )
    .fetch_one(&mut *connection)
    .await?;
    let taken = sqlx::query!(
        r#"-- outbox_take_lane
        SELECT pg_advisory_xact_lock('outbox'::REGCLASS::OID::INT, $1::SMALLINT) AS "taken!: ()""#,
        lane
    )
    .execute(&mut *connection)
    .await;
    match taken {
        Ok(_) => Ok(true),
        Err(error) if database::failure(&error) == database::Failure::LockTimeout => Ok(false),
        Err(error) => Err(error),
    }
}

/// Carries a decision out, in the transaction that holds the events' lane. Returns the events that it applied to.
///
/// # Errors
///
/// When the database fails, or refuses a text by its length; the transaction is then to be rolled back.
pub async fn decide(
    connection: &mut PgConnection,
    events: &[Uuid],
    decision: &Decision<'_>,
) -> Result<Vec<Uuid>, sqlx::Error> {
    let decided = match decision.verdict {
        Verdict::Retry => retry(connection, events, decision).await?,
        Verdict::Discard => discard(connection, events, decision).await?,
    };
    let chains: BTreeSet<Aggregate> = decided.iter().map(|(_, chain)| chain.clone()).collect();
    held::settle(connection, &Vec::from_iter(chains)).await?;
    let decided: Vec<Uuid> = decided.into_iter().map(|(event_id, _)| event_id).collect();
    let subjects: Vec<String> = decided.iter().map(Uuid::to_string).collect();
    let deeds = Deeds {
        actor: decision.actor,
        action: decision.action,
        subjects: &subjects,
        reason: decision.reason,
    };
    operators::record_all(connection, &deeds).await?;
    Ok(decided)
}

async fn retry(
    connection: &mut PgConnection,
    events: &[Uuid],
    decision: &Decision<'_>,
) -> Result<Vec<(Uuid, Aggregate)>, sqlx::Error> {
    let rows = sqlx::query!(
        "-- outbox_retry
        UPDATE outbox SET attempts = 0, dead_at = NULL, skipped_at = NULL
        WHERE event_id = ANY ($1) AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL
          AND first_error IS NOT NULL AND CASE WHEN dead_at IS NOT NULL THEN 'dead' ELSE 'held' END = ANY ($2)
        RETURNING event_id, aggregate_type, aggregate_id",
        events,
        &names(decision.states)
    )
    .fetch_all(connection)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| (row.event_id, Aggregate { kind: row.aggregate_type, id: row.aggregate_id }))
        .collect())
}

async fn discard(
    connection: &mut PgConnection,
    events: &[Uuid],
    decision: &Decision<'_>,
) -> Result<Vec<(Uuid, Aggregate)>, sqlx::Error> {
    let rows = sqlx::query!(
        "-- outbox_discard
        UPDATE outbox SET discarded_at = clock_timestamp(), discarded_by = $3, discard_reason = $4
        WHERE event_id = ANY ($1) AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL
          AND CASE WHEN dead_at IS NOT NULL THEN 'dead' WHEN first_error IS NOT NULL THEN 'held' ELSE 'waiting' END
              = ANY ($2)
        RETURNING event_id, aggregate_type, aggregate_id",
        events,
        &names(decision.states),
        decision.actor,
        decision.reason
    )
    .fetch_all(connection)
    .await?;
    Ok(rows
        .into_iter()
        .map(|row| (row.event_id, Aggregate { kind: row.aggregate_type, id: row.aggregate_id }))
        .collect())
}
