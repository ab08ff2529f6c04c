//! The work's own future is dropped after each of its polls, as a process that dies drops it: whoever goes on finds what is
//! left, and money moves once.

use std::collections::BTreeSet;
use std::pin::pin;
use std::task::Poll;

use semel_core::idempotency::engine::{Answer, LEASE, Operation as _, Proceeded};
use semel_core::idempotency::store;
use tokio::time::Instant;

use crate::bed::{Bed, DEADLINE, RETENTION, expect_fresh, scope, with_bed};

/// Fewer polls than this, and the work was not dropped between all of its steps.
const POLLS: usize = 12;
/// How often all polls are gone through, until each of its steps was met: from run to run, a step may take a poll more or less.
const SWEEPS: usize = 20;

/// Who goes on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Heir {
    Retry,
    Reaper,
}

/// How far the work had come when it was dropped.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Left {
    Nothing,
    Claimed,
    Charged,
    Settled,
}

impl Left {
    const ALL: [Self; 4] = [Self::Nothing, Self::Claimed, Self::Charged, Self::Settled];
}

/// Polls a future so often, each time when it asks to be, and drops it then, unless it has ended.
async fn dropped_after<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut left) = (pin!(future), polls);
    std::future::poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn left(bed: &Bed, key: &str) -> Left {
    let status: Option<String> = sqlx::query_scalar("SELECT status FROM idempotency_keys WHERE key = $1")
        .bind(key)
        .fetch_optional(&bed.pool)
        .await
        .unwrap();
    match status.as_deref() {
        None => Left::Nothing,
        Some("completed") => Left::Settled,
        Some(_) if bed.provider.moved_by(Bed::provider_key(key)) == 0 => Left::Claimed,
        Some(_) => Left::Charged,
    }
}

/// Drives on what a reaper finds, until there is nothing in progress. What the dropped work has sent may still be executed
/// meanwhile.
async fn reap_all(bed: &Bed) {
    let deadline = Instant::now() + DEADLINE;
    let in_progress = "SELECT count(*) FROM idempotency_keys WHERE status = 'in_progress'";
    while sqlx::query_scalar::<_, i64>(in_progress).fetch_one(&bed.pool).await.unwrap() > 0 {
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for a reaper to settle what is left");
        reap(bed).await;
    }
}

/// Drives on what a reaper finds once all leases are dead.
async fn reap(bed: &Bed) {
    bed.end_leases().await;
    let operations = ["payments.create".to_owned()];
    let mut connection = bed.pool.acquire().await.unwrap();
    let stuck = store::take_over_stuck(&mut connection, &operations, 10, LEASE).await.unwrap();
    for key in stuck {
        let scope = scope(&key.key);
        let driven = bed.operation().proceed(&bed.pool, &scope, key.fence, RETENTION).await.unwrap();
        assert!(matches!(driven, Proceeded::Completed { .. } | Proceeded::Lost), "{driven:?}");
    }
}

/// Asks again until the answer is final. What the dropped work has sent may still be executed meanwhile.
async fn retry(bed: &Bed, key: &str) -> Answer {
    let deadline = Instant::now() + DEADLINE;
    loop {
        bed.end_leases().await;
        let answer = bed.pay(key).await;
        if !matches!(answer, Answer::InProgress { .. } | Answer::Unknown { .. }) {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {DEADLINE:?} for a final answer; the last was {answer:?}");
    }
}

/// Returns after how many polls the work was dropped, at most, and how often all of them were gone through.
async fn drop_after_each_poll(heir: Heir) -> (usize, usize) {
    let mut came_to = (0, 0);
    with_bed(async |bed: Bed| {
        let (mut runs, mut polls, mut dropped, mut sweeps) = (0, 0, 0, 0);
        let mut found = BTreeSet::new();
        while polls > 0 || dropped < POLLS || found.len() < Left::ALL.len() {
            (runs, polls) = (runs + 1, polls + 1);
            let key = format!("k{runs}");
            let answer = dropped_after(polls, bed.anew().pay(&key)).await;
            let was = left(&bed, &key).await;
            found.insert(was);
            if heir == Heir::Reaper {
                reap_all(&bed).await;
                if was != Left::Nothing {
                    assert_eq!(left(&bed, &key).await, Left::Settled, "{key}");
                }
            }
            let told = retry(&bed, &key).await;
            let (Answer::Fresh { response, .. } | Answer::Replayed { response, .. }) = told else {
                panic!("{key}: {told:?}")
            };
            assert_eq!(response.code, 201, "{key}: {response:?}");
            let seen = bed.seen(&key).await;
            assert_eq!(
                (seen.payment.as_str(), seen.key.as_str()),
                ("succeeded 1", "completed completed"),
                "{key}"
            );
            assert_eq!(seen.events, ["PaymentCreated"], "{key}");
            assert!(
                !seen.evidence.is_empty() && seen.evidence.iter().all(|line| line == "charge succeeded"),
                "{seen:?}"
            );
            assert_eq!(bed.provider.moved_by(Bed::provider_key(&key)), 1, "{key}");
            if let Some(answer) = answer {
                assert_eq!(expect_fresh(answer, 201), response);
                (dropped, polls, sweeps) = (dropped.max(polls - 1), 0, sweeps + 1);
                assert!(sweeps < SWEEPS, "in {sweeps} sweeps of up to {dropped} polls only {found:?}");
            }
        }
        assert_eq!(usize::try_from(bed.provider.moved()), Ok(runs));
        came_to = (dropped, sweeps);
    })
    .await;
    came_to
}

#[tokio::test]
async fn work_that_is_dropped_after_any_poll_is_finished_by_a_retry_with_one_charge() {
    let (polls, sweeps) = drop_after_each_poll(Heir::Retry).await;
    println!("dropped after each of up to {polls} polls, in {sweeps} sweeps");
}

#[tokio::test]
async fn work_that_is_dropped_after_any_poll_is_finished_by_a_reaper_with_one_charge() {
    let (polls, sweeps) = drop_after_each_poll(Heir::Reaper).await;
    println!("dropped after each of up to {polls} polls, in {sweeps} sweeps");
}
