//! Several messages in one transaction.

use semel_consumer_kit::{ConsumerBuilder, headers};
use uuid::Uuid;

use crate::counters;
use crate::script::{Act, Order};
use crate::support::{Running, World, eventually, within};

fn in_batches(builder: ConsumerBuilder) -> ConsumerBuilder {
    builder.prefetch(40).concurrency(1).batch(20)
}

/// Publishes these behind an event that waits, and lets go when all have been sent to the consumer.
async fn together(world: &World, bodies: Vec<(Uuid, Vec<u8>)>) -> Running {
    let consumer = world.start_with(in_batches(world.builder()));
    consumer.ready().await;
    world.publish(Act::WaitAtGate).await;
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    world.publish_bodies(bodies).await;
    eventually("the messages at the consumer", || async {
        let queued = world.queued().await;
        if queued == 0 { Ok(()) } else { Err(queued) }
    })
    .await;
    world.script.gate.add_permits(1);
    consumer
}

fn body(act: Act) -> Vec<u8> {
    serde_json::to_vec(&Order { act }).unwrap()
}

fn bodies(acts: &[Act]) -> Vec<(Uuid, Vec<u8>)> {
    acts.iter().map(|act| (Uuid::new_v4(), body(*act))).collect()
}

#[tokio::test]
async fn what_has_arrived_is_committed_together() {
    let world = World::new().await;
    let consumer = together(&world, bodies(&[Act::Succeed; 20])).await;
    world.counted([21, 0, 0, 0, 0]).await;
    assert_eq!(world.count("effects").await, 21);
    let commits = world.count("(SELECT DISTINCT xmin::TEXT FROM effects) AS commits").await;
    // The event at the gate is one. The rest is one more, or two when it did not arrive in one piece.
    assert!((2..=3).contains(&commits), "{commits} commits");
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn one_that_fails_drags_no_other_along() {
    let world = World::new().await;
    let acts = [
        Act::Succeed,
        Act::Refuse,
        Act::Succeed,
        Act::Fail(2),
        Act::Panic(2),
        Act::BreakConstraint,
        Act::Swallow,
        Act::Succeed,
    ];
    let mut events = bodies(&acts);
    events.insert(4, (Uuid::new_v4(), b"{}".to_vec()));
    let consumer = together(&world, events.clone()).await;
    // A call in a batch that fails counts for none of its messages, so the retries are not always as many.
    eventually("effects and dead letters", || async {
        let [effects, duplicates, _, dead, invalid] = counters::of(&world.name);
        let seen = [effects, duplicates, dead, invalid];
        if seen == [6, 0, 3, 1] { Ok(()) } else { Err(seen) }
    })
    .await;
    for (event, body) in &events {
        let is_dead =
            body == b"{}" || [Act::Refuse, Act::BreakConstraint, Act::Swallow].map(self::body).contains(body);
        assert_eq!(world.effects(*event).await, i64::from(!is_dead), "{}", String::from_utf8_lossy(body));
    }
    let letters = world.dead_letters(4).await;
    assert!(letters.iter().all(|letter| letter.header(headers::REASON).is_some()));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn of_twins_in_one_batch_one_takes_effect() {
    let world = World::new().await;
    let once = bodies(&[Act::Succeed; 10]);
    let consumer = together(&world, once.iter().chain(&once).cloned().collect()).await;
    world.counted([11, 10, 0, 0, 0]).await;
    assert_eq!(world.count("effects").await, 11);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_lost_connection_settles_nothing_of_the_batch() {
    let world = World::new().await;
    let acts = [Act::Succeed, Act::LoseConnection(1), Act::Succeed];
    let events = bodies(&acts);
    let consumer = together(&world, events.clone()).await;
    world.counted([4, 0, 0, 0, 0]).await;
    assert!(consumer.losses() > 0);
    for (event, _) in &events {
        assert_eq!(world.effects(*event).await, 1);
    }
    consumer.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

#[tokio::test]
async fn two_consumers_with_batches_take_every_effect_once() {
    let world = World::new().await;
    let builder = || in_batches(world.builder()).concurrency(4);
    let consumers = [world.start_with(builder()), world.start_with(builder())];
    for consumer in &consumers {
        consumer.ready().await;
    }
    let events = bodies(&[Act::Succeed; 500]);
    world.publish_bodies(events.clone()).await;
    world.publish_bodies(events.iter().rev().cloned().collect()).await;
    world.counted([500, 500, 0, 0, 0]).await;
    assert_eq!(world.count("effects").await, 500);
    assert_eq!(world.count("(SELECT DISTINCT event_id FROM effects) AS once").await, 500);
    for consumer in consumers {
        consumer.stop().await;
    }
    world.close().await;
}
