//! Subscribing, subscribing again, and stopping.

use semel_broker::{Subscription, inspect};
use semel_consumer_kit::{Consumer, TopologyMode};

use crate::script::{Act, Script};
use crate::support::{HOUR, Tables, World, eventually, make_tables, within};

#[tokio::test]
async fn a_deleted_queue_is_declared_and_consumed_again() {
    let world = World::new().await;
    let consumer = world.start().await;
    world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    inspect::delete_queue(&world.connection, &world.name).await.unwrap();
    consumer.lost(1).await;
    consumer.ready().await;
    let event = world.publish(Act::Succeed).await;
    world.counted([2, 0, 0, 0, 0]).await;
    assert_eq!(world.effects(event).await, 1);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn connections_that_died_idle_cost_no_redelivery() {
    let world = World::new().await;
    let consumer = world.start().await;
    world.publish_all(&[Act::Linger; 20]).await;
    world.counted([20, 0, 0, 0, 0]).await;
    world.end_database_connections().await;
    world.publish_all(&[Act::Succeed; 20]).await;
    world.counted([40, 0, 0, 0, 0]).await;
    assert_eq!(consumer.losses(), 0);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_soft_stop_finishes_what_runs_and_leaves_the_rest_in_the_queue() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().prefetch(10).concurrency(2));
    consumer.ready().await;
    let events = world.publish_all(&[Act::WaitAtGate; 6]).await;
    within("two events at the gate", world.script.at_gate.acquire_many(2)).await.unwrap().forget();
    consumer.life.stop();
    world.script.gate.add_permits(events.len());
    consumer.ended().await.unwrap();
    assert_eq!(world.count("effects").await, 2);
    world.counted([2, 0, 0, 0, 0]).await;
    eventually("the rest in the queue", || async {
        match world.queued().await {
            4 => Ok(()),
            seen => Err(seen),
        }
    })
    .await;
    // Nothing of it is lost.
    let consumer = world.start().await;
    world.counted([6, 0, 0, 0, 0]).await;
    assert_eq!(world.count("effects").await, 6);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn what_waits_for_its_retry_holds_up_neither_its_neighbours_nor_a_stop() {
    let world = World::new().await;
    let builder = world.builder().retry_delays([HOUR]).prefetch(1).concurrency(1);
    let consumer = world.start_with(builder);
    consumer.ready().await;
    let events = world.publish_all(&[Act::Fail(1), Act::Fail(1), Act::Succeed]).await;
    world.counted([1, 0, 2, 0, 0]).await;
    consumer.stop().await;
    let calls: Vec<_> = events.iter().map(|event| world.script.calls(*event)).collect();
    assert_eq!((calls, world.waiting(HOUR).await, world.queued().await), (vec![1, 1, 1], 2, 0));
    world.close().await;
}

/// It may be one that ends the process, and then what was fetched with it comes once more, too.
#[tokio::test]
async fn after_a_start_what_comes_again_is_fetched_alone() {
    let world = World::new().await;
    world.start().await.stop().await;
    world.publish_all(&[Act::WaitAtGate, Act::Succeed, Act::Succeed]).await;
    let mut earlier = Subscription::open(&world.broker, "kit-test", &world.name, 3).await.unwrap();
    for _ in 0..3 {
        let _ = within("a delivery", earlier.next()).await.unwrap();
    }
    earlier.close().await;
    let consumer = world.start_with(world.builder());
    within("the event at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    assert_eq!(world.queued().await, 2);
    world.script.gate.add_permits(1);
    world.counted([3, 0, 0, 0, 0]).await;
    // Now as many as the settings say.
    let events = world.publish_all(&[Act::WaitAtGate; 3]).await;
    within("three at the gate", world.script.at_gate.acquire_many(3)).await.unwrap().forget();
    world.script.gate.add_permits(events.len());
    world.counted([6, 0, 0, 0, 0]).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn waits_for_tables_that_are_not_made_yet() {
    let world = World::with(Tables::Missing).await;
    let consumer = world.start_with(world.builder());
    consumer.lost(1).await;
    make_tables(&world.database).await;
    consumer.ready().await;
    let event = world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 1));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_refused_login_is_an_error() {
    let world = World::new().await;
    let url = std::env::var("AMQP_URL").unwrap();
    let (_, place) = url.rsplit_once('@').unwrap_or(("", url.trim_start_matches("amqp://")));
    let broker = format!("amqp://nobody:wrong@{place}").parse().unwrap();
    let consumer = Consumer::builder(world.name.as_str(), world.pool.clone(), broker, world.name.as_str());
    let consumer = consumer.bind("order.OrderPlaced").build(Script::default()).unwrap();
    let life = semel_core::lifecycle::Lifecycle::new();
    let error = within("the refusal", consumer.run(&life)).await.unwrap_err();
    assert!(error.to_string().contains("refuses the login"), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
    world.start().await.stop().await;
    world.close().await;
}

#[tokio::test]
async fn verifying_makes_nothing_and_waits_for_what_is_missing() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().topology(TopologyMode::Verify));
    consumer.lost(1).await;
    assert!(inspect::message_count(&world.connection, &world.name).await.is_err());
    world.start().await.stop().await;
    consumer.ready().await;
    world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    consumer.stop().await;
    world.close().await;
}
