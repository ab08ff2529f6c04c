//! Dead letters, and what people do about them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use semel_broker::{Envelope, Outcome, Outgoing, Publisher, Subscription, inspect};
use semel_consumer_kit::dead::{
    Bound, DeadError, DeadLetters, Decided, Decision, Fate, Filter, Letter, Verdict, Which,
};
use semel_consumer_kit::headers;
use uuid::Uuid;

use crate::failures::publish_as_it_is;
use crate::script::{Act, Order};
use crate::support::{World, eventually, within};

/// Longer than the age of what tests publish.
const EVER: Duration = Duration::from_hours(24 * 365 * 50);

impl World {
    fn letters(&self) -> DeadLetters {
        let (name, pool) = (self.name.as_str(), self.pool.clone());
        DeadLetters::new(name, pool, self.broker.clone(), name).retention(EVER)
    }

    /// Makes the queues, and leaves.
    async fn lay(&self) {
        self.start().await.stop().await;
    }

    /// Puts letters of these types among the dead ones, in this order, as a consumer would not.
    async fn bury(&self, letters: &[(Uuid, &str, Act)]) {
        let mut publisher = Publisher::open(&self.broker, "kit-test").await.unwrap();
        let dead = format!("{}.dead", self.name);
        let wave = letters.iter().map(|(event_id, event_type, act)| {
            let envelope = Envelope {
                event_id: *event_id,
                event_type: (*event_type).to_owned(),
                aggregate_type: "order".to_owned(),
                aggregate_id: event_id.to_string(),
                aggregate_version: None,
                outbox_id: 1,
                created_at_unix_micros: 1_700_000_000_000_000,
                source: "kit-test".to_owned(),
                headers: BTreeMap::new(),
            };
            Outgoing::event("", dead.as_str(), envelope, serde_json::to_vec(&Order { act: *act }).unwrap())
        });
        let outcomes = publisher.publish_wave(wave.collect()).await.outcomes;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
        publisher.close().await;
        let there = letters.len();
        eventually("the letters", || async {
            let count = self.dead_letter_count().await;
            if count as usize >= there { Ok(()) } else { Err(count) }
        })
        .await;
    }

    async fn bury_all(&self, count: usize, act: Act) -> Vec<Uuid> {
        let ids: Vec<_> = (0..count).map(|_| Uuid::new_v4()).collect();
        let letters: Vec<_> = ids.iter().map(|id| (*id, "OrderPlaced", act)).collect();
        self.bury(&letters).await;
        ids
    }

    async fn audit(&self) -> Vec<(String, String, String, String)> {
        sqlx::query_as("SELECT actor, action, subject, reason FROM operator_actions ORDER BY acted_at")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Waits until each of these took effect, once.
    async fn each_took_effect(&self, events: &[Uuid]) {
        let count = i64::try_from(events.len()).unwrap();
        eventually("the effects", || async {
            let done = self.count("(SELECT DISTINCT event_id FROM effects) AS once").await;
            let left = self.queued().await;
            if done == count && left == 0 { Ok(()) } else { Err((done, left)) }
        })
        .await;
        assert_eq!(self.count("effects").await, count);
    }
}

fn replay<'a>() -> Decision<'a> {
    Decision {
        verdict: Verdict::Replay,
        message_id: None,
        filter: Filter::default(),
        limit: usize::MAX,
        is_forced: false,
        is_dry_run: false,
        actor: "ada",
        reason: "the bank is open again",
    }
}

fn discard<'a>() -> Decision<'a> {
    Decision { verdict: Verdict::Discard, ..replay() }
}

async fn decide(letters: &DeadLetters, decision: &Decision<'_>) -> Result<Decided, DeadError> {
    within("a decision", letters.decide(decision, &mut |_, _| {})).await
}

async fn listed(letters: &DeadLetters, filter: &Filter) -> Vec<Uuid> {
    let seen = letters.list(filter, 1000).await.unwrap();
    assert_eq!(seen.bound, None);
    seen.letters.iter().filter_map(|letter| letter.event_id).collect()
}

#[tokio::test]
async fn looking_changes_nothing_and_keeps_the_order() {
    let world = World::new().await;
    world.lay().await;
    // More than the broker's own maps keep sorted.
    let ids = world.bury_all(70, Act::Succeed).await;
    let letters = world.letters();
    for _ in 0..3 {
        assert!(listed(&letters, &Filter::default()).await == ids, "the order has changed");
    }
    let first = letters.list(&Filter::default(), 5).await.unwrap();
    let seen: Vec<_> = first.letters.iter().filter_map(|letter| letter.event_id).collect();
    assert_eq!((seen.as_slice(), first.bound), (&ids[..5], Some(Bound::Limit)));
    let (shown, payload) = letters.show(&Which::Id(ids[69].to_string())).await.unwrap().unwrap();
    assert_eq!((shown.position, payload.as_slice()), (70, &br#"{"act":"Succeed"}"#[..]));
    assert!(letters.show(&Which::Position(71)).await.unwrap().is_none());
    let dry = decide(&letters, &Decision { is_dry_run: true, ..replay() }).await.unwrap();
    assert_eq!((dry.done, dry.bound), (70, None));
    assert!(world.audit().await.is_empty());
    assert!(listed(&letters, &Filter::default()).await == ids, "the order has changed");
    assert_eq!((world.dead_letter_count().await, world.queued().await), (70, 0));
    world.close().await;
}

#[tokio::test]
async fn what_a_look_holds_is_back_in_its_order_when_the_look_is_broken_off() {
    let world = World::new().await;
    world.lay().await;
    let ids = world.bury_all(70, Act::Succeed).await;
    let dead = format!("{}.dead", world.name);
    let mut held = Subscription::open(&world.broker, "kit-test", &dead, 100).await.unwrap();
    for _ in 0..50 {
        drop(within("a letter", held.next()).await.unwrap());
    }
    let meanwhile = world.letters().list(&Filter::default(), 1000).await.unwrap();
    assert_eq!((meanwhile.letters.len(), meanwhile.bound), (0, Some(Bound::Others)));
    // Cuts the socket, as the end of a process does.
    drop(held);
    eventually("the letters to be back", || async {
        let count = world.dead_letter_count().await;
        if count == 70 { Ok(()) } else { Err(count) }
    })
    .await;
    assert!(listed(&world.letters(), &Filter::default()).await == ids, "the order has changed");
    world.close().await;
}

#[tokio::test]
async fn a_replayed_letter_begins_anew_and_takes_effect() {
    let world = World::new().await;
    let consumer = world.start_with(world.builder().attempts(1));
    consumer.ready().await;
    let events = world.publish_all(&[Act::Fail(1), Act::Refuse]).await;
    world.counted([0, 0, 0, 2, 0]).await;
    let letters = world.letters();
    let id = events[1].to_string();
    let (before, _) = letters.show(&Which::Id(id.clone())).await.unwrap().unwrap();
    assert_eq!((before.reason.as_str(), before.attempts), ("permanent", Some(1)));
    assert_eq!(before.exchange.as_deref(), Some(world.name.as_str()));

    let mut told = Vec::new();
    let mut tell = |letter: &Letter, fate| told.push((letter.event_id, fate));
    letters.decide(&replay(), &mut tell).await.unwrap();
    told.sort_by_key(|(event, _)| *event != Some(events[0]));
    assert_eq!(told, [(Some(events[0]), Fate::Done), (Some(events[1]), Fate::Done)]);
    world.counted([1, 0, 0, 3, 0]).await;
    assert_eq!((world.effects(events[0]).await, world.effects(events[1]).await), (1, 0));
    assert_eq!(letters.took_effect_at(&before).await.unwrap(), None);
    // It failed again, for the first time.
    let (again, _) = letters.show(&Which::Id(id.clone())).await.unwrap().unwrap();
    assert_eq!((again.reason.as_str(), again.attempts), ("permanent", Some(1)));
    assert!(again.first_failed_at > before.failed_at, "{again:?}");
    assert_eq!((&again.exchange, &again.routing_key), (&before.exchange, &before.routing_key));
    let audit = world.audit().await;
    assert_eq!(audit.len(), 2);
    let subject = format!("{}: {id} OrderPlaced", world.name);
    let deed = ["ada", "dead replay", subject.as_str(), "the bank is open again"].map(str::to_owned);
    assert!(audit.contains(&deed.into()), "{audit:?}");
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_replay_of_what_had_taken_effect_is_a_duplicate() {
    let world = World::new().await;
    let consumer = world.start().await;
    let event = world.publish(Act::Succeed).await;
    world.counted([1, 0, 0, 0, 0]).await;
    world.bury(&[(event, "OrderPlaced", Act::Succeed)]).await;
    let letters = world.letters();
    let (letter, _) = letters.show(&Which::Position(1)).await.unwrap().unwrap();
    assert!(letters.took_effect_at(&letter).await.unwrap().is_some());
    assert_eq!(decide(&letters, &replay()).await.unwrap().done, 1);
    world.counted([1, 1, 0, 0, 0]).await;
    assert_eq!((world.effects(event).await, world.dead_letter_count().await), (1, 0));
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn two_replays_at_once_are_exact() {
    let world = World::new().await;
    let consumer = world.start().await;
    for _ in 0..4 {
        sqlx::query("DELETE FROM effects").execute(&world.pool).await.unwrap();
        let events = world.bury_all(120, Act::Succeed).await;
        let (one, other) = (world.letters(), world.letters());
        let all = replay();
        let (one, other) = tokio::join!(decide(&one, &all), decide(&other, &all));
        let rest = decide(&world.letters(), &replay()).await.unwrap();
        assert!(one.unwrap().done + other.unwrap().done + rest.done >= 120);
        world.each_took_effect(&events).await;
        assert_eq!(world.dead_letter_count().await, 0);
    }
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_replay_that_is_broken_off_loses_nothing() {
    let world = World::new().await;
    let consumer = world.start().await;
    let events = world.bury_all(900, Act::Succeed).await;
    let mut broken_off = 0;
    for millis in (20..).step_by(15) {
        let letters = world.letters();
        let (all, mut unheard) = (replay(), |_: &Letter, _| {});
        let replaying = letters.decide(&all, &mut unheard);
        match tokio::time::timeout(Duration::from_millis(millis), replaying).await {
            Ok(done) if done.as_ref().unwrap().bound.is_none() => break,
            // Another one's letters are not back yet.
            Ok(_) => {}
            Err(_) => broken_off += 1,
        }
    }
    assert!(broken_off > 1, "the replay was faster than this test");
    eventually("all letters to be back and put back", || async {
        decide(&world.letters(), &replay()).await.unwrap();
        let left = world.dead_letter_count().await;
        if left == 0 { Ok(()) } else { Err(left) }
    })
    .await;
    world.each_took_effect(&events).await;
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn what_is_older_than_the_consumer_remembers_is_put_back_by_force_alone() {
    let world = World::new().await;
    world.lay().await;
    let ids = world.bury_all(2, Act::Succeed).await;
    let forgetful = world.letters().retention(Duration::from_hours(720));
    // Nor is what would be forgotten before its last delivery is over.
    let age = (SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).elapsed().unwrap();
    let soon = world.letters().retention(age + Duration::from_hours(100));
    let refused = decide(&soon, &replay()).await.unwrap();
    assert_eq!((refused.done, refused.too_old), (0, 2));
    let mut told = Vec::new();
    let mut tell = |letter: &Letter, fate| told.push((letter.event_id, fate));
    let refused = forgetful.decide(&replay(), &mut tell).await.unwrap();
    assert_eq!((refused.done, refused.too_old), (0, 2));
    assert_eq!(told, [(Some(ids[0]), Fate::TooOld), (Some(ids[1]), Fate::TooOld)]);
    assert_eq!((world.dead_letter_count().await, world.queued().await), (2, 0));
    assert!(world.audit().await.is_empty());
    let one = ids[0].to_string();
    let forced = Decision { message_id: Some(&one), is_forced: true, ..replay() };
    assert_eq!(decide(&forgetful, &forced).await.unwrap().done, 1);
    assert_eq!(world.queued().await, 1);
    // To drop it needs no force: it takes no effect.
    assert_eq!(decide(&forgetful, &discard()).await.unwrap().done, 1);
    world.close().await;
}

#[tokio::test]
async fn only_what_is_meant_is_decided_about_and_the_rest_keeps_its_order() {
    let world = World::new().await;
    world.lay().await;
    // More in front than a wave holds.
    let letters: Vec<_> = (0..700)
        .map(|n| (Uuid::new_v4(), if n % 600 < 590 { "OrderPlaced" } else { "OrderMoved" }, Act::Succeed))
        .collect();
    world.bury(&letters).await;
    let moved = Filter { event_type: Some("OrderMoved".to_owned()), ..Filter::default() };
    let limited = Decision { filter: moved.clone(), limit: 4, ..discard() };
    let decided = decide(&world.letters(), &limited).await.unwrap();
    assert_eq!((decided.done, decided.bound), (4, Some(Bound::Limit)));
    let mut told = Vec::new();
    let mut tell = |letter: &Letter, _| told.extend(letter.event_id);
    let decision = Decision { filter: moved.clone(), ..discard() };
    let decided = world.letters().decide(&decision, &mut tell).await.unwrap();
    assert_eq!((decided.done, decided.bound), (6, None));
    let meant: Vec<_> =
        letters.iter().filter(|letter| letter.1 == "OrderMoved").map(|letter| letter.0).collect();
    assert_eq!(told, meant[4..]);
    let rest: Vec<_> =
        letters.iter().filter(|letter| letter.1 == "OrderPlaced").map(|letter| letter.0).collect();
    assert!(listed(&world.letters(), &Filter::default()).await == rest, "the order has changed");
    assert!(listed(&world.letters(), &moved).await.is_empty());
    assert_eq!(world.audit().await.len(), 10);
    let nobody = Decision { message_id: Some("nobody"), ..discard() };
    assert!(matches!(decide(&world.letters(), &nobody).await, Err(DeadError::NoLetter { .. })));
    world.close().await;
}

#[tokio::test]
async fn a_letter_whose_queue_is_gone_stays() {
    let world = World::new().await;
    world.lay().await;
    let ids = world.bury_all(3, Act::Succeed).await;
    inspect::delete_queue(&world.connection, &world.name).await.unwrap();
    let error = decide(&world.letters(), &replay()).await.unwrap_err();
    assert!(
        matches!(&error, DeadError::NotPutBack { outcome, .. } if outcome.contains("no such queue")),
        "{error}"
    );
    assert_eq!(listed(&world.letters(), &Filter::default()).await, ids);
    // With the queue, the letters would be gone, too, if their broker had to move them.
    world.lay().await;
    assert_eq!(decide(&world.letters(), &replay()).await.unwrap().done, 3);
    assert_eq!(world.queued().await, 3);
    world.close().await;
}

#[tokio::test]
async fn a_message_without_id_is_shown_by_its_place_and_discarded_by_its_reason() {
    let world = World::new().await;
    let consumer = world.start().await;
    publish_as_it_is(&world.name, BasicProperties::default(), b"card 4242").await;
    world.publish(Act::Refuse).await;
    world.counted([0, 0, 0, 1, 1]).await;
    let letters = world.letters();
    let invalid = Filter { reasons: vec!["invalid".to_owned()], ..Filter::default() };
    let seen = letters.list(&invalid, 10).await.unwrap().letters;
    let [letter] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((&letter.message_id, letter.event_id), (&None, None));
    let (shown, payload) = letters.show(&Which::Position(letter.position)).await.unwrap().unwrap();
    assert_eq!((shown, payload.as_slice()), (letter.clone(), &b"card 4242"[..]));
    let decided = decide(&letters, &Decision { filter: invalid, ..discard() }).await.unwrap();
    assert_eq!((decided.done, world.dead_letter_count().await), (1, 1));
    let subject = format!("{}: without id of no type", world.name);
    assert_eq!(world.audit().await[0].2, subject);
    consumer.stop().await;
    world.close().await;
}

#[tokio::test]
async fn a_letter_that_the_broker_moved_tells_its_reason_and_forgets_it() {
    let world = World::new().await;
    world.lay().await;
    world.publish(Act::Succeed).await;
    let mut queue = Subscription::open(&world.broker, "kit-test", &world.name, 1).await.unwrap();
    let _ = within("the message", queue.next()).await.unwrap().reject(false).await;
    queue.close().await;
    let letters = world.letters();
    let letter = eventually("the letter", || async {
        letters.list(&Filter::default(), 1).await.unwrap().letters.pop().ok_or(())
    })
    .await;
    assert_eq!((letter.reason.as_str(), letter.attempts), ("rejected", None));
    assert!(letter.failed_at.is_some());
    let by_age = Filter { newer_than: Some(Duration::from_hours(1)), ..Filter::default() };
    assert_eq!(decide(&letters, &Decision { filter: by_age, ..replay() }).await.unwrap().done, 1);
    let back = inspect::take(&world.connection, &world.name, 1).await.unwrap();
    assert!(back[0].death().is_none() && back[0].header("x-first-death-reason").is_none());
    assert!(back[0].header(headers::ATTEMPTS).is_none());
    world.close().await;
}
