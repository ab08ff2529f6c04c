//! A handler under test, without a broker.

use semel_consumer_kit::Event;
use semel_consumer_kit::testing::{Delivered, Rehearsal};
use uuid::Uuid;

use crate::script::{Act, Order, Script};
use crate::support::World;

fn rehearsal(world: &World) -> Rehearsal<Script> {
    world.builder().rehearse(world.script.clone()).unwrap()
}

fn event(act: Act) -> Event<Order> {
    Event::new(Uuid::new_v4(), Order { act })
}

#[tokio::test]
async fn a_crash_leaves_nothing_and_the_redelivery_takes_effect_once() {
    let world = World::new().await;
    let rehearsal = rehearsal(&world);
    let event = event(Act::Append);
    rehearsal.deliver_and_crash(event.clone()).await.unwrap();
    assert_eq!((world.effects(event.id).await, world.script.calls(event.id)), (0, 1));
    assert_eq!((world.count("processed_events").await, world.count("outbox").await), (0, 0));
    assert_eq!(rehearsal.deliver(event.clone()).await.unwrap(), Delivered::Effect);
    assert_eq!(rehearsal.deliver(event.clone()).await.unwrap(), Delivered::Duplicate);
    assert_eq!((world.effects(event.id).await, world.script.calls(event.id)), (1, 2));
    assert_eq!(world.count("outbox").await, 1);
    world.close().await;
}

#[tokio::test]
async fn what_a_consumer_would_do_is_told() {
    let world = World::new().await;
    let rehearsal = rehearsal(&world);
    for (act, reason) in [(Act::Fail(1), "the bank is closed"), (Act::Panic(1), "panicked")] {
        let event = event(act);
        let delivered = rehearsal.deliver(event.clone()).await.unwrap();
        assert!(
            matches!(&delivered, Delivered::Retried { error } if error.contains(reason)),
            "{delivered:?}"
        );
        assert_eq!(rehearsal.deliver(event).await.unwrap(), Delivered::Effect);
    }
    let delivered = rehearsal.deliver(event(Act::Refuse)).await.unwrap();
    assert!(
        matches!(&delivered, Delivered::Dead { error } if error.contains("no such account")),
        "{delivered:?}"
    );
    assert!(rehearsal.deliver(event(Act::NeedTable)).await.is_err());
    world.close().await;
}

#[tokio::test]
async fn of_concurrent_deliveries_one_takes_effect() {
    let world = World::new().await;
    let rehearsal = rehearsal(&world);
    let event = event(Act::Linger);
    let deliver = || rehearsal.deliver(event.clone());
    let (one, two, three) = tokio::join!(deliver(), deliver(), deliver());
    let effects = [one, two, three].into_iter().filter(|told| *told.as_ref().unwrap() == Delivered::Effect);
    assert_eq!((effects.count(), world.effects(event.id).await), (1, 1));
    world.close().await;
}
