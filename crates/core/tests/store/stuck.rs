//! Taking over keys that are stuck.

use std::collections::HashSet;
use std::time::Duration;

use semel_core::idempotency::store::{self, KeyState, StuckKey};
use semel_core::idempotency::{IdempotencyKey, Scope};

use crate::database::{Database, with_database};
use crate::keys::scope;

const LEASE: Duration = Duration::from_mins(5);

/// Claimed keys of which only `due` and `due-again` are to be taken over.
const SEVEN_KEYS: &str = "
    INSERT INTO idempotency_keys (
        client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
        status, recovery_point, lease_until, next_check_at, needs_person_at, needs_person_reason,
        response_code, response_headers, response_body, completed_at, expires_at
    )
    SELECT 'acme', operation, key, decode(repeat('07', 32), 'hex'), 1, '{}', gen_random_uuid(), gen_random_uuid(),
           CASE WHEN lease IS NULL THEN 'completed' ELSE 'in_progress' END, 'started', now() + lease, now() + check_in,
           CASE WHEN person THEN now() END, CASE WHEN person THEN 'nobody knows' END,
           CASE WHEN lease IS NULL THEN 201 END, CASE WHEN lease IS NULL THEN '[]'::JSONB END,
           CASE WHEN lease IS NULL THEN ''::BYTEA END, CASE WHEN lease IS NULL THEN now() END,
           CASE WHEN lease IS NULL THEN now() + INTERVAL '1 day' END
    FROM (VALUES
        ('due', 'probes.create', INTERVAL '-2 s', NULL::INTERVAL, FALSE),
        ('due-again', 'probes.create', '-1 s', '-1 s', FALSE),
        ('later', 'probes.create', '-1 s', '1 hour', FALSE),
        ('alive', 'probes.create', '1 hour', NULL, FALSE),
        ('person', 'probes.create', '-1 s', NULL, TRUE),
        ('unknown', 'probes.cancel', '-1 s', NULL, FALSE),
        ('done', 'probes.create', NULL, NULL, FALSE)
    ) AS keys (key, operation, lease, check_in, person)";

/// Keys with dead leases: 50 of the client `busy`, dead for longer than the one of `quiet`.
const TWO_CLIENTS: &str = "
    INSERT INTO idempotency_keys (
        client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
        status, recovery_point, lease_until
    )
    SELECT client, 'probes.create', 'k' || number, decode(repeat('07', 32), 'hex'), 1, '{}', gen_random_uuid(),
           gen_random_uuid(), 'in_progress', 'started', now() - age
    FROM (
        SELECT 'busy', number, INTERVAL '1 hour' - number * INTERVAL '1 minute' FROM generate_series(1, 50) AS number
        UNION ALL SELECT 'quiet', 1, INTERVAL '1 second'
    ) AS keys (client, number, age)";

async fn take_over(db: &Database, limit: i64) -> Vec<StuckKey> {
    let mut connection = db.pool.acquire().await.unwrap();
    store::take_over_stuck(&mut connection, &["probes.create".to_owned()], limit, LEASE).await.unwrap()
}

fn names(stuck: &[StuckKey]) -> Vec<String> {
    let mut names: Vec<_> = stuck.iter().map(|stuck| format!("{}/{}", stuck.client_id, stuck.key)).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn takes_over_dead_leases_that_are_due_and_nothing_else() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        let before: Vec<(String, i64)> = fences(&db).await;
        let stuck = take_over(&db, 100).await;
        assert_eq!(names(&stuck), ["acme/due", "acme/due-again"]);
        for stuck in &stuck {
            let held = state(&db, &stuck.key).await;
            let KeyState::InProgress { lease_left: Some(left), fence, taken_over: true, .. } = held else {
                panic!("{held:?}")
            };
            assert!(fence == stuck.fence && left > LEASE / 2, "{left:?}");
        }
        let untouched = |fences: Vec<(String, i64)>| -> Vec<_> {
            fences.into_iter().filter(|(key, _)| !key.starts_with("due")).collect()
        };
        assert_eq!(untouched(fences(&db).await), untouched(before));
        assert_eq!(names(&take_over(&db, 100).await), [""; 0], "they are held now");
    })
    .await;
}

async fn fences(db: &Database) -> Vec<(String, i64)> {
    sqlx::query_as("SELECT key, fence FROM idempotency_keys ORDER BY key").fetch_all(&db.pool).await.unwrap()
}

async fn state(db: &Database, key: &str) -> KeyState {
    store::look_up(&mut db.pool.acquire().await.unwrap(), &scope(key)).await.unwrap().unwrap().state
}

#[tokio::test]
async fn a_postponed_key_is_taken_over_when_its_check_is_due() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        let stuck = take_over(&db, 1).await;
        let [StuckKey { key, fence, .. }] = stuck.as_slice() else { panic!("{stuck:?}") };
        let held = Scope { key: key.parse::<IdempotencyKey>().unwrap(), ..scope("k") };
        let mut connection = db.pool.acquire().await.unwrap();
        assert!(store::postpone(&mut connection, &held, *fence, Duration::from_hours(1)).await.unwrap());
        assert_eq!(names(&take_over(&db, 100).await), ["acme/due-again"]);
        db.execute("UPDATE idempotency_keys SET next_check_at = now() WHERE key = 'due'").await;
        let again = take_over(&db, 100).await;
        assert_eq!(names(&again), ["acme/due"]);
        assert!(again[0].fence > *fence);
    })
    .await;
}

#[tokio::test]
async fn takes_over_no_more_than_asked_and_leaves_no_client_behind() {
    with_database(async |db: Database| {
        db.execute(TWO_CLIENTS).await;
        let stuck = names(&take_over(&db, 10).await);
        assert_eq!(stuck.len(), 10);
        assert!(stuck.contains(&"quiet/k1".to_owned()), "{stuck:?}");
        assert!(stuck.contains(&"busy/k1".to_owned()), "the oldest of the other client: {stuck:?}");
        let rest = take_over(&db, 100).await;
        assert_eq!(rest.len(), 41);
    })
    .await;
}

#[tokio::test]
async fn skips_what_somebody_has_locked() {
    with_database(async |db: Database| {
        db.execute(TWO_CLIENTS).await;
        let mut holder = db.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM idempotency_keys WHERE key IN ('k1', 'k3') FOR UPDATE")
            .execute(&mut *holder)
            .await
            .unwrap();
        assert_eq!(names(&take_over(&db, 3).await), ["busy/k2", "busy/k4", "busy/k5"]);
        holder.rollback().await.unwrap();
        assert_eq!(names(&take_over(&db, 3).await), ["busy/k1", "busy/k3", "quiet/k1"]);
    })
    .await;
}

#[tokio::test]
async fn of_callers_at_once_no_two_get_the_same_key_and_none_is_left() {
    with_database(async |db: Database| {
        for round in 0..20 {
            db.execute("DELETE FROM idempotency_keys").await;
            db.execute(TWO_CLIENTS).await;
            let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(4));
            let callers: Vec<_> = (0..4)
                .map(|_| {
                    let (db, barrier) = (db.clone(), barrier.clone());
                    tokio::spawn(async move {
                        barrier.wait().await;
                        let mut all = Vec::new();
                        // Others may hold the locks of all that is left: then there is nothing to take for a moment.
                        for _ in 0..30 {
                            all.extend(take_over(&db, 7).await);
                        }
                        all
                    })
                })
                .collect();
            let (mut keys, mut fences) = (HashSet::new(), HashSet::new());
            for caller in callers {
                for stuck in caller.await.unwrap() {
                    assert!(
                        keys.insert((stuck.client_id, stuck.key.clone())),
                        "{} twice in round {round}",
                        stuck.key
                    );
                    assert!(fences.insert(stuck.fence.0));
                }
            }
            assert_eq!(keys.len(), 51, "round {round}");
        }
    })
    .await;
}
