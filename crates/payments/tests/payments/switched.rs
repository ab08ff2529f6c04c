//! Payments that are in progress when their deployment is given another provider: it is asked nothing, sent nothing, and no
//! fence of it is believed.

use std::time::Duration;

use semel_core::idempotency::engine::Answer;
use semel_payments::provider::{Dedup, Fencing, LookUp, Promises};

use crate::bed::{Bed, expect_fresh, pending, succeeded, with_bed};
use crate::provider::{Call, unknown};

const BY_KEY: Promises =
    Promises { dedup: Dedup::For(Duration::from_hours(24)), look_up: LookUp::ByKey, fence: Fencing::Cancel };
const BY_REFERENCE: Promises = Promises { look_up: LookUp::ByReference, ..BY_KEY };

#[tokio::test]
async fn what_another_provider_may_have_charged_is_left_to_a_person_wherever_it_stands() {
    let (grpc, live, test) = (("grpc", BY_KEY), ("stripe:live", BY_REFERENCE), ("stripe:test", BY_REFERENCE));
    let stages = [
        ("sent", "SELECT"),
        (
            "sent",
            "UPDATE idempotency_keys SET provider_first_sent_at = provider_first_sent_at - INTERVAL '6 minutes'",
        ),
        (
            "sent",
            "UPDATE idempotency_keys SET provider_first_sent_at = provider_first_sent_at - INTERVAL '25 hours'",
        ),
        ("canceling", "UPDATE idempotency_keys SET recovery_point = 'canceling'"),
    ];
    with_bed(async |bed: Bed| {
        for (theirs, ours) in [(grpc, live), (live, grpc), (test, live)] {
            for (stage, (point, sql)) in stages.into_iter().enumerate() {
                let key = format!("{}-{}-{stage}", theirs.0, ours.0);
                let before = bed.with_provider(theirs.0, theirs.1);
                before.provider.do_and_say(Call::Charge, unknown("lost"));
                before.pay(&key).await;
                assert_eq!(before.provider.moved(), 1, "{key}");
                before.execute(sql).await;

                let after = bed.with_provider(ours.0, ours.1);
                let answer = after.pay(&key).await;
                assert!(matches!(answer, Answer::NeedsAttention { .. }), "{key}: {answer:?}");
                assert_eq!(
                    (after.provider.calls(), after.seen(&key).await),
                    (vec![], pending(point)),
                    "{key}"
                );
                let reason = after.for_person(&key).await.unwrap();
                assert!(reason.contains(theirs.0) && reason.contains(ours.0), "{key}: {reason}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn what_another_provider_is_known_to_have_said_settles() {
    with_bed(async |bed: Bed| {
        let before = bed.with_provider("grpc", BY_KEY);
        before.begin_unknown().await;
        bed.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, provider_key, 'charge', 'succeeded', 'ch_1', 1 FROM payments",
        )
        .await;
        let after = bed.with_provider("stripe:test", BY_REFERENCE);
        expect_fresh(after.pay("k").await, 201);
        assert_eq!(
            (after.provider.calls(), after.seen("k").await),
            (vec![], succeeded(&["charge succeeded"]))
        );
    })
    .await;
}
