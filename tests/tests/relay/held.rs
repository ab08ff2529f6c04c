//! Events that cannot be published, driven pass by pass: each gets its own true outcome, and nobody else pays for it.

use std::time::Duration;

use anyhow::{Result, ensure};
use semel_core::lifecycle::Pass;
use semel_relay::{Config, RelayError, TopologyMode};
use semel_tests::proxy::Fault;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;
use tokio::sync::Mutex;

use crate::yard::{Relay, Yard, arrived, first_deliveries};

const SOON: Duration = Duration::from_mins(1);

/// Passes until a condition on the outbox is met by no event.
async fn passes_until_none(yard: &Yard, relay: &Mutex<Relay>, condition: &str) -> Result<()> {
    let none = || async {
        relay.lock().await.pass().await.map_err(|error| error.to_string())?;
        match yard.count(condition).await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually(&format!("no event to be {condition}"), SOON, none).await
}

async fn connected(config: &Config) -> Result<Mutex<Relay>> {
    let mut relay = Relay::new(config);
    relay.connect().await?;
    Ok(Mutex::new(relay))
}

/// Tries what failed not again in this test.
fn without_retries(mut config: Config) -> Config {
    config.held.shortest = Duration::from_hours(1);
    config.held.longest = Duration::from_hours(1);
    config
}

#[tokio::test]
async fn in_a_mixed_window_each_event_has_its_own_true_outcome() -> Result<()> {
    // `cargo xtask test --full` sets it.
    let rounds = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 50 } else { 4 };
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.full_queue(&yard.vhost.scoped("full"), "thing.Nacked").await?;
    let mut config = without_retries(yard.config(1)?);
    // All in one window: a lane's share of the batch is more than any lane has.
    config.batch = 500 * 64;
    let relay = connected(&config).await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('thing', 'fills', 'Nacked', '{}')",
    )
    .await?;
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    for round in 1..=rounds {
        yard.execute(&format!(
            "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload, created_at)
             SELECT 'thing', 'r{round}-' || n, 1,
                    CASE n % 5 WHEN 1 THEN 'Unheard' WHEN 2 THEN 'Nacked' ELSE 'Happened' END, '{{}}',
                    CASE n % 5 WHEN 3 THEN '1969-07-20' ELSE clock_timestamp() END
             FROM generate_series(1, 500) AS n ORDER BY random()"
        ))
        .await?;
        passes_until_none(&yard, &relay, "published_at IS NULL AND held_at IS NULL").await?;
    }
    for (outcome, event) in [
        ("returned: %NO_ROUTE%", "event_type = 'Unheard'"),
        ("nacked%", "event_type = 'Nacked' AND aggregate_id <> 'fills'"),
        ("refused:%1970%", "created_at < '1970-01-01'"),
    ] {
        let failed =
            format!("{event} AND last_error LIKE '{outcome}' AND attempts = 1 AND published_at IS NULL");
        assert_eq!(yard.count(&failed).await?, rounds * 100, "{event}");
    }
    let published =
        "event_type = 'Happened' AND created_at > '1970-01-01' AND published_at IS NOT NULL AND attempts = 0";
    assert_eq!(yard.count(published).await?, rounds * 200);
    let routed = usize::try_from(rounds * 200)?;
    arrived(&tap, routed).await?;
    assert_eq!(tap.messages()?.len(), routed, "nothing was sent twice");
    Ok(())
}

#[tokio::test]
async fn a_failing_aggregate_holds_up_none_of_a_thousand_and_is_in_order_after_the_repair() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut connection = yard.connect().await?;
    yard.insert(&mut connection, "stuck", 1, "Unheard").await?;
    for version in 2..=40 {
        yard.insert(&mut connection, "stuck", version, "Happened").await?;
    }
    yard.fill(1000, 3).await?;
    let relay = connected(&yard.config(1)?).await?;
    passes_until_none(&yard, &relay, "published_at IS NULL AND aggregate_id <> 'stuck'").await?;
    arrived(&tap, 3000).await?;
    ensure!(first_deliveries(&tap, "stuck")?.is_empty(), "a later event overtook an unroutable one");
    // Some of its events come when the others are set aside already.
    for version in 41..=45 {
        yard.insert(&mut connection, "stuck", version, "Happened").await?;
    }
    passes_until_none(&yard, &relay, "published_at IS NULL AND held_at IS NULL").await?;

    let heard = yard.vhost.scoped("heard");
    let heard =
        Tap::open(&yard.vhost.url(), &yard.exchange, &heard, &["thing.Unheard", "thing.Happened"]).await?;
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    arrived(&heard, 45).await?;
    assert_eq!(first_deliveries(&heard, "stuck")?, (1..=45).collect::<Vec<_>>());
    assert_eq!(yard.count("EXISTS (SELECT FROM outbox_held)").await?, 0, "the chain is gone");
    yard.insert(&mut connection, "stuck", 46, "Happened").await?;
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    assert_eq!(yard.count("aggregate_version = 46 AND held_at IS NULL").await?, 1, "hot again");
    Ok(())
}

#[tokio::test]
async fn twenty_thousand_failing_aggregates_starve_no_other() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
         SELECT 'thing', 'bad' || n, 'Unheard', '{}' FROM generate_series(1, 20000) AS n",
    )
    .await?;
    yard.fill(100, 2).await?;
    let mut config = without_retries(yard.config(1)?);
    config.batch = 5000;
    let relay = connected(&config).await?;
    passes_until_none(&yard, &relay, "published_at IS NULL AND event_type = 'Happened'").await?;
    arrived(&tap, 200).await?;

    // And when all of the others are due at once, again and again.
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    yard.fill(100, 2).await?;
    let mut passes = 0;
    while yard.count("published_at IS NULL AND event_type = 'Happened'").await? > 0 {
        relay.lock().await.pass().await?;
        passes += 1;
        ensure!(passes <= 10, "hot events wait behind those that are tried again");
    }
    ensure!(yard.count("attempts = 2").await? > 0, "and those do not wait for ever either");
    Ok(())
}

#[tokio::test]
async fn a_lane_that_holds_only_failed_events_is_tried_again_by_itself() -> Result<()> {
    let yard = Yard::new().await?;
    let _tap = yard.tap(&["thing.Happened"]).await?;
    yard.insert(&mut yard.connect().await?, "alone", 1, "Unheard").await?;
    let relay = connected(&yard.config(1)?).await?;
    passes_until_none(&yard, &relay, "attempts < 3").await?;
    let heard = yard.vhost.scoped("heard");
    let heard = Tap::open(&yard.vhost.url(), &yard.exchange, &heard, &["thing.Unheard"]).await?;
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    arrived(&heard, 1).await
}

#[tokio::test]
async fn a_dead_event_blocks_its_aggregate_and_one_that_is_skipped_does_not() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut connection = yard.connect().await?;
    for (aggregate, event_type) in [("blocked", "Unheard"), ("skipped", "Noted")] {
        yard.insert(&mut connection, aggregate, 1, event_type).await?;
        for version in 2..=4 {
            yard.insert(&mut connection, aggregate, version, "Happened").await?;
        }
    }
    let mut config = yard.config(1)?;
    config.held.max_attempts = 2;
    config.held.skip_dead = vec!["Noted".to_owned()];
    let relay = connected(&config).await?;
    passes_until_none(&yard, &relay, "aggregate_id = 'skipped' AND published_at IS NULL AND dead_at IS NULL")
        .await?;
    passes_until_none(&yard, &relay, "event_type = 'Unheard' AND dead_at IS NULL").await?;
    arrived(&tap, 3).await?;
    assert_eq!(first_deliveries(&tap, "skipped")?, [2, 3, 4]);
    assert_eq!(yard.count("aggregate_id = 'blocked' AND published_at IS NULL").await?, 4);
    assert_eq!(yard.count("dead_at IS NOT NULL AND attempts = 2 AND last_error LIKE 'returned%'").await?, 2);
    assert_eq!(relay.lock().await.pass().await?, Pass::Idle);
    Ok(())
}

/// One aggregate, so that a wave is one event, and what is sent twice is known.
#[tokio::test]
async fn an_exchange_that_is_deleted_amid_a_batch_and_put_back_loses_nothing_and_blames_nobody() -> Result<()>
{
    const EVENTS: i64 = 1000;
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(1, EVENTS).await?;
    let mut config = yard.config(1)?;
    // One by one at 40 ms each, so that the batch is not over before the exchange is deleted.
    let (proxy, through) = yard.broker_behind_proxy().await?;
    proxy.set_both(Fault::Delay(Duration::from_millis(20)));
    (config.broker, config.batch, config.topology) = (through.parse()?, 64 * 1000, TopologyMode::Verify);
    (config.batch_time, config.confirm_limit) = (Duration::from_secs(15), Duration::from_secs(5));
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    let (url, exchange) = (yard.vhost.url(), yard.exchange.clone());
    let deleting = async {
        arrived(&tap, 50).await?;
        let broker = semel_broker::Connection::open(&url.parse()?, "test").await?;
        semel_broker::inspect::delete_exchange(&broker, &exchange).await?;
        anyhow::Ok(())
    };
    let working = async { anyhow::Ok(relay.pass().await) };
    let (passed, ()) = tokio::try_join!(working, deleting)?;
    ensure!(matches!(passed, Err(RelayError::Broker(_))), "{passed:?}");
    let marked = yard.count("published_at IS NOT NULL").await?;
    ensure!((50..EVENTS).contains(&marked), "it was not amid a batch: {marked}");
    ensure!(matches!(relay.pass().await, Err(RelayError::NoExchange(_))), "it is gone");

    // No event was marked that does not arrive.
    arrived(&tap, usize::try_from(marked)?).await?;
    drop(tap);
    proxy.heal().await?;
    let again = yard.vhost.scoped("again");
    let tap = Tap::open(&yard.vhost.url(), &yard.exchange, &again, &["thing.Happened"]).await?;
    let relay = Mutex::new(relay);
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    let left = usize::try_from(EVENTS - marked)?;
    arrived(&tap, left).await?;
    assert_eq!(tap.messages()?.len(), left, "only what was not confirmed is sent again");
    assert_eq!(first_deliveries(&tap, "a1")?, (marked + 1..=EVENTS).collect::<Vec<_>>());
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL").await?, 0);
    Ok(())
}
