//! Events that are set aside: what a relay does about them, and what people decide.

use std::time::Duration;

use semel_core::database;
use semel_core::outbox::drain::Floors;
use semel_core::outbox::held::{self, Aggregate, Failure, Policy};
use semel_core::outbox::operator::{self, Decision, Filter, State, Verdict};
use semel_core::outbox::{self, NewEvent, drain};
use serde_json::Map;
use sqlx::{Connection as _, Executor as _, PgConnection};
use uuid::Uuid;

use crate::database::{Database, with_database};

const ALL: [State; 3] = [State::Held, State::Waiting, State::Dead];

fn policy(max_attempts: i32, skip_dead: &[&str]) -> Policy {
    Policy {
        shortest: Duration::from_secs(8),
        longest: Duration::from_secs(20),
        max_attempts,
        skip_dead: skip_dead.iter().map(|&name| name.to_owned()).collect(),
    }
}

fn chain(id: &str) -> Aggregate {
    Aggregate { kind: "probe".to_owned(), id: id.to_owned() }
}

async fn append(db: &Database, aggregate: &str, count: usize) -> Vec<Uuid> {
    let event = |_| NewEvent {
        event_id: Uuid::new_v4(),
        aggregate_type: "probe",
        aggregate_id: aggregate.to_owned(),
        aggregate_version: None,
        event_type: "ProbeMade",
        payload: Map::new(),
        trace_context: None,
    };
    let events: Vec<NewEvent> = (0..count).map(event).collect();
    outbox::append(&mut db.pool.acquire().await.unwrap(), &events).await.unwrap();
    events.into_iter().map(|event| event.event_id).collect()
}

async fn fail(connection: &mut PgConnection, event_id: Uuid, policy: &Policy) -> Vec<held::Held> {
    let failure = Failure { event_id, error: format!("failed {event_id}") };
    held::hold(connection, &[failure], policy).await.unwrap()
}

fn all_lanes() -> Vec<i16> {
    (0..drain::LANES).collect()
}

/// The events of the chains that are due.
async fn due(connection: &mut PgConnection, per_lane: i64, bytes: i64) -> Vec<Uuid> {
    let due = held::due(connection, &all_lanes(), per_lane, bytes).await.unwrap();
    due.events.into_iter().map(|event| event.event_id).collect()
}

async fn hot(connection: &mut PgConnection) -> Vec<Uuid> {
    let read = drain::read(connection, &all_lanes(), &Floors::NONE, 1000, i64::MAX).await.unwrap();
    read.into_iter().map(|event| event.event_id).collect()
}

async fn lanes_to_work_on(connection: &mut PgConnection) -> usize {
    drain::probe(connection, &Floors::NONE).await.unwrap().heads.len()
}

#[tokio::test]
async fn what_was_confirmed_and_then_given_up_on_is_not_marked_and_stands_in_no_ones_way() {
    with_database(async |db: Database| {
        let [dead, discarded, other] = append(&db, "a", 3).await.try_into().unwrap();
        let mut connection = db.pool.acquire().await.unwrap();
        fail(&mut connection, dead, &policy(1, &[])).await;
        sqlx::query(
            "UPDATE outbox SET held_at = now(), discarded_at = now(), discarded_by = 'ada', discard_reason = 'a mistake' WHERE event_id = $1",
        )
        .bind(discarded)
        .execute(&mut *connection)
        .await
        .unwrap();
        let marked = drain::mark(&mut connection, &[dead, discarded, other]).await.unwrap();
        assert_eq!(marked.len(), 1);
        assert_eq!(db.count("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL").await, 1);
    })
    .await;
}

/// Lets every chain that is not dead be due.
async fn time_passes(db: &Database) {
    db.execute("UPDATE outbox_held SET next_attempt_at = now() - INTERVAL '1 s' WHERE dead_at IS NULL").await;
}

fn filter(states: &[State]) -> Filter {
    Filter {
        states: states.to_vec(),
        aggregate_type: None,
        aggregate_id: None,
        event_type: None,
        older_than: None,
    }
}

fn decision(verdict: Verdict) -> Decision<'static> {
    Decision { verdict, states: &ALL, actor: "ada", action: "events test", reason: "tried it" }
}

#[tokio::test]
async fn a_failed_event_leaves_the_hot_path_and_waits_longer_each_time() {
    with_database(async |db: Database| {
        let a = append(&db, "a", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        for attempt in 1..=4 {
            let held = fail(&mut connection, a[0], &policy(10, &[])).await;
            assert_eq!((held.len(), held[0].attempts, held[0].is_dead), (1, attempt, false));
            assert!(hot(&mut connection).await.is_empty());
            assert!(due(&mut connection, 10, i64::MAX).await.is_empty(), "too early");
            assert_eq!(lanes_to_work_on(&mut connection).await, 0);
            let step = f64::from(8 * 2_i32.pow(u32::try_from(attempt).unwrap() - 1)).min(20.0);
            let wait: f64 = sqlx::query_scalar(
                "SELECT EXTRACT(EPOCH FROM next_attempt_at - clock_timestamp())::FLOAT8 FROM outbox_held",
            )
            .fetch_one(&db.pool)
            .await
            .unwrap();
            assert!(wait > step / 2.0 - 2.0 && wait <= step, "attempt {attempt}: {wait}");
            time_passes(&db).await;
            assert_eq!(lanes_to_work_on(&mut connection).await, 1, "a lane with nothing hot");
            assert_eq!(due(&mut connection, 10, i64::MAX).await, a);
        }
        let kept = "SELECT count(*) FROM outbox WHERE attempts = 4 AND first_error LIKE 'failed%'
            AND last_error LIKE 'failed%' AND held_at IS NOT NULL AND published_at IS NULL";
        assert_eq!(db.count(kept).await, 1);
    })
    .await;
}

#[tokio::test]
async fn the_wait_after_a_failure_stays_within_its_bounds_however_often_it_was_tried() {
    with_database(async |db: Database| {
        let a = append(&db, "a", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        fail(&mut connection, a[0], &policy(1000, &[])).await;
        for attempts in [1, 20, 31, 64, 998] {
            sqlx::query("UPDATE outbox SET attempts = $1")
                .bind(attempts)
                .execute(&mut *connection)
                .await
                .unwrap();
            let before = db.count("SELECT EXTRACT(EPOCH FROM clock_timestamp())::BIGINT").await;
            fail(&mut connection, a[0], &policy(1000, &[])).await;
            let after = db.count("SELECT EXTRACT(EPOCH FROM clock_timestamp())::BIGINT").await;
            let due = db.count("SELECT EXTRACT(EPOCH FROM next_attempt_at)::BIGINT FROM outbox_held").await;
            // The second failure's step is 16 s, and any later one's the longest wait, 20 s; half of it may be jitter.
            let (shortest, longest) = if attempts == 1 { (8, 16) } else { (10, 20) };
            assert!(due >= before + shortest - 1 && due <= after + longest + 1, "after {attempts} attempts");
        }
    })
    .await;
}

#[tokio::test]
async fn later_events_are_diverted_and_flow_in_order_once_the_first_went_through() {
    with_database(async |db: Database| {
        let a = append(&db, "a", 4).await;
        let b = append(&db, "b", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        assert!(held::lanes_with_chains(&mut connection, &all_lanes()).await.unwrap().is_empty());
        assert!(held::divert(&mut connection, &a).await.unwrap().is_empty(), "no chain, nothing is diverted");
        fail(&mut connection, a[0], &policy(10, &[])).await;
        assert_eq!(held::lanes_with_chains(&mut connection, &all_lanes()).await.unwrap().len(), 1);
        let mut diverted = held::divert(&mut connection, &[&a[1..], &b[..]].concat()).await.unwrap();
        diverted.sort_by_key(|id| a.iter().position(|known| known == id));
        assert_eq!(diverted, a[1..]);
        assert_eq!(hot(&mut connection).await, b);

        time_passes(&db).await;
        assert_eq!(
            due(&mut connection, 10, i64::MAX).await,
            a[..1],
            "followers of one that fails are not read"
        );
        drain::mark(&mut connection, &a[..1]).await.unwrap();
        held::settle(&mut connection, &[chain("a")]).await.unwrap();
        assert_eq!(due(&mut connection, 10, i64::MAX).await, a[1..]);
        assert_eq!(due(&mut connection, 2, i64::MAX).await, a[1..3], "bounded in events");
        assert_eq!(due(&mut connection, 10, 1).await, a[1..2], "and in bytes");

        drain::mark(&mut connection, &a[1..]).await.unwrap();
        held::settle(&mut connection, &[chain("a")]).await.unwrap();
        assert_eq!(db.count("SELECT count(*) FROM outbox_held").await, 0);
        // What comes now is hot again.
        let later = append(&db, "a", 1).await;
        assert_eq!(hot(&mut connection).await, [b, later].concat());
    })
    .await;
}

#[tokio::test]
async fn a_dead_event_blocks_its_aggregate_unless_its_type_is_skipped() {
    with_database(async |db: Database| {
        for (aggregate, skip) in [("blocked", &[][..]), ("skipped", &["ProbeMade"][..])] {
            let events = append(&db, aggregate, 3).await;
            let mut connection = db.pool.acquire().await.unwrap();
            fail(&mut connection, events[0], &policy(2, skip)).await;
            held::divert(&mut connection, &events).await.unwrap();
            let held = fail(&mut connection, events[0], &policy(2, skip)).await;
            assert!(held[0].is_dead);
            assert_eq!(held[0].is_skipped, !skip.is_empty());
            if held[0].is_skipped {
                held::settle(&mut connection, &[chain(aggregate)]).await.unwrap();
                assert_eq!(due(&mut connection, 10, i64::MAX).await, events[1..]);
                continue;
            }
            time_passes(&db).await;
            assert!(due(&mut connection, 10, i64::MAX).await.is_empty());
            assert_eq!(lanes_to_work_on(&mut connection).await, 0, "never due");
            assert!(fail(&mut connection, events[0], &policy(2, skip)).await.is_empty(), "dead once");
        }
        let sample = outbox::sample(&mut db.pool.acquire().await.unwrap(), &Floors::NONE).await.unwrap();
        assert_eq!((sample.pending, sample.held, sample.dead), (0, 6, 2));
    })
    .await;
}

#[tokio::test]
async fn a_skipped_event_that_is_retried_does_not_let_followers_past_a_dead_one() {
    with_database(async |db: Database| {
        let events = append(&db, "a", 3).await;
        let mut connection = db.pool.acquire().await.unwrap();
        fail(&mut connection, events[0], &policy(1, &["ProbeMade"])).await;
        held::settle(&mut connection, &[chain("a")]).await.unwrap();
        fail(&mut connection, events[1], &policy(1, &[])).await;
        held::divert(&mut connection, &events).await.unwrap();

        let decided =
            operator::decide(&mut connection, &events[..1], &decision(Verdict::Retry)).await.unwrap();
        assert_eq!(decided, events[..1]);
        assert_eq!(due(&mut connection, 10, i64::MAX).await, events[..1]);
        drain::mark(&mut connection, &events[..1]).await.unwrap();
        held::settle(&mut connection, &[chain("a")]).await.unwrap();
        assert!(due(&mut connection, 10, i64::MAX).await.is_empty(), "the dead one blocks as before");

        operator::decide(&mut connection, &events[1..2], &decision(Verdict::Discard)).await.unwrap();
        assert_eq!(due(&mut connection, 10, i64::MAX).await, events[2..]);
    })
    .await;
}

#[tokio::test]
async fn a_chain_with_nothing_in_it_is_told_and_goes() {
    with_database(async |db: Database| {
        let a = append(&db, "a", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        fail(&mut connection, a[0], &policy(10, &[])).await;
        db.execute("DELETE FROM outbox").await;
        time_passes(&db).await;
        let due = held::due(&mut connection, &all_lanes(), 10, i64::MAX).await.unwrap();
        assert_eq!((due.events.len(), due.idle.clone()), (0, vec![chain("a")]));
        held::settle(&mut connection, &due.idle).await.unwrap();
        assert_eq!(lanes_to_work_on(&mut connection).await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_chain_is_put_off_for_about_as_long_as_it_waits_and_costs_its_event_no_attempt() {
    with_database(async |db: Database| {
        let a = append(&db, "a", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        let policy = policy(10, &[]);
        fail(&mut connection, a[0], &policy).await;
        // Never less than the policy's shortest wait, nor more than its longest; and half of each may be jitter.
        for (age, shortest, longest) in [(1_u64, 4, 8), (12, 6, 13), (3600, 10, 20)] {
            sqlx::query("UPDATE outbox SET held_at = now() - make_interval(secs => $1)")
                .bind(f64::from(u32::try_from(age).unwrap()))
                .execute(&mut *connection)
                .await
                .unwrap();
            db.execute("UPDATE outbox_held SET next_attempt_at = now()").await;
            let oldest = held::due(&mut connection, &all_lanes(), 10, i64::MAX).await.unwrap().oldest;
            assert!((age..age + 60).contains(&oldest.as_secs()), "{oldest:?} after {age} s");
            held::postpone(&mut connection, &[chain("a")], &policy).await.unwrap();
            let wait = "SELECT EXTRACT(EPOCH FROM next_attempt_at - now())::BIGINT FROM outbox_held";
            let wait = db.count(wait).await;
            assert!((shortest..=longest).contains(&wait), "put off for {wait} s after {age} s");
        }
        assert!(due(&mut connection, 10, i64::MAX).await.is_empty());
        assert_eq!(db.count("SELECT attempts::BIGINT FROM outbox").await, 1);
    })
    .await;
}

#[tokio::test]
async fn each_of_several_failures_leaves_its_own_words() {
    with_database(async |db: Database| {
        let failure = |event_id| Failure { event_id, error: format!("failed {event_id}") };
        let mut failures = Vec::new();
        for aggregate in ["a", "b", "c"] {
            failures.push(failure(append(&db, aggregate, 1).await[0]));
        }
        let mut connection = db.pool.acquire().await.unwrap();
        let held = held::hold(&mut connection, &failures, &policy(10, &[])).await.unwrap();
        assert_eq!(held.len(), 3);
        let own = "SELECT count(*) FROM outbox WHERE first_error = 'failed ' || event_id AND last_error = first_error";
        assert_eq!(db.count(own).await, 3);
    })
    .await;
}

#[tokio::test]
async fn a_decision_is_recorded_for_each_event_or_not_made() {
    with_database(async |db: Database| {
        let (a, b) = (append(&db, "a", 2).await, append(&db, "b", 1).await);
        let mut connection = db.pool.acquire().await.unwrap();
        for event in [a[0], b[0]] {
            fail(&mut connection, event, &policy(1, &[])).await;
        }
        held::divert(&mut connection, &a).await.unwrap();

        let too_long = "r".repeat(4097);
        let mut tx = connection.begin().await.unwrap();
        let unrecorded = Decision { reason: &too_long, ..decision(Verdict::Discard) };
        operator::decide(&mut tx, &b, &unrecorded).await.unwrap_err();
        tx.rollback().await.unwrap();
        assert_eq!(db.count("SELECT count(*) FROM outbox WHERE discarded_at IS NOT NULL").await, 0);

        let both = [a[0], b[0]];
        let decided = operator::decide(&mut connection, &both, &decision(Verdict::Discard)).await.unwrap();
        assert_eq!(decided.len(), 2);
        let kept = "SELECT count(*) FROM outbox JOIN operator_actions ON subject = event_id::TEXT
            WHERE discarded_at IS NOT NULL AND discarded_by = 'ada' AND discard_reason = 'tried it'
              AND actor = 'ada' AND action = 'events test' AND reason = 'tried it'";
        assert_eq!(db.count(kept).await, 2);
        assert_eq!(
            db.count("SELECT count(*) FROM outbox_held").await,
            1,
            "a's follower is due, b's chain is gone"
        );
        assert_eq!(due(&mut connection, 10, i64::MAX).await, a[1..]);
        // Nobody decides twice, nor about what is published.
        assert!(
            operator::decide(&mut connection, &both, &decision(Verdict::Retry)).await.unwrap().is_empty()
        );
        drain::mark(&mut connection, &a[1..]).await.unwrap();
        assert!(operator::decide(&mut connection, &a, &decision(Verdict::Discard)).await.unwrap().is_empty());
        assert_eq!(db.count("SELECT count(*) FROM operator_actions").await, 2);
    })
    .await;
}

#[tokio::test]
async fn the_list_shows_what_the_filter_asks_for_page_by_page() {
    with_database(async |db: Database| {
        let (a, b) = (append(&db, "a", 3).await, append(&db, "b", 1).await);
        append(&db, "hot", 1).await;
        let mut connection = db.pool.acquire().await.unwrap();
        fail(&mut connection, a[0], &policy(10, &[])).await;
        held::divert(&mut connection, &a).await.unwrap();
        fail(&mut connection, b[0], &policy(1, &[])).await;
        let mut connection = db.pool.acquire().await.unwrap();
        let list = async |connection: &mut PgConnection, filter: Filter| {
            let listed = operator::list(connection, &filter, None, 100).await.unwrap();
            listed.into_iter().map(|event| event.event_id).collect::<Vec<_>>()
        };
        assert_eq!(list(&mut connection, filter(&ALL)).await, [a.clone(), b.clone()].concat());
        assert_eq!(list(&mut connection, filter(&[State::Held])).await, a[..1]);
        assert_eq!(list(&mut connection, filter(&[State::Waiting])).await, a[1..]);
        assert_eq!(list(&mut connection, filter(&[State::Dead])).await, b);
        let of_b = Filter { aggregate_id: Some("b".to_owned()), ..filter(&ALL) };
        assert_eq!(list(&mut connection, of_b).await, b);
        let other = Filter { event_type: Some("Other".to_owned()), ..filter(&ALL) };
        assert!(list(&mut connection, other).await.is_empty());
        let old = Filter { older_than: Some(Duration::from_mins(1)), ..filter(&ALL) };
        assert!(list(&mut connection, old).await.is_empty());

        let page = operator::list(&mut connection, &filter(&ALL), None, 2).await.unwrap();
        let next = operator::list(&mut connection, &filter(&ALL), page.last(), 2).await.unwrap();
        let both: Vec<Uuid> = page.iter().chain(&next).map(|event| event.event_id).collect();
        assert_eq!(both, [a.clone(), b.clone()].concat());

        let shown = operator::show(&mut connection, a[1]).await.unwrap().unwrap();
        assert_eq!(
            (shown.state.as_str(), shown.first_of_chain, shown.waiting_behind),
            ("waiting", Some(a[0]), 1)
        );
        assert!(operator::show(&mut connection, Uuid::new_v4()).await.unwrap().is_none());
        let dead = operator::show(&mut connection, b[0]).await.unwrap().unwrap();
        assert_eq!((dead.state.as_str(), dead.next_attempt_at), ("dead", None));
    })
    .await;
}

#[tokio::test]
async fn a_person_waits_for_a_lane_and_not_for_ever() {
    with_database(async |db: Database| {
        let mut relay = db.pool.begin().await.unwrap();
        assert_eq!(drain::take_lanes(&mut relay, &[7], 1).await.unwrap(), [7]);
        let mut person = db.pool.begin().await.unwrap();
        assert!(!operator::take_lane(&mut person, 7, Duration::from_millis(50)).await.unwrap());
        person.rollback().await.unwrap();

        let (mut person, pid) = db.connect().await;
        let waiting = tokio::spawn(async move {
            let mut tx = person.begin().await.unwrap();
            operator::take_lane(&mut tx, 7, Duration::from_mins(1)).await.unwrap()
        });
        db.until_blocked(pid).await;
        relay.rollback().await.unwrap();
        assert!(waiting.await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_may_not_write_is_found_out_before_anything_is_sent() {
    with_database(async |db: Database| {
        let (mut connection, _) = db.connect().await;
        held::probe_writing(&mut connection).await.unwrap();
        connection.execute("SET default_transaction_read_only = on").await.unwrap();
        let error = held::probe_writing(&mut connection).await.unwrap_err();
        assert!(database::is_read_only(&error), "{error}");

        let role = format!("semel_{}", Uuid::new_v4().simple());
        let grants = [
            "SELECT, UPDATE (published_at, attempts, first_error, last_error, held_at, dead_at, skipped_at) ON outbox",
            "SELECT, INSERT, UPDATE, DELETE ON outbox_held",
        ];
        let (mut owner, _) = db.connect().await;
        owner.execute(sqlx::AssertSqlSafe(format!("CREATE ROLE {role}"))).await.unwrap();
        for missing in [Some(0), Some(1), None] {
            for (at, grant) in grants.iter().enumerate() {
                let of = if grant.ends_with("held") { "outbox_held" } else { "outbox" };
                let sql = if missing == Some(at) {
                    format!("GRANT SELECT ON {of} TO {role}")
                } else {
                    format!("GRANT {grant} TO {role}")
                };
                owner.execute(sqlx::AssertSqlSafe(sql)).await.unwrap();
            }
            let (mut relay, _) = db.connect().await;
            relay.execute(sqlx::AssertSqlSafe(format!("SET ROLE {role}"))).await.unwrap();
            let probed = held::probe_writing(&mut relay).await;
            match missing {
                Some(_) => {
                    assert_eq!(database::sqlstate(&probed.unwrap_err()).as_deref(), Some("42501"));
                }
                None => probed.unwrap(),
            }
            owner.execute(sqlx::AssertSqlSafe(format!("DROP OWNED BY {role}"))).await.unwrap();
        }
        owner.execute(sqlx::AssertSqlSafe(format!("DROP ROLE {role}"))).await.unwrap();
    })
    .await;
}
