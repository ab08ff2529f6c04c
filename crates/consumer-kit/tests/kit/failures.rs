//! What cannot be handled, now or ever.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, ConnectionProperties};
use semel_broker::{Delivery, HeaderValue, Outcome, Outgoing, Publisher, Subscription, inspect};
use semel_consumer_kit::headers;
use uuid::Uuid;

use crate::script::{Act, Order};
use crate::support::{HOUR, World, eventually, within};

fn text(letter: &Delivery, name: &str) -> String {
    match letter.header(name) {
        Some(HeaderValue::Text(text)) => text,
        other => panic!("{name}: {other:?}"),
    }
}

fn reason(letter: &Delivery) -> String {
    text(letter, headers::REASON)
}

fn id(letter: &Delivery) -> Uuid {
    letter.envelope.as_ref().unwrap().event_id
}

#[tokio::test]
async fn a_refused_event_becomes_a_dead_letter_and_its_neighbours_take_effect() {
    let world = World::new().await;
    let consumer = world.start().await;
    let events = world.publish_all(&[Act::Succeed, Act::Refuse, Act::BreakConstraint, Act::Succeed]).await;
    world.counted([2, 0, 0, 2, 0]).await;
    let mut letters = world.dead_letters(2).await;
    letters.sort_by_key(|letter| id(letter) != events[1]);
    let letter = &letters[0];
    assert_eq!((id(letter), reason(letter).as_str()), (events[1], "permanent"));
    assert!(text(letter, headers::ERROR).contains("no such account"));
    assert!((1000..=1024).contains(&text(letter, headers::ERROR).len()));
    assert_eq!(text(letter, headers::CONSUMER), world.name);
    assert_eq!(letter.header(headers::ATTEMPTS), Some(HeaderValue::Integer(1)));
    assert_eq!(text(letter, headers::EXCHANGE), world.name);
    assert_eq!(text(letter, headers::ROUTING_KEY), "order.OrderPlaced");
    assert!(text(letter, headers::FAILED_AT).ends_with('Z'));
    assert_eq!(text(letter, headers::FIRST_FAILED_AT), text(letter, headers::FAILED_AT));
    assert_eq!(letter.body, br#"{"act":"Refuse"}"#);
    assert!(letter.envelope.as_ref().unwrap().headers.contains_key("traceparent"));
    assert_eq!((id(&letters[1]), reason(&letters[1]).as_str()), (events[2], "permanent"));
    for (event, effects) in events.iter().zip([1, 0, 0, 1]) {
        assert_eq!(world.effects(*event).await, effects);
    }
    // What is not recorded as processed can be put back.
    assert_eq!(world.count("processed_events").await, 2);
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn what_is_no_event_becomes_a_dead_letter() {
    let world = World::new().await;
    let consumer = world.start().await;
    world.publish_bodies(vec![(Uuid::new_v4(), b"\xff{".to_vec()), (Uuid::new_v4(), b"{}".to_vec())]).await;
    publish_without_id(&world.name).await;
    let event = world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 3]).await;
    let letters = world.dead_letters(3).await;
    assert!(letters.iter().all(|letter| reason(letter) == "invalid"));
    let without_id: Vec<_> = letters.iter().filter(|letter| letter.envelope.is_err()).collect();
    assert_eq!(without_id.len(), 1);
    assert_eq!(text(without_id[0], headers::ERROR), "the message has no message_id");
    assert_eq!(world.effects(event).await, 1);
    consumer.stop().await;
    world.close().await;
}

async fn publish_without_id(exchange: &str) {
    publish_as_it_is(exchange, BasicProperties::default(), br#"{"act":"Succeed"}"#).await;
}

/// An event that tells of no aggregate.
pub(crate) async fn publish_bare(exchange: &str, event: Uuid, body: &[u8]) {
    publish_as_it_is(exchange, BasicProperties::default().with_message_id(event.to_string().into()), body)
        .await;
}

pub(crate) async fn publish_as_it_is(exchange: &str, properties: BasicProperties, body: &[u8]) {
    let url = std::env::var("AMQP_URL").unwrap();
    let connection = lapin::Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let key = "order.OrderPlaced";
    let options = BasicPublishOptions::default();
    let sent = channel.basic_publish(exchange.into(), key.into(), options, body, properties);
    sent.await.unwrap();
    connection.close(200, "OK".into()).await.unwrap();
}

#[tokio::test]
async fn a_passing_failure_is_retried_until_it_passes() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::Fail(2)).await;
    world.counted([1, 0, 2, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 3));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn a_dead_letter_that_is_put_back_has_its_attempts_anew() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().attempts(2));
    consumer.ready().await;
    let event = world.publish(Act::Fail(3)).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(world.script.calls(event), 2);
    let mut publisher = Publisher::open(&world.broker, "kit-test").await.unwrap();
    let back = Outgoing::copy_to_queue(world.name.as_str(), letters[0].copy());
    assert_eq!(publisher.publish_wave(vec![back]).await.outcomes, [Outcome::Confirmed]);
    publisher.close().await;
    world.counted([1, 0, 2, 1, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 4));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn each_failure_waits_in_the_next_queue() {
    let world = World::new().await;
    let delays = [Duration::from_millis(10), HOUR];
    let consumer = world.start_with(world.builder().retry_delays(delays));
    consumer.ready().await;
    let event = world.publish(Act::Fail(u32::MAX)).await;
    world.counted([0, 0, 2, 0, 0]).await;
    eventually("the message in the second queue", || async {
        let waiting = world.waiting(HOUR).await;
        if waiting == 1 { Ok(()) } else { Err(waiting) }
    })
    .await;
    assert_eq!(world.script.calls(event), 2);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_failure_that_does_not_pass_is_dead_after_its_attempts() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().attempts(4));
    consumer.ready().await;
    let event = world.publish(Act::Fail(u32::MAX)).await;
    world.counted([0, 0, 3, 1, 0]).await;
    let letters = world.dead_letters(1).await;
    let letter = &letters[0];
    assert_eq!((id(letter), reason(letter).as_str()), (event, "exhausted"));
    assert!(text(letter, headers::ERROR).contains("the bank is closed"));
    assert_eq!(letter.header(headers::ATTEMPTS), Some(HeaderValue::Integer(4)));
    // What it was before it went through the retry queues.
    assert_eq!(text(letter, headers::EXCHANGE), world.name);
    assert_eq!(text(letter, headers::ROUTING_KEY), "order.OrderPlaced");
    assert!(text(letter, headers::FIRST_FAILED_AT) < text(letter, headers::FAILED_AT));
    assert_eq!(letter.body, serde_json::to_vec(&Order { act: Act::Fail(u32::MAX) }).unwrap());
    assert!(letter.envelope.as_ref().unwrap().headers.contains_key("traceparent"));
    assert_eq!((world.effects(event).await, world.script.calls(event)), (0, 4));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

/// A message that ends the process comes back until the broker gives it up.
#[tokio::test]
async fn a_message_that_is_never_settled_is_dead_after_the_delivery_limit() {
    let world = World::new().await;
    let exchange = world.name.as_str();
    let consumer = world.start_with(world.builder().delivery_limit(2));
    consumer.ready().await;
    consumer.stop().await;
    let event = world.publish(Act::Succeed).await;
    for count in 0..3 {
        let mut subscription = Subscription::open(&world.broker, "kit-test", exchange, 1).await.unwrap();
        let delivery = within("a delivery", subscription.next()).await.unwrap();
        assert_eq!((id(&delivery), delivery.delivery_count.unwrap_or(0)), (event, count));
        subscription.close().await;
    }
    assert_eq!(id(&world.dead_letters(1).await[0]), event);
    world.close().await;
}

#[tokio::test]
async fn a_panic_is_a_passing_failure() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::Panic(1)).await;
    world.counted([1, 0, 1, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 2));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_handler_past_its_time_is_ended_and_retried() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().budget(Duration::from_secs(1)));
    consumer.ready().await;
    let events = world.publish_all(&[Act::Hang(1), Act::HangInDatabase(1)]).await;
    world.counted([2, 0, 2, 0, 0]).await;
    for event in events {
        assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 2));
    }
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_serialisation_failure_is_repeated_at_once_and_only_once() {
    let world = World::new().await;
    let consumer = world.start().await;
    let once = world.publish(Act::Conflict(1)).await;
    world.counted([1, 0, 0, 0, 0]).await;
    let thrice = world.publish(Act::Conflict(3)).await;
    world.counted([2, 0, 1, 0, 0]).await;
    for (event, calls) in [(once, 2), (thrice, 4)] {
        assert_eq!((world.effects(event).await, world.script.calls(event)), (1, calls));
    }
    consumer.stop().await;
    world.close().await;
}

/// COMMIT of such a transaction rolls back and reports success.
#[tokio::test]
async fn a_swallowed_database_error_is_not_taken_for_an_effect() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().attempts(2));
    consumer.ready().await;
    let event = world.publish(Act::Swallow).await;
    world.counted([0, 0, 1, 1, 0]).await;
    assert_eq!(reason(&world.dead_letters(1).await[0]), "exhausted");
    assert_eq!(world.effects(event).await, 0);
    assert_eq!(world.count("processed_events").await, 0);
    consumer.stop().await;
    world.close().await;
}

/// The headers of a message travel in one frame, of 128 KiB here.
#[tokio::test]
async fn a_message_without_room_for_a_reason_is_moved_to_the_dead_letters_as_it_is() {
    let world = World::new().await;
    let consumer = world.start().await;
    let padding = AMQPValue::LongString("x".repeat(128 * 1024 - 1000).into());
    let padded = FieldTable::from(BTreeMap::from([(ShortString::from("padding"), padding)]));
    let event = Uuid::new_v4();
    let properties =
        BasicProperties::default().with_message_id(event.to_string().into()).with_headers(padded);
    publish_as_it_is(&world.name, properties, br#"{"act":"Refuse"}"#).await;
    world.counted([0, 0, 0, 1, 0]).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(id(&letters[0]), event);
    assert_eq!(letters[0].header(headers::REASON), None);
    assert_eq!(consumer.losses(), 0);
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

/// Nor has it room to say how often it failed: the broker counts.
#[tokio::test]
async fn a_message_without_room_for_its_history_is_retried_until_the_delivery_limit() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().delivery_limit(2));
    consumer.ready().await;
    let padding = AMQPValue::LongString("x".repeat(128 * 1024 - 1000).into());
    let padded = FieldTable::from(BTreeMap::from([(ShortString::from("padding"), padding)]));
    let event = Uuid::new_v4();
    let properties =
        BasicProperties::default().with_message_id(event.to_string().into()).with_headers(padded);
    let body = serde_json::to_vec(&Order { act: Act::FailAtLength }).unwrap();
    publish_as_it_is(&world.name, properties, &body).await;
    assert_eq!(id(&world.dead_letters(1).await[0]), event);
    world.counted([0, 0, 3, 0, 0]).await;
    assert_eq!((world.script.calls(event), consumer.losses()), (3, 0));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn a_dead_letter_does_not_tell_what_the_database_quotes() {
    let world = World::new().await;
    let consumer = world.start().await;
    world.publish(Act::QuoteValue).await;
    world.counted([0, 0, 0, 1, 0]).await;
    let error = text(&world.dead_letters(1).await[0], headers::ERROR);
    assert!(error.ends_with("SQLSTATE 22P02"), "{error}");
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn an_unconfirmed_dead_letter_leaves_its_original_in_the_queue() {
    let world = World::new().await;
    let consumer = world.start().await;
    inspect::delete_queue(&world.connection, &format!("{}.dead", world.name)).await.unwrap();
    let event = world.publish(Act::Refuse).await;
    consumer.lost(1).await;
    // The broker returns the first dead letter; subscribing anew declares its queue again.
    world.counted([0, 0, 0, 1, 0]).await;
    let letters = world.dead_letters(1).await;
    assert_eq!((id(&letters[0]), reason(&letters[0]).as_str()), (event, "permanent"));
    assert_eq!(world.script.calls(event), 2);
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

/// Its outcome is not known, so it is neither acknowledged nor a failure of the event.
#[tokio::test]
async fn a_lost_database_connection_settles_nothing() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::LoseConnection(1)).await;
    consumer.lost(1).await;
    world.counted([1, 0, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 2));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn settings_that_the_queue_does_not_have_are_an_error() {
    let world = World::new().await;
    world.start().await.stop().await;
    let error = world.start_with(world.builder().delivery_limit(3)).ended().await.unwrap_err();
    assert!(error.to_string().contains("exists with other settings"), "{error}");
    world.close().await;
}
