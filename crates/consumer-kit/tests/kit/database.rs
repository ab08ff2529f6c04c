//! A database that is read-only, lacks a table, falls silent: no message is lost, dead or handled twice because of it.

use std::time::Duration;

use futures_util::future::join_all;
use semel_consumer_kit::ConsumerBuilder;
use semel_core::lifecycle::{Drained, Heartbeat};
use sqlx::Executor as _;

use crate::line::{Line, Passes};
use crate::script::Act;
use crate::support::{Running, World, eventually, within};

/// A transaction of this consumer is given up after 1.5 s of silence.
fn impatient(builder: ConsumerBuilder) -> ConsumerBuilder {
    builder.budget(Duration::from_secs(1)).answer_limit(Duration::from_millis(500))
}

/// One message at a time on one connection: if that is lost and keeps its place in the pool, nothing works any more.
async fn start_on_one_connection(world: &World, line: &Line) -> Running {
    let builder = impatient(world.builder_on(line.pool(1)));
    let consumer = world.start_with(builder.concurrency(1));
    consumer.ready().await;
    consumer
}

#[tokio::test]
async fn a_database_that_becomes_read_only_costs_no_message() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().delivery_limit(1).attempts(1));
    consumer.ready().await;
    world.set_read_only(true).await;
    let events = world.publish_all(&[Act::Succeed; 40]).await;
    consumer.lost(6).await;
    assert_eq!(events.iter().map(|event| world.script.calls(*event)).sum::<u32>(), 0);
    world.set_read_only(false).await;
    world.counted([40, 0, 0, 0, 0]).await;
    for event in events {
        assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 1));
    }
    assert_eq!(world.dead_letter_count().await, 0);
    consumer.ready().await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn nothing_is_fetched_before_the_database_takes_writes() {
    let world = World::new().await;
    world.start().await.stop().await;
    world.set_read_only(true).await;
    let consumer = world.start_with(world.builder());
    world.publish_all(&[Act::Succeed; 3]).await;
    consumer.lost(2).await;
    assert_eq!(world.queued().await, 3);
    world.set_read_only(false).await;
    world.counted([3, 0, 0, 0, 0]).await;
    consumer.stop().await;
    // What was tried has left nothing behind.
    assert_eq!(world.count("processed_events").await, 3);
    world.close().await;
}

/// Such a handler may be newer than the tables.
#[tokio::test]
async fn a_table_that_a_handler_misses_is_no_fault_of_the_event() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().delivery_limit(1).attempts(1));
    consumer.ready().await;
    let events = world.publish_all(&[Act::NeedTable, Act::Succeed]).await;
    world.counted([1, 0, 0, 0, 0]).await;
    eventually("more calls than the limits allow", || async {
        let calls = world.script.calls(events[0]);
        if calls > 3 { Ok(()) } else { Err(calls) }
    })
    .await;
    assert!(!consumer.is_ready());
    world.pool.execute("CREATE TABLE made_later (n INT)").await.unwrap();
    world.counted([2, 0, 0, 0, 0]).await;
    consumer.ready().await;
    assert_eq!((world.effects(events[0]).await, world.dead_letter_count().await), (1, 0));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_soft_stop_gives_back_what_is_kept() {
    let world = World::new().await;
    let consumer = world.start().await;
    world.publish(Act::NeedTable).await;
    consumer.lost(1).await;
    consumer.stop().await;
    eventually("the message in the queue", || async { (world.queued().await == 1).then_some(()).ok_or(0) })
        .await;
    world.close().await;
}

#[tokio::test]
async fn after_a_failure_one_message_is_fetched_at_first() {
    let world = World::new().await;
    let consumer = world.start().await;
    let first = world.publish_all(&[Act::LoseConnectionThenWait]).await[0];
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    world.publish_all(&[Act::Succeed; 5]).await;
    // More than one would be taken from the queue at once.
    assert_eq!(world.queued().await, 5);
    world.script.gate.add_permits(1);
    world.counted([6, 0, 0, 0, 0]).await;
    assert_eq!((world.effects(first).await, world.script.calls(first)), (1, 2));
    // Now as many as the settings say.
    let events = world.publish_all(&[Act::WaitAtGate; 3]).await;
    within("three at the gate", world.script.at_gate.acquire_many(3)).await.unwrap().forget();
    world.script.gate.add_permits(events.len());
    world.counted([9, 0, 0, 0, 0]).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn connections_that_fall_silent_idle_are_replaced() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let consumer = world.start_with(impatient(world.builder_on(line.pool(9))));
    consumer.ready().await;
    world.publish_all(&[Act::Linger; 20]).await;
    world.counted([20, 0, 0, 0, 0]).await;
    line.silence();
    world.publish_all(&[Act::Succeed; 20]).await;
    world.counted([40, 0, 0, 0, 0]).await;
    assert_eq!(world.count("(SELECT DISTINCT event_id FROM effects) AS once").await, 40);
    assert_eq!((world.count("effects").await, world.dead_letter_count().await), (40, 0));
    consumer.stop().await;
    world.close().await;
}

/// Each of them would cost seconds to find out.
#[tokio::test]
async fn with_one_silent_connection_the_idle_ones_go_too() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let pool = line.pool(9);
    let consumer = world.start_with(impatient(world.builder_on(pool.clone())).concurrency(1));
    consumer.ready().await;
    let lent = join_all((0..9).map(|_| pool.acquire())).await;
    assert!(lent.iter().all(Result::is_ok));
    drop(lent);
    eventually("nine idle connections", || async {
        let idle = pool.num_idle();
        if idle == 9 { Ok(()) } else { Err(idle) }
    })
    .await;
    line.silence();
    world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_connection_that_falls_silent_under_a_handler_is_replaced() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let consumer = start_on_one_connection(&world, &line).await;
    let event = world.publish(Act::WaitAtGate).await;
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    line.silence();
    world.script.gate.add_permits(2);
    consumer.lost(1).await;
    world.counted([1, 0, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 2));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_commit_whose_answer_never_comes_is_found_by_the_next_delivery() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let consumer = start_on_one_connection(&world, &line).await;
    line.silence_at_commit(Passes::No);
    let event = world.publish(Act::Succeed).await;
    world.counted([0, 1, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 1));
    consumer.stop().await;
    world.close().await;
}

/// The pool pings what it is given back.
#[tokio::test]
async fn a_connection_that_falls_silent_on_its_way_back_leaves_the_pool() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let consumer = start_on_one_connection(&world, &line).await;
    line.silence_at_commit(Passes::Yes);
    world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    assert!(line.is_trap_sprung());
    let event = world.publish(Act::Succeed).await;
    world.counted([2, 0, 0, 0, 0]).await;
    assert_eq!(world.effects(event).await, 1);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_soft_stop_ends_within_the_limits_of_a_silent_database() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let consumer = start_on_one_connection(&world, &line).await;
    world.publish(Act::WaitAtGate).await;
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    line.silence_for_good();
    consumer.stop().await;
    eventually("the message in the queue", || async { (world.queued().await == 1).then_some(()).ok_or(0) })
        .await;
    world.close().await;
}

#[tokio::test]
async fn the_hard_stop_waits_for_no_database() {
    let world = World::new().await;
    let line = Line::to_database_of(&world).await;
    let builder = world.builder_on(line.pool(9)).budget(Duration::from_mins(5));
    let consumer = world.start_with(builder);
    consumer.ready().await;
    world.publish(Act::WaitAtGate).await;
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    line.silence_for_good();
    let grace = Duration::from_millis(100);
    assert_eq!(within("the grace", consumer.life.drain(grace)).await, Drained::CutOff);
    consumer.ended().await.unwrap();
    eventually("the message in the queue", || async { (world.queued().await == 1).then_some(()).ok_or(0) })
        .await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_consumer_with_a_stuck_message_does_not_look_alive() {
    let world = World::new().await;
    let heartbeat = Heartbeat::default();
    // Five calls of a second each are the most that a message may take.
    let builder = world.builder().budget(Duration::from_millis(700)).answer_limit(Duration::from_millis(300));
    let consumer = world.start_with(builder.heartbeat(heartbeat.clone()));
    consumer.ready().await;
    world.publish(Act::BlockThread).await;
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    eventually("the heartbeat to stop", || async {
        let age = heartbeat.age();
        if age > Duration::from_secs(4) { Ok(()) } else { Err(age) }
    })
    .await;
    world.script.gate.add_permits(100);
    eventually("the heartbeat to go on", || async {
        let age = heartbeat.age();
        if age < Duration::from_secs(2) { Ok(()) } else { Err(age) }
    })
    .await;
    consumer.stop().await;
    world.close().await;
}
