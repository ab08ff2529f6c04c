//! Parked events that cannot go on: none is lost, and none makes others wait for ever.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use semel_broker::HeaderValue;
use semel_consumer_kit::headers;
use semel_core::inbox::order::{self, Place};
use sqlx::Executor as _;
use uuid::Uuid;

use crate::counters;
use crate::failures::publish_as_it_is;
use crate::order::in_order;
use crate::script::{Act, Order};
use crate::support::{HOUR, World, eventually, ids, steps, within};

/// Waits until what is said of the parked event contains this.
async fn told(world: &World, part: &str) {
    eventually("what is said of the parked event", || async {
        let error: Option<String> =
            sqlx::query_scalar("SELECT error FROM parked_events").fetch_one(&world.pool).await.unwrap();
        if error.as_ref().is_some_and(|error| error.contains(part)) { Ok(()) } else { Err(error) }
    })
    .await;
}

#[tokio::test]
async fn what_there_can_be_no_dead_letter_of_stays_parked_and_says_so() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    let chain = steps("a", &[Act::Fail(1), Act::Succeed]);
    world.publish_steps(&chain).await;
    world.parked(2).await;
    // As if frames had held more when it was parked.
    let grow = r#"UPDATE parked_events
        SET properties = jsonb_set(properties::JSONB, '{headers,padding}', to_jsonb(repeat('x', 200000)))::JSON,
            payload = '{"act":"Refuse"}', next_attempt_at = now()
        WHERE next_attempt_at IS NOT NULL"#;
    world.pool.execute(grow).await.unwrap();
    eventually("what is said of the parked event", || async {
        let told: Option<String> =
            sqlx::query_scalar("SELECT error FROM parked_events ORDER BY parked_id LIMIT 1")
                .fetch_one(&world.pool)
                .await
                .unwrap();
        if told
            .as_ref()
            .is_some_and(|told| told.starts_with("there can be no dead letter of it: the headers"))
        {
            Ok(())
        } else {
            Err(told)
        }
    })
    .await;
    assert_eq!((world.count("parked_events").await, world.dead_letter_count().await), (2, 0));
    assert_eq!(world.script.calls(chain[1].id), 0);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_zero_byte_in_what_a_handler_says_is_no_obstacle() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    let chain = steps("a", &[Act::FailWithZeroByte]);
    world.publish_steps(&chain).await;
    world.parked(1).await;
    told(&world, "the bank\u{fffd}is closed").await;
    // From where it is parked, too.
    let hurry = "UPDATE parked_events SET next_attempt_at = now(), error = 'before'";
    world.pool.execute(hurry).await.unwrap();
    told(&world, "the bank\u{fffd}is closed").await;
    assert_eq!((world.script.calls(chain[0].id), consumer.losses()), (2, 0));
    consumer.stop().await;
    world.close().await;
}

/// Such as one with tables in tables in tables: nobody could try it again, and its followers would wait for ever.
#[tokio::test]
async fn what_no_message_could_be_made_of_again_is_dead_and_not_parked() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    let id = Uuid::new_v4();
    let text = |text: &str| AMQPValue::LongString(text.into());
    let deep = (0..70).fold(AMQPValue::Boolean(true), |inner, _| {
        AMQPValue::FieldTable(FieldTable::from(BTreeMap::from([(ShortString::from("in"), inner)])))
    });
    let odd = BTreeMap::from([
        (ShortString::from("deep"), deep),
        (ShortString::from("x-semel-aggregate-type"), text("order")),
        (ShortString::from("x-semel-aggregate-id"), text("a")),
    ]);
    let properties =
        BasicProperties::default().with_message_id(id.to_string().into()).with_headers(FieldTable::from(odd));
    let body = serde_json::to_vec(&Order { act: Act::Fail(u32::MAX) }).unwrap();
    publish_as_it_is(&world.name, properties, &body).await;
    let chain = steps("a", &[Act::Succeed]);
    world.publish_steps(&chain).await;
    world.took_effect(1).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(letters[0].envelope.as_ref().unwrap().event_id, id);
    assert_eq!(letters[0].header(headers::REASON), Some(HeaderValue::Text("invalid".to_owned())));
    assert_eq!(world.count("parked_events").await, 0);
    consumer.stop().await;
    world.close().await;
}

/// As a full disk does.
async fn refuse_to_park(world: &World) {
    let refuse = "CREATE FUNCTION refuse() RETURNS TRIGGER LANGUAGE plpgsql AS
                  $$ BEGIN RAISE SQLSTATE '53100'; END $$;
                  CREATE TRIGGER refuse BEFORE INSERT ON parked_events FOR EACH ROW EXECUTE FUNCTION refuse()";
    world.pool.execute(refuse).await.unwrap();
}

async fn park_again(world: &World) {
    world.pool.execute("DROP TRIGGER refuse ON parked_events").await.unwrap();
}

/// To end the subscription would give back what was sent ahead, and make suspects of it.
#[tokio::test]
async fn while_the_database_refuses_to_park_what_fails_waits_and_its_neighbours_take_effect() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().concurrency(2)));
    consumer.ready().await;
    refuse_to_park(&world).await;
    let failing = steps("a", &[Act::Fail(1), Act::Succeed]);
    let others = steps("b", &[Act::WaitAtGate, Act::Succeed, Act::Succeed, Act::Succeed]);
    world.publish_steps(&[failing.clone(), others.clone()].concat()).await;
    within("the handler at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    consumer.lost(1).await;
    world.script.gate.add_permits(1);
    world.took_effect(4).await;
    assert_eq!((world.effects_in_order().await, counters::parked(&world.name)), (ids(&others), 0));
    park_again(&world).await;
    world.took_effect(6).await;
    consumer.ready().await;
    assert_eq!(world.script.calls(failing[0].id), 2);
    consumer.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

#[tokio::test]
async fn nothing_is_fetched_while_nothing_could_be_parked() {
    let world = World::new().await;
    world.start_with(in_order(world.builder())).stop_when_ready().await;
    refuse_to_park(&world).await;
    let consumer = world.start_with(in_order(world.builder()));
    consumer.lost(1).await;
    world.publish_steps(&steps("a", &[Act::Succeed])).await;
    consumer.lost(2).await;
    assert_eq!((world.queued().await, world.count("effects").await), (1, 0));
    park_again(&world).await;
    world.took_effect(1).await;
    consumer.stop().await;
    world.close().await;
}

/// Holds the aggregate's lock for a moment, again and again.
async fn keep_busy(world: &World, aggregate: &str) {
    loop {
        let mut tx = world.pool.begin().await.unwrap();
        order::lock(&mut tx, Place { consumer: &world.name, kind: "order", id: aggregate }).await.unwrap();
        tx.execute("SELECT pg_sleep(0.02)").await.unwrap();
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn parked_events_have_their_turn_although_their_aggregate_is_never_idle() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    let chain = steps("a", &[Act::Fail(1), Act::Succeed, Act::Succeed, Act::Succeed]);
    world.publish_steps(&chain).await;
    world.parked(4).await;
    let drained = async {
        // Of the two, one has the lock and the other one waits for it.
        world.waits_for_lock().await;
        let hurry = "UPDATE parked_events SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL";
        world.pool.execute(hurry).await.unwrap();
        world.parked(0).await;
    };
    tokio::select! {
        () = drained => {}
        () = keep_busy(&world, "a") => {}
        () = keep_busy(&world, "a") => {}
    }
    assert_eq!(world.effects_in_order().await, ids(&chain));
    consumer.stop().await;
    world.close().await;
}

/// There the next one that fails would be kept, until the broker ends the subscription, which costs all that was sent ahead.
#[tokio::test]
async fn nothing_is_fetched_while_as_many_are_parked_as_may_be() {
    let world = World::new().await;
    let builder = || in_order(world.builder().retry_delays([HOUR])).parked_limit(1);
    let consumer = world.start_with(builder());
    consumer.ready().await;
    let failing = steps("a", &[Act::Fail(1)]);
    world.publish_steps(&failing).await;
    world.parked(1).await;
    consumer.stop().await;
    world.publish_steps(&steps("b", &[Act::Succeed])).await;
    let consumer = world.start_with(builder());
    consumer.lost(2).await;
    assert_eq!((world.queued().await, world.count("effects").await), (1, 0));
    eventually("the count of what is parked", || async {
        let told = counters::backlog(&world.name);
        if told == Some(1.0) { Ok(()) } else { Err(told) }
    })
    .await;
    world.pool.execute("UPDATE parked_events SET next_attempt_at = now()").await.unwrap();
    world.took_effect(2).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn without_an_order_nothing_is_fetched_while_events_are_parked_that_nobody_would_try_again() {
    let world = World::new().await;
    world.start().await.stop().await;
    let left = "INSERT INTO parked_events
        (consumer, aggregate_type, aggregate_id, event_id, exchange, routing_key, properties, payload, reason, attempts)
        VALUES ($1, 'order', 'a', gen_random_uuid(), 'e', 'k', '{}', '', 'behind', 0)";
    sqlx::query(left).bind(&world.name).execute(&world.pool).await.unwrap();
    world.publish(Act::Succeed).await;
    let consumer = world.start_with(world.builder());
    consumer.lost(2).await;
    assert_eq!((world.queued().await, world.count("effects").await), (1, 0));
    world.pool.execute("DELETE FROM parked_events").await.unwrap();
    world.took_effect(1).await;
    consumer.stop().await;
    world.close().await;
}
