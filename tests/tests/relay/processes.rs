//! The relay as a process that dies, stops and starts.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::net::free_port;
use semel_tests::process::{Daemon, binary};
use semel_tests::proxy::Fault;
use semel_tests::services::{ROLE, Services};
use semel_tests::skip::skip;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;

use crate::yard::{Yard, arrived, first_deliveries};

const READY: Duration = Duration::from_secs(30);

/// Starts a relay on the yard's database and broker.
pub(crate) async fn start(yard: &Yard, name: &str, env: &[(&str, &str)]) -> Result<(Daemon, u16)> {
    let admin = free_port()?;
    let daemon = Daemon::command(name, binary("semel-relay")?)
        .env("DATABASE_URL", yard.database.url())
        .env("AMQP_URL", yard.vhost.url())
        .env("SEMEL_EXCHANGE", &yard.exchange)
        .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
        .envs(env.iter().copied())
        .start()
        .await?;
    Ok((daemon, admin))
}

/// Reads one of a relay's metrics that has no labels.
pub(crate) async fn metric(admin: u16, name: &str) -> Result<f64> {
    let text = reqwest::get(format!("http://127.0.0.1:{admin}/metrics")).await?.text().await?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).with_context(|| format!("no {name} in {text}"))
}

/// A relay that dies at a failpoint, and another that goes on: nothing lost, order kept.
async fn dies_at(failpoint: &str, repeats: bool) -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(20, 10).await?;
    let log = tempfile(failpoint);
    let plan = format!("{failpoint}=abort");
    let env = [("SEMEL_FAILPOINTS", plan.as_str()), ("SEMEL_FAILPOINT_LOG", log.as_str())];
    let (doomed, _) = start(&yard, "doomed", &env).await?;
    let status = doomed.wait_exit(READY).await?;
    ensure!(!status.success(), "the failpoint did not kill it");
    let hits = std::fs::read_to_string(&log)?;
    ensure!(hits.contains(failpoint), "the failpoint was not hit: {hits}");
    std::fs::remove_file(&log)?;

    let (heir, admin) = start(&yard, "heir", &[]).await?;
    heir.wait_ready(admin, READY).await?;
    arrived(&tap, 200).await?;
    for aggregate in 1..=20 {
        let versions = first_deliveries(&tap, &format!("a{aggregate}"))?;
        assert_eq!(versions, (1..=10).collect::<Vec<_>>(), "a{aggregate}");
    }
    let yard = &yard;
    let none = || async move {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("every event to be marked", READY, none).await?;
    if repeats {
        ensure!(tap.messages()?.len() > 200, "what was confirmed and not marked must come again");
    } else {
        assert_eq!(tap.messages()?.len(), 200, "nothing had been sent, so nothing comes twice");
    }
    Ok(())
}

fn tempfile(name: &str) -> String {
    let file = format!("semel-{name}-{}-{}.log", std::process::id(), uuid::Uuid::new_v4());
    std::env::temp_dir().join(file).display().to_string()
}

#[tokio::test]
async fn killed_after_taking_lanes_it_loses_and_repeats_nothing() -> Result<()> {
    dies_at("relay.after_take", false).await
}

#[tokio::test]
async fn killed_between_confirm_and_mark_it_repeats_and_loses_nothing() -> Result<()> {
    dies_at("relay.after_confirm", true).await
}

#[tokio::test]
async fn killed_before_its_commit_it_repeats_and_loses_nothing() -> Result<()> {
    dies_at("relay.before_commit", true).await
}

/// A relay that dies around setting events aside, and another that goes on.
async fn dies_setting_aside_at(failpoint: &str) -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut connection = yard.connect().await?;
    for aggregate in 1..=20 {
        let name = format!("s{aggregate}");
        yard.insert(&mut connection, &name, 1, "Unheard").await?;
        for version in 2..=10 {
            yard.insert(&mut connection, &name, version, "Happened").await?;
        }
    }
    yard.fill(20, 10).await?;
    let log = tempfile(failpoint);
    let plan = format!("{failpoint}=abort");
    let env = [("SEMEL_FAILPOINTS", plan.as_str()), ("SEMEL_FAILPOINT_LOG", log.as_str())];
    let (doomed, _) = start(&yard, "doomed", &env).await?;
    let status = doomed.wait_exit(READY).await?;
    ensure!(!status.success(), "the failpoint did not kill it");
    ensure!(std::fs::read_to_string(&log)?.contains(failpoint), "the failpoint was not hit");
    std::fs::remove_file(&log)?;

    let (_heir, _) = start(&yard, "heir", &[]).await?;
    let yard = &yard;
    let aside = || async move {
        let held = yard.count("held_at IS NOT NULL AND published_at IS NULL").await;
        let waiting = yard.count("published_at IS NULL AND held_at IS NULL").await;
        match (held, waiting) {
            (Ok(200), Ok(0)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("each event to be published or set aside", READY, aside).await?;
    arrived(&tap, 200).await?;
    ensure!(first_deliveries(&tap, "s1")?.is_empty(), "a later event overtook its predecessor");
    let heard = yard.vhost.scoped("heard");
    let heard =
        Tap::open(&yard.vhost.url(), &yard.exchange, &heard, &["thing.Unheard", "thing.Happened"]).await?;
    let none = || async move {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("every event to be published after the repair", READY, none).await?;
    arrived(&heard, 200).await?;
    for aggregate in 1..=20 {
        let name = format!("s{aggregate}");
        assert_eq!(first_deliveries(&heard, &name)?, (1..=10).collect::<Vec<_>>(), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn what_fails_is_told_in_a_line_a_second_and_not_in_one_per_event() -> Result<()> {
    let yard = Yard::new().await?;
    let _tap = yard.tap(&["thing.Happened"]).await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
         SELECT 'thing', 'bad' || n, 'Unheard', '{}' FROM generate_series(1, 5000) AS n",
    )
    .await?;
    let began = std::time::Instant::now();
    let (relay, _) = start(&yard, "terse", &[("SEMEL_RELAY_MAX_ATTEMPTS", "2")]).await?;
    let yard = &yard;
    let dead = || async move {
        match yard.count("dead_at IS NOT NULL AND attempts = 2").await {
            Ok(5000) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("each event to be dead", READY, dead).await?;
    // A second may pass in which nothing is told.
    relay.wait_for_line("who was given up on", READY, |line| line.contains("were given up on")).await?;
    let lines = relay.lines();
    let of = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
    let (failed, given_up) = (of("could not be published"), of("were given up on"));
    ensure!(failed > 0 && given_up > 0, "nothing was said: {lines:?}");
    // Four workers, and a line of each kind a second.
    let most = usize::try_from(4 * (began.elapsed().as_secs() + 1))?;
    ensure!(failed <= most && given_up <= most, "{failed} and {given_up} lines, {most} at most");
    Ok(())
}

#[tokio::test]
async fn killed_when_failed_events_are_set_aside_it_loses_and_reorders_nothing() -> Result<()> {
    dies_setting_aside_at("relay.after_hold").await
}

#[tokio::test]
async fn killed_when_events_are_set_aside_behind_others_it_loses_and_reorders_nothing() -> Result<()> {
    dies_setting_aside_at("relay.after_divert").await
}

/// For how long a worker that failed says that it waits.
fn pause_of(line: &str) -> Option<Duration> {
    let (_, said) = line.split_once("retry_in_ms")?;
    let digits = said.trim_start_matches(|sign: char| !sign.is_ascii_digit());
    let digits = digits.split(|sign: char| !sign.is_ascii_digit()).next()?;
    digits.parse().ok().map(Duration::from_millis)
}

/// After how many seconds a relay is at work again once its broker is back.
const BACK_AT_WORK: f64 = 15.0;

#[tokio::test]
async fn waits_for_a_broker_that_is_away_and_is_at_work_again_soon_after_it_is_back() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(3, 3).await?;
    let (proxy, url) = yard.broker_behind_proxy().await?;
    proxy.refuse().await?;
    let (relay, admin) = start(&yard, "patient", &[("AMQP_URL", url.as_str())]).await?;
    relay.wait_for_line("the broker's absence", READY, |line| line.contains("the broker is away")).await?;
    let ready = reqwest::get(format!("http://127.0.0.1:{admin}/readyz")).await?;
    assert_eq!(ready.status(), 503);
    ensure!(
        reqwest::get(format!("http://127.0.0.1:{admin}/livez")).await?.status() == 200,
        "alive all the same"
    );
    // Pauses double up to 5 s, less up to a half of it: one of more than 4 s is of the longest kind.
    let is_longest = |line: &str| pause_of(line).is_some_and(|pause| pause > Duration::from_secs(4));
    relay.wait_for_line("a pause that has grown to the longest", 4 * READY, is_longest).await?;
    proxy.heal().await?;
    let back = yard.now().await?;
    relay.wait_ready(admin, READY).await?;
    arrived(&tap, 9).await?;
    let none = || async {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("every event to be marked", READY, none).await?;
    let took = yard.last_mark_after(back).await?;
    ensure!(took <= BACK_AT_WORK, "it was back at work {took:.1} s after its broker");

    // And again, with connections that are cut while it works.
    proxy.sever().await;
    yard.fill(3, 3).await?;
    arrived(&tap, 18).await?;
    Ok(())
}

#[tokio::test]
async fn stops_with_exit_code_0_in_the_middle_of_a_backlog() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(100, 200).await?;
    let (proxy, url) = yard.broker_behind_proxy().await?;
    // The 200 events of an aggregate go one by one, so they take 8 s at least.
    proxy.set_both(Fault::Delay(Duration::from_millis(20)));
    let (relay, _) = start(&yard, "stopped", &[("AMQP_URL", url.as_str())]).await?;
    arrived(&tap, 500).await?;
    relay.terminate()?;
    let status = relay.wait_exit(Duration::from_secs(25)).await?;
    ensure!(status.success(), "left with {status}");
    ensure!(yard.unpublished().await? > 0, "the backlog was gone before it stopped");
    let (heir, _) = start(&yard, "heir", &[]).await?;
    arrived(&tap, 20_000).await?;
    for aggregate in [1, 50, 100] {
        assert_eq!(first_deliveries(&tap, &format!("a{aggregate}"))?, (1..=200).collect::<Vec<_>>());
    }
    assert_eq!(tap.messages()?.len(), 20_000, "a clean stop repeats nothing");
    heir.terminate()?;
    ensure!(heir.wait_exit(Duration::from_secs(25)).await?.success(), "the heir stops cleanly too");
    Ok(())
}

#[tokio::test]
async fn a_relay_that_may_not_mark_sends_nothing_and_ends_with_an_error() -> Result<()> {
    let services = Services::from_env()?;
    if services.postgres.private().is_none() {
        let name = "a_relay_that_may_not_mark_sends_nothing_and_ends_with_an_error";
        return Ok(skip(name, "a given role may be a superuser")?);
    }
    let yard = Yard::on(&services).await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(20, 2).await?;
    yard.execute(&format!("REVOKE UPDATE ON outbox FROM {ROLE}")).await?;
    let (relay, _) = start(&yard, "powerless", &[]).await?;
    let status = relay.wait_exit(READY).await?;
    ensure!(!status.success(), "left with {status}");
    let told = |line: &String| line.contains("takes a relay's writes") && line.contains("permission denied");
    ensure!(relay.lines().iter().any(told), "{:?}", relay.lines());
    ensure!(tap.messages()?.is_empty(), "it sent what it cannot mark");
    yard.execute(&format!("GRANT UPDATE ON outbox TO {ROLE}")).await?;
    let (_heir, _) = start(&yard, "heir", &[]).await?;
    arrived(&tap, 40).await
}

#[tokio::test]
async fn a_link_for_hints_that_dies_silently_costs_latency_alone() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let (proxy, url) = yard.database_behind_proxy().await?;
    let (relay, admin) = start(&yard, "deaf", &[("SEMEL_RELAY_LISTEN_URL", url.as_str())]).await?;
    relay.wait_ready(admin, READY).await?;
    let listens = || async {
        let listeners = "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name = 'semel-relay listener' AND query LIKE 'LISTEN%'";
        let mut connection = yard.connect().await.map_err(|error| error.to_string())?;
        match sqlx::query_scalar::<_, i64>(listeners).fetch_one(&mut connection).await {
            Ok(1) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("it to listen", READY, listens).await?;
    proxy.set_both(Fault::BlackHole);
    for round in 1..=5 {
        let began = std::time::Instant::now();
        yard.fill(10, 1).await?;
        yard.execute("NOTIFY semel_outbox").await?;
        arrived(&tap, round * 10).await?;
        ensure!(began.elapsed() < Duration::from_secs(5), "round {round} took {:?}", began.elapsed());
    }
    ensure!(relay.is_running(), "it ended");
    Ok(())
}
