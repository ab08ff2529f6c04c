//! Refunds at the same time: the database's own arithmetic.

use std::sync::Arc;

use semel_core::idempotency::engine::{Answer, Hindrance};
use sqlx::Executor as _;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{seen, succeeded};
use crate::bed::{Bed, expect_fresh, with_bed};

/// How many refunds of 300 ask for a payment of 1250 at once: four fit.
const AT_ONCE: usize = 8;

/// Asks for refunds under these keys, all at once.
async fn at_once(bed: &Bed, payment: Uuid, amount: i64, keys: Vec<String>) -> Vec<Answer> {
    let barrier = Arc::new(Barrier::new(keys.len()));
    let mut asking = JoinSet::new();
    for key in keys {
        let (bed, barrier) = (bed.clone(), Arc::clone(&barrier));
        asking.spawn(async move {
            barrier.wait().await;
            bed.refund(&key, payment, amount).await
        });
    }
    asking.join_all().await
}

fn code(answer: &Answer) -> u16 {
    match answer {
        Answer::Fresh { response, .. } | Answer::Replayed { response, .. } => response.code,
        answer => panic!("not final: {answer:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refunds_at_once_never_add_up_to_more_than_the_payment() {
    with_bed(async |bed: Bed| {
        let bed = bed.patient();
        for round in 0..50 {
            let payment = bed.paid(&format!("p{round}")).await;
            let before = bed.provider.given();
            let keys: Vec<_> = (0..AT_ONCE).map(|number| format!("r{round}-{number}")).collect();
            let answers = at_once(&bed, payment, 300, keys).await;
            let mut codes: Vec<_> = answers.iter().map(code).collect();
            codes.sort_unstable();
            assert_eq!(codes, [201, 201, 201, 201, 409, 409, 409, 409], "round {round}");
            assert_eq!(bed.provider.given() - before, 1200, "round {round}");
            let (taken, made, refused): (i64, i64, i64) = sqlx::query_as(
                "SELECT refund_reserved, (SELECT sum(amount)::BIGINT FROM refunds AS r WHERE r.payment_id = p.payment_id
                                          AND r.status = 'succeeded'),
                        (SELECT count(*) FROM refunds AS r WHERE r.payment_id = p.payment_id AND r.status = 'refused')
                 FROM payments AS p WHERE payment_id = $1",
            )
            .bind(payment)
            .fetch_one(&bed.pool)
            .await
            .unwrap();
            assert_eq!((taken, made, refused), (1200, 1200, 4), "round {round}");
            // In the order of their ids, though settled side by side.
            let versions: Vec<_> = bed.events_of(payment).await.into_iter().map(|(version, _)| version).collect();
            assert_eq!(versions, [1, 2, 3, 4, 5], "round {round}");
        }
        let keys = "SELECT count(*) FROM idempotency_keys WHERE operation = 'refunds.create' AND status = 'completed'";
        assert_eq!(bed.count(keys).await, i64::try_from(50 * AT_ONCE).unwrap());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_refunds_at_once_with_one_key_one_takes_effect() {
    with_bed(async |bed: Bed| {
        let bed = bed.patient();
        for round in 0..20 {
            let payment = bed.paid(&format!("p{round}")).await;
            let before = bed.provider.given();
            let answers = at_once(&bed, payment, 1000, vec![format!("r{round}"); AT_ONCE]).await;
            let fresh = answers.iter().filter(|answer| matches!(answer, Answer::Fresh { .. })).count();
            assert_eq!(fresh, 1, "{answers:?}");
            // The others found it at work or done, and none took anything for itself, or was refused for want of it.
            let others = |answer: &Answer| match answer {
                Answer::InProgress { .. } => true,
                answer => code(answer) == 201,
            };
            assert!(answers.iter().all(others), "{answers:?}");
            assert_eq!(bed.provider.given() - before, 1000);
            assert_eq!(bed.seen_refund(&format!("r{round}")).await, succeeded(&["refund succeeded"], 1000));
        }
    })
    .await;
}

#[tokio::test]
async fn what_was_taken_since_it_was_read_is_refused_by_the_database() {
    with_bed(async |bed: Bed| {
        let bed = bed.patient();
        let payment = bed.paid("p").await;
        // Somebody else is about to take 1000, and has not committed it.
        let mut tx = bed.pool.begin().await.unwrap();
        sqlx::query("UPDATE payments SET refund_reserved = 1000").execute(&mut *tx).await.unwrap();
        let refunding = bed.start_refunding("r", payment, 500);
        bed.until_one_is_blocked().await;
        tx.commit().await.unwrap();
        expect_fresh(refunding.await.unwrap(), 409);
        assert_eq!(bed.seen_refund("r").await, seen("refused", "completed completed", &[], 1000));
        assert_eq!(bed.provider.given(), 0);
    })
    .await;
}

#[tokio::test]
async fn what_is_given_back_while_it_is_waited_for_can_be_taken() {
    with_bed(async |bed: Bed| {
        let bed = bed.patient();
        let payment = bed.paid("p").await;
        bed.execute("UPDATE payments SET refund_reserved = 500").await;
        let mut tx = bed.pool.begin().await.unwrap();
        sqlx::query("UPDATE payments SET refund_reserved = 0").execute(&mut *tx).await.unwrap();
        let refunding = bed.start_refunding("r", payment, 750);
        bed.until_one_is_blocked().await;
        tx.commit().await.unwrap();
        expect_fresh(refunding.await.unwrap(), 201);
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 750));
    })
    .await;
}

#[tokio::test]
async fn a_refund_of_a_payment_that_others_hold_is_unavailable_and_leaves_its_key_free() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        let mut others = bed.pool.begin().await.unwrap();
        others.execute("SELECT FROM payments FOR UPDATE").await.unwrap();
        // It waits for the payment for as long as a lock is waited for.
        let answer = bed.refund("r", payment, 500).await;
        assert!(matches!(answer, Answer::Hindered(Hindrance::Busy)), "{answer:?}");
        others.rollback().await.unwrap();
        assert_eq!(bed.count("SELECT count(*) FROM idempotency_keys WHERE key = 'r'").await, 0);
        expect_fresh(bed.refund("r", payment, 500).await, 201);
        assert_eq!(bed.seen_refund("r").await, succeeded(&["refund succeeded"], 500));
    })
    .await;
}

#[tokio::test]
async fn a_refund_whose_key_others_are_writing_is_in_progress() {
    with_bed(async |bed: Bed| {
        let payment = bed.paid("p").await;
        expect_fresh(bed.refund("other", payment, 500).await, 201);
        let mut others = bed.pool.begin().await.unwrap();
        others.execute("UPDATE idempotency_keys SET key = 'r' WHERE key = 'other'").await.unwrap();
        let answer = bed.refund("r", payment, 500).await;
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        others.rollback().await.unwrap();
        expect_fresh(bed.refund("r", payment, 500).await, 201);
    })
    .await;
}
