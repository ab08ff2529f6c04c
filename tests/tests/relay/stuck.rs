//! Relays that are killed, frozen or slowed down with lanes in their hands, and brokers that fall silent: the lanes move on.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use semel_tests::gate::Gate;
use semel_tests::process::Daemon;
use semel_tests::proxy::Fault;
use semel_tests::system::READY;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;
use sqlx::Executor as _;

use crate::processes::start;
use crate::yard::{Yard, arrived, first_deliveries};

/// Far longer than anything takes here, such as the 10 s after which the server gives up a client that reads nothing.
const LONG: Duration = Duration::from_mins(3);

async fn all_published(yard: &Yard, deadline: Duration) -> Result<()> {
    let look = || async {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?} unpublished")),
        }
    };
    eventually("everything to be published", deadline, look).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lanes_of_a_killed_relay_move_on_to_another_at_once() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let gate = Gate::at("relay.after_take");
    let (doomed, _) = start(&yard, "doomed", &gate.env()?).await?;
    yard.fill(64, 2).await?;
    gate.wait_for(1).await?;
    let (heir, admin) = start(&yard, "heir", &[]).await?;
    heir.wait_ready(admin, READY).await?;
    ensure!(yard.unpublished().await? > 0, "the doomed one holds nothing");
    doomed.kill().await?;
    all_published(&yard, READY).await?;
    arrived(&tap, 128).await
}

/// A relay that holds every lane which has work, and another that stands beside it with nothing to do.
struct Beside {
    yard: Yard,
    tap: Tap,
    doomed: Daemon,
    heir: Daemon,
    holders: BTreeSet<i32>,
    _gate: Gate,
}

impl Beside {
    async fn set_up(env: &[(&str, &str)]) -> Result<Self> {
        let yard = Yard::new().await?;
        let tap = yard.tap(&["thing.Happened"]).await?;
        let gate = Gate::at("relay.after_take");
        let [plan, log] = gate.env()?;
        // One worker, whose share is all lanes.
        let env: Vec<_> =
            [plan, log, ("SEMEL_RELAY_WORKERS", "1")].into_iter().chain(env.iter().copied()).collect();
        let (doomed, _) = start(&yard, "doomed", &env).await?;
        yard.fill(256, 2).await?;
        gate.wait_for(1).await?;
        let holders = yard.holders().await?;
        let (heir, admin) = start(&yard, "heir", &[]).await?;
        heir.wait_ready(admin, READY).await?;
        // What was committed before the doomed one's probe is held by it alone. Late lanes are the other's, and are done.
        let rest = || async {
            match (yard.holders().await, yard.count("published_at IS NOT NULL").await) {
                (Ok(now), Ok(published)) if now == holders && published < 512 => Ok(()),
                other => Err(format!("{other:?}")),
            }
        };
        eventually("the doomed one alone to hold lanes", READY, rest).await?;
        Ok(Self { yard, tap, doomed, heir, holders, _gate: gate })
    }

    /// Waits until the other has published what was held; returns how many seconds after that moment.
    async fn moved_on_after(&self, moment: f64) -> Result<f64> {
        all_published(&self.yard, LONG).await?;
        let holders = self.yard.holders().await?;
        ensure!(holders.is_disjoint(&self.holders), "{holders:?} hold lanes, {:?} still", self.holders);
        arrived(&self.tap, 512).await?;
        assert_eq!(self.tap.messages()?.len(), 512, "nothing was sent twice");
        self.heir.terminate()?;
        self.yard.last_mark_after(moment).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_second_relay_running_the_lanes_of_a_killed_one_move_on_without_any_timeout() -> Result<()> {
    let beside = Beside::set_up(&[]).await?;
    let killed = beside.yard.now().await?;
    beside.doomed.kill().await?;
    let took = beside.moved_on_after(killed).await?;
    // Each guard takes longer than that; `cargo xtask bench relay` says how long it is when the machine has time.
    ensure!(took < 8.0, "its lanes moved on after {took:.1} s");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_second_relay_running_the_lanes_of_a_frozen_one_move_on_by_the_servers_guard() -> Result<()> {
    let beside =
        Beside::set_up(&[("SEMEL_RELAY_BATCH_SECONDS", "1"), ("SEMEL_RELAY_CONFIRM_SECONDS", "1")]).await?;
    let frozen = beside.yard.now().await?;
    beside.doomed.freeze().await?;
    let took = beside.moved_on_after(frozen).await?;
    ensure!(took < 45.0, "its lanes moved on after {took:.1} s, and the guard is 30 s");
    beside.doomed.kill().await?;
    Ok(())
}

/// Freezes a relay at a moment when the server is sending it a batch and cannot go on.
async fn freeze_while_it_is_sent_a_batch(yard: &Yard, relay: &Daemon) -> Result<()> {
    let stuck = "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = 'semel-relay worker'
                   AND state = 'active' AND wait_event = 'ClientWrite'";
    let mut watch = yard.connect().await?;
    for _ in 0..400 {
        relay.freeze().await?;
        // Whatever was to be read without it is read by then; a server that still writes is stuck.
        for _ in 0..2 {
            watch.execute("SELECT pg_sleep(0.02)").await?;
        }
        let stuck: i64 = sqlx::query_scalar(stuck).fetch_one(&mut watch).await?;
        if stuck > 0 {
            return Ok(());
        }
        relay.cont()?;
        watch.execute("SELECT pg_sleep(random() / 20)").await?;
    }
    anyhow::bail!("the server was never caught sending a batch");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lanes_of_a_relay_that_freezes_while_the_server_sends_it_a_batch_move_on() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    // So much that no socket's buffers hold a batch of it.
    let mut connection = yard.connect().await?;
    connection
        .execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
             SELECT 'thing', 'a' || n % 8, 1 + n / 8, 'Happened', jsonb_build_object('x', repeat('x', 900000))
             FROM generate_series(0, 159) AS n",
        )
        .await?;
    let one = [("SEMEL_RELAY_WORKERS", "1")];
    let (frozen, _) = start(&yard, "frozen", &one).await?;
    freeze_while_it_is_sent_a_batch(&yard, &frozen).await?;
    ensure!(yard.lanes_held().await? > 0 && yard.unpublished().await? > 0, "it holds nothing");
    let (heir, admin) = start(&yard, "heir", &one).await?;
    heir.wait_ready(admin, READY).await?;
    all_published(&yard, LONG).await?;
    // It finds its batch gone, and goes on with others: what it read comes twice at most, and nothing out of order.
    frozen.cont()?;
    let given_up = |line: &str| line.contains("relay worker");
    frozen.wait_for_line("it to notice", LONG, given_up).await?;
    yard.fill(8, 1).await?;
    all_published(&yard, LONG).await?;
    arrived(&tap, 168).await?;
    for aggregate in 1..8 {
        let versions = first_deliveries(&tap, &format!("a{aggregate}"))?;
        assert_eq!(versions[..20], (1..=20).collect::<Vec<_>>(), "a{aggregate}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_aggregate_at_a_slow_broker_advances_batch_by_batch_and_nothing_is_rolled_back() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let (proxy, url) = yard.broker_behind_proxy().await?;
    // An event takes over 12 ms and 2,000 longer than the server waits for a batch, which would take all of them.
    proxy.set_both(Fault::Delay(Duration::from_millis(6)));
    let impatient = format!("{}?options=-c%20idle_in_transaction_session_timeout%3D20s", yard.database.url());
    let env = [
        ("DATABASE_URL", impatient.as_str()),
        ("AMQP_URL", url.as_str()),
        ("SEMEL_RELAY_BATCH", "5000"),
        ("SEMEL_RELAY_BATCH_SECONDS", "2"),
        ("SEMEL_RELAY_CONFIRM_SECONDS", "8"),
    ];
    yard.fill(1, 2000).await?;
    let (relay, _) = start(&yard, "slow", &env).await?;
    all_published(&yard, LONG).await?;
    arrived(&tap, 2000).await?;
    assert_eq!(first_deliveries(&tap, "a1")?, (1..=2000).collect::<Vec<_>>());
    assert_eq!(tap.messages()?.len(), 2000, "something was rolled back and repeated");
    relay.terminate()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_lane_starves_while_all_of_them_are_busy_and_workers_are_few() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(256, 40).await?;
    let (_relay, _) =
        start(&yard, "few", &[("SEMEL_RELAY_WORKERS", "2"), ("SEMEL_RELAY_BATCH", "64")]).await?;
    arrived(&tap, 256 * 40).await?;
    // The oldest heads go first, so no aggregate is far behind another one.
    let messages = tap.messages()?;
    let half = &messages[..messages.len() / 2];
    for aggregate in 1..=256 {
        let name = format!("a{aggregate}");
        let early = half.iter().filter(|message| message.aggregate_id == name).count();
        ensure!(early >= 1, "{name} had none of its 40 events in the first half");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_falls_silent_blames_no_event_and_is_used_again_once_it_speaks() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let (proxy, url) = yard.broker_behind_proxy().await?;
    let env = [("AMQP_URL", url.as_str()), ("SEMEL_RELAY_CONFIRM_SECONDS", "5")];
    let (relay, admin) = start(&yard, "cut-off", &env).await?;
    yard.fill(64, 1).await?;
    arrived(&tap, 64).await?;
    all_published(&yard, READY).await?;

    proxy.set_both(Fault::BlackHole);
    yard.fill(64, 2).await?;
    relay.wait_for_line("the silence", READY, |line| line.contains("the broker is away")).await?;
    let readiness = || async move {
        let answer = reqwest::get(format!("http://127.0.0.1:{admin}/readyz")).await.ok()?;
        (answer.status() == 503).then_some(())
    };
    eventually("the relay not to be ready", READY, readiness).await?;
    let free = || async {
        match yard.lanes_held().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?} lanes held")),
        }
    };
    eventually("no lane to be held", READY, free).await?;
    let blamed = "SELECT count(*) FROM outbox WHERE attempts > 0 OR held_at IS NOT NULL";
    let blamed: i64 = sqlx::query_scalar(blamed).fetch_one(&mut yard.connect().await?).await?;
    assert_eq!(blamed, 0, "an event was blamed for a silent broker");

    proxy.heal().await?;
    all_published(&yard, READY * 2).await?;
    arrived(&tap, 64 * 3).await
}
