//! Payments through a provider at which a charge is prepared first: no money moves before its reference is committed.

use std::time::{Duration, SystemTime};

use semel_core::idempotency::engine::Answer;
use semel_payments::provider::{Answer as Said, DEADLINE, Dedup, Fencing, LookUp, Promises};

use crate::bed::{Bed, expect_fresh, expect_unknown, pending, rolled_back, seen, succeeded, with_bed};
use crate::provider::{Call, unknown};

const PREPARING: Promises = Promises {
    dedup: Dedup::For(Duration::from_hours(24)),
    look_up: LookUp::ByReference,
    fence: Fencing::Cancel,
};

/// Runs a test with a provider that prepares.
async fn with_preparing(test: impl AsyncFnOnce(Bed)) {
    with_bed(async |bed: Bed| test(bed.promising(PREPARING)).await).await;
}

impl Bed {
    /// What the key `k` refers to at the provider.
    async fn reference(&self) -> Option<String> {
        let reference = "SELECT provider_reference FROM idempotency_keys";
        sqlx::query_scalar(reference).fetch_one(&self.pool).await.unwrap()
    }

    /// Moves the first send behind the provider's horizon.
    async fn pass_the_horizon(&self) {
        self.execute(
            "UPDATE idempotency_keys SET provider_first_sent_at = provider_first_sent_at - INTERVAL '25 hours'",
        )
        .await;
    }
}

fn named() -> String {
    format!("pi_{}", Bed::provider_key("k"))
}

#[tokio::test]
async fn a_charge_is_prepared_and_its_reference_committed_before_it_is_sent() {
    with_preparing(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Charge);
        let paying = bed.start_paying("k");
        hold.reached().await;
        assert_eq!(bed.reference().await, Some(named()));
        hold.release();
        expect_fresh(paying.await.unwrap(), 201);
        assert_eq!(bed.provider.calls(), [Call::Prepare, Call::Charge]);
        assert_eq!(bed.provider.charged_as(), [Some(named())]);
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn each_of_the_two_calls_has_its_time() {
    with_preparing(async |bed: Bed| {
        let before = SystemTime::now();
        bed.pay("k").await;
        let [not_after] = bed.provider.not_after().try_into().unwrap();
        assert!(before + 2 * DEADLINE <= not_after && not_after <= SystemTime::now() + 2 * DEADLINE);
    })
    .await;
}

#[tokio::test]
async fn what_is_prepared_is_not_prepared_again() {
    with_preparing(async |bed: Bed| {
        bed.begin_unknown().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Prepare, Call::Charge, Call::Charge]);
    })
    .await;
}

#[tokio::test]
async fn a_preparation_whose_answer_is_lost_is_asked_for_again_and_nothing_is_charged_meanwhile() {
    with_preparing(async |bed: Bed| {
        for said in [unknown("lost"), Said::InProgress, Said::NotExecuted { reason: "away".to_owned() }] {
            bed.provider.say(Call::Prepare, said);
            expect_unknown(&bed.pay("k").await);
            assert_eq!((bed.seen("k").await, bed.reference().await), (pending("sent"), None));
        }
        assert_eq!(bed.provider.calls(), [Call::Prepare; 3]);
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.moved(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_preparation_that_is_refused_is_a_decline() {
    with_preparing(async |bed: Bed| {
        let (reference, code) = (None, "resource_missing".to_owned());
        bed.provider.say(Call::Prepare, Said::Declined { reference, code });
        expect_fresh(bed.pay("k").await, 402);
        let declined = seen("declined 1", "completed completed", &["PaymentDeclined"], &["charge declined"]);
        assert_eq!((bed.seen("k").await, bed.provider.moved()), (declined, 0));
    })
    .await;
}

#[tokio::test]
async fn what_will_never_be_prepared_is_rolled_back_at_once() {
    with_preparing(async |bed: Bed| {
        bed.provider.say(Call::Prepare, Said::Fenced);
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Prepare]);
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
    })
    .await;
}

#[tokio::test]
async fn a_mismatch_of_a_preparation_is_left_to_a_person() {
    with_preparing(async |bed: Bed| {
        bed.provider.say(Call::Prepare, Said::Mismatch { reason: "another order".to_owned() });
        let answer = bed.pay("k").await;
        assert!(matches!(answer, Answer::NeedsAttention { .. }), "{answer:?}");
        assert_eq!(bed.provider.moved(), 0);
    })
    .await;
}

/// The reference may be lost with a database's tail, and the charge made.
#[tokio::test]
async fn past_the_window_a_reference_that_is_not_on_record_is_asked_for_before_it_is_decided() {
    with_preparing(async |bed: Bed| {
        bed.provider.do_and_say(Call::Charge, unknown("lost"));
        expect_unknown(&bed.pay("k").await);
        bed.execute("UPDATE idempotency_keys SET provider_reference = NULL").await;
        bed.pass_the_window().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Prepare, Call::Charge, Call::Prepare, Call::Get]);
        assert_eq!(bed.provider.moved(), 1);
    })
    .await;
}

#[tokio::test]
async fn past_the_window_what_is_prepared_is_asked_about_and_fenced_by_its_reference() {
    with_preparing(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.pass_the_window().await;
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Prepare, Call::Charge, Call::Get, Call::Cancel]);
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
    })
    .await;
}

/// It would be another charge: the provider has forgotten the key.
#[tokio::test]
async fn past_the_horizon_nothing_is_prepared_and_what_has_no_reference_was_never_charged() {
    with_preparing(async |bed: Bed| {
        bed.provider.say(Call::Prepare, unknown("lost"));
        expect_unknown(&bed.pay("k").await);
        bed.pass_the_horizon().await;
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Prepare]);
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
    })
    .await;
}

#[tokio::test]
async fn past_the_horizon_what_has_a_reference_is_asked_about_and_never_sent() {
    with_preparing(async |bed: Bed| {
        bed.provider.do_and_say(Call::Charge, unknown("lost"));
        expect_unknown(&bed.pay("k").await);
        bed.pass_the_horizon().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Prepare, Call::Charge, Call::Get]);
        assert_eq!(bed.provider.moved(), 1);
    })
    .await;
}

/// It slept past its lease between the answer and the commit, and the next owner has gone on without it.
#[tokio::test]
async fn an_owner_that_is_late_with_a_reference_charges_nothing() {
    with_preparing(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Prepare);
        let late = bed.start_paying("k");
        hold.reached().await;
        bed.end_leases().await;
        bed.pass_the_horizon().await;
        expect_fresh(bed.pay("k").await, 424);
        hold.release();
        // It is told what the other has settled.
        expect_fresh(late.await.unwrap(), 424);
        assert_eq!((bed.provider.calls(), bed.provider.moved()), (vec![Call::Prepare], 0));
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced"]));
    })
    .await;
}

#[tokio::test]
async fn no_reference_is_committed_once_the_key_is_being_canceled() {
    with_preparing(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Prepare);
        let paying = bed.start_paying("k");
        hold.reached().await;
        // Its own fence is still good.
        bed.execute("UPDATE idempotency_keys SET recovery_point = 'canceling'").await;
        hold.release();
        let answer = paying.await.unwrap();
        assert!(!matches!(answer, Answer::Fresh { .. }), "{answer:?}");
        assert_eq!((bed.reference().await, bed.provider.moved()), (None, 0));
        bed.end_leases().await;
        expect_fresh(bed.pay("k").await, 424);
    })
    .await;
}
