//! What a working fence rules out: a charge of a payment that was rolled back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use semel_core::idempotency::engine::Answer;
use semel_payments::metrics::CONTRADICTIONS;
use semel_payments::provider::Answer as Said;

use crate::bed::{Bed, expect_fresh, expect_unknown, rolled_back, seen, with_bed};
use crate::provider::Call;

/// Counts contradictions.
#[derive(Default)]
pub(crate) struct Counting(Arc<AtomicU64>);

impl Counting {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Recorder for Counting {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() == CONTRADICTIONS { Counter::from_arc(Arc::clone(&self.0)) } else { Counter::noop() }
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test]
async fn a_charge_of_a_payment_that_was_rolled_back_is_written_down_and_told_and_changes_nothing() {
    // For this thread, on which the whole test runs.
    let counting = Counting::default();
    let _guard = metrics::set_default_local_recorder(&counting);
    with_bed(async |bed: Bed| {
        let late =
            bed.provider.hold_and_say(Call::Charge, Said::Succeeded { reference: "ch_late".to_owned() });
        let sleeper = bed.start_paying("k");
        late.reached().await;
        bed.end_leases().await;
        bed.pass_the_window().await;
        let stored = expect_fresh(bed.pay("k").await, 424);
        assert_eq!(counting.count(), 0);
        late.release();
        assert_eq!(expect_fresh(sleeper.await.unwrap(), 424), stored);
        assert_eq!(bed.seen("k").await, rolled_back(&["cancel fenced", "charge succeeded"]));
        assert_eq!(counting.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_charge_of_a_payment_that_was_declined_is_told_too() {
    let counting = Counting::default();
    let _guard = metrics::set_default_local_recorder(&counting);
    with_bed(async |bed: Bed| {
        let late =
            bed.provider.hold_and_say(Call::Charge, Said::Succeeded { reference: "ch_late".to_owned() });
        let sleeper = bed.start_paying("k");
        late.reached().await;
        bed.end_leases().await;
        bed.provider.say(Call::Charge, Said::Declined { reference: None, code: "no".to_owned() });
        expect_fresh(bed.pay("k").await, 402);
        late.release();
        expect_fresh(sleeper.await.unwrap(), 402);
        assert_eq!(
            bed.seen("k").await,
            seen(
                "declined 1",
                "completed completed",
                &["PaymentDeclined"],
                &["charge declined", "charge succeeded"]
            )
        );
        assert_eq!(counting.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_success_is_never_taken_back() {
    let counting = Counting::default();
    let _guard = metrics::set_default_local_recorder(&counting);
    with_bed(async |bed: Bed| {
        let late = bed.provider.hold_and_say(Call::Charge, Said::Fenced);
        let sleeper = bed.start_paying("k");
        late.reached().await;
        bed.end_leases().await;
        let stored = expect_fresh(bed.pay("k").await, 201);
        late.release();
        assert_eq!(expect_fresh(sleeper.await.unwrap(), 201), stored);
        let there = bed.seen("k").await;
        assert_eq!(there.payment, "succeeded 1");
        assert_eq!(there.evidence, ["charge succeeded", "charge fenced"]);
    })
    .await;
}

#[tokio::test]
async fn a_late_answer_while_somebody_else_still_asks_is_used_as_evidence() {
    with_bed(async |bed: Bed| {
        let late = bed.provider.hold(Call::Charge);
        let sleeper = bed.start_paying("k");
        late.reached().await;
        bed.end_leases().await;
        // The next owner is not answered, and gives the key up until later.
        bed.provider.say(Call::Charge, crate::provider::unknown("500"));
        expect_unknown(&bed.pay("k").await);
        late.release();
        let answer = sleeper.await.unwrap();
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        assert_eq!(bed.seen("k").await, seen("processing 0", "in_progress sent", &[], &["charge succeeded"]));
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Charge], "the evidence is enough");
    })
    .await;
}
