//! What a broker and the way to it may do: effects are exact, and the consumer comes back.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, ConnectionProperties};
use semel_broker::inspect;
use semel_consumer_kit::{Ordering, TopologyMode};

use crate::line::Line;
use crate::order::in_order;
use crate::script::{Act, Order};
use crate::support::{HOUR, World, eventually, ids, service, steps, within};

#[tokio::test]
async fn a_queue_that_is_deleted_again_and_again_costs_no_effect_of_what_was_published_since() {
    let world = World::new().await;
    let consumer = world.start().await;
    let mut expected = 0;
    for _ in 0..3 {
        // Some of these may be in the queue when it goes, and go with it.
        world.publish_all(&[Act::Linger; 20]).await;
        let losses = consumer.losses();
        inspect::delete_queue(&world.connection, &world.name).await.unwrap();
        consumer.lost(losses + 1).await;
        consumer.ready().await;
        let events = world.publish_all(&[Act::Succeed; 20]).await;
        for event in events {
            eventually("the effect", || async {
                match world.effects(event).await {
                    1 => Ok(()),
                    other => Err(other),
                }
            })
            .await;
            expected += 1;
        }
    }
    assert!(world.count("effects").await >= expected);
    let twice = "(SELECT event_id FROM effects GROUP BY event_id HAVING count(*) > 1) AS twice";
    assert_eq!(world.count(twice).await, 0);
    consumer.stop().await;
    world.close().await;
}

/// Nothing tells it but the missing heartbeats.
#[tokio::test]
async fn behind_a_line_that_fell_silent_it_is_back_within_fifteen_seconds() {
    let world = World::new().await;
    let line = Line::to_broker().await;
    let consumer = world.start_with(world.builder_by(&line));
    consumer.ready().await;
    let before = world.publish_all(&[Act::Succeed; 50]).await;
    world.took_effect(before.len()).await;
    let (began, losses) = (Instant::now(), consumer.losses());
    line.silence();
    let meanwhile = world.publish_all(&[Act::Succeed; 50]).await;
    consumer.lost(losses + 1).await;
    consumer.ready().await;
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    world.took_effect(before.len() + meanwhile.len()).await;
    consumer.stop().await;
    let once = "(SELECT DISTINCT event_id FROM effects) AS once";
    assert_eq!((world.count("effects").await, world.count(once).await), (100, 100));
    world.close().await;
}

#[tokio::test]
async fn a_connection_that_is_cut_again_and_again_under_load_changes_no_effect() {
    let world = World::new().await;
    let line = Line::to_broker().await;
    let consumer = world.start_with(in_order(world.builder_by(&line)));
    consumer.ready().await;
    let mut all = Vec::new();
    for number in 0..40 {
        let mut acts = [Act::Linger; 5];
        if number % 4 == 0 {
            acts[2] = Act::Fail(1);
        }
        all.extend(steps(&number.to_string(), &acts));
    }
    all.sort_by_key(|step| step.version);
    for part in all.chunks(50) {
        world.publish_steps(part).await;
        line.cut();
        consumer.ready().await;
    }
    world.took_effect(all.len()).await;
    world.parked(0).await;
    world.drained().await;
    consumer.stop().await;
    let effects = world.effects_in_order().await;
    assert_eq!(effects.len(), all.len());
    for number in 0..40 {
        let chain: Vec<_> = all.iter().filter(|step| step.aggregate == number.to_string()).collect();
        let chain = ids(chain);
        let seen: Vec<_> = effects.iter().copied().filter(|id| chain.contains(id)).collect();
        assert_eq!(seen, chain);
    }
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

/// The client library cannot read such a message and gives its connection up. So the broker counts its deliveries.
async fn a_message_whose_id_is_no_text(ordering: Ordering, delivery_limit: u32) {
    let world = World::new().await;
    let builder = || world.builder().delivery_limit(delivery_limit).ordering(ordering);
    world.start_with(builder()).stop_when_ready().await;
    let before = world.publish_all(&[Act::Succeed; 10]).await;
    let line = Line::to_broker().await;
    line.swap(b"an id that is no text", b"an id that is no \xff\xfe\xff\xfe");
    let url = service("AMQP_URL");
    let (_, path) = url.rsplit_once('/').unwrap();
    let broker = line.url();
    assert!(broker.ends_with(path));
    let connection = lapin::Connection::connect(&broker, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let properties = BasicProperties::default().with_message_id("an id that is no text".into());
    let body = serde_json::to_vec(&Order { act: Act::Succeed }).unwrap();
    let options = BasicPublishOptions::default();
    let sent = channel
        .basic_publish(world.name.as_str().into(), "order.OrderPlaced".into(), options, &body, properties)
        .await
        .unwrap();
    assert!(sent.await.unwrap().is_ack());
    let after = world.publish_all(&[Act::Succeed; 10]).await;
    let consumer = world.start_with(builder());
    world.took_effect(before.len() + after.len()).await;
    eventually("the dead letter", || async {
        match world.dead_letter_count().await {
            1 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    for event in before.into_iter().chain(after) {
        assert_eq!(world.effects(event).await, 1);
    }
    consumer.ready().await;
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn a_message_whose_id_is_no_text_is_dead_after_the_delivery_limit_and_stops_nobody_for_ever() {
    a_message_whose_id_is_no_text(Ordering::None, 2).await;
}

#[tokio::test]
async fn nor_does_it_in_an_aggregates_order() {
    a_message_whose_id_is_no_text(Ordering::Aggregate, 5).await;
}

/// A queue of dead letters that takes no more.
#[tokio::test]
async fn a_dead_letter_that_is_not_taken_is_kept_and_sent_again_without_a_redelivery() {
    let world = World::new().await;
    world.start().await.stop().await;
    let dead = format!("{}.dead", world.name);
    inspect::delete_queue(&world.connection, &dead).await.unwrap();
    let connection =
        lapin::Connection::connect(&service("AMQP_URL"), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let arguments: BTreeMap<ShortString, AMQPValue> = BTreeMap::from([
        ("x-max-length".into(), AMQPValue::LongInt(1)),
        ("x-overflow".into(), AMQPValue::LongString("reject-publish".into())),
    ]);
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(dead.as_str().into(), durable, FieldTable::from(arguments)).await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let options = BasicPublishOptions::default();
    let filler =
        channel.basic_publish("".into(), dead.as_str().into(), options, b"x", BasicProperties::default());
    assert!(filler.await.unwrap().await.unwrap().is_ack());

    let consumer = world.start_with(world.builder().topology(TopologyMode::Off));
    consumer.ready().await;
    let event = world.publish(Act::Refuse).await;
    // It says so each time that the copy is not taken.
    consumer.lost(3).await;
    assert_eq!(world.script.calls(event), 1);
    let neighbour = world.publish(Act::Succeed).await;
    world.took_effect(1).await;
    assert_eq!(inspect::purge(&world.connection, &dead).await.unwrap(), 1);
    world.counted([1, 0, 0, 1, 0]).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(letters[0].envelope.as_ref().unwrap().event_id, event);
    assert_eq!((world.script.calls(event), world.effects(neighbour).await), (1, 1));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn a_batch_that_fails_at_a_soft_stop_settles_what_it_can_and_gives_the_rest_back() {
    let world = World::new().await;
    world.start().await.stop().await;
    // The first waits until the stop was asked for, then the batch fails.
    let mut acts = vec![Act::WaitAtGate; 1];
    acts.extend([Act::Succeed; 4]);
    acts.push(Act::Fail(u32::MAX));
    let events = world.publish_all(&acts).await;
    let builder = world.builder().retry_delays([HOUR]).batch(10).concurrency(1).prefetch(10);
    let consumer = world.start_with(builder);
    within("the batch at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    consumer.life.stop();
    world.script.gate.add_permits(10);
    consumer.ended().await.unwrap();
    let first = world.count("effects").await;
    // Nothing is lost, and nothing done twice.
    let consumer = world.start_with(world.builder().retry_delays([HOUR]));
    consumer.ready().await;
    world.took_effect(5).await;
    eventually("the failed one in its retry queue", || async {
        match world.waiting(HOUR).await {
            1 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    for event in &events[..5] {
        assert_eq!(world.effects(*event).await, 1);
    }
    assert!(first < 5, "the stop came too late");
    consumer.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}
