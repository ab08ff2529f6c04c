//! Payments whose outcome was not known, driven on inside the send window and past it.

use std::time::{Duration, SystemTime};

use semel_core::credentials;
use semel_core::idempotency::engine::Answer;
use semel_payments::provider::{Answer as Said, DEADLINE, Dedup, Fencing, LookUp, Promises};
use serde_json::Value;

use crate::bed::{
    Bed, expect_fresh, expect_unknown, made_by, pending, rolled_back, scope, seen, succeeded, with_bed,
};
use crate::provider::{Call, unknown};

fn not_executed() -> Said {
    Said::NotExecuted { reason: "connection refused".to_owned() }
}

#[tokio::test]
async fn a_lost_answer_is_unknown_and_the_retry_sends_the_same_again() {
    with_bed(async |bed: Bed| {
        bed.provider.do_and_say(Call::Charge, unknown("the answer was lost"));
        let answer = bed.pay("k").await;
        let Answer::Unknown { resource_id, retry_after } = answer else { panic!("{answer:?}") };
        assert_eq!(resource_id, made_by(&bed, "k"));
        assert!(retry_after > Duration::ZERO);
        assert_eq!(bed.seen("k").await, pending("sent"));

        expect_fresh(bed.pay("k").await, 201);
        let [first, second] = bed.provider.sent().try_into().unwrap();
        assert_eq!((first, bed.provider.moved()), (second, 1));
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn a_stored_key_and_request_win_over_ones_derived_anew() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        // As written by a version that derived and encoded in another way.
        bed.execute("UPDATE idempotency_keys SET provider_key = 'older', provider_request = 'older request'")
            .await;
        bed.execute("UPDATE payments SET provider_key = 'older'").await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.sent()[1], ("older".to_owned(), b"older request".to_vec()));
    })
    .await;
}

#[tokio::test]
async fn what_is_not_definitive_waits_at_sent() {
    with_bed(async |bed: Bed| {
        for said in [unknown("sticky 500"), Said::InProgress, not_executed(), Said::NotFound] {
            bed.provider.say(Call::Charge, said.clone());
            expect_unknown(&bed.pay("k").await);
            assert_eq!(bed.seen("k").await, pending("sent"), "{said:?}");
        }
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!((bed.provider.calls(), bed.provider.moved()), (vec![Call::Charge; 5], 1));
    })
    .await;
}

#[tokio::test]
async fn what_is_sent_may_not_start_later_than_its_answer_is_awaited() {
    with_bed(async |bed: Bed| {
        let before = SystemTime::now();
        bed.pay("k").await;
        let [not_after] = bed.provider.not_after().try_into().unwrap();
        assert!(before + DEADLINE <= not_after && not_after <= SystemTime::now() + DEADLINE);
    })
    .await;
}

#[tokio::test]
async fn a_key_whose_owner_is_at_work_is_left_alone() {
    with_bed(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Charge);
        let paying = bed.start_paying("k");
        hold.reached().await;
        assert!(matches!(bed.pay("k").await, Answer::InProgress { .. }));
        assert_eq!(bed.provider.calls(), [Call::Charge]);
        hold.release();
        expect_fresh(paying.await.unwrap(), 201);
    })
    .await;
}

#[tokio::test]
async fn what_was_written_down_settles_before_anybody_is_asked() {
    for (outcome, code, there) in [
        ("succeeded", 201, succeeded(&["charge succeeded"])),
        (
            "declined",
            402,
            seen("declined 1", "completed completed", &["PaymentDeclined"], &["charge declined"]),
        ),
        ("fenced", 424, rolled_back(&["charge fenced"])),
    ] {
        with_bed(async |bed: Bed| {
            bed.begin_unknown().await;
            bed.pass_the_window().await;
            // Left by an owner who was answered, and died.
            sqlx::query(
                "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, decline_code, fence)
                 SELECT payment_id, provider_key, 'charge', $1, 'ch_1', 'card_declined', 1 FROM payments",
            )
            .bind(outcome)
            .execute(&bed.pool)
            .await
            .unwrap();
            expect_fresh(bed.pay("k").await, code);
            assert_eq!(bed.provider.calls(), [Call::Charge], "only the first request asked");
            assert_eq!(bed.seen("k").await, there);
        })
        .await;
    }
}

#[tokio::test]
async fn a_success_that_was_written_down_counts_more_than_what_else_was() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence, answered_at)
             SELECT payment_id, provider_key, 'cancel', 'fenced', NULL, 1, now() FROM payments
             UNION ALL SELECT payment_id, provider_key, 'charge', 'succeeded', 'ch_1', 1, now() + INTERVAL '1 s' FROM payments",
        )
        .await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.seen("k").await, succeeded(&["cancel fenced", "charge succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn past_the_window_a_success_is_found_by_asking() {
    with_bed(async |bed: Bed| {
        bed.provider.do_and_say(Call::Charge, unknown("the answer was lost"));
        expect_unknown(&bed.pay("k").await);
        bed.pass_the_window().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!((bed.provider.calls(), bed.provider.moved()), (vec![Call::Charge, Call::Get], 1));
        assert_eq!(bed.seen("k").await, succeeded(&["get succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn past_the_window_a_decline_is_found_by_asking() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.pass_the_window().await;
        bed.provider.say(Call::Get, Said::Declined { reference: None, code: "no_money".to_owned() });
        expect_fresh(bed.pay("k").await, 402);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get]);
        assert_eq!(
            bed.seen("k").await,
            seen("declined 1", "completed completed", &["PaymentDeclined"], &["get declined"])
        );
    })
    .await;
}

#[tokio::test]
async fn past_the_window_what_the_provider_works_at_waits_and_is_not_fenced() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.pass_the_window().await;
        for said in [Said::InProgress, not_executed()] {
            bed.provider.say(Call::Get, said);
            expect_unknown(&bed.pay("k").await);
            assert_eq!(bed.seen("k").await, pending("sent"));
        }
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Get]);
    })
    .await;
}

#[tokio::test]
async fn nothing_is_sent_again_for_a_client_that_was_shut_out() {
    for (revoked, calls, code) in [
        ("UPDATE api_credentials SET revoked_at = now()", &[Call::Charge, Call::Get, Call::Cancel][..], 424),
        // A credential that was rotated shuts nobody out.
        (
            "UPDATE api_credentials SET revoked_at = now()
             WHERE credential_id = (SELECT min(credential_id) FROM api_credentials)",
            &[Call::Charge, Call::Charge],
            201,
        ),
    ] {
        with_bed(async |bed: Bed| {
            for _ in 0..2 {
                credentials::operator::create(&bed.pool, &scope("k").client, &credentials::Scopes::all())
                    .await
                    .unwrap();
            }
            bed.begin_unknown().await;
            bed.execute(revoked).await;
            expect_fresh(bed.pay("k").await, code);
            assert_eq!(bed.provider.calls(), calls);
        })
        .await;
    }
}

#[tokio::test]
async fn near_the_horizon_nothing_is_sent_again_though_the_window_is_open() {
    with_bed(async |bed: Bed| {
        let forgetful = Promises {
            dedup: Dedup::For(Duration::from_mins(2)),
            look_up: LookUp::ByKey,
            fence: Fencing::Cancel,
        };
        let bed = bed.promising(forgetful);
        bed.begin_unknown().await;
        // 2 minutes, less the deadline of 10 s and the margin of a minute.
        bed.execute(
            "UPDATE idempotency_keys SET provider_first_sent_at = clock_timestamp() - INTERVAL '51 seconds'",
        )
        .await;
        expect_fresh(bed.pay("k").await, 424);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Cancel]);
    })
    .await;
}

#[tokio::test]
async fn without_deduplication_there_is_one_send_ever() {
    with_bed(async |bed: Bed| {
        let once = Promises { dedup: Dedup::None, look_up: LookUp::ByKey, fence: Fencing::None };
        let bed = bed.promising(once);
        bed.provider.do_and_say(Call::Charge, not_executed());
        expect_unknown(&bed.pay("k").await);
        bed.provider.say(Call::Get, Said::InProgress);
        expect_unknown(&bed.pay("k").await);
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Get, Call::Get]);
        assert_eq!(bed.provider.moved(), 1);
    })
    .await;
}

#[tokio::test]
async fn what_nobody_can_find_out_waits_for_a_person_and_nobody_asks_again() {
    for (dedup, look_up) in
        [(Dedup::None, LookUp::None), (Dedup::ForEver, LookUp::None), (Dedup::None, LookUp::ByKey)]
    {
        with_bed(async |bed: Bed| {
            let bed = bed.promising(Promises { dedup, look_up, fence: Fencing::None });
            bed.begin_unknown().await;
            bed.pass_the_window().await;
            let mut calls = None;
            for _ in 0..3 {
                let answer = bed.pay("k").await;
                assert!(
                    matches!(answer, Answer::NeedsAttention { resource_id } if resource_id == made_by(&bed, "k")),
                    "{answer:?}"
                );
                assert_eq!(*calls.get_or_insert(bed.provider.calls()), bed.provider.calls());
            }
            assert_eq!(bed.seen("k").await, pending("sent"));
        })
        .await;
    }
}

#[tokio::test]
async fn another_order_under_our_key_is_for_a_person() {
    with_bed(async |bed: Bed| {
        bed.provider.say(Call::Charge, Said::Mismatch { reason: "KEY_MISMATCH".to_owned() });
        for _ in 0..3 {
            assert!(matches!(bed.pay("k").await, Answer::NeedsAttention { .. }));
        }
        assert_eq!(bed.provider.calls(), [Call::Charge]);
        let (reason, command): (String, Value) =
            sqlx::query_as("SELECT needs_person_reason, command FROM idempotency_keys")
                .fetch_one(&bed.pool)
                .await
                .unwrap();
        assert_eq!((reason.as_str(), command["source"].as_str()), ("KEY_MISMATCH", Some("tok_visa")));
        assert_eq!(bed.seen("k").await, pending("sent"));
    })
    .await;
}

#[tokio::test]
async fn a_recovery_point_of_a_newer_version_is_for_a_person() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.execute("UPDATE idempotency_keys SET recovery_point = 'newer'").await;
        assert!(matches!(bed.pay("k").await, Answer::NeedsAttention { .. }));
        assert_eq!(bed.provider.calls(), [Call::Charge]);
    })
    .await;
}

/// The provider contradicts itself, and the owner whose word is "declined" comes second.
#[tokio::test]
async fn a_decline_does_not_settle_what_is_on_record_as_a_success() {
    with_bed(async |bed: Bed| {
        let first = bed.provider.hold(Call::Charge);
        let sleeper = bed.start_paying("k");
        first.reached().await;
        bed.end_leases().await;
        let code = "card_declined".to_owned();
        let second = bed.provider.hold_and_say(Call::Charge, Said::Declined { reference: None, code });
        let owner = bed.start_paying("k");
        second.reached().await;
        first.release();
        sleeper.await.unwrap();
        second.release();
        let answer = owner.await.unwrap();
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        assert!(bed.seen("k").await.payment.starts_with("processing"));
        bed.end_leases().await;
        bed.pay("k").await;
        let settled = bed.seen("k").await;
        assert!(settled.payment.starts_with("succeeded"), "{settled:?}");
        assert_eq!((settled.evidence.len(), bed.provider.moved()), (2, 1));
    })
    .await;
}
