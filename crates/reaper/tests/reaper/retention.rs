//! Deleting what is past its retention, and nothing else.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use semel_core::lifecycle::{Pass, Work as _};
use semel_core::schema::ENGINE;
use semel_reaper::Reaper;
use semel_reaper::retention::{Kept, Retention, Walks};
use sqlx::PgPool;

use crate::database::{Database, Stuck, with_database, with_sets};

const WEEK: Duration = Duration::from_hours(7 * 24);

/// One event of every kind that is not for deletion, all of them ten days old, and three that are.
const EVENTS: &str = "
    INSERT INTO outbox (
        aggregate_type, aggregate_id, event_type, payload, created_at, published_at, attempts, first_error, last_error,
        held_at, dead_at, discarded_at, discarded_by, discard_reason
    )
    SELECT 'order', name, 'OrderCreated', '{}', now() - INTERVAL '10 days', now() - published,
           CASE WHEN held IS NULL THEN 0 ELSE 1 END, held, held,
           CASE WHEN held IS NOT NULL THEN now() - INTERVAL '10 days' END,
           CASE WHEN held = 'dead' THEN now() - INTERVAL '9 days' END,
           CASE WHEN held = 'discarded' THEN now() - discarded END,
           CASE WHEN held = 'discarded' THEN 'ada' END, CASE WHEN held = 'discarded' THEN 'no use' END
    FROM (VALUES
        ('old-1', INTERVAL '8 days', NULL, NULL), ('old-2', INTERVAL '169 hours', NULL, NULL),
        ('young', INTERVAL '167 hours', NULL, NULL), ('waiting', NULL, NULL, NULL), ('held', NULL, 'held', NULL),
        ('dead', NULL, 'dead', NULL), ('discarded', NULL, 'discarded', INTERVAL '167 hours'),
        ('discarded-old', NULL, 'discarded', INTERVAL '169 hours')
    ) AS events (name, published, held, discarded)";

/// Passes until so many in a row have found nothing: a whole round, where that many passes see the whole table.
async fn walk(retention: &mut Retention, idle: usize) {
    let mut in_a_row = 0;
    while in_a_row < idle {
        in_a_row = if retention.run_once().await.unwrap() == Pass::Idle { in_a_row + 1 } else { 0 };
    }
}

fn reaping(pool: &PgPool, kept: Kept, age: Duration) -> Retention {
    Retention::new(pool.clone(), kept, age, 1000)
}

#[tokio::test]
async fn published_and_discarded_events_go_and_no_other() {
    with_database(async |db: Database| {
        db.execute(EVENTS).await;
        walk(&mut reaping(&db.pool, Kept::PublishedEvents, WEEK), 2).await;
        assert_eq!(
            db.texts("SELECT aggregate_id FROM outbox ORDER BY 1").await,
            ["dead", "discarded", "held", "waiting", "young"]
        );
    })
    .await;
}

#[tokio::test]
async fn a_batch_that_is_full_comes_back_to_its_blocks() {
    with_database(async |db: Database| {
        db.execute(EVENTS).await;
        let mut retention = Retention::new(db.pool.clone(), Kept::PublishedEvents, WEEK, 1);
        let passes = [Pass::Full, Pass::Full, Pass::Full, Pass::Idle];
        for expected in passes {
            assert_eq!(retention.run_once().await.unwrap(), expected);
        }
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 5);
    })
    .await;
}

#[tokio::test]
async fn one_table_keeps_no_other_from_being_walked() {
    with_database(async |db: Database| {
        db.execute(EVENTS).await;
        db.execute(
            "INSERT INTO operator_actions (actor, action, subject, reason, acted_at)
             SELECT 'a', 'a', 's', 'r', now() - INTERVAL '8 days' FROM generate_series(1, 3)",
        )
        .await;
        // One that cannot be walked comes first.
        db.execute("ALTER TABLE processed_events RENAME COLUMN processed_at TO elsewhere").await;
        let kinds = [Kept::ProcessedEvents, Kept::PublishedEvents, Kept::OperatorActions];
        let mut walks = Walks::new(kinds.map(|kept| Retention::new(db.pool.clone(), kept, WEEK, 1)).into());
        walks.run_once().await.unwrap_err();
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 7);
        assert_eq!(db.count("SELECT count(*) FROM operator_actions").await, 2);
        // Now those that have more, and those alone, to their end.
        let passes = [Pass::Full, Pass::Full, Pass::Idle];
        for expected in passes {
            assert_eq!(walks.run_once().await.unwrap(), expected);
        }
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 5);
        assert_eq!(db.count("SELECT count(*) FROM operator_actions").await, 0);
    })
    .await;
}

#[tokio::test]
async fn nobody_is_waited_for() {
    with_database(async |db: Database| {
        db.execute(EVENTS).await;
        let mut holder = db.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM outbox WHERE aggregate_id = 'old-1' FOR UPDATE")
            .execute(&mut *holder)
            .await
            .unwrap();
        let mut retention = reaping(&db.pool, Kept::PublishedEvents, WEEK);
        walk(&mut retention, 2).await;
        assert_eq!(
            db.texts("SELECT aggregate_id FROM outbox WHERE aggregate_id LIKE 'old%'").await,
            ["old-1"]
        );
        holder.rollback().await.unwrap();
        walk(&mut retention, 2).await;
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 5);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_walk_covers_a_table_that_is_written_to() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at)
             SELECT 'order', n::TEXT, 'OrderCreated', '{}', now() - INTERVAL '8 days' FROM generate_series(1, 20000) AS n",
        )
        .await;
        let done = AtomicBool::new(false);
        let write = async {
            for _ in 0..200 {
                db.execute(
                    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at)
                     SELECT 'order', n::TEXT, 'OrderCreated', '{}',
                            CASE WHEN n % 2 = 0 THEN now() - INTERVAL '8 days' END
                     FROM generate_series(1, 100) AS n",
                )
                .await;
            }
            done.store(true, Ordering::Relaxed);
        };
        let blocks = db.count("SELECT pg_relation_size('outbox') / 8192").await;
        assert!(blocks > 100, "the table has {blocks} blocks");
        let mut retention =
            Retention::new(db.pool.clone(), Kept::PublishedEvents, WEEK, 10_000).with_blocks(7);
        let reap = async {
            while !done.load(Ordering::Relaxed) {
                retention.run_once().await.unwrap();
            }
        };
        tokio::join!(write, reap);
        let blocks = db.count("SELECT pg_relation_size('outbox') / 8192").await;
        walk(&mut retention, usize::try_from(blocks / 7 + 2).unwrap()).await;
        assert_eq!(db.count("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL").await, 0);
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 10_000);
    })
    .await;
}

#[tokio::test]
async fn a_pass_reads_its_blocks_and_no_more() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at)
             SELECT 'order', n::TEXT, 'OrderCreated', '{}', now() - INTERVAL '8 days' FROM generate_series(1, 20000) AS n",
        )
        .await;
        db.execute("ANALYZE outbox").await;
        let scans = "SELECT seq_scan + idx_scan FROM pg_stat_user_tables WHERE relname = 'outbox'";
        let pool = db.another_pool(1);
        let flush = async || sqlx::query("SELECT pg_stat_force_next_flush()").execute(&pool).await.unwrap();
        flush().await;
        let before = db.count(scans).await;
        let mut retention = reaping(&pool, Kept::PublishedEvents, WEEK).with_blocks(10);
        // A prepared statement is planned anew each time at first, and later once for all.
        for _ in 0..10 {
            retention.run_once().await.unwrap();
        }
        flush().await;
        assert_eq!(db.count("SELECT count(*) FROM outbox WHERE ctid < '(100,0)'").await, 0);
        let read = "SELECT count(*) FROM pg_stat_user_tables WHERE relname = 'outbox' AND n_tup_del > 0";
        assert_eq!(db.count(read).await, 1, "the statistics have arrived");
        // The count above is one scan of the test's own at most, and another connection's.
        assert!(db.count(scans).await - before <= 1, "neither the table nor an index was read from end to end");
    })
    .await;
}

#[tokio::test]
async fn consumers_forget_what_is_past_its_retention() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO processed_events (consumer, event_id, processed_at)
             SELECT age::TEXT, gen_random_uuid(), now() - age * INTERVAL '1 day' FROM unnest(ARRAY[1, 29, 31, 400]) AS age",
        )
        .await;
        let mut retention = reaping(&db.pool, Kept::ProcessedEvents, Duration::from_hours(30 * 24));
        walk(&mut retention, 2).await;
        assert_eq!(db.texts("SELECT consumer FROM processed_events ORDER BY 1").await, ["1", "29"]);
        db.execute(
            "INSERT INTO aggregate_versions (consumer, aggregate_type, aggregate_id, version, effect_at)
             SELECT age::TEXT, 'order', '7', 1, now() - age * INTERVAL '1 day' FROM unnest(ARRAY[1, 29, 31, 400]) AS age",
        )
        .await;
        walk(&mut reaping(&db.pool, Kept::AggregateVersions, Duration::from_hours(30 * 24)), 2).await;
        assert_eq!(db.texts("SELECT consumer FROM aggregate_versions ORDER BY 1").await, ["1", "29"]);
    })
    .await;
}

#[tokio::test]
async fn a_table_that_is_not_here_is_passed_over() {
    with_sets(&[&ENGINE], async |db: Database| {
        for kept in Kept::ALL {
            assert_eq!(reaping(&db.pool, kept, WEEK).run_once().await.unwrap(), Pass::Idle, "{kept:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn evidence_stays_until_its_payment_is_settled() {
    with_database(async |db: Database| {
        Stuck::OLD.plant(&db, 2).await;
        db.execute(
            "UPDATE payments SET status = 'canceled', version = 1, settled_at = now() WHERE provider_key = 'acme-1'",
        )
        .await;
        db.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, fence, answered_at)
             SELECT payment_id, provider_key || age, 'cancel', 'fenced', 1, now() - age * INTERVAL '1 day'
             FROM payments, unnest(ARRAY[399, 401]) AS age
             UNION ALL SELECT gen_random_uuid(), 'nobodys', 'cancel', 'fenced', 1, now() - INTERVAL '401 days'",
        )
        .await;
        let mut retention = reaping(&db.pool, Kept::ProviderAnswers, Duration::from_hours(400 * 24));
        walk(&mut retention, 2).await;
        assert_eq!(
            db.texts("SELECT provider_key FROM provider_answers ORDER BY 1").await,
            ["acme-0399", "acme-0401", "acme-1399", "nobodys"]
        );
    })
    .await;
}

#[tokio::test]
async fn what_people_did_is_kept_for_its_time() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO operator_actions (actor, action, subject, reason, acted_at)
             SELECT age::TEXT, 'a', 's', 'r', now() - age * INTERVAL '1 day' FROM unnest(ARRAY[1, 399, 401]) AS age",
        )
        .await;
        let mut retention = reaping(&db.pool, Kept::OperatorActions, Duration::from_hours(400 * 24));
        walk(&mut retention, 2).await;
        assert_eq!(db.texts("SELECT actor FROM operator_actions ORDER BY 1").await, ["1", "399"]);
    })
    .await;
}

#[tokio::test]
async fn a_payment_that_is_stuck_for_years_keeps_its_key() {
    with_database(async |db: Database| {
        let years = Duration::from_hours(3 * 365 * 24);
        Stuck { sent_ago: years, dead_for: years, ..Stuck::OLD }.plant(&db, 3).await;
        let mut reaper = Reaper::new(db.pool.clone(), 100);
        for _ in 0..3 {
            assert_eq!(reaper.run_once().await.unwrap(), Pass::Idle);
        }
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys").await, 3);
    })
    .await;
}
