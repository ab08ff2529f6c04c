//! What the publisher says of messages when nothing breaks.

use lapin::ConnectionProperties;
use std::sync::atomic::{AtomicUsize, Ordering};

use lapin::options::{BasicPublishOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use semel_broker::inspect::{self, QueueKind};
use semel_broker::{Acceptance, Envelope, HeaderValue, Outcome, Outgoing, Received};

use crate::support::{Bed, envelope, next, raw_url, text};

const NO_ROUTE: &str = "312 NO_ROUTE";

fn returned() -> Outcome {
    Outcome::Returned { reason: NO_ROUTE.into() }
}

#[tokio::test]
async fn confirms_a_wave_and_keeps_its_order() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let mut publisher = bed.publisher().await;
        let envelopes: Vec<Envelope> = (0..300).map(|n| Envelope { outbox_id: n, ..envelope() }).collect();
        let wave = envelopes
            .iter()
            .map(|envelope| Outgoing::event(bed.exchange.clone(), "in", envelope.clone(), b"{}".to_vec()))
            .collect();

        let wave = publisher.publish_wave(wave).await;
        assert!(wave.broken.is_none(), "{:?}", wave.broken);
        assert_eq!(wave.outcomes, vec![Outcome::Confirmed; 300]);
        assert!(publisher.is_usable());

        let received = inspect::take(&bed.connection, &queue, 1000).await.unwrap();
        assert_eq!(received.len(), 300);
        for (sent, delivery) in envelopes.into_iter().zip(received) {
            assert_eq!(delivery.routing_key, "in");
            assert_eq!(delivery.exchange, bed.exchange);
            let received: Received = delivery.envelope.unwrap();
            assert_eq!(received.event_id, sent.event_id);
            assert_eq!(received.outbox_id, Some(sent.outbox_id));
            assert_eq!(received.created_at_unix_micros, Some(sent.created_at_unix_micros));
            assert_eq!(received.headers, sent.headers);
        }
    })
    .await;
}

#[tokio::test]
async fn an_empty_wave_is_fine() {
    Bed::run(async |bed| {
        let mut publisher = bed.publisher().await;
        let wave = publisher.publish_wave(Vec::new()).await;
        assert!(wave.outcomes.is_empty() && wave.broken.is_none());
        assert!(publisher.is_usable());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_exactly_the_unroutable_messages_among_routable_ones() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Classic).await;
        let mut publisher = bed.publisher().await;
        let mut routable = 0;
        for round in 0..40_usize {
            let unroutable = |n: usize| {
                (n * 7 + round).is_multiple_of(10) || (n / 50) % 5 == round % 5 && n.is_multiple_of(3)
            };
            let wave = (0..500)
                .map(|n| bed.outgoing(if unroutable(n) { "nowhere" } else { "in" }, &"x".repeat(n % 97)))
                .collect();
            let wave = publisher.publish_wave(wave).await;
            assert!(wave.broken.is_none(), "{:?}", wave.broken);
            for (n, outcome) in wave.outcomes.iter().enumerate() {
                let expected = if unroutable(n) { returned() } else { Outcome::Confirmed };
                assert_eq!(*outcome, expected, "round {round}, message {n}");
                routable += u32::from(!unroutable(n));
            }
        }
        bed.wait_for_count(&queue, routable).await;
    })
    .await;
}

#[tokio::test]
async fn messages_with_one_id_are_told_apart() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let mut publisher = bed.publisher().await;
        let twin = envelope();
        let send = |key: &str| Outgoing::event(bed.exchange.clone(), key, twin.clone(), b"twin".to_vec());
        let wave =
            vec![send("in"), send("nowhere"), bed.outgoing("in", "other"), send("nowhere"), send("in")];

        let wave = publisher.publish_wave(wave).await;
        let confirmed = Outcome::Confirmed;
        assert_eq!(wave.outcomes, [confirmed.clone(), returned(), confirmed.clone(), returned(), confirmed]);
        bed.wait_for_count(&queue, 3).await;
    })
    .await;
}

#[tokio::test]
async fn refuses_what_cannot_be_sent_and_sends_the_rest() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let mut publisher = bed.publisher().await;
        let long = "x".repeat(256);
        let event = |envelope| Outgoing::event(bed.exchange.clone(), "in", envelope, b"{}".to_vec());
        let mut routes_itself = envelope();
        routes_itself.headers.insert("CC".into(), "elsewhere".into());
        let mut huge = envelope();
        huge.headers.insert("baggage".into(), "x".repeat(200_000));

        let wave = publisher
            .publish_wave(vec![
                bed.outgoing("in", "first"),
                bed.outgoing(&long, "key"),
                Outgoing { exchange: long.clone(), ..bed.outgoing("in", "exchange") },
                event(Envelope { event_type: long.clone(), ..envelope() }),
                event(Envelope { source: long, ..envelope() }),
                event(routes_itself),
                event(huge),
                bed.outgoing("in", "last"),
            ])
            .await;

        assert!(wave.broken.is_none(), "{:?}", wave.broken);
        let reasons: Vec<&str> = wave.outcomes[1..7]
            .iter()
            .map(|outcome| match outcome {
                Outcome::Refused { reason } => reason.as_str(),
                other => panic!("{other:?}"),
            })
            .collect();
        for (reason, part) in
            reasons.iter().zip(["routing key", "exchange", "event type", "source", "CC", "frame"])
        {
            assert!(reason.contains(part), "{reason}");
        }
        assert_eq!([&wave.outcomes[0], &wave.outcomes[7]], [&Outcome::Confirmed, &Outcome::Confirmed]);
        assert!(publisher.is_usable());
        bed.wait_for_count(&queue, 2).await;
    })
    .await;
}

#[tokio::test]
async fn large_bodies_pass() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let mut publisher = bed.publisher().await;
        let body = "x".repeat(1024 * 1024);
        let wave = publisher.publish_wave(vec![bed.outgoing("in", &body), bed.outgoing("in", "")]).await;
        assert_eq!(wave.outcomes, [Outcome::Confirmed, Outcome::Confirmed]);
        let taken = inspect::take(&bed.connection, &queue, 2).await.unwrap();
        assert_eq!(taken.iter().map(|delivery| delivery.body.len()).collect::<Vec<_>>(), [1024 * 1024, 0]);
    })
    .await;
}

#[tokio::test]
async fn says_nacked_when_a_queue_is_full() {
    Bed::run(async |bed| {
        let queue = bed.queue_name();
        let raw = lapin::Connection::connect(&raw_url(), ConnectionProperties::default()).await.unwrap();
        let channel = raw.create_channel().await.unwrap();
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(5));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.as_str().into(), durable, arguments).await.unwrap();
        let (name, exchange) = (queue.as_str().into(), bed.exchange.as_str().into());
        channel
            .queue_bind(name, exchange, "in".into(), QueueBindOptions::default(), FieldTable::default())
            .await
            .unwrap();

        let mut publisher = bed.publisher().await;
        let mut keys = vec!["in"; 60];
        keys[30] = "nowhere";
        let wave = publisher.publish_wave(keys.iter().map(|key| bed.outgoing(key, "x")).collect()).await;

        assert!(wave.broken.is_none(), "{:?}", wave.broken);
        assert_eq!(wave.outcomes[30], returned());
        let count = |outcome| u32::try_from(wave.outcomes.iter().filter(|o| **o == outcome).count()).unwrap();
        assert!(count(Outcome::Nacked) > 0, "{:?}", wave.outcomes);
        assert_eq!(count(Outcome::Confirmed) + count(Outcome::Nacked), 59);
        assert_eq!(bed.count(&queue).await, count(Outcome::Confirmed));
        assert!(publisher.is_usable());
    })
    .await;
}

#[tokio::test]
async fn copies_keep_the_message_and_take_headers() {
    Bed::run(async |bed| {
        let (queue, dead) = (bed.queue(QueueKind::Quorum).await, bed.queue_name());
        inspect::declare_plain_queue(&bed.connection, &dead, QueueKind::Quorum, &bed.exchange, &[])
            .await
            .unwrap();
        bed.fill(&["payload"]).await;
        let mut subscription = bed.subscription(&queue, 1).await;
        let delivery = next(&mut subscription).await;
        let original = delivery.envelope.clone().unwrap();

        let copy =
            delivery.copy().with_header("x-semel-dead-reason", "invalid").with_header("x-semel-attempts", 3);
        let mut publisher = bed.publisher().await;
        let wave = publisher
            .publish_wave(vec![
                Outgoing::copy_to_queue(&dead, copy.clone()),
                Outgoing::copy_to_queue("no such queue", copy),
            ])
            .await;
        assert_eq!(wave.outcomes, [Outcome::Confirmed, returned()]);

        let taken = inspect::take(&bed.connection, &dead, 5).await.unwrap();
        let [dead_letter] = taken.as_slice() else { panic!("{taken:?}") };
        assert_eq!(text(dead_letter), "payload");
        assert_eq!(dead_letter.envelope.as_ref().unwrap(), &original);
        assert_eq!(dead_letter.header("x-semel-dead-reason"), Some(HeaderValue::Text("invalid".into())));
        assert_eq!(dead_letter.header("x-semel-attempts"), Some(HeaderValue::Integer(3)));
        subscription.close().await;
    })
    .await;
}

#[tokio::test]
async fn copies_of_messages_without_id_are_told_apart() {
    Bed::run(async |bed| {
        let queue = bed.queue(QueueKind::Quorum).await;
        let raw = lapin::Connection::connect(&raw_url(), ConnectionProperties::default()).await.unwrap();
        let channel = raw.create_channel().await.unwrap();
        let bare = lapin::BasicProperties::default();
        channel
            .basic_publish("".into(), queue.as_str().into(), BasicPublishOptions::default(), b"bare", bare)
            .await
            .unwrap();
        bed.wait_for_count(&queue, 1).await;
        let taken = inspect::take(&bed.connection, &queue, 1).await.unwrap();
        assert!(taken[0].envelope.is_err());

        let copy = |to: &str| Outgoing::copy_to_queue(to, taken[0].copy());
        let mut publisher = bed.publisher().await;
        let wave = publisher
            .publish_wave(vec![
                copy(&queue),
                copy("no such queue"),
                bed.outgoing("in", "event"),
                copy(&queue),
            ])
            .await;
        let confirmed = Outcome::Confirmed;
        assert_eq!(wave.outcomes, [confirmed.clone(), returned(), confirmed.clone(), confirmed]);
        bed.wait_for_count(&queue, 3).await;
    })
    .await;
}

/// Counts what the client library says about returned messages, which it logs with their payload.
struct ReturnsInTheLog;

static RETURNS_IN_THE_LOG: AtomicUsize = AtomicUsize::new(0);

impl tracing::Subscriber for ReturnsInTheLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "lapin::returned_messages"
    }

    fn event(&self, event: &tracing::Event<'_>) {
        if *event.metadata().level() <= tracing::Level::WARN {
            RETURNS_IN_THE_LOG.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test]
async fn a_returned_payload_is_not_logged() {
    tracing::subscriber::set_global_default(ReturnsInTheLog).unwrap();
    Bed::run(async |bed| {
        let mut publisher = bed.publisher().await;
        let wave = publisher.publish_wave(vec![bed.outgoing("nowhere", "secret")]).await;
        assert_eq!(wave.outcomes, [returned()]);
        assert_eq!(RETURNS_IN_THE_LOG.load(Ordering::SeqCst), 0);
    })
    .await;
}

#[tokio::test]
async fn asking_whether_an_exchange_takes_messages_sends_none() {
    Bed::run(async |bed| {
        let queue = bed.queue_name();
        inspect::declare_plain_queue(&bed.connection, &queue, QueueKind::Quorum, &bed.exchange, &["#"])
            .await
            .unwrap();
        let mut publisher = bed.publisher().await;
        for (exchange, acceptance) in [
            (bed.exchange.as_str(), Acceptance::Takes),
            ("no such exchange", Acceptance::Missing),
            ("", Acceptance::Takes),
        ] {
            assert_eq!(publisher.exchange_takes(exchange).await.unwrap(), acceptance, "{exchange}");
        }
        assert!(publisher.is_usable());
        // Whatever was sent before it is in the queue before it.
        let wave = publisher.publish_wave(vec![bed.outgoing("in", "last")]).await;
        assert_eq!(wave.outcomes, [Outcome::Confirmed]);
        bed.wait_for_count(&queue, 1).await;
        let taken = inspect::take(&bed.connection, &queue, 2).await.unwrap();
        assert_eq!(taken.iter().map(text).collect::<Vec<_>>(), ["last"]);
    })
    .await;
}
