//! Refunds whose outcome was not known: sent again, asked about, left to a person, and never rolled back.

use std::time::{Duration, SystemTime};

use semel_core::credentials;
use semel_core::idempotency::engine::Answer;
use semel_payments::operator::{Decision, Desk, Undecided};
use semel_payments::provider::{Answer as Said, DEADLINE, Dedup, Fencing, LookUp, Promises};
use semel_payments::refunds::settle::Verdict;
use sqlx::Executor as _;

use super::{made_by, open, refund_of, scope, seen, succeeded};
use crate::bed::{Bed, RETENTION, expect_fresh, expect_unknown, with_bed};
use crate::contradictions::Counting;
use crate::provider::{Call, unknown};

/// Its keys are forgotten after two minutes.
const FORGETFUL: Promises =
    Promises { dedup: Dedup::For(Duration::from_mins(2)), look_up: LookUp::ByKey, fence: Fencing::Cancel };

fn not_executed() -> Said {
    Said::NotExecuted { reason: "connection refused".to_owned() }
}

fn expect_person(answer: &Answer) {
    assert!(matches!(answer, Answer::NeedsAttention { .. }), "{answer:?}");
}

#[tokio::test]
async fn a_lost_answer_is_unknown_and_the_retry_sends_the_same_again() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        bed.provider.do_and_say(Call::Refund, unknown("the answer was lost"));
        let answer = bed.refund("r", payment, 500).await;
        let Answer::Unknown { resource_id, .. } = answer else { panic!("{answer:?}") };
        assert_eq!((resource_id, bed.seen_refund("r").await), (made_by(&bed, "r"), open(500)));

        expect_fresh(bed.refund("r", payment, 500).await, 201);
        let [first, second] = bed.provider.refunds().try_into().unwrap();
        assert_eq!((first, bed.provider.given()), (second, 500));
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
    })
    .await;
}

#[tokio::test]
async fn what_is_not_definitive_waits_and_stays_taken() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        for said in [unknown("sticky 500"), Said::InProgress, not_executed(), Said::NotFound, Said::Fenced] {
            bed.provider.say(Call::Refund, said.clone());
            expect_unknown(&bed.refund("r", payment, 500).await);
            assert_eq!(bed.seen_refund("r").await, open(500), "{said:?}");
        }
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.provider.given(), 500);
    })
    .await;
}

#[tokio::test]
async fn a_refund_may_not_start_later_than_its_answer_is_awaited() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let before = SystemTime::now();
        bed.refund("r", payment, 500).await;
        let [not_after] = bed.provider.refund_not_after().try_into().unwrap();
        assert!(before + DEADLINE <= not_after && not_after <= SystemTime::now() + DEADLINE);
    })
    .await;
}

#[tokio::test]
async fn past_the_window_the_provider_is_asked() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        bed.provider.do_and_say(Call::Refund, unknown("the answer was lost"));
        expect_unknown(&bed.refund("r", payment, 500).await);
        bed.pass_the_window().await;
        bed.provider.say(Call::GetRefund, Said::InProgress);
        expect_unknown(&bed.refund("r", payment, 500).await);
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        let calls = [Call::Charge, Call::Refund, Call::GetRefund, Call::GetRefund];
        assert_eq!((bed.provider.calls(), bed.provider.given()), (calls.to_vec(), 500));
        assert_eq!(bed.seen_refund("r").await, succeeded(&["get_refund succeeded"], 500));
    })
    .await;
}

#[tokio::test]
async fn past_the_window_a_failure_is_found_by_asking() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        bed.pass_the_window().await;
        let code = "account_closed".to_owned();
        bed.provider.say(Call::GetRefund, Said::Declined { reference: None, code });
        expect_fresh(bed.refund("r", payment, 500).await, 402);
        let expected = seen("failed", "completed completed", &["get_refund declined"], 0);
        assert_eq!(bed.seen_refund("r").await, expected);
    })
    .await;
}

#[tokio::test]
async fn what_asking_does_not_tell_is_sent_again_within_the_horizon_and_never_rolled_back() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        bed.pass_the_window().await;
        for said in [Said::NotFound, unknown("an error of theirs")] {
            bed.provider.say(Call::GetRefund, said);
            bed.provider.say(Call::Refund, unknown("the answer was lost"));
            expect_unknown(&bed.refund("r", payment, 500).await);
            assert_eq!(bed.seen_refund("r").await, open(500));
        }
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        let sent = bed.provider.refunds();
        assert!(sent.len() == 4 && sent.iter().all(|again| *again == sent[0]), "{sent:?}");
        assert!(!bed.provider.calls().contains(&Call::Cancel));
        assert_eq!(bed.provider.given(), 500);
    })
    .await;
}

/// The look-up may have taken the whole time of a call.
#[tokio::test]
async fn what_is_sent_after_a_look_up_has_the_time_of_two_calls_to_start() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        bed.pass_the_window().await;
        bed.provider.say(Call::GetRefund, unknown("no answer in time"));
        let before = SystemTime::now();
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        let not_after = bed.provider.refund_not_after();
        let last = not_after.last().unwrap();
        assert!(before + 2 * DEADLINE <= *last && *last <= SystemTime::now() + 2 * DEADLINE);
    })
    .await;
}

/// Moves the first send to where the forgetful provider may have forgotten it: 2 minutes, less the deadline of 10 s and the
/// margin of a minute.
async fn pass_the_horizon(bed: &Bed) {
    bed.execute(
        "UPDATE idempotency_keys SET provider_first_sent_at = clock_timestamp() - INTERVAL '51 seconds'
         WHERE status = 'in_progress'",
    )
    .await;
}

#[tokio::test]
async fn past_the_horizon_what_the_provider_does_not_know_of_is_for_a_person_and_stays_taken() {
    with_bed(async |bed: Bed| {
        let bed = bed.promising(FORGETFUL);
        let payment = bed.begin_unknown_refund().await;
        pass_the_horizon(&bed).await;
        for _ in 0..3 {
            expect_person(&bed.refund("r", payment, 500).await);
        }
        assert_eq!(bed.provider.calls(), [Call::Charge, Call::Refund, Call::GetRefund]);
        assert_eq!(bed.seen_refund("r").await, open(500));
        expect_fresh(bed.refund("other", payment, 751).await, 409);
    })
    .await;
}

#[tokio::test]
async fn past_the_horizon_a_refund_is_found_by_asking_and_an_unclear_answer_is_waited_out() {
    with_bed(async |bed: Bed| {
        let bed = bed.promising(FORGETFUL);
        let payment = bed.paid("p").await;
        bed.provider.do_and_say(Call::Refund, unknown("the answer was lost"));
        expect_unknown(&bed.refund("r", payment, 500).await);
        pass_the_horizon(&bed).await;
        for said in [unknown("an error of theirs"), Said::InProgress, not_executed()] {
            bed.provider.say(Call::GetRefund, said);
            expect_unknown(&bed.refund("r", payment, 500).await);
        }
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!((bed.provider.refunds().len(), bed.provider.given()), (1, 500));
    })
    .await;
}

#[tokio::test]
async fn what_the_provider_has_told_nothing_of_for_a_day_is_for_a_person() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        for (attempts, is_over) in [("500", false), ("1000", true)] {
            let sql = "UPDATE idempotency_keys SET provider_first_sent_at = now() - INTERVAL '1 day', attempts = $1::INT
                       WHERE status = 'in_progress'";
            sqlx::query(sql).bind(attempts).execute(&bed.pool).await.unwrap();
            bed.provider.say(Call::GetRefund, unknown("an error of theirs"));
            bed.provider.say(Call::Refund, unknown("an error of theirs"));
            let answer = bed.refund("r", payment, 500).await;
            assert_eq!(matches!(answer, Answer::NeedsAttention { .. }), is_over, "{answer:?}");
        }
        assert_eq!(bed.seen_refund("r").await, open(500));
    })
    .await;
}

#[tokio::test]
async fn without_deduplication_there_is_one_send_ever() {
    for (look_up, settled) in [(LookUp::ByKey, true), (LookUp::None, false)] {
        with_bed(async |bed: Bed| {
            let bed = bed.promising(Promises { dedup: Dedup::None, look_up, fence: Fencing::None });
            let payment = bed.paid("p").await;
            bed.provider.do_and_say(Call::Refund, unknown("the answer was lost"));
            expect_unknown(&bed.refund("r", payment, 500).await);
            let answer = bed.refund("r", payment, 500).await;
            if settled {
                expect_fresh(answer, 201);
            } else {
                expect_person(&answer);
            }
            assert_eq!((bed.provider.refunds().len(), bed.provider.given()), (1, 500));
        })
        .await;
    }
}

#[tokio::test]
async fn what_contradicts_the_providers_records_is_for_a_person() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        bed.provider.say(Call::Refund, Said::Mismatch { reason: "EXCEEDS_CHARGE".to_owned() });
        for _ in 0..3 {
            expect_person(&bed.refund("r", payment, 500).await);
        }
        assert_eq!(bed.provider.refunds().len(), 1);
        assert_eq!(bed.seen_refund("r").await, open(500));
    })
    .await;
}

#[tokio::test]
async fn a_recovery_point_of_a_newer_version_is_for_a_person() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        bed.execute("UPDATE idempotency_keys SET recovery_point = 'newer' WHERE key = 'r'").await;
        expect_person(&bed.refund("r", payment, 500).await);
        assert_eq!(bed.provider.refunds().len(), 1);
    })
    .await;
}

#[tokio::test]
async fn nothing_is_sent_again_for_a_client_that_was_shut_out() {
    with_bed(async |bed: Bed| {
        credentials::operator::create(&bed.pool, &scope("r").client, &credentials::Scopes::all())
            .await
            .unwrap();
        let payment = bed.begin_unknown_refund().await;
        bed.execute("UPDATE api_credentials SET revoked_at = now()").await;
        bed.provider.say(Call::GetRefund, unknown("an error of theirs"));
        expect_unknown(&bed.refund("r", payment, 500).await);
        expect_person(&bed.refund("r", payment, 500).await);
        assert_eq!(bed.provider.refunds().len(), 1);
        assert_eq!(bed.seen_refund("r").await, open(500));
    })
    .await;
}

#[tokio::test]
async fn what_was_written_down_about_the_refund_settles_it_and_nothing_else_does() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        // Beside the payment's own: `charge succeeded`.
        bed.provider.say(Call::Refund, unknown("the answer was lost"));
        expect_unknown(&bed.refund("r", payment, 500).await);
        bed.execute(
            "INSERT INTO provider_answers (payment_id, refund_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, refund_id, provider_key, 'refund', 'succeeded', 're_1', 1 FROM refunds",
        )
        .await;
        let before = bed.provider.calls();
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.provider.calls(), before, "nobody was asked");
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
    })
    .await;
}

#[tokio::test]
async fn what_was_written_down_about_a_refund_is_no_evidence_about_its_payment() {
    with_bed(async |bed: Bed| {
        bed.begin_unknown().await;
        bed.execute(
            "INSERT INTO provider_answers (payment_id, refund_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, gen_random_uuid(), 'other', 'refund', 'succeeded', 're_1', 1 FROM payments",
        )
        .await;
        let code = "card_declined".to_owned();
        bed.provider.say(Call::Charge, Said::Declined { reference: None, code });
        expect_fresh(bed.pay("k").await, 402);
    })
    .await;
}

#[tokio::test]
async fn an_owner_that_slept_writes_nothing_but_evidence() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let hold = bed.provider.hold(Call::Refund);
        let sleeper = bed.start_refunding("r", payment, 500);
        hold.reached().await;
        bed.end_leases().await;
        let stored = expect_fresh(bed.refund("r", payment, 500).await, 201);
        hold.release();
        let answer = sleeper.await.unwrap();
        let (Answer::Fresh { response, .. } | Answer::Replayed { response, .. }) = answer else { panic!() };
        assert_eq!(response, stored);
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded", "refund succeeded"], 500));
        assert_eq!(bed.events_of(payment).await.len(), 2);
        assert_eq!(bed.provider.given(), 500);
    })
    .await;
}

#[tokio::test]
async fn an_answer_to_an_owner_that_slept_is_evidence_for_the_one_that_still_asks() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let hold = bed.provider.hold(Call::Refund);
        let sleeper = bed.start_refunding("r", payment, 500);
        hold.reached().await;
        bed.end_leases().await;
        // The next owner is not answered, and gives the key up until later.
        bed.provider.say(Call::Refund, unknown("an error of theirs"));
        expect_unknown(&bed.refund("r", payment, 500).await);
        hold.release();
        let answer = sleeper.await.unwrap();
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        let expected = seen("processing", "in_progress sent", &["refund succeeded"], 500);
        assert_eq!((bed.seen_refund("r").await, bed.events_of(payment).await.len()), (expected, 1));
        let before = bed.provider.calls();
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.provider.calls(), before, "the evidence is enough");
    })
    .await;
}

/// The provider contradicts itself, and the owner whose word is "failed" comes second.
#[tokio::test]
async fn a_failure_does_not_settle_what_is_on_record_as_a_success() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let first = bed.provider.hold(Call::Refund);
        let sleeper = bed.start_refunding("r", payment, 500);
        first.reached().await;
        bed.end_leases().await;
        let code = "account_closed".to_owned();
        let second = bed.provider.hold_and_say(Call::Refund, Said::Declined { reference: None, code });
        let owner = bed.start_refunding("r", payment, 500);
        second.reached().await;
        first.release();
        sleeper.await.unwrap();
        second.release();
        let answer = owner.await.unwrap();
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        let evidence = ["refund succeeded", "refund declined"];
        assert_eq!(bed.seen_refund("r").await, seen("processing", "in_progress sent", &evidence, 500));
        bed.end_leases().await;
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.seen_refund("r").await, seen("succeeded", "completed completed", &evidence, 500));
    })
    .await;
}

#[tokio::test]
async fn a_refund_that_was_made_though_it_had_failed_is_written_down_and_told_and_changes_nothing() {
    // For this thread, on which the whole test runs.
    let counting = Counting::default();
    let _guard = metrics::set_default_local_recorder(&counting);
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let hold = bed.provider.hold(Call::Refund);
        let sleeper = bed.start_refunding("r", payment, 500);
        hold.reached().await;
        bed.end_leases().await;
        let code = "account_closed".to_owned();
        bed.provider.say(Call::Refund, Said::Declined { reference: None, code });
        let stored = expect_fresh(bed.refund("r", payment, 500).await, 402);
        assert_eq!(counting.count(), 0);
        hold.release();
        let (Answer::Fresh { response, .. } | Answer::Replayed { response, .. }) = sleeper.await.unwrap()
        else {
            panic!()
        };
        assert_eq!((response, counting.count()), (stored, 1));
        let evidence = ["refund declined", "refund succeeded"];
        assert_eq!(bed.seen_refund("r").await, seen("failed", "completed completed", &evidence, 0));
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_is_lost_while_settling_is_replaced_and_settles_once() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let mut stopped = bed.pool.begin().await.unwrap();
        stopped.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
        let refunding = bed.patient().start_refunding("r", payment, 500);
        let first = bed.until_one_is_blocked().await;
        bed.kill(first).await;
        let second = bed.until_one_is_blocked().await;
        assert_ne!(first, second, "it settles on another connection");
        stopped.rollback().await.unwrap();
        expect_fresh(refunding.await.unwrap(), 201);
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
    })
    .await;
}

#[tokio::test]
async fn an_answer_is_on_record_though_others_hold_the_payment_for_too_long() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let hold = bed.provider.hold(Call::Refund);
        let refunding = bed.start_refunding("r", payment, 500);
        hold.reached().await;
        let mut others = bed.pool.begin().await.unwrap();
        others.execute("SELECT FROM payments FOR UPDATE").await.unwrap();
        hold.release();
        expect_unknown(&refunding.await.unwrap());
        let answered = seen("processing", "in_progress sent", &["refund succeeded"], 500);
        assert_eq!(bed.seen_refund("r").await, answered);
        others.rollback().await.unwrap();
        bed.end_leases().await;
        let before = bed.provider.calls();
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
        assert_eq!(bed.provider.calls(), before, "the evidence is enough");
    })
    .await;
}

fn desk(bed: &Bed) -> Desk {
    Desk {
        pool: bed.pool.clone(),
        namespace: "test".parse().unwrap(),
        problems: "/errors".parse().unwrap(),
        retention: RETENTION,
    }
}

fn decision(verdict: Verdict) -> Decision<'static> {
    Decision { ruling: verdict.into(), actor: "ada", action: "keys resolve", reason: "asked them" }
}

fn failed() -> Verdict {
    Verdict::Failed { reference: None, code: "never_arrived".to_owned() }
}

#[tokio::test]
async fn a_person_settles_a_refund_as_the_providers_word_would() {
    for (verdict, code, status, taken) in [
        (Verdict::Succeeded { reference: "re_7".to_owned() }, 201, "succeeded", 500),
        (failed(), 402, "failed", 0),
    ] {
        with_bed(async |bed: Bed| {
            let payment = bed.begin_unknown_refund().await;
            let refund = made_by(&bed, "r");
            let early = desk(&bed).settle(refund, &decision(verdict.clone())).await.unwrap_err();
            assert!(matches!(early, Undecided::NotWaiting(_)), "{early}");
            bed.provider.say(Call::Refund, Said::Mismatch { reason: "KEY_MISMATCH".to_owned() });
            expect_person(&bed.refund("r", payment, 500).await);

            desk(&bed).settle(refund, &decision(verdict.clone())).await.unwrap();
            let Answer::Replayed { response, .. } = bed.refund("r", payment, 500).await else { panic!() };
            assert_eq!(response.code, code);
            let outcome = if code == 201 { "operator succeeded" } else { "operator declined" };
            assert_eq!(bed.seen_refund("r").await, seen(status, "completed completed", &[outcome], taken));
            assert_eq!(bed.events_of(payment).await.len(), 2);
            let again = desk(&bed).settle(refund, &decision(verdict.clone())).await.unwrap_err();
            assert_eq!(again.to_string(), format!("refund {refund} is settled: {status}"));
            // What it is about is told by the decision: a payment's id is no refund's.
            let mistaken = desk(&bed).settle(payment, &decision(verdict.clone())).await.unwrap_err();
            assert_eq!(mistaken.to_string(), format!("there is no refund {payment}"));
        })
        .await;
    }
}

#[tokio::test]
async fn a_person_does_not_overrule_the_provider() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        bed.provider.say(Call::Refund, Said::Mismatch { reason: "KEY_MISMATCH".to_owned() });
        expect_person(&bed.refund("r", payment, 500).await);
        bed.execute(
            "INSERT INTO provider_answers (payment_id, refund_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, refund_id, provider_key, 'refund', 'succeeded', 're_zombie', 1 FROM refunds",
        )
        .await;
        let refund = made_by(&bed, "r");
        let undecided = desk(&bed).settle(refund, &decision(failed())).await.unwrap_err();
        assert!(matches!(undecided, Undecided::Contradicts { .. }), "{undecided}");
        assert_eq!(bed.seen_refund("r").await.taken, 500);
        let agreed = Verdict::Succeeded { reference: "re_zombie".to_owned() };
        desk(&bed).settle(refund, &decision(agreed)).await.unwrap();
        let Answer::Replayed { response, .. } = bed.refund("r", payment, 500).await else { panic!() };
        assert_eq!(refund_of(&response).status, "succeeded");
    })
    .await;
}

/// None but the provider that was paid can give it back.
#[tokio::test]
async fn a_refund_of_what_another_provider_was_paid_is_left_to_a_person_begun_before_or_now() {
    with_bed(async |bed: Bed| {
        let payment = bed.begin_unknown_refund().await;
        let after = bed.with_provider("stripe:live", FORGETFUL);
        for key in ["r", "later"] {
            expect_person(&after.refund(key, payment, 500).await);
            let reason = after.for_person(key).await.unwrap();
            assert!(reason.contains("scripted") && reason.contains("stripe:live"), "{key}: {reason}");
        }
        assert_eq!((after.provider.calls(), after.seen_refund("later").await), (vec![], open(1000)));
    })
    .await;
}
