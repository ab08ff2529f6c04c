//! The rows of `idempotency_keys`.
//!
//! Every statement that changes a row repeats the state and the fence that it expects, and reports whether it met them.
//! Leases are judged by the database's clock alone, with `clock_timestamp()`: `now()` is when the transaction began, and
//! a claim that waited for a lock would be born dead.

use std::time::Duration;

use serde_json::Value;
use sqlx::PgConnection;
use sqlx::postgres::types::PgInterval;
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{ClientId, Request, RequestHash, Scope, StoredResponse};

/// A key that is known.
#[derive(Clone, Debug)]
pub struct KnownKey {
    /// Hash of the request that claimed it.
    pub hash: RequestHash,
    /// That request's command.
    pub command: Value,
    /// That request's id.
    pub request_id: Uuid,
    /// The resource that the operation creates or changes.
    pub resource_id: Uuid,
    /// Where its execution stands.
    pub state: KeyState,
}

/// Where the execution under a key stands, judged by the database's clock.
#[derive(Clone, Debug)]
pub enum KeyState {
    /// Claimed, and not completed.
    InProgress {
        /// What is left of the lease; none once it is dead.
        lease_left: Option<Duration>,
        /// The fence of the current acquisition.
        fence: Fence,
        /// Whether it is another acquisition than that of the request which claimed the key.
        taken_over: bool,
        /// Whether recovery has given up on it until a person decides.
        needs_person: bool,
    },
    /// Completed, and replayed.
    Completed {
        /// The answer.
        response: StoredResponse,
        /// Until when it is replayed.
        expires_at: OffsetDateTime,
    },
    /// Completed, and past its retention.
    Expired,
}

/// The number of one acquisition of a key; an earlier owner's is stale and writes nothing.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Fence(pub i64);

/// What a key is claimed with.
#[derive(Clone, Debug)]
pub struct NewKey<'a> {
    /// Its scope.
    pub scope: &'a Scope,
    /// The command's hash.
    pub hash: RequestHash,
    /// The command.
    pub command: &'a Value,
    /// The resource that the operation creates or changes.
    pub resource_id: Uuid,
    /// The claiming request.
    pub request: &'a Request,
}

/// What a key's look-up found, column by column: what it selects is null where the key is not known. And what was written,
/// where nothing was found.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the columns of idempotency_keys, and what is made of them")]
pub struct LookedUp {
    pub request_hash: Option<Vec<u8>>,
    pub hash_version: Option<i16>,
    pub command: Option<Value>,
    pub request_id: Option<Uuid>,
    pub resource_id: Option<Uuid>,
    pub fence: Option<i64>,
    pub taken_over: Option<bool>,
    pub needs_person: Option<bool>,
    pub completed: Option<bool>,
    pub expired: Option<bool>,
    pub lease_left_ms: Option<i64>,
    pub response_code: Option<i16>,
    pub response_headers: Option<Json<Vec<(String, String)>>>,
    pub response_body: Option<Vec<u8>>,
    pub expires_at: Option<OffsetDateTime>,
    /// The row that an earlier execution left; asked for only where the key is not known.
    pub outcome: Option<Uuid>,
    /// Until when the key is replayed that was written as completed.
    pub written_until: Option<OffsetDateTime>,
    /// The fence of the key that was claimed.
    pub claimed: Option<i64>,
    /// Whether nothing was written because its client has too many keys in progress.
    pub limited: Option<bool>,
}

impl LookedUp {
    /// Says whether there is a key, or what an earlier execution left.
    #[must_use]
    pub fn is_something(&self) -> bool {
        self.request_hash.is_some() || self.outcome.is_some()
    }

    /// Reads the key; none when it is not known.
    ///
    /// # Errors
    ///
    /// When it holds what this binary cannot read.
    pub fn known(self) -> Result<Option<KnownKey>, sqlx::Error> {
        let unreadable =
            |column: &str| sqlx::Error::Decode(format!("idempotency_keys.{column} of a known key").into());
        let Some(request_hash) = self.request_hash else { return Ok(None) };
        let state = if self.completed != Some(true) {
            let left = u64::try_from(self.lease_left_ms.unwrap_or_default()).unwrap_or_default();
            KeyState::InProgress {
                lease_left: (left > 0).then(|| Duration::from_millis(left)),
                fence: Fence(self.fence.ok_or_else(|| unreadable("fence"))?),
                taken_over: self.taken_over == Some(true),
                needs_person: self.needs_person == Some(true),
            }
        } else if self.expired == Some(true) {
            KeyState::Expired
        } else {
            KeyState::Completed {
                response: StoredResponse {
                    code: self
                        .response_code
                        .and_then(|code| u16::try_from(code).ok())
                        .ok_or_else(|| unreadable("response_code"))?,
                    headers: self.response_headers.ok_or_else(|| unreadable("response_headers"))?.0,
                    body: self.response_body.ok_or_else(|| unreadable("response_body"))?,
                },
                expires_at: self.expires_at.ok_or_else(|| unreadable("expires_at"))?,
            }
        };
        let bytes = request_hash.try_into().map_err(|_| unreadable("request_hash"))?;
        let version = self.hash_version.ok_or_else(|| unreadable("hash_version"))?;
        Ok(Some(KnownKey {
            hash: RequestHash { version, bytes },
            command: self.command.ok_or_else(|| unreadable("command"))?,
            request_id: self.request_id.ok_or_else(|| unreadable("request_id"))?,
            resource_id: self.resource_id.ok_or_else(|| unreadable("resource_id"))?,
            state,
        }))
    }
}

/// Looks a key up and, where it is not known, for what a query of the operation's own finds under `$1`, `$2` and `$3`, the
/// client, the operation and the key. Both are of one moment, since they are one statement.
#[macro_export]
macro_rules! look_up_key {
    ($name:literal, $outcome:literal, $connection:expr, $scope:expr) => {
        $crate::begin_key!(
            $name,
            $outcome,
            "key AS (SELECT NULL::TIMESTAMPTZ AS expires_at, NULL::BIGINT AS fence LIMIT 0)",
            "NULL::BOOLEAN",
            $connection,
            $scope
        )
    };
}

/// Looks up as [`look_up_key!`](crate::look_up_key) does and, where nothing is found, writes; all of it is one statement, and
/// one round trip.
///
/// What it writes begins with `key AS (INSERT INTO idempotency_keys … FROM outcome … WHERE outcome.id IS NULL … ON CONFLICT DO
/// NOTHING RETURNING expires_at, fence …)`, from which everything else selects. Another literal says whether nothing was
/// written since there are too many. The arguments are `$4` and so on.
///
/// A key that commits while the statement is at work is met by the `INSERT`, but not seen by the look-up: then there is
/// neither a key nor something written, and it has to be asked again, in a new statement.
#[macro_export]
macro_rules! begin_key {
    ($name:literal, $outcome:literal, $writes:literal, $limited:literal, $connection:expr, $scope:expr $(, $argument:expr)*) => {
        sqlx::query_as!(
            $crate::idempotency::store::LookedUp,
            "-- "
                + $name
                + r#"
            WITH known AS MATERIALIZED (
                SELECT * FROM idempotency_keys WHERE client_id = $1 AND operation = $2 AND key = $3
            ), outcome AS MATERIALIZED (
                SELECT ("#
                + $outcome
                + r#") AS id WHERE NOT EXISTS (SELECT FROM known)
            ), "#
                + $writes
                + r#"
            SELECT known.request_hash AS "request_hash?", known.hash_version AS "hash_version?",
                   known.command AS "command?", known.request_id AS "request_id?", known.resource_id AS "resource_id?",
                   known.fence AS "fence?", known.attempts > 1 AS "taken_over?",
                   known.needs_person_at IS NOT NULL AS "needs_person?", known.status = 'completed' AS "completed?",
                   known.expires_at <= clock_timestamp() AS "expired?",
                   GREATEST(0, EXTRACT(EPOCH FROM known.lease_until - clock_timestamp()) * 1000)::BIGINT
                       AS "lease_left_ms?",
                   known.response_code AS "response_code?", known.response_headers AS "response_headers?: _",
                   known.response_body AS "response_body?", known.expires_at AS "expires_at?",
                   outcome.id AS "outcome?", key.expires_at AS "written_until?", key.fence AS "claimed?",
                   CASE WHEN outcome.id IS NULL AND known.key IS NULL AND key.fence IS NULL THEN "#
                + $limited
                + r#" END AS "limited?"
            FROM (VALUES (1)) AS one LEFT JOIN known ON TRUE LEFT JOIN outcome ON TRUE LEFT JOIN key ON TRUE"#,
            $scope.client.as_str(),
            $scope.operation,
            $scope.key.as_str()
            $(, $argument)*
        )
        .fetch_one($connection)
    };
}

/// Looks a key up. Must be asked of the primary.
///
/// # Errors
///
/// When the database fails, or holds a row that this binary cannot read.
pub async fn look_up(connection: &mut PgConnection, scope: &Scope) -> Result<Option<KnownKey>, sqlx::Error> {
    look_up_key!("idempotency_look_up", "NULL::UUID", connection, scope).await?.known()
}

/// Claims a key for an execution that has effects outside this database. Commit before the first of them.
///
/// There is no way back: nothing releases a claimed key but its completion, so that a dropped future, a panic and a
/// timeout release nothing either.
///
/// Returns the fence, or none when the key is known already; read it again in a new statement.
///
/// # Errors
///
/// When the database fails; a concurrent claim is waited for, at most `lock_timeout`.
pub async fn claim(
    connection: &mut PgConnection,
    key: &NewKey<'_>,
    recovery_point: &str,
    lease: Duration,
) -> Result<Option<Fence>, sqlx::Error> {
    let fence = sqlx::query_scalar!(
        "-- idempotency_claim
        INSERT INTO idempotency_keys (
            client_id, operation, key, request_hash, hash_version, command, resource_id, request_id, trace_context,
            status, recovery_point, lease_until
        ) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'in_progress', $10, clock_timestamp() + $11)
        ON CONFLICT DO NOTHING
        RETURNING fence",
        key.scope.client.as_str(),
        key.scope.operation,
        key.scope.key.as_str(),
        &key.hash.bytes[..],
        key.hash.version,
        key.command,
        key.resource_id,
        key.request.id,
        key.request.trace_context,
        recovery_point,
        interval(lease)
    )
    .fetch_optional(connection)
    .await?;
    Ok(fence.map(Fence))
}

/// Counts a client's keys in progress, up to `limit`.
///
/// # Errors
///
/// When the database fails.
pub async fn count_in_progress(
    connection: &mut PgConnection,
    client: &ClientId,
    limit: i64,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- idempotency_count_in_progress
        SELECT count(*) AS "in_progress!" FROM (
            SELECT FROM idempotency_keys WHERE client_id = $1 AND status = 'in_progress' LIMIT $2
        ) AS live"#,
        client.as_str(),
        limit
    )
    .fetch_one(connection)
    .await
}

/// Takes over a key whose lease is dead, from the acquisition `seen`; execution resumes at its recovery point.
///
/// Returns none when somebody else was faster, the lease is alive, or a person has to decide.
///
/// # Errors
///
/// When the database fails.
pub async fn take_over(
    connection: &mut PgConnection,
    scope: &Scope,
    seen: Fence,
    lease: Duration,
) -> Result<Option<Fence>, sqlx::Error> {
    let fence = sqlx::query_scalar!(
        "-- idempotency_take_over
        UPDATE idempotency_keys
        SET fence = nextval('idempotency_fence'), lease_until = clock_timestamp() + $5, attempts = attempts + 1
        WHERE client_id = $1 AND operation = $2 AND key = $3
          AND status = 'in_progress' AND fence = $4 AND lease_until <= clock_timestamp() AND needs_person_at IS NULL
        RETURNING fence",
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        seen.0,
        interval(lease)
    )
    .fetch_optional(connection)
    .await?;
    Ok(fence.map(Fence))
}

/// A key that recovery has taken over.
#[derive(Clone, Debug)]
pub struct StuckKey {
    /// The account.
    pub client_id: String,
    /// The operation.
    pub operation: String,
    /// The client's key.
    pub key: String,
    /// The fence of this acquisition.
    pub fence: Fence,
}

/// Takes over keys whose lease is dead and whose next check is due, at most `limit`, and of each client the oldest first,
/// so that one client's thousand stuck keys do not keep another's single one waiting.
///
/// Several reapers share the work: rows that somebody has locked are skipped.
///
/// # Errors
///
/// When the database fails.
pub async fn take_over_stuck(
    connection: &mut PgConnection,
    operations: &[String],
    limit: i64,
    lease: Duration,
) -> Result<Vec<StuckKey>, sqlx::Error> {
    let rows = sqlx::query!(
        "-- idempotency_take_over_stuck
        WITH due AS MATERIALIZED (
            SELECT client_id, operation, key, row_number() OVER (PARTITION BY client_id ORDER BY lease_until) AS turn
            FROM (
                SELECT client_id, operation, key, lease_until FROM idempotency_keys
                WHERE status = 'in_progress' AND lease_until <= (SELECT clock_timestamp()) AND needs_person_at IS NULL
                  AND (next_check_at IS NULL OR next_check_at <= (SELECT clock_timestamp()))
                  AND operation = ANY($1)
                ORDER BY lease_until
                LIMIT 10000
            ) AS oldest
        ), mine AS MATERIALIZED (
            SELECT k.client_id, k.operation, k.key
            FROM due JOIN idempotency_keys AS k USING (client_id, operation, key)
            -- Asked again of the locked row: somebody may just have driven it on.
            WHERE k.status = 'in_progress' AND k.lease_until <= clock_timestamp() AND k.needs_person_at IS NULL
              AND (k.next_check_at IS NULL OR k.next_check_at <= clock_timestamp())
            ORDER BY due.turn, k.lease_until
            LIMIT $2
            FOR UPDATE OF k SKIP LOCKED
        )
        UPDATE idempotency_keys AS k
        SET fence = nextval('idempotency_fence'), lease_until = clock_timestamp() + $3, attempts = attempts + 1
        FROM mine
        WHERE k.client_id = mine.client_id AND k.operation = mine.operation AND k.key = mine.key
          AND k.status = 'in_progress'
        RETURNING k.client_id, k.operation, k.key, k.fence",
        operations,
        limit,
        interval(lease)
    )
    .fetch_all(connection)
    .await?;
    let stuck = rows.into_iter().map(|row| StuckKey {
        client_id: row.client_id,
        operation: row.operation,
        key: row.key,
        fence: Fence(row.fence),
    });
    Ok(stuck.collect())
}

/// Moves a held key on to another recovery point; says whether the fence was still good.
///
/// # Errors
///
/// When the database fails.
pub async fn advance(
    connection: &mut PgConnection,
    scope: &Scope,
    fence: Fence,
    from: &str,
    to: &str,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- idempotency_advance
        UPDATE idempotency_keys SET recovery_point = $6
        WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4
          AND recovery_point = $5",
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0,
        from,
        to
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Writes down what the provider calls that which a held key is to do, while it stands at this point. Says whether it did, or
/// had, and not under another name.
///
/// # Errors
///
/// When the database fails; what is known of the name is then in the row.
pub async fn refer(
    connection: &mut PgConnection,
    scope: &Scope,
    fence: Fence,
    at: &str,
    reference: &str,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- idempotency_refer
        UPDATE idempotency_keys SET provider_reference = $6
        WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4
          AND recovery_point = $5 AND COALESCE(provider_reference, $6) = $6",
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0,
        at,
        reference
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Gives a held key up until a later check: its lease ends now, its execution does not. Says whether the fence was still
/// good.
///
/// # Errors
///
/// When the database fails; the lease then ends by itself.
pub async fn postpone(
    connection: &mut PgConnection,
    scope: &Scope,
    fence: Fence,
    wait: Duration,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- idempotency_postpone
        UPDATE idempotency_keys SET lease_until = clock_timestamp(), next_check_at = clock_timestamp() + $5
        WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4",
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0,
        interval(wait)
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Leaves a held key to a person: recovery does not touch it any more. Says whether the fence was still good.
///
/// # Errors
///
/// When the database fails; the next check finds the same.
pub async fn leave_to_person(
    connection: &mut PgConnection,
    scope: &Scope,
    fence: Fence,
    reason: &str,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query!(
        "-- idempotency_leave_to_person
        UPDATE idempotency_keys
        SET lease_until = clock_timestamp(), needs_person_at = clock_timestamp(), needs_person_reason = $5
        WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4",
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0,
        reason
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Completes a claimed key with its response, in the transaction of the outcome and before its other writes.
///
/// Returns until when it is replayed, or none when the fence is stale: then nothing else may be written.
///
/// # Errors
///
/// When the database fails, or refuses the response (status 200 to 499, body at most 64 KiB).
pub async fn complete(
    connection: &mut PgConnection,
    scope: &Scope,
    fence: Fence,
    response: &StoredResponse,
    retention: Duration,
) -> Result<Option<OffsetDateTime>, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- idempotency_complete
        UPDATE idempotency_keys
        SET status = 'completed', recovery_point = 'completed', lease_until = NULL, next_check_at = NULL,
            needs_person_at = NULL, needs_person_reason = NULL, response_code = $5, response_headers = $6, response_body = $7,
            completed_at = clock_timestamp(), expires_at = clock_timestamp() + $8
        WHERE client_id = $1 AND operation = $2 AND key = $3 AND status = 'in_progress' AND fence = $4
        RETURNING expires_at AS "expires_at!""#,
        scope.client.as_str(),
        scope.operation,
        scope.key.as_str(),
        fence.0,
        code(response),
        Json(&response.headers) as _,
        response.body,
        interval(retention)
    )
    .fetch_optional(connection)
    .await
}

/// Deletes completed keys past their retention, oldest first, at most `limit`; a key in progress never expires by age.
///
/// Skips rows that somebody has locked, so it is never in a claim's way. Returns how many went.
///
/// # Errors
///
/// When the database fails.
pub async fn reap_expired(connection: &mut PgConnection, limit: i64) -> Result<u64, sqlx::Error> {
    let done = sqlx::query!(
        "-- idempotency_reap_expired
        WITH due AS MATERIALIZED (
            -- Chosen once: inside IN (…) the planner may ask for these rows again per outer row, each time for others, since
            -- those already locked are skipped. The instant is a subquery so that the index on expires_at serves it.
            SELECT client_id, operation, key FROM idempotency_keys
            WHERE status = 'completed' AND expires_at <= (SELECT clock_timestamp())
            ORDER BY expires_at
            LIMIT $1
            FOR UPDATE SKIP LOCKED
        )
        DELETE FROM idempotency_keys AS old USING due
        WHERE old.client_id = due.client_id AND old.operation = due.operation AND old.key = due.key
          AND old.status = 'completed'",
        limit
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected())
}

/// How many keys are in which state, for the gauges.
#[derive(Clone, Copy, Debug)]
pub struct KeyCounts {
    /// Keys in progress, counted up to 100,001.
    pub in_progress: i64,
    /// Those of them that wait for a person.
    pub waiting_for_person: i64,
    /// Age of the oldest key in progress, in seconds; 0 without one.
    pub oldest_in_progress_age: f64,
    /// Completed keys, as the planner's statistics have it.
    pub completed_estimate: i64,
}

/// Counts the keys.
///
/// # Errors
///
/// When the database fails.
pub async fn count(connection: &mut PgConnection) -> Result<KeyCounts, sqlx::Error> {
    sqlx::query_as!(
        KeyCounts,
        r#"-- idempotency_count
        SELECT in_progress AS "in_progress!",
               waiting_for_person AS "waiting_for_person!",
               oldest AS "oldest_in_progress_age!",
               GREATEST(0, (SELECT reltuples FROM pg_class WHERE oid = 'idempotency_keys'::REGCLASS)::BIGINT - in_progress)
                   AS "completed_estimate!"
        FROM (
            SELECT count(*) AS in_progress, count(needs_person_at) AS waiting_for_person,
                   COALESCE(EXTRACT(EPOCH FROM clock_timestamp() - min(created_at)), 0)::FLOAT8 AS oldest
            FROM (
                SELECT created_at, needs_person_at FROM idempotency_keys WHERE status = 'in_progress' LIMIT 100001
            ) AS live
        ) AS counted"#
    )
    .fetch_one(connection)
    .await
}

/// Returns a duration as the database's interval.
#[must_use]
pub fn interval(time: Duration) -> PgInterval {
    PgInterval { months: 0, days: 0, microseconds: i64::try_from(time.as_micros()).unwrap_or(i64::MAX) }
}

/// Returns a response's status as its column holds it.
#[must_use]
pub fn code(response: &StoredResponse) -> i16 {
    i16::try_from(response.code).unwrap_or(i16::MAX)
}
