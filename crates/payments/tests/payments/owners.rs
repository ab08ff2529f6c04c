//! Two owners of one key: the one whose fence is stale changes nothing, and answers from the row.

use semel_core::idempotency::engine::Answer;
use semel_payments::provider::Answer as Said;

use crate::bed::{Bed, expect_fresh, pending, rolled_back, succeeded, with_bed};
use crate::provider::{Call, unknown};

#[tokio::test]
async fn an_owner_that_slept_after_its_answer_leaves_only_evidence() {
    with_bed(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Charge);
        let sleeper = bed.start_paying("k");
        hold.reached().await;
        bed.end_leases().await;
        let stored = expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
        let before = everything_but_evidence(&bed).await;
        hold.release();
        // The key was claimed by the sleeper's request, so that this is the first answer to it.
        assert_eq!(expect_fresh(sleeper.await.unwrap(), 201), stored);
        assert_eq!(everything_but_evidence(&bed).await, before);
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded", "charge succeeded"]));
        assert_eq!(bed.provider.moved(), 1);
    })
    .await;
}

async fn everything_but_evidence(bed: &Bed) -> Vec<String> {
    sqlx::query_scalar(
        "SELECT k::TEXT FROM idempotency_keys AS k UNION ALL SELECT p::TEXT FROM payments AS p
         UNION ALL SELECT o::TEXT FROM outbox AS o",
    )
    .fetch_all(&bed.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn an_owner_that_slept_before_it_knew_gives_nothing_up() {
    for said in [unknown("500"), Said::Mismatch { reason: "KEY_MISMATCH".to_owned() }] {
        with_bed(async |bed: Bed| {
            let first = bed.provider.hold_and_say(Call::Charge, said);
            let sleeper = bed.start_paying("k");
            first.reached().await;
            bed.end_leases().await;
            let second = bed.provider.hold(Call::Charge);
            let owner = bed.start_paying("k");
            second.reached().await;
            first.release();
            let answer = sleeper.await.unwrap();
            assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
            // The owner's lease is as it was, and nobody is asked to look.
            assert!(matches!(bed.pay("k").await, Answer::InProgress { .. }));
            second.release();
            expect_fresh(owner.await.unwrap(), 201);
            assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
        })
        .await;
    }
}

#[tokio::test]
async fn an_owner_that_slept_past_its_lease_does_not_begin_to_cancel() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.pass_the_window().await;
        let hold = bed.provider.hold_and_say(Call::Get, Said::NotFound);
        let sleeper = bed.start_paying("k");
        hold.reached().await;
        bed.end_leases().await;
        bed.provider.say(Call::Get, Said::InProgress);
        bed.pay("k").await;
        hold.release();
        let answer = sleeper.await.unwrap();
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        assert_eq!(bed.seen("k").await, pending("sent"));
        assert!(!bed.provider.calls().contains(&Call::Cancel));
    })
    .await;
}

#[tokio::test]
async fn of_two_owners_that_cancel_one_rolls_back() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.pass_the_window().await;
        let hold = bed.provider.hold(Call::Cancel);
        let sleeper = bed.start_paying("k");
        hold.reached().await;
        bed.end_leases().await;
        // Fenced already, so that this cancel is an error: it is asked for.
        let stored = expect_fresh(bed.pay("k").await, 424);
        hold.release();
        let answer = sleeper.await.unwrap();
        assert!(matches!(&answer, Answer::Replayed { response, .. } if *response == stored), "{answer:?}");
        assert_eq!(bed.seen("k").await, rolled_back(&["get fenced", "cancel fenced"]));
        assert_eq!(bed.provider.moved(), 0);
    })
    .await;
}
