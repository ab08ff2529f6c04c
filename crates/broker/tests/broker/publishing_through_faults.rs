//! What the publisher says of messages when something breaks: never too much.

use std::time::{Duration, Instant};

use semel_broker::inspect::QueueKind;
use semel_broker::{Disposition, Error, Outcome, Outgoing, Patience, Publisher};

use crate::forwarder::Forwarder;
use crate::support::{Bed, SOON, envelope, within};

fn is_unknown(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Unconfirmed | Outcome::Unknown { .. })
}

/// Of a wave that may be silent to its end.
fn patience(whole: Duration) -> Patience {
    Patience { whole, silence: whole }
}

async fn publisher_through(forwarder: &Forwarder) -> Publisher {
    Publisher::open(&forwarder.url("heartbeat=10"), "broker tests: faulty line").await.unwrap()
}

#[tokio::test]
async fn a_missing_exchange_leaves_everything_unknown_and_breaks_the_publisher() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let mut publisher = bed.publisher().await;
        let lost = |_| Outgoing::event("no such exchange", "in", envelope(), b"{}".to_vec());

        let wave = publisher.publish_wave((0..300).map(lost).collect()).await;
        assert!(wave.outcomes.iter().all(is_unknown), "{:?}", wave.outcomes);
        let error = wave.broken.expect("the channel is gone");
        assert_eq!(error.reply_code(), Some(404));
        assert_eq!(error.disposition(), Disposition::Retry);
        assert!(!publisher.is_usable());

        let again = publisher.publish_wave(vec![bed.outgoing("in", "x")]).await;
        assert!(is_unknown(&again.outcomes[0]));
        assert!(matches!(again.broken, Some(Error::PublisherBroken)));
        within("a broken publisher to close", SOON, publisher.close()).await;

        let mut next = bed.publisher().await;
        let wave = next.publish_wave(vec![bed.outgoing("in", "x")]).await;
        assert_eq!(wave.outcomes, [Outcome::Confirmed]);
        bed.wait_for_count(&queue, 1).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_cut_in_mid_wave_leaves_the_rest_unknown() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Classic).await;
        let (mut cut_waves, mut confirmed) = (0, 0_u32);
        for bytes in (0..600).step_by(31) {
            let forwarder = Forwarder::start().await;
            let mut publisher = publisher_through(&forwarder).await;
            forwarder.cut_after(bytes);
            let wave = (0..300).map(|_| bed.outgoing("in", "x")).collect();
            let wave = within("a wave on a cut line", SOON, publisher.publish_wave(wave)).await;
            confirmed +=
                u32::try_from(wave.outcomes.iter().filter(|o| **o == Outcome::Confirmed).count()).unwrap();
            assert!(
                wave.outcomes.iter().all(|o| *o == Outcome::Confirmed || is_unknown(o)),
                "{:?}",
                wave.outcomes
            );
            assert_eq!(wave.outcomes.iter().any(is_unknown), wave.broken.is_some());
            assert_eq!(publisher.is_usable(), wave.broken.is_none());
            cut_waves += usize::from(wave.broken.is_some());
        }
        assert!(cut_waves > 0);
        within("every confirmed message in the queue", SOON, async {
            while bed.count(&queue).await < confirmed {}
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_unroutable_message_is_confirmed_by_a_wave_that_breaks_off() {
    Bed::run(async |bed| {
        bed.queue(QueueKind::Classic).await;
        let mut cut_waves = 0;
        for round in 0..60_usize {
            let forwarder = Forwarder::start().await;
            let mut publisher = publisher_through(&forwarder).await;
            forwarder.cut_after(100 + round * 397);
            let unroutable = |n: usize| (n + round).is_multiple_of(3);
            let wave =
                (0..200).map(|n| bed.outgoing(if unroutable(n) { "nowhere" } else { "in" }, "x")).collect();
            let wave = within("a wave on a cut line", SOON, publisher.publish_wave(wave)).await;
            for (n, outcome) in wave.outcomes.iter().enumerate() {
                match outcome {
                    Outcome::Confirmed => assert!(!unroutable(n), "round {round}, message {n}"),
                    Outcome::Returned { .. } => assert!(unroutable(n), "round {round}, message {n}"),
                    other => assert!(is_unknown(other) && wave.broken.is_some(), "{other:?}"),
                }
            }
            cut_waves += usize::from(wave.broken.is_some());
        }
        assert!(cut_waves > 10, "only {cut_waves} waves broke off");
    })
    .await;
}

#[tokio::test]
async fn a_silent_broker_costs_no_more_than_the_limit() {
    Bed::run(async |bed| {
        let forwarder = Forwarder::start().await;
        let mut publisher =
            publisher_through(&forwarder).await.with_patience(patience(Duration::from_millis(300)));
        forwarder.freeze();

        let begun = Instant::now();
        let wave = publisher.publish_wave((0..50).map(|_| bed.outgoing("in", "x")).collect()).await;
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(wave.outcomes.iter().all(is_unknown), "{:?}", wave.outcomes);
        assert!(matches!(wave.broken, Some(Error::TimedOut { .. })), "{:?}", wave.broken);
        assert!(!publisher.is_usable());
        let begun = Instant::now();
        publisher.close().await;
        assert!(begun.elapsed() < Duration::from_secs(1), "a cut connection is not closed politely");
    })
    .await;
}

/// `connection.blocked` with an empty reason, as the broker sends it when an alarm begins.
const BLOCKED: &[u8] = &[1, 0, 0, 0, 0, 0, 5, 0, 10, 0, 60, 0, 0xCE];

#[tokio::test]
async fn a_blocked_connection_is_seen_and_hangs_neither_wave_nor_close() {
    Bed::run(async |bed| {
        let forwarder = Forwarder::start().await;
        let mut publisher =
            publisher_through(&forwarder).await.with_patience(patience(Duration::from_millis(300)));
        assert!(!publisher.is_blocked());
        forwarder.inject(BLOCKED.to_vec());
        within("the publisher to see that it is blocked", SOON, async {
            while !publisher.is_blocked() {
                tokio::task::yield_now().await;
            }
        })
        .await;

        let begun = Instant::now();
        let wave = publisher.publish_wave(vec![bed.outgoing("in", "x")]).await;
        assert!(is_unknown(&wave.outcomes[0]));
        assert!(matches!(wave.broken, Some(Error::Blocked { .. })), "{:?}", wave.broken);
        assert!(publisher.is_blocked(), "it stays open, to learn when the alarm is over");
        within("a blocked publisher to close", SOON, publisher.close()).await;
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    })
    .await;
}

#[tokio::test]
async fn a_wave_that_is_dropped_half_way_breaks_the_publisher() {
    Bed::run(async |bed| {
        let forwarder = Forwarder::start().await;
        let mut publisher = publisher_through(&forwarder).await;
        forwarder.freeze();
        let wave = publisher.publish_wave(vec![bed.outgoing("in", "x")]);
        assert!(tokio::time::timeout(Duration::from_millis(50), wave).await.is_err());
        assert!(!publisher.is_usable());
        let next = publisher.publish_wave(vec![bed.outgoing("in", "x")]).await;
        assert!(matches!(next.broken, Some(Error::PublisherBroken)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_unroutable_message_is_confirmed_by_a_wave_that_runs_out_of_time() {
    Bed::run(async |bed| {
        bed.queue(QueueKind::Classic).await;
        let mut late_waves = 0;
        for round in 0..120_u64 {
            let limit = Duration::from_micros(500 + round * 150);
            let mut publisher = bed.publisher().await.with_patience(patience(limit));
            let unroutable = |n: u64| (n + round).is_multiple_of(3);
            let wave =
                (0..200).map(|n| bed.outgoing(if unroutable(n) { "nowhere" } else { "in" }, "x")).collect();
            let wave = publisher.publish_wave(wave).await;
            for (n, outcome) in (0..).zip(&wave.outcomes) {
                match outcome {
                    Outcome::Confirmed => assert!(!unroutable(n), "round {round}, message {n}"),
                    Outcome::Returned { .. } => assert!(unroutable(n), "round {round}, message {n}"),
                    other => assert!(is_unknown(other), "{other:?}"),
                }
            }
            if wave.broken.is_none() {
                // What still comes of that wave is not taken for part of the next one.
                let wave =
                    vec![bed.outgoing("in", "x"), bed.outgoing("nowhere", "x"), bed.outgoing("in", "x")];
                let wave = publisher.publish_wave_within(Patience::default(), wave).await;
                let returned = matches!(wave.outcomes[1], Outcome::Returned { .. });
                let others = [&wave.outcomes[0], &wave.outcomes[2]];
                assert!(returned && others == [&Outcome::Confirmed; 2], "{:?}", wave.outcomes);
            }
            let heard = wave.outcomes.iter().filter(|outcome| !is_unknown(outcome)).count();
            late_waves += usize::from(heard > 0 && heard < 200);
        }
        assert!(late_waves > 5, "only {late_waves} waves ran out of time half-way");
    })
    .await;
}
