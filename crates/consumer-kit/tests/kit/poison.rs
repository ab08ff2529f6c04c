//! Messages that end the process of their consumer: each is dead after its bound, and its neighbours take effect once.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use semel_broker::HeaderValue;
use semel_consumer_kit::{Consumer, ConsumerBuilder, headers};
use semel_core::database;
use semel_core::lifecycle::Lifecycle;
use uuid::Uuid;

use crate::order::in_order;
use crate::script::{Act, Script};
use crate::support::{Step, World, eventually_within, ids, service, steps};

/// Which database and queue a process of its own consumes, and how.
const NAME: &str = "SEMEL_KIT_CHILD_NAME";
const MODE: &str = "SEMEL_KIT_CHILD_MODE";
const TEST: &str = "poison::consumes_in_a_process_of_its_own";

const DELIVERY_LIMIT: u32 = 3;
/// A process starts and dies once per delivery.
const DEADLINE: Duration = Duration::from_secs(90);

#[derive(Clone, Copy, Debug)]
enum Mode {
    Alone,
    Batch,
    Order,
}

impl Mode {
    fn of(name: &str) -> Self {
        [Self::Alone, Self::Batch, Self::Order].into_iter().find(|mode| format!("{mode:?}") == name).unwrap()
    }

    fn set(self, builder: ConsumerBuilder) -> ConsumerBuilder {
        let builder = builder
            .delivery_limit(DELIVERY_LIMIT)
            .attempts(3)
            .retry_delays([Duration::from_millis(10), Duration::from_millis(20)])
            .budget(Duration::from_millis(500))
            .answer_limit(Duration::from_millis(500));
        match self {
            Self::Alone => builder,
            Self::Batch => builder.batch(10),
            Self::Order => in_order(builder),
        }
    }
}

#[tokio::test]
#[ignore = "it is what the other tests here start"]
async fn consumes_in_a_process_of_its_own() {
    let (Ok(name), Ok(mode)) = (std::env::var(NAME), std::env::var(MODE)) else { return };
    let url = service("SEMEL_TEST_POSTGRES_URL");
    let (server, _) = url.rsplit_once('/').unwrap();
    let pool = database::pool(&format!("{server}/{name}").parse().unwrap(), "kit-test child", 13);
    let broker = service("AMQP_URL").parse().unwrap();
    let builder = Consumer::builder(name.as_str(), pool, broker, name.as_str());
    let builder = builder.exchange(name.as_str()).bind("order.OrderPlaced");
    Mode::of(&mode).set(builder).build(Script::default()).unwrap().run(&Lifecycle::new()).await.unwrap();
}

/// Consumers in processes of their own, one at a time, each started when the one before has died.
struct Children {
    name: String,
    mode: Mode,
    child: Child,
    deaths: u32,
}

impl Children {
    fn start(world: &World, mode: Mode) -> Self {
        Self { name: world.name.clone(), mode, child: child(&world.name, mode), deaths: 0 }
    }

    fn keep_running(&mut self) {
        if self.child.try_wait().unwrap().is_some() {
            self.deaths += 1;
            self.child = child(&self.name, self.mode);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn child(name: &str, mode: Mode) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([TEST, "--exact", "--ignored"])
        .env(NAME, name)
        .env(MODE, format!("{mode:?}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Publishes the steps and keeps consumers running until all but the poison took effect and that is dead. Returns how many of
/// them died.
async fn survive(world: &World, mode: Mode, all: &[Step], poison: Uuid) -> u32 {
    world.start_with(mode.set(world.builder())).stop_when_ready().await;
    world.publish_steps(all).await;
    let mut children = Children::start(world, mode);
    eventually_within(DEADLINE, "the poison's end", || {
        children.keep_running();
        async {
            let seen = (world.count("effects").await, world.dead_letter_count().await);
            assert!(seen.1 <= 1, "{:?}", told(world, all).await);
            if seen == (i64::try_from(all.len()).unwrap() - 1, 1) { Ok(()) } else { Err(seen) }
        }
    })
    .await;
    let deaths = children.deaths;
    drop(children);
    let letters = world.dead_letters(1).await;
    assert_eq!(letters[0].envelope.as_ref().unwrap().event_id, poison);
    assert_eq!(world.effects(poison).await, 0);
    let once = "(SELECT event_id FROM effects GROUP BY event_id HAVING count(*) > 1) AS twice";
    assert_eq!(world.count(once).await, 0);
    let counted_by_us = Some(HeaderValue::Text("exhausted".to_owned()));
    let counted_by_the_broker = None;
    let counted = if matches!(mode, Mode::Order) { counted_by_us } else { counted_by_the_broker };
    assert_eq!(letters[0].header(headers::REASON), counted);
    deaths
}

/// What the dead letters are, for a test that fails.
async fn told(world: &World, all: &[Step]) -> Vec<String> {
    let letters = world.dead_letters(2).await;
    let told = letters.iter().map(|letter| {
        let id = letter.envelope.as_ref().unwrap().event_id;
        let step = all.iter().find(|step| step.id == id);
        format!("{step:?}: {:?} {:?}", letter.header(headers::REASON), letter.header(headers::ERROR))
    });
    told.collect()
}

async fn poison_among_neighbours(mode: Mode) {
    let world = World::new().await;
    let mut all: Vec<Step> = (0..40).flat_map(|number| steps(&number.to_string(), &[Act::Succeed])).collect();
    all[20].act = Act::Abort;
    let poison = all[20].id;
    // The last death may not be noticed any more.
    let deaths = survive(&world, mode, &all, poison).await;
    assert!((DELIVERY_LIMIT..=DELIVERY_LIMIT + 1).contains(&deaths), "{deaths}");
    world.close().await;
}

#[tokio::test]
async fn a_message_that_ends_the_process_is_dead_after_the_delivery_limit_and_takes_no_neighbour_along() {
    poison_among_neighbours(Mode::Alone).await;
}

#[tokio::test]
async fn a_message_that_ends_the_process_in_a_batch_takes_no_neighbour_along() {
    poison_among_neighbours(Mode::Batch).await;
}

#[tokio::test]
async fn an_event_that_ends_the_process_lets_its_aggregate_go_on_in_order_when_it_is_dead() {
    let world = World::new().await;
    let chain = steps("a", &[Act::Succeed, Act::Abort, Act::Succeed, Act::Succeed]);
    let other = steps("b", &[Act::Succeed; 10]);
    survive(&world, Mode::Order, &[chain.clone(), other.clone()].concat(), chain[1].id).await;
    let effects = world.effects_in_order().await;
    let of_chain: Vec<_> = effects.iter().copied().filter(|id| ids(&chain).contains(id)).collect();
    assert_eq!(of_chain, [chain[0].id, chain[2].id, chain[3].id]);
    let of_other: Vec<_> = effects.iter().copied().filter(|id| ids(&other).contains(id)).collect();
    assert_eq!(of_other, ids(&other));
    world.close().await;
}

/// There no broker counts: the attempt is counted before the handler runs.
#[tokio::test]
async fn a_parked_event_that_ends_the_process_is_dead_after_its_attempts() {
    let world = World::new().await;
    let chain = steps("a", &[Act::Succeed, Act::FailThenAbort, Act::Succeed, Act::Succeed]);
    let deaths = survive(&world, Mode::Order, &chain, chain[1].id).await;
    assert_eq!(deaths, 2);
    assert_eq!(world.effects_in_order().await, [chain[0].id, chain[2].id, chain[3].id]);
    world.close().await;
}
