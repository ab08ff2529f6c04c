//! Deleting keys past their retention.

use semel_core::idempotency::store;

use crate::database::{Database, with_database};

/// Five completed keys that expired 1 to 5 hours ago (`k1` last), one that is still replayed, one that is in progress since
/// a year with a dead lease.
const SEVEN_KEYS: &str = "
    INSERT INTO idempotency_keys (
        client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
        status, recovery_point, lease_until, response_code, response_headers, response_body,
        created_at, completed_at, expires_at
    )
    SELECT 'acme', 'probes.create', key, decode(repeat('07', 32), 'hex'), 1, '{}', gen_random_uuid(), gen_random_uuid(),
           CASE WHEN expires IS NULL THEN 'in_progress' ELSE 'completed' END, 'started',
           CASE WHEN expires IS NULL THEN now() - INTERVAL '1 year' END,
           CASE WHEN expires IS NOT NULL THEN 201 END, CASE WHEN expires IS NOT NULL THEN '[]'::JSONB END,
           CASE WHEN expires IS NOT NULL THEN ''::BYTEA END,
           now() - INTERVAL '1 year', CASE WHEN expires IS NOT NULL THEN now() - INTERVAL '2 days' END, expires
    FROM (
        SELECT 'k' || hours, now() - hours * INTERVAL '1 hour' FROM generate_series(1, 5) AS hours
        UNION ALL VALUES ('alive', now() + INTERVAL '1 hour'), ('running', NULL::TIMESTAMPTZ)
    ) AS keys (key, expires)";

async fn left(db: &Database) -> Vec<String> {
    sqlx::query_scalar("SELECT key FROM idempotency_keys ORDER BY key").fetch_all(&db.pool).await.unwrap()
}

#[tokio::test]
async fn reaps_the_oldest_first_and_no_more_than_asked() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        let mut connection = db.pool.acquire().await.unwrap();
        assert_eq!(store::reap_expired(&mut connection, 2).await.unwrap(), 2);
        assert_eq!(left(&db).await, ["alive", "k1", "k2", "k3", "running"]);
        assert_eq!(store::reap_expired(&mut connection, 100).await.unwrap(), 3);
        assert_eq!(store::reap_expired(&mut connection, 100).await.unwrap(), 0);
    })
    .await;
}

#[tokio::test]
async fn a_key_in_progress_never_goes_whatever_its_age() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        store::reap_expired(&mut db.pool.acquire().await.unwrap(), 100).await.unwrap();
        assert_eq!(left(&db).await, ["alive", "running"]);
    })
    .await;
}

#[tokio::test]
async fn reaping_skips_what_somebody_has_locked() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        let mut holder = db.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM idempotency_keys WHERE key IN ('k5', 'k3') FOR UPDATE")
            .execute(&mut *holder)
            .await
            .unwrap();
        let mut connection = db.pool.acquire().await.unwrap();
        assert_eq!(store::reap_expired(&mut connection, 2).await.unwrap(), 2);
        assert_eq!(left(&db).await, ["alive", "k1", "k3", "k5", "running"]);
        holder.rollback().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn counts_keys_by_state() {
    with_database(async |db: Database| {
        db.execute(SEVEN_KEYS).await;
        db.execute("ANALYZE idempotency_keys").await;
        let counts = store::count(&mut db.pool.acquire().await.unwrap()).await.unwrap();
        assert_eq!((counts.in_progress, counts.completed_estimate), (1, 6));
        let year = 365.0 * 24.0 * 3600.0;
        assert!((counts.oldest_in_progress_age - year).abs() < 2.0 * 24.0 * 3600.0, "{counts:?}");
    })
    .await;
}
