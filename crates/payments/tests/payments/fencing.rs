//! Payments that are rolled back: only behind a fence, and nobody sends once it is being set.

use semel_core::idempotency::engine::Answer;
use semel_payments::provider::Answer as Said;
use serde_json::Value;

use crate::bed::{
    Bed, expect_fresh, expect_unknown, made_by, pending, rolled_back, seen, succeeded, with_bed,
};
use crate::provider::{Call, unknown};

/// Begins a payment that the provider has never heard of, and lets its window pass.
async fn begin_unheard_of(bed: &Bed) {
    bed.begin_unknown().await;
    bed.pass_the_window().await;
}

#[tokio::test]
async fn what_is_not_found_is_fenced_and_rolled_back() {
    with_bed(async |bed: Bed| {
        begin_unheard_of(&bed).await;
        let hold = bed.provider.hold(Call::Cancel);
        let paying = bed.start_paying("k");
        hold.reached().await;
        assert_eq!(bed.seen("k").await, pending("canceling"), "committed before it is canceled");
        hold.release();
        let response = expect_fresh(paying.await.unwrap(), 424);
        let problem: Value = serde_json::from_slice(&response.body).unwrap();
        assert_eq!(problem["type"], "/errors/payment-rolled-back");
        assert_eq!(problem["payment"]["status"], "canceled");
        assert_eq!(problem["payment"]["id"], made_by(&bed, "k").to_string());
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Cancel]);
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
        let again = bed.pay("k").await;
        assert!(matches!(&again, Answer::Replayed { response: same, .. } if *same == response), "{again:?}");
        assert_eq!(bed.provider.moved(), 0);
    })
    .await;
}

#[tokio::test]
async fn what_the_provider_cannot_tell_is_fenced_too() {
    with_bed(async |bed: Bed| {
        begin_unheard_of(&bed).await;
        bed.provider.say(Call::Get, unknown("500"));
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Cancel]);
    })
    .await;
}

#[tokio::test]
async fn a_cancel_that_comes_too_late_ends_in_success() {
    with_bed(async |bed: Bed| {
        bed.provider.do_and_say(Call::Charge, unknown("the answer was lost"));
        expect_unknown(&bed.pay("k").await);
        bed.pass_the_window().await;
        // The charge was still on its way when it was asked for.
        bed.provider.say(Call::Get, Said::NotFound);
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Cancel, Call::Get]);
        assert_eq!(bed.seen("k").await, succeeded(&["get succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn a_second_cancel_is_an_error_and_the_fence_is_found_by_asking() {
    with_bed(async |bed: Bed| {
        begin_unheard_of(&bed).await;
        bed.provider.do_and_say(Call::Cancel, unknown("the answer was lost"));
        bed.provider.say(Call::Get, Said::NotFound);
        bed.provider.say(Call::Get, unknown("500"));
        expect_unknown(&bed.pay("k").await);
        assert_eq!(bed.seen("k").await, pending("canceling"));
        expect_fresh(bed.pay("k").await, 424);
        let asked = [Call::Charge, Call::Get, Call::Cancel, Call::Get, Call::Cancel, Call::Get];
        assert_eq!(bed.provider.calls(), asked);
        assert_eq!(bed.seen("k").await, rolled_back(&["get fenced"]));
    })
    .await;
}

#[tokio::test]
async fn a_cancel_that_is_declined_ends_in_a_decline() {
    with_bed(async |bed: Bed| {
        begin_unheard_of(&bed).await;
        bed.provider.say(Call::Cancel, unknown("it is declined already"));
        bed.provider.say(Call::Get, Said::NotFound);
        bed.provider.say(Call::Get, Said::Declined { reference: None, code: "no_money".to_owned() });
        expect_fresh(bed.pay("k").await, 402);
        assert_eq!(
            bed.seen("k").await,
            seen("declined 1", "completed completed", &["PaymentDeclined"], &["get declined"])
        );
    })
    .await;
}

#[tokio::test]
async fn once_it_is_being_canceled_nobody_sends_whatever_is_answered() {
    with_bed(async |bed: Bed| {
        begin_unheard_of(&bed).await;
        let nothing_known = [
            Said::NotFound,
            Said::InProgress,
            Said::NotExecuted { reason: "connection refused".to_owned() },
            unknown("500"),
            Said::Mismatch { reason: "KEY_MISMATCH".to_owned() },
        ];
        bed.provider.say(Call::Get, Said::NotFound);
        for said in nothing_known {
            bed.provider.say(Call::Cancel, unknown("500"));
            bed.provider.say(Call::Get, said.clone());
            expect_unknown(&bed.pay("k").await);
            assert_eq!(bed.seen("k").await, pending("canceling"), "{said:?}");
            // Even if the first send were young again.
            bed.execute("UPDATE idempotency_keys SET provider_first_sent_at = clock_timestamp()").await;
        }
        let calls = bed.provider.calls();
        let canceling = calls.iter().position(|call| *call == Call::Cancel).unwrap();
        assert!(!calls[canceling..].contains(&Call::Charge), "{calls:?}");
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!((bed.provider.sent().len(), bed.provider.moved()), (1, 0));
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
    })
    .await;
}

#[tokio::test]
async fn a_charge_that_was_fenced_is_rolled_back_by_its_own_answer() {
    with_bed(async |bed: Bed| {
        bed.provider.say(Call::Charge, Said::Fenced);
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Charge]);
        assert_eq!(bed.seen("k").await, rolled_back(&["charge fenced"]));
    })
    .await;
}
