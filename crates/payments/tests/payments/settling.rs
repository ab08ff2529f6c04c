//! The second transaction while the database makes trouble: a payment is settled once, or not yet.

use semel_core::idempotency::engine::Answer;
use sqlx::{Executor as _, Postgres, Transaction};

use crate::bed::{Bed, Seen, expect_fresh, expect_unknown, pending, succeeded, with_bed};
use crate::provider::Call;

/// A payment that could not be settled, and whose answer is on record.
fn open_and_answered() -> Seen {
    Seen { evidence: vec!["charge succeeded".to_owned()], ..pending("sent") }
}

/// Takes a lock that keeps payments from being settled, but not from being begun or looked up.
async fn stop_settling(bed: &Bed) -> Transaction<'static, Postgres> {
    let mut tx = bed.pool.begin().await.unwrap();
    tx.execute("LOCK TABLE outbox IN SHARE MODE").await.unwrap();
    tx
}

#[tokio::test]
async fn a_settlement_that_is_refused_leaves_nothing_but_the_answer() {
    with_bed(async |bed: Bed| {
        bed.execute("ALTER TABLE outbox ADD CONSTRAINT outbox_refuses_all CHECK (FALSE)").await;
        expect_unknown(&bed.pay("k").await);
        assert_eq!(bed.seen("k").await, open_and_answered());
        assert!(matches!(bed.pay("k").await, Answer::InProgress { .. }), "its lease is alive");
        bed.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_refuses_all").await;
        bed.end_leases().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!((bed.provider.sent().len(), bed.provider.moved()), (1, 1));
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
    })
    .await;
}

#[tokio::test]
async fn a_connection_that_is_lost_while_settling_is_replaced_and_settles_once() {
    with_bed(async |bed: Bed| {
        let stopped = stop_settling(&bed).await;
        let paying = bed.patient().start_paying("k");
        let first = bed.until_one_is_blocked().await;
        bed.kill(first).await;
        let second = bed.until_one_is_blocked().await;
        assert_ne!(first, second, "it settles on another connection");
        stopped.rollback().await.unwrap();
        expect_fresh(paying.await.unwrap(), 201);
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
        assert_eq!(bed.provider.calls(), [Call::Charge]);
    })
    .await;
}

#[tokio::test]
async fn a_settlement_that_cannot_be_written_is_unknown_and_settled_by_a_retry() {
    with_bed(async |bed: Bed| {
        let stopped = stop_settling(&bed).await;
        let paying = bed.patient().start_paying("k");
        // Every connection on which it settles is lost.
        while !paying.is_finished() {
            let pid = tokio::select! {
                pid = bed.until_one_is_blocked() => pid,
                () = async {
                    while !paying.is_finished() {
                        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                    }
                } => break,
            };
            bed.kill(pid).await;
        }
        expect_unknown(&paying.await.unwrap());
        stopped.rollback().await.unwrap();
        assert_eq!(bed.seen("k").await, open_and_answered());
        bed.end_leases().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!((bed.provider.moved(), bed.seen("k").await), (1, succeeded(&["charge succeeded"])));
    })
    .await;
}

#[tokio::test]
async fn an_answer_is_on_record_though_others_hold_the_payment_for_too_long() {
    with_bed(async |bed: Bed| {
        let hold = bed.provider.hold(Call::Charge);
        let paying = bed.start_paying("k");
        hold.reached().await;
        let mut others = bed.pool.begin().await.unwrap();
        others.execute("SELECT FROM payments FOR UPDATE").await.unwrap();
        hold.release();
        expect_unknown(&paying.await.unwrap());
        assert_eq!(bed.seen("k").await, open_and_answered());
        others.rollback().await.unwrap();
        bed.end_leases().await;
        expect_fresh(bed.pay("k").await, 201);
        assert_eq!(bed.seen("k").await, succeeded(&["charge succeeded"]));
        assert_eq!(bed.provider.calls(), [Call::Charge], "the evidence is enough");
    })
    .await;
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_is_recognised_as_settled() {
    with_bed(async |bed: Bed| {
        // The very statement commits, and its answer is as good as lost: the same statement follows with the same fence.
        let hold = bed.provider.hold(Call::Charge);
        let paying = bed.start_paying("k");
        hold.reached().await;
        bed.execute(
            "UPDATE idempotency_keys
             SET status = 'completed', recovery_point = 'completed', lease_until = NULL, response_code = 201,
                 response_headers = '[]', response_body = 'first', completed_at = clock_timestamp(),
                 expires_at = clock_timestamp() + INTERVAL '1 day', provider_request = NULL",
        )
        .await;
        bed.execute(
            "UPDATE payments SET status = 'succeeded', version = 1, provider_reference = 'ch_1', settled_at = now()",
        )
        .await;
        hold.release();
        assert_eq!(expect_fresh(paying.await.unwrap(), 201).body, b"first");
        let there = bed.seen("k").await;
        assert_eq!((there.payment.as_str(), there.events.len()), ("succeeded 1", 0), "nothing is written twice");
    })
    .await;
}
