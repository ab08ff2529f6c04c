//! Effects in the order of their aggregate.

use std::collections::HashMap;
use std::time::Duration;

use semel_broker::{Delivery, HeaderValue, Outcome, Outgoing, Publisher};
use semel_consumer_kit::{ConsumerBuilder, Ordering, VersionGuard, headers};
use uuid::Uuid;

use crate::counters;
use crate::failures::publish_bare;
use crate::line::Line;
use crate::script::{Act, Order};
use crate::support::{HOUR, Running, Step, World, ids, steps, within};

pub(crate) fn in_order(builder: ConsumerBuilder) -> ConsumerBuilder {
    builder.ordering(Ordering::Aggregate)
}

async fn start(world: &World) -> Running {
    let consumer = world.start_with(in_order(world.builder()));
    consumer.ready().await;
    consumer
}

fn letter(letter: &Delivery) -> (Uuid, Option<HeaderValue>) {
    (letter.envelope.as_ref().unwrap().event_id, letter.header(headers::REASON))
}

fn dead(id: Uuid, reason: &str) -> (Uuid, Option<HeaderValue>) {
    (id, Some(HeaderValue::Text(reason.to_owned())))
}

/// The effects of an aggregate's events, in order.
fn of(effects: &[Uuid], steps: &[Step]) -> Vec<Uuid> {
    effects.iter().copied().filter(|id| steps.iter().any(|step| step.id == *id)).collect()
}

#[tokio::test]
async fn an_aggregates_events_take_effect_one_after_another_and_others_side_by_side() {
    let world = World::new().await;
    let consumer = start(&world).await;
    // The first of the one waits at the gate; all of the other go past it.
    let held = steps("held", &[Act::WaitAtGate, Act::Succeed, Act::Succeed]);
    let free = steps("free", &[Act::Linger; 5]);
    world.publish_steps(&[held.clone(), free.clone()].concat()).await;
    world.took_effect(5).await;
    assert_eq!(world.effects_in_order().await, ids(&free));
    assert_eq!(world.script.calls(held[1].id), 0);
    world.script.gate.add_permits(1);
    world.counted([8, 0, 0, 0, 0]).await;
    assert_eq!(of(&world.effects_in_order().await, &held), ids(&held));
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn many_aggregates_at_two_processes_keep_their_order() {
    let world = World::new().await;
    let consumers = [start(&world).await, start(&world).await];
    let mut chains = HashMap::new();
    let mut all = Vec::new();
    for number in 0..20 {
        // Some fail on their way.
        let mut acts = [Act::Succeed; 10];
        acts[number % 10] = [Act::Fail(1), Act::Panic(1), Act::Linger][number % 3];
        let chain = steps(&number.to_string(), &acts);
        all.extend(chain.clone());
        chains.insert(number, chain);
    }
    all.sort_by_key(|step| step.version);
    world.publish_steps(&all).await;
    world.took_effect(all.len()).await;
    world.parked(0).await;
    let effects = world.effects_in_order().await;
    assert_eq!(effects.len(), all.len());
    for chain in chains.values() {
        assert_eq!(of(&effects, chain), ids(chain));
    }
    for consumer in consumers {
        consumer.stop().await;
    }
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

#[tokio::test]
async fn one_that_fails_and_its_followers_are_parked_and_take_effect_in_order() {
    let world = World::new().await;
    let consumer = start(&world).await;
    let chain = steps("a", &[Act::Fail(3), Act::Succeed, Act::Fail(1), Act::Succeed]);
    let other = steps("b", &[Act::Succeed; 2]);
    world.publish_steps(&[chain.clone(), other.clone()].concat()).await;
    world.took_effect(6).await;
    world.parked(0).await;
    let effects = world.effects_in_order().await;
    assert_eq!(of(&effects, &chain), ids(&chain));
    assert_eq!(of(&effects, &other), ids(&other));
    assert!(counters::parked(&world.name) >= 2, "{}", counters::parked(&world.name));
    assert_eq!(world.script.calls(chain[0].id), 4);
    assert_eq!(world.count("processed_events").await, 6);
    consumer.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

type Row = (Uuid, String, Option<String>, i32, String, String, String, Vec<u8>, bool);

#[tokio::test]
async fn a_parked_event_keeps_what_it_was_and_holds_up_no_other_aggregate() {
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    let chain = steps("a", &[Act::Fail(1), Act::Succeed]);
    let other = steps("b", &[Act::Succeed]);
    world.publish_steps(&[chain.clone(), other].concat()).await;
    world.parked(2).await;
    world.took_effect(1).await;
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT event_id, reason, error, attempts, exchange, routing_key, properties ->> 'type', payload,
                next_attempt_at BETWEEN now() + INTERVAL '59 min' AND now() + INTERVAL '61 min' IS TRUE
         FROM parked_events ORDER BY parked_id",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    let (exchange, key, kind) =
        (world.name.clone(), "order.OrderPlaced".to_owned(), "OrderPlaced".to_owned());
    let error = rows[0].2.clone().unwrap();
    assert!(error.contains("the bank is closed"), "{error}");
    let failed = (
        chain[0].id,
        "failed".to_owned(),
        Some(error),
        1,
        exchange,
        key,
        kind,
        br#"{"act":{"Fail":1}}"#.to_vec(),
        true,
    );
    assert_eq!(rows[0], failed);
    assert_eq!((rows[1].0, rows[1].1.as_str(), rows[1].3, rows[1].8), (chain[1].id, "behind", 0, false));
    // Acknowledged: it is in the database alone.
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    // Another process takes it on when it is due.
    sqlx::query("UPDATE parked_events SET next_attempt_at = now() WHERE next_attempt_at IS NOT NULL")
        .execute(&world.pool)
        .await
        .unwrap();
    let consumer = start_delayed(&world).await;
    world.took_effect(3).await;
    world.parked(0).await;
    assert_eq!(of(&world.effects_in_order().await, &chain), ids(&chain));
    consumer.stop().await;
    world.close().await;
}

async fn start_delayed(world: &World) -> Running {
    let consumer = world.start_with(in_order(world.builder().retry_delays([HOUR])));
    consumer.ready().await;
    consumer
}

#[tokio::test]
async fn what_never_succeeds_is_dead_after_its_attempts_and_its_followers_go_on_in_order() {
    let world = World::new().await;
    let builder = in_order(world.builder().attempts(3)).budget(Duration::from_secs(1));
    let consumer = world.start_with(builder);
    consumer.ready().await;
    let (mut all, mut poisons, mut innocent) = (Vec::new(), Vec::new(), Vec::new());
    for (name, poison) in [
        ("errs", Act::Fail(u32::MAX)),
        ("panics", Act::Panic(u32::MAX)),
        ("hangs", Act::Hang(u32::MAX)),
        ("hangs in the database", Act::HangInDatabase(u32::MAX)),
        ("refuses", Act::Refuse),
    ] {
        let chain = steps(name, &[Act::Succeed, poison, Act::Succeed, Act::Succeed]);
        poisons.push(chain[1].clone());
        innocent.push([&chain[..1], &chain[2..]].concat());
        all.extend(chain);
    }
    world.publish_steps(&all).await;
    let letters = world.dead_letters(5).await;
    world.took_effect(15).await;
    world.parked(0).await;
    let reasons: HashMap<_, _> = letters.iter().map(letter).collect();
    for poison in &poisons[..4] {
        assert_eq!(reasons[&poison.id], dead(poison.id, "exhausted").1);
        assert_eq!(world.script.calls(poison.id), 3);
    }
    assert_eq!(reasons[&poisons[4].id], dead(poisons[4].id, "permanent").1);
    let of_first =
        letters.iter().find(|letter| letter.envelope.as_ref().unwrap().event_id == poisons[0].id).unwrap();
    assert_eq!(of_first.header(headers::ATTEMPTS), Some(HeaderValue::Integer(3)));
    assert_eq!(of_first.header(headers::EXCHANGE), Some(HeaderValue::Text(world.name.clone())));
    assert!(of_first.envelope.as_ref().unwrap().headers.contains_key("traceparent"));
    let effects = world.effects_in_order().await;
    assert_eq!(effects.len(), 15);
    for chain in &innocent {
        assert_eq!(of(&effects, chain), ids(chain));
    }
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

async fn put_back(world: &World, letters: &[Delivery]) {
    let mut publisher = Publisher::open(&world.broker, "kit-test").await.unwrap();
    for letter in letters {
        let back = Outgoing::copy_to_queue(world.name.as_str(), letter.copy());
        assert_eq!(publisher.publish_wave(vec![back]).await.outcomes, [Outcome::Confirmed]);
    }
    publisher.close().await;
}

#[tokio::test]
async fn a_dead_letter_that_is_put_back_behind_a_later_version_is_stale_and_one_that_took_effect_a_duplicate()
{
    let world = World::new().await;
    let consumer = world.start_with(in_order(world.builder().attempts(1)));
    consumer.ready().await;
    let chain = steps("a", &[Act::Succeed, Act::Fail(1), Act::Succeed]);
    world.publish_steps(&chain).await;
    let letters = world.dead_letters(1).await;
    world.took_effect(2).await;
    put_back(&world, &letters).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(letter(&letters[0]), dead(chain[1].id, "stale"));
    // Its handler would have succeeded by now.
    assert_eq!((world.script.calls(chain[1].id), world.effects(chain[1].id).await), (1, 0));
    // An old one that took effect is acknowledged.
    world.publish_steps(&chain[..1]).await;
    world.counted([2, 1, 0, 2, 0]).await;
    consumer.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    // Without the guard it takes effect.
    let builder = in_order(world.builder()).version_guard(VersionGuard::Off);
    let consumer = world.start_with(builder);
    consumer.ready().await;
    put_back(&world, &letters).await;
    world.took_effect(3).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn events_of_one_version_and_events_without_one_are_not_stale() {
    let world = World::new().await;
    let consumer = start(&world).await;
    let mut chain = steps("a", &[Act::Succeed; 4]);
    for (step, version) in chain.iter_mut().zip([Some(2), Some(2), None, Some(3)]) {
        step.version = version;
    }
    world.publish_steps(&chain).await;
    world.counted([4, 0, 0, 0, 0]).await;
    assert_eq!(world.effects_in_order().await, ids(&chain));
    consumer.stop().await;
    world.close().await;
}

/// As after a lost connection, when the former owner of the queue does not know yet.
#[tokio::test]
async fn an_old_handler_that_still_runs_is_waited_for_at_a_takeover() {
    let world = World::new().await;
    let slow = Duration::from_secs(30);
    let line = Line::to_broker().await;
    let former = world.start_with(in_order(world.builder_by(&line).budget(slow)));
    former.ready().await;
    let chain = steps("a", &[Act::Linger, Act::WaitAtGate, Act::Succeed, Act::Succeed]);
    world.publish_steps(&chain).await;
    within("the handler at the gate", world.script.at_gate.acquire()).await.unwrap().forget();
    let heir = world.start_with(in_order(world.builder().budget(slow)));
    heir.ready().await;
    line.cut();
    // The heir has the event and waits for the lock: its handler is not called.
    world.waits_for_lock().await;
    assert_eq!(world.script.calls(chain[1].id), 1);
    world.script.gate.add_permits(1);
    world.took_effect(4).await;
    assert_eq!(world.effects_in_order().await, ids(&chain));
    assert_eq!(world.script.calls(chain[1].id), 1);
    heir.stop().await;
    former.stop().await;
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}

#[tokio::test]
async fn when_too_many_are_parked_the_next_one_waits_in_its_queue() {
    let world = World::new().await;
    let builder = || in_order(world.builder()).retry_delays([HOUR]).parked_limit(2);
    let consumer = world.start_with(builder());
    consumer.ready().await;
    let failing: Vec<_> = (0..3).flat_map(|number| steps(&number.to_string(), &[Act::Fail(1)])).collect();
    world.publish_steps(&failing[..2]).await;
    world.parked(2).await;
    world.publish_steps(&failing[2..]).await;
    consumer.not_ready().await;
    sqlx::query("UPDATE parked_events SET next_attempt_at = now()").execute(&world.pool).await.unwrap();
    world.took_effect(2).await;
    world.parked(1).await;
    consumer.ready().await;
    consumer.stop().await;
    assert_eq!(world.queued().await, 0);
    world.close().await;
}

#[tokio::test]
async fn an_event_without_an_aggregate_is_retried_as_ever() {
    let world = World::new().await;
    let consumer = start(&world).await;
    let body = serde_json::to_vec(&Order { act: Act::Fail(1) }).unwrap();
    let id = Uuid::new_v4();
    publish_bare(&world.name, id, &body).await;
    world.counted([1, 0, 1, 0, 0]).await;
    assert_eq!((world.effects(id).await, counters::parked(&world.name)), (1, 0));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn an_aggregate_that_no_row_can_hold_makes_a_message_invalid() {
    let world = World::new().await;
    let consumer = start(&world).await;
    world.publish_steps(&steps(&"x".repeat(256), &[Act::Succeed])).await;
    let letters = world.dead_letters(1).await;
    assert_eq!(letter(&letters[0]).1, Some(HeaderValue::Text("invalid".to_owned())));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_storm_of_redeliveries_changes_nothing() {
    let world = World::new().await;
    let consumers = [start(&world).await, start(&world).await];
    let mut all: Vec<_> = (0..30)
        .flat_map(|number| steps(&number.to_string(), &[Act::Succeed, Act::Fail(1), Act::Succeed]))
        .collect();
    all.sort_by_key(|step| step.version);
    let twice: Vec<_> = all.iter().flat_map(|step| [step.clone(), step.clone()]).collect();
    world.publish_steps(&twice).await;
    world.took_effect(all.len()).await;
    world.parked(0).await;
    world.drained().await;
    let effects = world.effects_in_order().await;
    assert_eq!(effects.len(), all.len());
    for number in 0..30 {
        let chain: Vec<_> = all.iter().filter(|step| step.aggregate == number.to_string()).cloned().collect();
        assert_eq!(of(&effects, &chain), ids(&chain));
    }
    for consumer in consumers {
        consumer.stop().await;
    }
    assert_eq!((world.queued().await, world.dead_letter_count().await), (0, 0));
    world.close().await;
}
