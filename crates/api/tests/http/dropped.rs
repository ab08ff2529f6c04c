//! The connection's future is dropped after each of its polls, as the end of a connection drops it: the work goes on, and
//! what was not begun is begun by the retry.

use std::collections::BTreeSet;
use std::pin::pin;
use std::task::Poll;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use semel_core::lifecycle::Drained;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::bed::{DEADLINE, Database, with_database};
use crate::provider::Provider;

/// Fewer polls than this, and the connection was not dropped between all of its steps.
const POLLS: usize = 12;
/// How often all polls are gone through, until each of its steps was met: from run to run, a step may take a poll more or less.
const SWEEPS: usize = 20;

/// So few bytes at a time, that request and answer take many polls each.
const AT_A_TIME: usize = 64;

/// When the connection was dropped.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Dropped {
    BeforeTheWork,
    DuringTheWork,
    AmidTheAnswer,
}

impl Dropped {
    const ALL: [Self; 3] = [Self::BeforeTheWork, Self::DuringTheWork, Self::AmidTheAnswer];
}

/// Polls a future so often, each time when it asks to be, and drops it then; says whether it has ended.
async fn ends_within(polls: usize, future: impl Future) -> bool {
    let (mut future, mut left) = (pin!(future), polls);
    std::future::poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(true),
            Poll::Pending if left == 0 => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Status of the payment, status of its key, and how many events tell of it; none when the key is not known.
async fn seen(db: &Database, key: &str) -> Option<(String, String, i64)> {
    sqlx::query_as(
        "SELECT p.status, k.status, (SELECT count(*) FROM outbox WHERE aggregate_id = p.payment_id::TEXT)
         FROM payments AS p JOIN idempotency_keys AS k ON k.key = p.idempotency_key WHERE k.key = $1",
    )
    .bind(key)
    .fetch_optional(&db.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn a_connection_that_is_dropped_after_any_poll_ends_the_waiting_and_not_the_work() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let retries = db.serve_payments(&provider).await;
        let made = ("succeeded".to_owned(), "completed".to_owned(), 1);
        let (mut runs, mut polls, mut dropped, mut sweeps) = (0, 0, 0, 0);
        let mut found = BTreeSet::new();
        while polls > 0 || dropped < POLLS || found.len() < Dropped::ALL.len() {
            (runs, polls) = (runs + 1, polls + 1);
            let key = format!("k{runs}");
            // Of its own, so that all that it has spawned can be waited for, and nothing is at hand yet.
            let server = db.anew().serve_payments(&provider).await;
            let (near, far) = tokio::io::duplex(AT_A_TIME);
            let (mut reading, mut writing) = tokio::io::split(near);
            let request = server.payment(&key, 1250).bytes();
            let written = tokio::spawn(async move { writing.write_all(&request).await });
            let read = tokio::spawn(async move {
                let mut bytes = Vec::new();
                // Cut off, for all connections but the last.
                let _ = reading.read_to_end(&mut bytes).await;
                bytes
            });
            let service = TowerToHyperService::new(semel_api::router(server.api.clone()));
            let connection = http1::Builder::new().serve_connection(TokioIo::new(far), service);
            let ended = ends_within(polls, connection).await;
            assert_eq!(server.life.drain(DEADLINE).await, Drained::Finished, "{key}");
            // Whole, or not begun.
            let before = seen(&db, &key).await;
            assert!(before.is_none() || before.as_ref() == Some(&made), "{key}: {before:?}");

            let retry = retries.payment(&key, 1250).send(retries.address).await;
            assert_eq!(retry.status, 201, "{key}: {retry:?}");
            assert_eq!(retry.header("idempotent-replayed").is_some(), before.is_some(), "{key}");
            assert_eq!(seen(&db, &key).await.as_ref(), Some(&made), "{key}");
            assert_eq!((provider.charges(), provider.charged()), (runs, runs), "{key}");
            let answer = read.await.unwrap();
            if ended {
                written.await.unwrap().unwrap();
                assert!(answer.starts_with(b"HTTP/1.1 201 ") && answer.ends_with(&retry.body), "{answer:?}");
                (dropped, polls, sweeps) = (dropped.max(polls - 1), 0, sweeps + 1);
                assert!(sweeps < SWEEPS, "in {sweeps} sweeps of up to {dropped} polls only {found:?}");
            } else {
                found.insert(match (before.is_some(), answer.is_empty()) {
                    (false, _) => Dropped::BeforeTheWork,
                    (true, true) => Dropped::DuringTheWork,
                    (true, false) => Dropped::AmidTheAnswer,
                });
            }
        }
        println!("dropped after each of up to {dropped} polls in {sweeps} sweeps");
    })
    .await;
}
