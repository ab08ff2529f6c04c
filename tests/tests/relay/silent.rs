//! Queues that do not confirm, and brokers that are slow to: the others go on, and nobody is blamed for slowness.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use semel_core::lifecycle::Work as _;
use semel_tests::proxy::{Direction, Fault};
use semel_tests::services::{PrivateRabbitMq, Services};
use semel_tests::skip::skip;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;
use tokio::sync::Mutex;

use crate::yard::{Relay, Yard, arrived, first_deliveries};

const SOON: Duration = Duration::from_mins(1);

/// How long a wave may take where it is told; longer than the 3 s of chains that were just set aside.
const ANY_WAVE: Duration = Duration::from_secs(7);

/// Why a test is skipped.
const OWN: &str = "only a server of our own can be told to be silent";

/// A queue that takes messages and, while it is suspended, does not confirm them.
struct Silence<'a> {
    server: &'a PrivateRabbitMq,
    vhost: &'a str,
    queue: String,
    tap: Tap,
}

impl<'a> Silence<'a> {
    async fn begin(server: &'a PrivateRabbitMq, yard: &'a Yard) -> Result<Self> {
        let silence = Self::of(server, yard, "thing.Silent").await?;
        silence.tell("suspend").await?;
        Ok(silence)
    }

    /// A queue for this key that is not suspended yet.
    async fn of(server: &'a PrivateRabbitMq, yard: &'a Yard, key: &str) -> Result<Self> {
        let queue = yard.vhost.scoped("silent");
        let tap = Tap::open(&yard.vhost.url(), &yard.exchange, &queue, &[key]).await?;
        Ok(Self { server, vhost: yard.vhost.name(), queue, tap })
    }

    async fn end(&self) -> Result<()> {
        self.tell("resume").await
    }

    /// Suspends or resumes the queue's process.
    async fn tell(&self, how: &str) -> Result<()> {
        let (vhost, queue) = (self.vhost, &self.queue);
        let code = format!(
            "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>, queue, <<\"{queue}\">>)), ok = sys:{how}(amqqueue:get_pid(Q))."
        );
        self.server.control(&["eval", &code]).await?;
        Ok(())
    }
}

#[tokio::test]
async fn a_queue_that_never_confirms_holds_its_own_events_alone() -> Result<()> {
    let services = Services::from_env()?;
    let Some(server) = services.rabbitmq.private() else {
        return Ok(skip("a_queue_that_never_confirms_holds_its_own_events_alone", OWN)?);
    };
    let yard = Yard::on(&services).await?;
    let silence = Silence::begin(server, &yard).await?;
    let outcome = holds_its_own_events_alone(&yard, &silence).await;
    // Whatever became of the test: a queue that hangs cannot be deleted.
    silence.end().await?;
    outcome
}

async fn holds_its_own_events_alone(yard: &Yard, silence: &Silence<'_>) -> Result<()> {
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut connection = yard.connect().await?;
    for aggregate in 0..20 {
        let name = format!("s{aggregate}");
        yard.insert(&mut connection, &name, 1, "Silent").await?;
        yard.insert(&mut connection, &name, 2, "Happened").await?;
    }
    yard.fill(100, 2).await?;
    let mut config = yard.config(1)?;
    config.confirm_limit = Duration::from_secs(2);
    let relay = Mutex::new(Relay::new(&config));
    let healthy = "published_at IS NULL AND aggregate_id LIKE 'a%'";
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match (yard.count(healthy).await, yard.count("last_error LIKE 'unknown%'").await) {
            (Ok(0), Ok(20)) => Ok(()),
            other => Err(format!("{passed:?}, {other:?}")),
        }
    };
    eventually("healthy events to go on, and silent ones to be set aside", SOON, none).await?;
    arrived(&tap, 200).await?;
    assert_eq!(
        yard.count("event_type = 'Happened' AND aggregate_id LIKE 's%' AND published_at IS NOT NULL").await?,
        0
    );

    silence.end().await?;
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{passed:?}, {other:?}")),
        }
    };
    eventually("all to be published", SOON, none).await?;
    arrived(&silence.tap, 20).await?;
    arrived(&tap, 220).await
}

#[tokio::test]
async fn chains_that_lead_to_a_silent_queue_hold_no_lane_for_long() -> Result<()> {
    let services = Services::from_env()?;
    let Some(server) = services.rabbitmq.private() else {
        return Ok(skip("chains_that_lead_to_a_silent_queue_hold_no_lane_for_long", OWN)?);
    };
    let yard = Yard::on(&services).await?;
    let silence = Silence::begin(server, &yard).await?;
    let outcome = hold_no_lane_for_long(&yard).await;
    silence.end().await?;
    outcome
}

/// How long a short wave of chains may hold its lanes, with what a loaded machine adds to 3 s.
const SHORT_WAVE: Duration = Duration::from_secs(5);

async fn hold_no_lane_for_long(yard: &Yard) -> Result<()> {
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut config = yard.config(1)?;
    config.batch = 64 * 100;
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    set_aside_long_ago(yard, &mut relay, 20).await?;

    // Alone, none of them can be told from the victim of a slow broker: it is put off, and blamed for nothing.
    let (mut short, mut long) = (0, 0);
    for round in 1..=6 {
        yard.fill(100, 1).await?;
        yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
        let began = Instant::now();
        let healthy = || async {
            match yard.count("aggregate_id LIKE 'a%' AND published_at IS NULL").await {
                Ok(0) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        };
        let marked = async {
            eventually("healthy events to be marked", SOON, healthy).await?;
            anyhow::Ok(began.elapsed())
        };
        let (passed, marked) = tokio::join!(relay.pass(), marked);
        passed?;
        let (took, marked) = (began.elapsed(), marked?);
        ensure!(took >= Duration::from_secs(2), "none was tried in round {round}: {took:?}");
        ensure!(took >= marked + Duration::from_secs(1), "healthy events waited: {marked:?} of {took:?}");
        if took < SHORT_WAVE {
            short += 1;
        } else {
            long += 1;
        }
        ensure!(relay.workers[0].run_once().await.is_ok(), "the connection is good");
    }
    assert_eq!((long, short), (1, 5), "waves that were long, and short");
    assert_eq!(
        yard.count("aggregate_id LIKE 's%' AND attempts > 1").await?,
        0,
        "an event was blamed without proof"
    );
    arrived(&tap, 6 * 100).await
}

/// Has events of so many aggregates set aside at the silent queue, as if an hour ago.
async fn set_aside_long_ago(yard: &Yard, relay: &mut Relay, aggregates: i64) -> Result<()> {
    yard.execute(&format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
         SELECT 'thing', 's' || n, 1, 'Silent', '{{}}' FROM generate_series(1, {aggregates}) AS n"
    ))
    .await?;
    // What goes to other queues is confirmed: the proof that it is this one that is silent.
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
         SELECT 'thing', 'proof' || n, 'Happened', '{}' FROM generate_series(1, 500) AS n",
    )
    .await?;
    while yard.count("held_at IS NULL AND published_at IS NULL").await? > 0 {
        relay.pass().await?;
    }
    assert_eq!(yard.count("attempts = 1 AND last_error LIKE 'unknown%'").await?, aggregates);
    yard.execute("UPDATE outbox SET held_at = held_at - INTERVAL '1 hour' WHERE held_at IS NOT NULL").await
}

#[tokio::test]
async fn a_chain_that_was_not_heard_of_for_long_is_waited_for_as_long_as_any_wave() -> Result<()> {
    let services = Services::from_env()?;
    let Some(server) = services.rabbitmq.private() else {
        return Ok(skip("a_chain_that_was_not_heard_of_for_long_is_waited_for_as_long_as_any_wave", OWN)?);
    };
    let yard = Yard::on(&services).await?;
    let mut config = yard.config(1)?;
    config.confirm_limit = ANY_WAVE;
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    yard.insert(&mut yard.connect().await?, "late", 1, "Silent").await?;
    relay.pass().await?;
    assert_eq!(yard.count("attempts = 1 AND held_at IS NOT NULL").await?, 1, "nobody wanted it");
    let silence = Silence::begin(server, &yard).await?;
    let outcome = slow_and_published(&yard, &mut relay, &silence).await;
    silence.end().await?;
    outcome
}

async fn slow_and_published(yard: &Yard, relay: &mut Relay, silence: &Silence<'_>) -> Result<()> {
    // Set aside for so long that it may take what any wave may.
    yard.execute("UPDATE outbox SET held_at = now() - INTERVAL '1 hour'").await?;
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    let began = Instant::now();
    relay.pass().await?;
    ensure!(began.elapsed() >= ANY_WAVE, "it was given up on after {:?}", began.elapsed());
    assert_eq!(yard.count("published_at IS NULL AND attempts = 1").await?, 1, "and nobody blames it");

    silence.end().await?;
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    relay.pass().await?;
    assert_eq!(yard.count("published_at IS NOT NULL AND attempts = 1").await?, 1);
    Ok(())
}

#[tokio::test]
async fn the_only_queue_that_falls_silent_amid_a_wave_blames_no_event() -> Result<()> {
    let services = Services::from_env()?;
    let Some(server) = services.rabbitmq.private() else {
        return Ok(skip("the_only_queue_that_falls_silent_amid_a_wave_blames_no_event", OWN)?);
    };
    let yard = Yard::on(&services).await?;
    let silence = Silence::of(server, &yard, "thing.Happened").await?;
    let outcome = silent_amid_a_wave(&yard, &silence).await;
    silence.end().await?;
    outcome
}

async fn silent_amid_a_wave(yard: &Yard, silence: &Silence<'_>) -> Result<()> {
    let (proxy, url) = yard.broker_behind_proxy().await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
         SELECT 'thing', 'a' || n % 500, 1 + n / 500, 'Happened', jsonb_build_object('x', repeat('x', 1000))
         FROM generate_series(0, 999) AS n",
    )
    .await?;
    let mut config = yard.config(1)?;
    (config.broker, config.batch, config.batch_bytes) = (url.parse()?, 64 * 100, 64 * 1024 * 1024);
    (config.batch_time, config.confirm_limit) = (Duration::from_secs(2), Duration::from_secs(22));
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    // Slow enough for the queue to be suspended in the middle of the first wave.
    proxy.set(Direction::ToServer, Fault::Throttle(50_000));
    let falls_silent = async {
        let some =
            || async { silence.tap.messages().is_ok_and(|messages| messages.len() >= 50).then_some(()) };
        eventually("some of the wave", SOON, some).await?;
        silence.tell("suspend").await?;
        proxy.heal().await
    };
    let (passed, fell_silent) = tokio::join!(relay.pass(), falls_silent);
    fell_silent?;
    let published = yard.count("published_at IS NOT NULL").await?;
    ensure!((1..500).contains(&published), "{published} published: it was not amid a wave ({passed:?})");
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL").await?, 0, "an event was blamed");
    assert_eq!(yard.lanes_held().await?, 0);

    silence.end().await?;
    let relay = Mutex::new(relay);
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{passed:?}, {other:?}")),
        }
    };
    eventually("all to be published", SOON, none).await?;
    arrived(&silence.tap, 1000).await?;
    for aggregate in 0..500 {
        assert_eq!(first_deliveries(&silence.tap, &format!("a{aggregate}"))?, [1, 2], "a{aggregate}");
    }
    Ok(())
}

#[tokio::test]
async fn a_slow_broker_blames_no_event_that_it_has_not_confirmed_yet() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let (proxy, url) = yard.broker_behind_proxy().await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
         SELECT 'thing', 'a' || n, 'Happened', jsonb_build_object('x', repeat('x', 1000)) FROM generate_series(1, 500) AS n",
    )
    .await?;
    let mut config = yard.config(1)?;
    (config.broker, config.confirm_limit, config.batch) = (url.parse()?, Duration::from_secs(2), 64 * 100);
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    // The wave takes over three seconds, and confirms come all the time.
    proxy.set(Direction::ToServer, Fault::Throttle(250_000));
    let _ = relay.pass().await;
    let published = yard.count("published_at IS NOT NULL").await?;
    ensure!((1..500).contains(&published), "{published} published: it was not amid a wave");
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL").await?, 0, "slowness is nobody's fault");

    proxy.heal().await?;
    let relay = Mutex::new(relay);
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{passed:?}, {other:?}")),
        }
    };
    eventually("all to be published", SOON, none).await?;
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL").await?, 0);
    arrived(&tap, 500).await
}
