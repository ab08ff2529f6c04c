//! Events that could not be published: set aside, retried with growing waits, given up on.
//!
//! An aggregate with such an event has a *chain*: its set-aside events in the order of id, and one row in `outbox_held`
//! that says when the first of them is tried again. Its later events are diverted into the chain, so that none overtakes.
//! An event never goes back from a chain to the hot path.
//!
//! Promise: a lane's other aggregates are not held up by a chain, however long it is and however often it fails. What
//! a batch does about chains is bounded by its limits; a chain that is dead is never due, so it costs one look.
//!
//! Every function is called in the transaction that holds the lanes, by statements that are younger than the locks (see
//! [`drain`](super::drain)). A crash undoes all of a batch: nothing is set aside, and what was sent is sent again.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::PgConnection;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use super::drain::PendingEvent;
use crate::idempotency::store::interval;

/// An aggregate, by type and id.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Aggregate {
    /// What kind of thing it is.
    pub kind: String,
    /// Which one.
    pub id: String,
}

/// A lane that has chains.
#[derive(Clone, Copy, Debug)]
pub struct LaneWithChains {
    /// The lane.
    pub lane: i16,
    /// Whether one of them is due.
    pub is_due: bool,
}

/// Chains that are due.
#[derive(Debug, Default)]
pub struct Due {
    /// Their events, in order within each chain: one of a chain whose first event failed before, more of one that flows.
    pub events: Vec<PendingEvent>,
    /// Those that turned out to have nothing to send: to be settled.
    pub idle: Vec<Aggregate>,
    /// For how long the one of the events has been set aside that was so first.
    pub oldest: Duration,
}

/// An event that could not be published by its own fault.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The event.
    pub event_id: Uuid,
    /// Why.
    pub error: String,
}

/// How failures are retried, and when they are given up on.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The wait after the first failure; it doubles with each.
    pub shortest: Duration,
    /// The wait that it grows to.
    pub longest: Duration,
    /// After this many failed attempts an event is dead.
    pub max_attempts: i32,
    /// Types of events whose dead ones are skipped: their aggregate's later events go past them.
    pub skip_dead: Vec<String>,
}

/// What became of an event that failed.
#[derive(Clone, Debug)]
pub struct Held {
    /// The event.
    pub event_id: Uuid,
    /// Its aggregate.
    pub aggregate: Aggregate,
    /// Failed attempts so far.
    pub attempts: i32,
    /// Whether it was given up on.
    pub is_dead: bool,
    /// Whether its aggregate's later events go past it: the chain is to be settled.
    pub is_skipped: bool,
}

/// Returns those of the lanes that have chains, due or not.
///
/// # Errors
///
/// When the database fails.
pub async fn lanes_with_chains(
    connection: &mut PgConnection,
    lanes: &[i16],
) -> Result<Vec<LaneWithChains>, sqlx::Error> {
    sqlx::query_as!(
        LaneWithChains,
        r#"-- outbox_lanes_with_chains
        SELECT taken.lane AS "lane!", chain.next_attempt_at <= statement_timestamp() AS "is_due!"
        FROM unnest($1::SMALLINT[]) AS taken (lane)
        CROSS JOIN LATERAL (
            SELECT next_attempt_at FROM outbox_held WHERE outbox_held.lane = taken.lane
            ORDER BY lane, next_attempt_at LIMIT 1
        ) AS chain"#,
        lanes
    )
    .fetch_all(connection)
    .await
}

/// Reads chains that are due, longest due first: per lane at most `per_lane` events and chains, and no more than
/// `bytes_per_lane` of payload (but always one event).
///
/// # Errors
///
/// When the database fails.
pub async fn due(
    connection: &mut PgConnection,
    lanes: &[i16],
    per_lane: i64,
    bytes_per_lane: i64,
) -> Result<Due, sqlx::Error> {
    let links = sqlx::query_as!(
        Link,
        r#"-- outbox_due
        SELECT aggregate_type AS "aggregate_type!", aggregate_id AS "aggregate_id!", lane AS "lane!",
               event_id AS "event_id?", id AS "id?", aggregate_version AS "aggregate_version?",
               event_type AS "event_type?", payload AS "payload?",
               headers AS "headers?: Json<BTreeMap<String, String>>", created_at AS "created_at?",
               EXTRACT(EPOCH FROM statement_timestamp() - held_at)::FLOAT8 AS "waited?",
               COALESCE(is_dead, false) AS "is_dead!"
        FROM (
            SELECT link.*,
                   sum(octet_length(payload)) OVER (
                       PARTITION BY lane ORDER BY next_attempt_at, aggregate_type, aggregate_id, id
                   ) - octet_length(payload) AS before
            FROM unnest($1::SMALLINT[]) AS taken (taken_lane)
            CROSS JOIN LATERAL (
                SELECT chain.aggregate_type, chain.aggregate_id, chain.lane, next_attempt_at, event.*
                FROM (
                    SELECT aggregate_type, aggregate_id, lane, next_attempt_at, flows FROM outbox_held
                    -- Not clock_timestamp(), which is volatile and would be asked of every row: those of dead chains, too.
                    WHERE lane = taken_lane AND next_attempt_at <= statement_timestamp()
                    ORDER BY lane, next_attempt_at LIMIT $2
                ) AS chain
                LEFT JOIN LATERAL (
                    SELECT event_id, id, aggregate_version, event_type, payload::TEXT AS payload, headers, created_at,
                           held_at, dead_at IS NOT NULL AS is_dead
                    FROM outbox
                    WHERE outbox.aggregate_type = chain.aggregate_type AND outbox.aggregate_id = chain.aggregate_id
                      AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL AND skipped_at IS NULL
                    ORDER BY outbox.aggregate_type, outbox.aggregate_id, id
                    LIMIT CASE WHEN chain.flows THEN $2 ELSE 1 END
                ) AS event ON true
                LIMIT $2
            ) AS link
        ) AS sized
        WHERE COALESCE(before, 0) < $3
        ORDER BY lane, next_attempt_at, aggregate_type, aggregate_id, id"#,
        lanes,
        per_lane,
        bytes_per_lane
    )
    .fetch_all(connection)
    .await?;
    Ok(Due::from(links))
}

/// A row of `outbox_held` with one event of its chain, if that has any.
struct Link {
    aggregate_type: String,
    aggregate_id: String,
    lane: i16,
    event_id: Option<Uuid>,
    id: Option<i64>,
    aggregate_version: Option<i64>,
    event_type: Option<String>,
    payload: Option<String>,
    headers: Option<Json<BTreeMap<String, String>>>,
    created_at: Option<OffsetDateTime>,
    /// For how long it has been set aside, in seconds.
    waited: Option<f64>,
    is_dead: bool,
}

impl From<Vec<Link>> for Due {
    fn from(links: Vec<Link>) -> Self {
        let mut due = Self::default();
        // The chain that the last link belongs to, and whether a dead event ended it.
        let mut last: Option<(Aggregate, bool)> = None;
        for link in links {
            let chain = Aggregate { kind: link.aggregate_type.clone(), id: link.aggregate_id.clone() };
            let (is_first, has_ended) = match &last {
                Some((known, has_ended)) if *known == chain => (false, *has_ended),
                _ => (true, false),
            };
            let waited = Duration::try_from_secs_f64(link.waited.unwrap_or_default()).unwrap_or_default();
            let event = if link.is_dead || has_ended { None } else { link.event() };
            if is_first && event.is_none() {
                due.idle.push(chain.clone());
            }
            last = Some((chain, event.is_none()));
            if event.is_some() {
                due.oldest = due.oldest.max(waited);
            }
            due.events.extend(event);
        }
        due
    }
}

impl Link {
    fn event(self) -> Option<PendingEvent> {
        Some(PendingEvent {
            event_id: self.event_id?,
            id: self.id?,
            lane: self.lane,
            aggregate_type: self.aggregate_type,
            aggregate_id: self.aggregate_id,
            aggregate_version: self.aggregate_version,
            event_type: self.event_type?,
            payload: self.payload?,
            headers: self.headers?,
            created_at: self.created_at?,
        })
    }
}

/// Sets those of the events aside whose aggregate has a chain, behind what is in it. Returns which.
///
/// # Errors
///
/// When the database fails.
pub async fn divert(connection: &mut PgConnection, events: &[Uuid]) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- outbox_divert
        UPDATE outbox SET held_at = clock_timestamp()
        WHERE published_at IS NULL AND held_at IS NULL AND event_id = ANY (ARRAY (
            SELECT event_id
            FROM (SELECT event_id, aggregate_type, aggregate_id FROM outbox WHERE event_id = ANY ($1)) AS new
            CROSS JOIN LATERAL (
                SELECT FROM outbox_held
                WHERE outbox_held.aggregate_type = new.aggregate_type AND outbox_held.aggregate_id = new.aggregate_id
                LIMIT 1
            ) AS chain
        ))
        RETURNING event_id",
        events
    )
    .fetch_all(connection)
    .await
}

/// Notes failed attempts, at most one per aggregate: sets the events aside where they are not yet, and tells when they
/// are tried again, or that they are dead.
///
/// # Errors
///
/// When the database fails.
pub async fn hold(
    connection: &mut PgConnection,
    failures: &[Failure],
    policy: &Policy,
) -> Result<Vec<Held>, sqlx::Error> {
    let events: Vec<Uuid> = failures.iter().map(|failure| failure.event_id).collect();
    let errors: Vec<String> = failures.iter().map(|failure| bounded(&failure.error)).collect();
    let rows = sqlx::query!(
        r#"-- outbox_hold
        WITH failed AS (
            UPDATE outbox
            SET attempts = attempts + 1,
                last_error = failure.error,
                first_error = COALESCE(first_error, failure.error),
                held_at = COALESCE(held_at, clock_timestamp()),
                dead_at = CASE WHEN attempts + 1 >= $3 THEN clock_timestamp() END,
                skipped_at = CASE WHEN attempts + 1 >= $3 AND event_type = ANY ($4) THEN clock_timestamp() END
            FROM unnest($1::UUID[], $2::TEXT[]) AS failure (id_of_event, error)
            WHERE event_id = id_of_event AND published_at IS NULL AND dead_at IS NULL AND discarded_at IS NULL
            RETURNING event_id, aggregate_type, aggregate_id, lane, attempts, dead_at, skipped_at
        ), chain AS (
            INSERT INTO outbox_held (aggregate_type, aggregate_id, lane, next_attempt_at, dead_at)
            SELECT aggregate_type, aggregate_id, lane,
                   CASE WHEN dead_at IS NOT NULL THEN 'infinity' ELSE
                       clock_timestamp() + LEAST($5::INTERVAL * 2 ^ LEAST(attempts - 1, 20), $6::INTERVAL)
                           * (0.5 + random() / 2) END,
                   dead_at
            FROM failed
            ON CONFLICT (aggregate_type, aggregate_id) DO UPDATE
            SET next_attempt_at = excluded.next_attempt_at, dead_at = excluded.dead_at, flows = false
        )
        SELECT event_id, aggregate_type, aggregate_id, attempts, dead_at IS NOT NULL AS "is_dead!",
               skipped_at IS NOT NULL AS "is_skipped!"
        FROM failed"#,
        &events,
        &errors,
        policy.max_attempts,
        &policy.skip_dead,
        interval(policy.shortest),
        interval(policy.longest)
    )
    .fetch_all(connection)
    .await?;
    let held = rows.into_iter().map(|row| Held {
        event_id: row.event_id,
        aggregate: Aggregate { kind: row.aggregate_type, id: row.aggregate_id },
        attempts: row.attempts,
        is_dead: row.is_dead,
        is_skipped: row.is_skipped,
    });
    Ok(held.collect())
}

/// What is kept of an error, in bytes.
const ERROR_LIMIT: usize = 500;

fn bounded(error: &str) -> String {
    let end = (0..=ERROR_LIMIT.min(error.len())).rev().find(|&end| error.is_char_boundary(end)).unwrap_or(0);
    error[..end].to_owned()
}

/// Puts chains off, at no cost to their events: for about as long as their first event has been set aside already, so that
/// the waits grow, and within the policy's bounds.
///
/// # Errors
///
/// When the database fails.
pub async fn postpone(
    connection: &mut PgConnection,
    chains: &[Aggregate],
    policy: &Policy,
) -> Result<(), sqlx::Error> {
    let (kinds, ids) = columns(chains);
    sqlx::query!(
        "-- outbox_postpone
        UPDATE outbox_held
        SET next_attempt_at = clock_timestamp()
            + LEAST(GREATEST(clock_timestamp() - head.held_at, $3::INTERVAL), $4::INTERVAL) * (0.5 + random() / 2)
        FROM unnest($1::TEXT[], $2::TEXT[]) AS late (kind, name)
        CROSS JOIN LATERAL (
            SELECT held_at FROM outbox
            WHERE aggregate_type = kind AND aggregate_id = name
              AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL AND skipped_at IS NULL
            ORDER BY aggregate_type, aggregate_id, id LIMIT 1
        ) AS head
        WHERE aggregate_type = kind AND aggregate_id = name AND outbox_held.dead_at IS NULL",
        &kinds,
        &ids,
        interval(policy.shortest),
        interval(policy.longest)
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Settles chains after something was taken out of them or came to life again: one that is empty goes, one whose first
/// event is dead waits for a person, any other is due at once. In a statement after those that changed the events.
///
/// # Errors
///
/// When the database fails.
pub async fn settle(connection: &mut PgConnection, chains: &[Aggregate]) -> Result<(), sqlx::Error> {
    let (kinds, ids) = columns(chains);
    sqlx::query!(
        "-- outbox_settle_chains
        WITH chain AS MATERIALIZED (
            SELECT kind, name, head.*
            FROM unnest($1::TEXT[], $2::TEXT[]) AS changed (kind, name)
            LEFT JOIN LATERAL (
                SELECT lane, dead_at, first_error FROM outbox
                WHERE aggregate_type = kind AND aggregate_id = name
                  AND held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL AND skipped_at IS NULL
                ORDER BY aggregate_type, aggregate_id, id LIMIT 1
            ) AS head ON true
        ), ended AS (
            DELETE FROM outbox_held USING chain
            WHERE aggregate_type = kind AND aggregate_id = name AND chain.lane IS NULL
        )
        INSERT INTO outbox_held (aggregate_type, aggregate_id, lane, next_attempt_at, dead_at, flows)
        SELECT kind, name, lane, CASE WHEN dead_at IS NOT NULL THEN 'infinity' ELSE clock_timestamp() END, dead_at,
               dead_at IS NULL AND first_error IS NULL
        FROM chain WHERE lane IS NOT NULL
        ON CONFLICT (aggregate_type, aggregate_id) DO UPDATE
        SET next_attempt_at = excluded.next_attempt_at, dead_at = excluded.dead_at, flows = excluded.flows",
        &kinds,
        &ids
    )
    .execute(connection)
    .await?;
    Ok(())
}

fn columns(chains: &[Aggregate]) -> (Vec<String>, Vec<String>) {
    chains.iter().map(|chain| (chain.kind.clone(), chain.id.clone())).unzip()
}

/// Writes nothing, and fails if this connection may not write what a relay has to.
///
/// # Errors
///
/// When the database fails, is read-only, or a permission is missing.
pub async fn probe_writing(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- outbox_probe_writing
        WITH events AS (
            UPDATE outbox
            SET published_at = published_at, attempts = attempts, first_error = first_error, last_error = last_error,
                held_at = held_at, dead_at = dead_at, skipped_at = skipped_at
            WHERE false
        ), chains AS (
            INSERT INTO outbox_held AS held (aggregate_type, aggregate_id, lane, next_attempt_at, dead_at, flows)
            SELECT aggregate_type, aggregate_id, lane, next_attempt_at, dead_at, flows FROM outbox_held WHERE false
            ON CONFLICT (aggregate_type, aggregate_id) DO UPDATE
            SET next_attempt_at = held.next_attempt_at, dead_at = held.dead_at, flows = held.flows
        )
        DELETE FROM outbox_held WHERE false"
    )
    .execute(connection)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_kept_up_to_its_limit_and_cut_between_characters() {
        assert_eq!(bounded("short"), "short");
        let long = "é".repeat(ERROR_LIMIT);
        assert_eq!(bounded(&long).len(), ERROR_LIMIT);
        assert_eq!(bounded(&format!("x{long}")).len(), ERROR_LIMIT - 1);
    }
}
