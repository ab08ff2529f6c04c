//! Deliveries, their settlement, and the ways in which they end.

use std::time::Duration;

use semel_broker::inspect::{self, QueueKind};
use semel_broker::{Error, Outgoing, Settled, Subscription, Topology, topology};

use crate::forwarder::Forwarder;
use crate::support::{Bed, SOON, next, text, url, within};

/// A declared queue with dead letters that gets everything with key `in`.
async fn full_topology(bed: &Bed, change: impl FnOnce(&mut Topology)) -> Topology {
    let mut topology = Topology::new(&bed.exchange, bed.queue_name(), vec!["in".into()]);
    change(&mut topology);
    bed.remove_queue(&topology.dead_queue());
    for delay in &topology.retry_delays {
        bed.remove_queue(&topology.retry_queue(*delay));
    }
    topology::declare(&bed.connection, &topology).await.unwrap();
    topology
}

#[tokio::test]
async fn acked_is_gone_requeued_comes_again_and_rejected_is_dead() {
    Bed::run(async |bed| {
        let topology = full_topology(bed, |_| {}).await;
        bed.fill(&["ack", "requeue", "reject"]).await;
        let mut subscription = bed.subscription(&topology.queue, 10).await;

        let (ack, requeue, reject) =
            (next(&mut subscription).await, next(&mut subscription).await, next(&mut subscription).await);
        assert_eq!([text(&ack), text(&requeue), text(&reject)], ["ack", "requeue", "reject"]);
        assert!(!requeue.redelivered);
        assert_eq!(requeue.delivery_count, None);
        assert_eq!(ack.ack().await, Settled::Sent);
        assert_eq!(reject.reject(false).await, Settled::Sent);
        assert_eq!(requeue.reject(true).await, Settled::Sent);

        let again = next(&mut subscription).await;
        assert_eq!(text(&again), "requeue");
        assert!(again.redelivered);
        assert_eq!(again.delivery_count, Some(1));
        assert_eq!(again.ack().await, Settled::Sent);

        bed.wait_for_count(&topology.dead_queue(), 1).await;
        subscription.close().await;
        assert_eq!(bed.count(&topology.queue).await, 0);
        let dead = inspect::take(&bed.connection, &topology.dead_queue(), 5).await.unwrap();
        assert_eq!(dead.iter().map(text).collect::<Vec<_>>(), ["reject"]);
    })
    .await;
}

#[tokio::test]
async fn closing_returns_the_unacknowledged_in_order() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let bodies: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        bed.fill(&bodies.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let mut subscription = bed.subscription(&queue, 6).await;
        let held = [next(&mut subscription).await, next(&mut subscription).await];
        subscription.close().await;
        for delivery in held {
            assert_eq!(delivery.ack().await, Settled::Lost);
        }

        let mut subscription = bed.subscription(&queue, 10).await;
        for body in bodies {
            let delivery = next(&mut subscription).await;
            assert_eq!(text(&delivery), body);
            assert_eq!(delivery.ack().await, Settled::Sent);
        }
        subscription.close().await;
    })
    .await;
}

#[tokio::test]
async fn the_prefetch_can_change_while_deliveries_are_out() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        bed.fill(&["1", "2", "3", "4", "5"]).await;
        let mut subscription = bed.subscription(&queue, 1).await;
        bed.wait_for_count(&queue, 4).await;
        subscription.set_prefetch(2).await.unwrap();
        bed.wait_for_count(&queue, 2).await;

        let first = next(&mut subscription).await;
        let second = next(&mut subscription).await;
        let third = next(&mut subscription).await;
        assert_eq!([text(&first), text(&second), text(&third)], ["1", "2", "3"]);
        for delivery in [first, second, third] {
            assert_eq!(delivery.ack().await, Settled::Sent);
        }
        for body in ["4", "5"] {
            let delivery = next(&mut subscription).await;
            assert_eq!(text(&delivery), body);
            assert_eq!(delivery.ack().await, Settled::Sent);
        }
        assert!(subscription.is_usable());
        subscription.close().await;
        assert_eq!(bed.count(&queue).await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_deleted_queue_is_an_error_and_no_end() {
    Bed::run(async |bed| {
        for kind in [QueueKind::Classic, QueueKind::Quorum] {
            let queue = bed.queue(kind).await;
            let mut subscription = bed.subscription(&queue, 10).await;
            inspect::delete_queue(&bed.connection, &queue).await.unwrap();
            for _ in 0..2 {
                let error = within("the cancel", SOON, subscription.next()).await.unwrap_err();
                assert!(matches!(&error, Error::ConsumerCanceled { queue: canceled } if *canceled == queue));
            }
            assert!(!subscription.is_usable());
            subscription.close().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_missing_queue_is_an_error() {
    let error = Subscription::open(&url(), "broker tests", "no such queue", 1).await.unwrap_err();
    assert_eq!(error.reply_code(), Some(404));
    assert!(error.to_string().contains("no such queue"), "{error}");
}

#[tokio::test]
async fn after_a_cut_next_fails_and_settling_says_lost() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        bed.fill(&["1"]).await;
        let forwarder = Forwarder::start().await;
        let url = forwarder.url("heartbeat=10");
        let mut subscription = Subscription::open(&url, "broker tests: cut", &queue, 10).await.unwrap();
        let delivery = next(&mut subscription).await;
        forwarder.cut();
        within("the loss", SOON, subscription.next()).await.unwrap_err();
        within("the loss again", SOON, subscription.next()).await.unwrap_err();
        assert_eq!(within("the settlement", SOON, delivery.ack()).await, Settled::Lost);
        within("a cut subscription to close", SOON, subscription.close()).await;
        bed.wait_for_count(&queue, 1).await;
    })
    .await;
}

#[tokio::test]
async fn a_line_that_went_silent_is_noticed_by_the_heartbeat() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let forwarder = Forwarder::start().await;
        let url = forwarder.url("heartbeat=1");
        let mut subscription = Subscription::open(&url, "broker tests: silent", &queue, 10).await.unwrap();
        forwarder.freeze();
        within("the missing heartbeat", SOON, subscription.next()).await.unwrap_err();
        within("a silent subscription to close", SOON, subscription.close()).await;
    })
    .await;
}

#[tokio::test]
async fn a_message_beyond_its_delivery_limit_is_dead() {
    Bed::run(async |bed| {
        let topology = full_topology(bed, |topology| topology.delivery_limit = 2).await;
        bed.fill(&["poison"]).await;
        let mut subscription = bed.subscription(&topology.queue, 1).await;
        for earlier in [None, Some(1), Some(2)] {
            let delivery = next(&mut subscription).await;
            assert_eq!(delivery.delivery_count, earlier);
            assert_eq!(delivery.reject(true).await, Settled::Sent);
        }
        bed.wait_for_count(&topology.dead_queue(), 1).await;
        subscription.close().await;
        assert_eq!(bed.count(&topology.queue).await, 0);
    })
    .await;
}

#[tokio::test]
async fn a_retry_queue_gives_a_message_back_to_its_queue_alone() {
    Bed::run(async |bed| {
        let delay = Duration::from_millis(50);
        let topology = full_topology(bed, |topology| topology.retry_delays = vec![delay]).await;
        bed.fill(&["later"]).await;
        let mut subscription = bed.subscription(&topology.queue, 1).await;
        let mut publisher = bed.publisher().await;
        for round in 0..3 {
            let delivery = next(&mut subscription).await;
            assert_eq!(text(&delivery), "later");
            assert_eq!(delivery.delivery_count, None, "round {round}");
            let copy = Outgoing::copy_to_queue(topology.retry_queue(delay), delivery.copy());
            let wave = publisher.publish_wave(vec![copy]).await;
            assert_eq!(wave.outcomes, [semel_broker::Outcome::Confirmed]);
            assert_eq!(delivery.ack().await, Settled::Sent);
        }
        assert_eq!(next(&mut subscription).await.ack().await, Settled::Sent);
        subscription.close().await;
    })
    .await;
}
