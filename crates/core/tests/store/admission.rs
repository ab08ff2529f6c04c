//! What new executions a client may begin: asked of no key that is known.

use std::num::NonZeroU32;
use std::time::Duration;

use semel_core::idempotency::admission::{Admission, Rate};
use semel_core::idempotency::engine::{self, Answer, Operation, Terms};
use semel_core::idempotency::store;
use semel_core::idempotency::{IdempotencyKey, Request, Scope};
use sqlx::Executor as _;
use uuid::Uuid;

use crate::database::{Database, with_database};
use crate::driven::{Lost, Scripted, Step};
use crate::engine::Probe;

const DAY: Duration = Duration::from_hours(24);

fn scope(client: &str, key: &str) -> Scope {
    let key: IdempotencyKey = key.parse().unwrap();
    Scope { client: client.parse().unwrap(), operation: "probes.create", key }
}

fn one_an_hour() -> Admission {
    let rate = Rate { every: Duration::from_hours(1), burst: NonZeroU32::MIN };
    Admission::new(Some(rate), None)
}

async fn ask<O: Operation<Command = Probe>>(
    db: &Database,
    admission: &Admission,
    operation: &O,
    scope: Scope,
    value: i64,
) -> Answer {
    let request = Request { id: Uuid::new_v4(), trace_context: None };
    let terms = Terms { retention: DAY, admission: Some(admission) };
    engine::run(&db.pool, operation, &scope, &Probe { value }, &request, terms).await.unwrap()
}

#[tokio::test]
async fn a_key_that_is_known_is_answered_though_the_bucket_is_empty() {
    with_database(async |db: Database| {
        let admission = one_an_hour();
        let operation = Scripted::new(&[Step::Complete, Step::Fail]);
        assert!(matches!(
            ask(&db, &admission, &operation, scope("acme", "k"), 7).await,
            Answer::Fresh { .. }
        ));
        let Answer::Limited { retry_after } = ask(&db, &admission, &operation, scope("acme", "new"), 7).await
        else {
            panic!("the bucket is empty")
        };
        assert!(retry_after > DAY / 25 && retry_after <= Duration::from_hours(1), "{retry_after:?}");
        assert_eq!(
            db.count("SELECT count(*) FROM idempotency_keys").await,
            1,
            "what is refused is not stored"
        );

        let again = ask(&db, &admission, &operation, scope("acme", "k"), 7).await;
        assert!(matches!(again, Answer::Replayed { .. }), "{again:?}");
        let other = ask(&db, &admission, &operation, scope("acme", "k"), 8).await;
        assert!(matches!(other, Answer::Mismatch), "{other:?}");
        db.execute("UPDATE idempotency_keys SET expires_at = completed_at + interval '1 microsecond'").await;
        let late = ask(&db, &admission, &operation, scope("acme", "k"), 7).await;
        assert!(matches!(late, Answer::Expired { .. }), "{late:?}");

        // Another client has a bucket of its own, and what it has begun is in progress for its retries.
        let half_way = ask(&db, &admission, &operation, scope("other", "k"), 7).await;
        assert!(matches!(half_way, Answer::Unknown { .. }), "{half_way:?}");
        let meanwhile = ask(&db, &admission, &operation, scope("other", "k"), 7).await;
        assert!(matches!(meanwhile, Answer::InProgress { .. }), "{meanwhile:?}");
    })
    .await;
}

#[tokio::test]
async fn what_begins_nothing_takes_nothing() {
    with_database(async |db: Database| {
        let admission = one_an_hour();
        let mut operation = Scripted::new(&[Step::Complete]);
        let invalid = ask(&db, &admission, &operation, scope("acme", "k"), -1).await;
        assert!(matches!(invalid, Answer::Invalid(_)), "{invalid:?}");
        operation.may_begin = false;
        let closed = ask(&db, &admission, &operation, scope("acme", "k"), 7).await;
        assert!(matches!(closed, Answer::Unavailable), "{closed:?}");
        operation.may_begin = true;
        // A twin claims the key after the look-up of this one missed.
        operation.lost = Lost::Race;
        let raced = ask(&db, &admission, &operation, scope("acme", "raced"), 7).await;
        assert!(matches!(raced, Answer::InProgress { .. }), "{raced:?}");
        operation.lost = Lost::Nothing;
        let first = ask(&db, &admission, &operation, scope("acme", "k"), 7).await;
        assert!(matches!(first, Answer::Fresh { .. }), "{first:?}");
    })
    .await;
}

#[tokio::test]
async fn a_client_has_so_many_keys_in_progress_and_no_more() {
    with_database(async |db: Database| {
        let admission = Admission::new(None, NonZeroU32::new(2));
        let steps = [Step::Fail, Step::Wait, Step::Fail, Step::Complete, Step::Complete, Step::Complete];
        let operation = Scripted::new(&steps);
        let begin =
            async |client: &str, key: &str| ask(&db, &admission, &operation, scope(client, key), 7).await;
        for key in ["one", "two"] {
            let answer = begin("acme", key).await;
            assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
        }
        let third = begin("acme", "three").await;
        assert!(
            matches!(third, Answer::Limited { retry_after } if retry_after > Duration::ZERO),
            "{third:?}"
        );
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys").await, 2);
        let other = begin("other", "three").await;
        assert!(matches!(other, Answer::Unknown { .. }), "another client is not kept from it: {other:?}");

        // The retry of what is in progress is driven on, and frees its place.
        let driven = begin("acme", "two").await;
        assert!(matches!(driven, Answer::Fresh { .. }), "{driven:?}");
        let third = begin("acme", "three").await;
        assert!(matches!(third, Answer::Fresh { .. }), "{third:?}");
    })
    .await;
}

#[tokio::test]
async fn keys_in_progress_are_counted_by_their_own_index_up_to_the_bound() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO idempotency_keys (client_id, operation, key, request_hash, hash_version, command, status,
                 recovery_point, resource_id, request_id, response_code, response_headers, response_body, completed_at, expires_at)
             SELECT 'acme', 'probes.create', 'k' || n, decode(repeat('00', 32), 'hex'), 1, '{}', 'completed', 'completed',
                 gen_random_uuid(), gen_random_uuid(), 201, '[]', '', now(), now() + interval '1 day'
             FROM generate_series(1, 50000) AS n",
        )
        .await;
        db.execute(
            "INSERT INTO idempotency_keys (client_id, operation, key, request_hash, hash_version, command, status,
                 recovery_point, resource_id, request_id, lease_until)
             SELECT 'acme', 'probes.create', 'p' || n, decode(repeat('00', 32), 'hex'), 1, '{}', 'in_progress', 'sent',
                 gen_random_uuid(), gen_random_uuid(), now()
             FROM generate_series(1, 100) AS n",
        )
        .await;
        let acme = "acme".parse().unwrap();
        let mut connection = db.pool.acquire().await.unwrap();
        let scans = "SELECT COALESCE(sum(idx_scan), 0)::BIGINT FROM pg_stat_user_indexes
                     WHERE indexrelname = 'idempotency_keys_in_progress'";
        // Never analysed, and analysed; each often enough for a plan of its own and a general one.
        for sql in ["SELECT 1", "ANALYZE idempotency_keys"] {
            connection.execute(sql).await.unwrap();
            let before = db.count(scans).await;
            for _ in 0..8 {
                let counted = store::count_in_progress(&mut connection, &acme, 20).await.unwrap();
                assert_eq!(counted, 20, "no more than asked");
            }
            connection.execute("SELECT pg_stat_force_next_flush()").await.unwrap();
            connection.execute("SELECT 1").await.unwrap();
            assert_eq!(db.count(scans).await - before, 8, "after {sql}");
        }
        assert_eq!(store::count_in_progress(&mut connection, &acme, 1000).await.unwrap(), 100);
    })
    .await;
}
