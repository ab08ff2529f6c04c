//! Effects happen once.

use uuid::Uuid;

use crate::script::Act;
use semel_core::trace::TraceContext;

use crate::support::{TRACE, World};

#[tokio::test]
async fn a_first_delivery_takes_effect_and_is_acknowledged() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    assert_eq!(world.effects(event).await, 1);
    assert_eq!(world.count("processed_events").await, 1);
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn a_second_delivery_writes_nothing() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = Uuid::new_v4();
    world.publish_events(&[(event, Act::Succeed)]).await;
    world.counted([1, 0, 0, 0, 0]).await;
    world.publish_events(&[(event, Act::Succeed)]).await;
    world.counted([1, 1, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.script.calls(event)), (1, 1));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn of_concurrent_twins_one_takes_effect() {
    let world = World::new().await;
    let consumers = [world.start().await, world.start().await];
    // `cargo xtask test --full` sets it.
    let rounds: u16 = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 500 } else { 50 };
    let twins: Vec<_> = (0..rounds).map(|_| (Uuid::new_v4(), Act::Linger)).collect();
    // At once, so that both copies of an event are handled at the same time, mostly by different consumers.
    tokio::join!(world.publish_events(&twins), world.publish_events(&twins));
    world.counted([rounds.into(), rounds.into(), 0, 0, 0]).await;
    assert_eq!(world.count("effects").await, i64::from(rounds));
    assert_eq!(world.count("(SELECT DISTINCT event_id FROM effects) AS once").await, i64::from(rounds));
    for consumer in consumers {
        consumer.stop().await;
    }
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn events_of_the_handler_commit_with_its_effect() {
    let world = World::new().await;
    let consumer = world.start().await;
    let events = world.publish_all(&[Act::Append, Act::AppendAndRefuse]).await;
    world.counted([1, 0, 0, 1, 0]).await;
    let told: Vec<(String, Option<i64>, serde_json::Value)> =
        sqlx::query_as("SELECT aggregate_id, aggregate_version, headers FROM outbox")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    let [(aggregate, Some(1), headers)] = &told[..] else { panic!("{told:?}") };
    assert_eq!(*aggregate, events[0].to_string());
    // In the trace that the event came with, and below a span of the handler's own.
    let [came_with, goes_on] =
        [TRACE, headers["traceparent"].as_str().unwrap()].map(|text| text.parse::<TraceContext>().unwrap());
    assert_eq!(goes_on.trace_id(), came_with.trace_id());
    assert_ne!(goes_on.span_id(), came_with.span_id());
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn the_same_event_takes_effect_for_each_consumer() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    sqlx::query("UPDATE processed_events SET consumer = 'another'").execute(&world.pool).await.unwrap();
    world.publish_events(&[(event, Act::Succeed)]).await;
    world.counted([2, 0, 0, 0, 0]).await;
    consumer.stop().await;
    world.close().await;
}
