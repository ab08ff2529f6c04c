//! What a relay asks of the outbox.

use std::collections::HashSet;
use std::sync::Arc;

use semel_core::outbox::drain::Floors;
use semel_core::outbox::{self, NewEvent, drain};
use serde_json::{Map, json};
use sqlx::{Connection as _, Executor as _};
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::database::{Database, with_database};

fn all_lanes() -> Vec<i16> {
    (0..drain::LANES).collect()
}

/// Appends `count` events of one aggregate, each with a payload of the same size; returns its lane and their ids.
async fn append(db: &Database, aggregate_id: &str, count: usize) -> (i16, Vec<Uuid>) {
    let events: Vec<NewEvent> = (0..count)
        .map(|_| NewEvent {
            event_id: Uuid::new_v4(),
            aggregate_type: "probe",
            aggregate_id: aggregate_id.to_owned(),
            aggregate_version: None,
            event_type: "ProbeMade",
            payload: Map::from_iter([("text".to_owned(), json!("x".repeat(100)))]),
            trace_context: None,
        })
        .collect();
    outbox::append(&mut db.pool.acquire().await.unwrap(), &events).await.unwrap();
    let lane = sqlx::query_scalar("SELECT lane FROM outbox WHERE aggregate_id = $1 LIMIT 1")
        .bind(aggregate_id)
        .fetch_one(&db.pool)
        .await
        .unwrap();
    (lane, events.into_iter().map(|event| event.event_id).collect())
}

async fn pending(db: &Database, lanes: &[i16], per_lane: i64, bytes: i64) -> Vec<Uuid> {
    let mut connection = db.pool.acquire().await.unwrap();
    let read = drain::read(&mut connection, lanes, &Floors::NONE, per_lane, bytes).await.unwrap();
    read.into_iter().map(|event| event.event_id).collect()
}

async fn probe(connection: &mut sqlx::PgConnection) -> Vec<drain::LaneHead> {
    drain::probe(connection, &Floors::NONE).await.unwrap().heads
}

#[tokio::test]
async fn two_relays_never_hold_one_lane() {
    with_database(async |db: Database| {
        let (taken, done) = (Arc::new(Barrier::new(8)), Arc::new(Barrier::new(8)));
        let relays: Vec<_> = (0..8)
            .map(|_| {
                let (db, taken, done) = (db.clone(), Arc::clone(&taken), Arc::clone(&done));
                tokio::spawn(async move {
                    let mut tx = db.pool.begin().await.unwrap();
                    taken.wait().await;
                    let lanes = drain::take_lanes(&mut tx, &all_lanes(), 16).await.unwrap();
                    done.wait().await;
                    tx.commit().await.unwrap();
                    lanes
                })
            })
            .collect();
        let mut held = Vec::new();
        for relay in relays {
            held.extend(relay.await.unwrap());
        }
        let distinct: HashSet<_> = held.iter().copied().collect();
        assert_eq!(held.len(), distinct.len(), "held at the same time: {held:?}");
        assert_eq!(distinct.len(), 64, "every lane was free for somebody");
    })
    .await;
}

#[tokio::test]
async fn lanes_are_taken_in_the_order_given_and_freed_with_the_transaction() {
    with_database(async |db: Database| {
        let mut first = db.pool.begin().await.unwrap();
        let mut second = db.pool.begin().await.unwrap();
        assert_eq!(drain::take_lanes(&mut first, &[9, 3, 5], 2).await.unwrap(), [9, 3]);
        assert_eq!(drain::take_lanes(&mut second, &[9, 3, 5], 3).await.unwrap(), [5]);
        first.rollback().await.unwrap();
        assert_eq!(drain::take_lanes(&mut second, &[9, 3], 2).await.unwrap(), [9, 3]);
    })
    .await;
}

#[tokio::test]
async fn lanes_of_another_schema_are_others() {
    with_database(async |db: Database| {
        db.execute("CREATE SCHEMA other; CREATE TABLE other.outbox (LIKE outbox INCLUDING ALL)").await;
        let mut own = db.pool.begin().await.unwrap();
        let mut other = db.pool.begin().await.unwrap();
        other.execute("SET LOCAL search_path TO other").await.unwrap();
        assert_eq!(drain::take_lanes(&mut own, &[1], 1).await.unwrap(), [1]);
        assert_eq!(drain::take_lanes(&mut other, &[1], 1).await.unwrap(), [1]);
    })
    .await;
}

/// Why a relay takes its lanes and reads them in two statements.
#[tokio::test]
async fn one_statement_that_locks_and_reads_sees_what_was_just_published_and_two_do_not() {
    const TAKE: &str = "SELECT pg_advisory_xact_lock('outbox'::REGCLASS::OID::INT, lane) FROM (
        SELECT DISTINCT lane FROM outbox) AS only_lane";
    const TAKE_AND_READ: &str = "WITH taken AS MATERIALIZED (
            SELECT pg_advisory_xact_lock('outbox'::REGCLASS::OID::INT, lane) FROM (
                SELECT DISTINCT lane FROM outbox) AS only_lane)
        SELECT count(*) FROM taken, outbox WHERE published_at IS NULL";
    with_database(async |db: Database| {
        let (lane, events) = append(&db, "a", 3).await;
        let mut owner = db.pool.begin().await.unwrap();
        assert_eq!(drain::take_lanes(&mut owner, &[lane], 1).await.unwrap(), [lane]);

        let (mut in_one, in_one_pid) = db.connect().await;
        let (mut in_two, in_two_pid) = db.connect().await;
        for connection in [&mut in_one, &mut in_two] {
            connection.execute("SET lock_timeout = '30s'").await.unwrap();
        }
        let in_one = tokio::spawn(async move {
            sqlx::query_scalar::<_, i64>(TAKE_AND_READ).fetch_one(&mut in_one).await.unwrap()
        });
        db.until_blocked(in_one_pid).await;
        let in_two = tokio::spawn(async move {
            let mut tx = in_two.begin().await.unwrap();
            tx.execute(TAKE).await.unwrap();
            drain::read(&mut tx, &[lane], &Floors::NONE, 100, i64::MAX).await.unwrap().len()
        });
        db.until_blocked(in_two_pid).await;

        drain::mark(&mut owner, &events).await.unwrap();
        owner.commit().await.unwrap();
        assert_eq!(in_one.await.unwrap(), 3, "its snapshot is older than its lock");
        assert_eq!(in_two.await.unwrap(), 0);
    })
    .await;
}

#[tokio::test]
async fn reads_oldest_first_and_no_more_than_asked() {
    with_database(async |db: Database| {
        let (lane, a) = append(&db, "a", 4).await;
        let (other_lane, b) = another_lane(&db, lane, 2).await;
        let lanes = [lane, other_lane];
        assert_eq!(pending(&db, &lanes, 100, i64::MAX).await, [a.clone(), b.clone()].concat());
        assert_eq!(pending(&db, &lanes, 1, i64::MAX).await, [a[0], b[0]]);
        assert_eq!(pending(&db, &[other_lane], 100, i64::MAX).await, b);
        assert!(pending(&db, &[], 100, i64::MAX).await.is_empty());

        let size = db.count("SELECT octet_length(payload::TEXT)::BIGINT FROM outbox LIMIT 1").await;
        assert_eq!(pending(&db, &[lane], 100, 1).await, a[..1], "always one");
        assert_eq!(pending(&db, &[lane], 100, size).await, a[..1]);
        assert_eq!(pending(&db, &[lane], 100, size + 1).await, a[..2]);
        assert_eq!(pending(&db, &lanes, 100, 2 * size).await, [a[0], a[1], b[0], b[1]], "bounded per lane");
    })
    .await;
}

/// Appends events of an aggregate in a lane other than this one.
async fn another_lane(db: &Database, lane: i16, count: usize) -> (i16, Vec<Uuid>) {
    let aggregate: String = sqlx::query_scalar(
        "SELECT n::TEXT FROM generate_series(1, 100) AS n
         WHERE (hashtextextended('probe' || E'\\x1f' || n, 0) & 63) <> $1 LIMIT 1",
    )
    .bind(i64::from(lane))
    .fetch_one(&db.pool)
    .await
    .unwrap();
    let (other, events) = append(db, &aggregate, count).await;
    assert_ne!(other, lane);
    (other, events)
}

#[tokio::test]
async fn reads_an_event_whole() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
             VALUES ('00000000-0000-4000-8000-000000000001', 'probe', 'a', 7, 'ProbeMade', '{\"z\":1e2,\"a\":\"é\"}',
                     '{\"traceparent\":\"t\",\"k\":\"v\"}')",
        )
        .await;
        let mut connection = db.pool.acquire().await.unwrap();
        let read = drain::read(&mut connection, &all_lanes(), &Floors::NONE, 10, i64::MAX).await.unwrap();
        let [event] = read.as_slice() else { panic!("{read:?}") };
        assert_eq!(event.event_id.to_string(), "00000000-0000-4000-8000-000000000001");
        assert_eq!((event.aggregate_type.as_str(), event.aggregate_id.as_str()), ("probe", "a"));
        assert_eq!((event.aggregate_version, event.event_type.as_str()), (Some(7), "ProbeMade"));
        assert_eq!(event.payload, "{\"a\": \"é\", \"z\": 100}", "JSON text as Postgres keeps it");
        let headers: Vec<_> = event.headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(headers, [("k", "v"), ("traceparent", "t")]);
    })
    .await;
}

#[tokio::test]
async fn marks_exactly_what_was_confirmed() {
    with_database(async |db: Database| {
        let (lane, events) = append(&db, "a", 4).await;
        let mut connection = db.pool.acquire().await.unwrap();
        let confirmed = [events[0], events[2], Uuid::new_v4()];
        let latencies = drain::mark(&mut connection, &confirmed).await.unwrap();
        assert_eq!(latencies.len(), 2);
        assert!(latencies.iter().all(|&seconds| (0.0..3600.0).contains(&seconds)), "{latencies:?}");
        assert_eq!(pending(&db, &[lane], 100, i64::MAX).await, [events[1], events[3]]);
        assert!(drain::mark(&mut connection, &confirmed).await.unwrap().is_empty(), "marked once");
        assert!(drain::mark(&mut connection, &[]).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn the_probe_tells_each_lane_with_work_by_its_oldest_event() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        assert_eq!(probe(&mut connection).await, []);
        let (lane, a) = append(&db, "a", 2).await;
        let (other_lane, _) = another_lane(&db, lane, 1).await;
        let lanes = |heads: Vec<drain::LaneHead>| heads.into_iter().map(|head| head.lane).collect::<Vec<_>>();
        assert_eq!(lanes(probe(&mut connection).await), [lane, other_lane]);
        // Its first event set aside, the lane's oldest that is ready is the second.
        sqlx::query("UPDATE outbox SET held_at = now() WHERE event_id = $1")
            .bind(a[0])
            .execute(&db.pool)
            .await
            .unwrap();
        assert_eq!(pending(&db, &[lane], 100, i64::MAX).await, a[1..]);
        drain::mark(&mut connection, &a[1..]).await.unwrap();
        assert_eq!(lanes(probe(&mut connection).await), [other_lane]);
        assert!(!drain::is_read_only(&mut connection).await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn the_sample_tells_what_waits_and_what_is_set_aside() {
    with_database(async |db: Database| {
        append(&db, "a", 5).await;
        db.execute(
            "UPDATE outbox SET published_at = now() WHERE id = 1;
             UPDATE outbox SET created_at = now() - INTERVAL '1 hour' WHERE id = 1;
             UPDATE outbox SET held_at = now(), created_at = now() - INTERVAL '30 minutes' WHERE id = 2;
             UPDATE outbox SET held_at = now(), dead_at = now(), created_at = now() - INTERVAL '2 hours' WHERE id = 3;
             UPDATE outbox SET created_at = now() - INTERVAL '10 minutes' WHERE id = 4",
        )
        .await;
        let sample = outbox::sample(&mut db.pool.acquire().await.unwrap(), &Floors::NONE).await.unwrap();
        assert_eq!((sample.pending, sample.held, sample.dead), (2, 2, 1));
        let near = |seconds: f64, minutes: f64| (seconds - minutes * 60.0).abs() < 60.0;
        assert!(near(sample.oldest_pending_age, 10.0), "{sample:?}");
        assert!(near(sample.oldest_unpublished_age, 30.0), "held ones count, dead ones do not: {sample:?}");
    })
    .await;
}
