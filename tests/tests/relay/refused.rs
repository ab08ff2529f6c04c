//! What the broker refuses by closing the channel: an event, and then it alone pays; or the exchange, and then none does.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use reqwest::Method;
use semel_core::lifecycle::{Pass, Work as _};
use semel_relay::{Config, RelayError, TopologyMode};
use semel_tests::progress::Progress;
use semel_tests::services::{Management, Permissions, Services};
use semel_tests::skip::skip;
use semel_tests::wait::eventually;
use serde_json::json;
use tokio::sync::Mutex;

use crate::yard::{Relay, Yard, arrived, first_deliveries};

const SOON: Duration = Duration::from_mins(1);

/// Why a test is skipped.
const ADMINISTRATOR: &str = "users are made over the management API";

/// A user who may write to the yard's exchange and nothing else.
struct User<'a> {
    yard: &'a Yard,
    management: &'a Management,
    name: String,
}

impl<'a> User<'a> {
    /// Makes one; none where the management API is not at hand.
    async fn make(yard: &'a Yard) -> Result<Option<Self>> {
        let Some(management) = yard.vhost.management() else { return Ok(None) };
        let name = semel_tests::net::unique_name("relay");
        management.create_user(&name, "relay").await?;
        let user = Self { yard, management, name };
        user.may_write(true).await?;
        Ok(Some(user))
    }

    async fn may_write(&self, may: bool) -> Result<()> {
        let none = || "^$".to_owned();
        let write = if may { format!("^{}$", self.yard.exchange) } else { none() };
        let permissions = Permissions { configure: none(), write, read: none() };
        self.management.set_permissions(self.yard.vhost.name(), &self.name, &permissions).await
    }

    /// Limits the routing keys that it may use.
    async fn may_use_keys(&self, keys: &str) -> Result<()> {
        let path = ["topic-permissions", self.yard.vhost.name(), &self.name];
        let body = json!({ "exchange": self.yard.exchange, "write": keys, "read": "" });
        self.management.call(Method::PUT, &path, Some(body)).await
    }

    /// A relay's configuration as this user.
    fn config(&self) -> Result<Config> {
        let mut config = self.yard.config(1)?;
        config.broker = self.yard.vhost.url_as(&self.name, "relay").parse()?;
        config.topology = TopologyMode::Verify;
        Ok(config)
    }

    async fn delete(self) -> Result<()> {
        self.management.delete_user(&self.name).await
    }
}

/// Passes until a condition on the outbox is met by no event.
async fn passes_until_none(yard: &Yard, relay: &Mutex<Relay>, condition: &str) -> Result<()> {
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match (passed, yard.count(condition).await) {
            (Ok(_), Ok(0)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually(&format!("no event to be {condition}"), SOON, none).await
}

#[tokio::test]
async fn an_event_whose_routing_key_is_refused_is_held_alone_and_the_others_go_on_in_order() -> Result<()> {
    let yard = Yard::new().await?;
    let Some(user) = User::make(&yard).await? else {
        return Ok(skip("an_event_whose_routing_key_is_refused_is_held_alone", ADMINISTRATOR)?);
    };
    let tap = yard.tap(&["thing.Happened", "thing.Forbidden"]).await?;
    user.may_use_keys("^thing[.]Happened$").await?;
    let mut connection = yard.connect().await?;
    for version in 1..=3 {
        // In each wave some are refused: the first events of these, and the second ones of those.
        for aggregate in 1..=5 {
            let kind = |refused| if version == refused { "Forbidden" } else { "Happened" };
            yard.insert(&mut connection, &format!("first{aggregate}"), version, kind(1)).await?;
            yard.insert(&mut connection, &format!("second{aggregate}"), version, kind(2)).await?;
        }
        for aggregate in 1..=100 {
            yard.insert(&mut connection, &format!("a{aggregate}"), version, "Happened").await?;
        }
    }
    let mut config = user.config()?;
    (config.batch, config.held.shortest, config.held.longest) = (64 * 100, SOON, SOON);
    // Each that is refused costs a few channels, and all of them are to be found in one batch.
    (config.batch_time, config.confirm_limit) = (Duration::from_secs(12), Duration::from_secs(12));
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    relay.pass().await?;
    assert_eq!(yard.count("aggregate_id LIKE 'a%' AND published_at IS NOT NULL").await?, 300);
    let held = "event_type = 'Forbidden' AND attempts = 1 AND last_error LIKE 'refused: %topic%'";
    assert_eq!(yard.count(held).await?, 10, "each has its own outcome, in the broker's words");
    assert_eq!(yard.count("attempts > 0").await?, 10, "nobody else pays");
    arrived(&tap, 305).await?;
    assert_eq!(first_deliveries(&tap, "second1")?, [1]);
    ensure!(first_deliveries(&tap, "first1")?.is_empty(), "a later event overtook one that was refused");

    // A chain of which every event is refused, alone in its wave.
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    relay.pass().await?;
    assert_eq!(yard.count("event_type = 'Forbidden' AND attempts = 2").await?, 10);

    user.may_use_keys(".*").await?;
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    // What was asked on an open channel is remembered there.
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    passes_until_none(&yard, &Mutex::new(relay), "published_at IS NULL").await?;
    arrived(&tap, 330).await?;
    for aggregate in ["first1", "second5", "a7"] {
        assert_eq!(first_deliveries(&tap, aggregate)?, [1, 2, 3], "{aggregate}");
    }
    user.delete().await
}

#[tokio::test]
async fn while_the_exchange_is_refused_no_lane_is_held_and_no_event_is_blamed() -> Result<()> {
    let yard = Yard::new().await?;
    let Some(user) = User::make(&yard).await? else {
        return Ok(skip("while_the_exchange_is_refused_no_lane_is_held", ADMINISTRATOR)?);
    };
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut relay = Relay::new(&user.config()?);
    relay.connect().await?;
    yard.fill(100, 2).await?;
    // Amid its work, so that a wave finds out.
    user.may_write(false).await?;
    let refused = relay.pass().await;
    let told = matches!(&refused, Err(RelayError::Broker(error)) if error.reply_code() == Some(403));
    ensure!(told, "{refused:?}");
    for _ in 0..3 {
        let refused = relay.workers[0].run_once().await;
        ensure!(matches!(refused, Err(RelayError::NotAllowed { .. })), "{refused:?}");
        assert_eq!(relay.prober.run_once().await?, Pass::Idle);
    }
    // And from the start on.
    let mut late = Relay::new(&user.config()?);
    late.shared.broker(0, semel_relay::Broker::Up);
    late.prober.run_once().await?;
    let refused = late.workers[0].run_once().await;
    ensure!(matches!(refused, Err(RelayError::NotAllowed { .. })), "{refused:?}");
    assert_eq!(yard.lanes_held().await?, 0);
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL OR published_at IS NOT NULL").await?, 0);

    user.may_write(true).await?;
    let relay = Mutex::new(relay);
    let connected = || async {
        match relay.lock().await.workers[0].run_once().await {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    };
    eventually("the broker to be used again", SOON, connected).await?;
    passes_until_none(&yard, &relay, "published_at IS NULL").await?;
    arrived(&tap, 200).await?;
    assert_eq!(tap.messages()?.len(), 200, "asking whether the exchange takes messages sends none");
    user.delete().await
}

#[tokio::test]
async fn an_event_that_is_too_large_for_the_broker_is_held_alone() -> Result<()> {
    // A server of this test's own, since its limit is everybody's.
    let place = Services::from_env()?.place().own("small");
    let services = Services::start_private(place, Progress::Silent).await?;
    let outcome = with_a_small_limit(&services).await;
    services.remove(Progress::Silent).await?;
    outcome
}

async fn with_a_small_limit(services: &Services) -> Result<()> {
    let server = services.rabbitmq.private().context("a private server")?;
    server.control(&["eval", "application:set_env(rabbit, max_message_size, 10000)."]).await?;
    let yard = Yard::on(services).await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
         SELECT 'thing', 'a' || n % 100, 1 + n / 100, 'Happened',
                jsonb_build_object('x', repeat('x', CASE WHEN n IN (7, 107, 250) THEN 20000 ELSE 10 END))
         FROM generate_series(0, 299) AS n",
    )
    .await?;
    let mut config = yard.config(1)?;
    (config.batch, config.held.shortest, config.held.longest) = (64 * 100, SOON, SOON);
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    while yard.count("published_at IS NULL AND held_at IS NULL").await? > 0 {
        relay.pass().await?;
    }
    let held = "attempts = 1 AND last_error LIKE 'refused: %larger than%'";
    assert_eq!(yard.count(held).await?, 2, "the second event of a7 waits behind its first");
    assert_eq!(yard.count("published_at IS NULL").await?, 4);
    arrived(&tap, 296).await?;
    ensure!(first_deliveries(&tap, "a7")?.is_empty(), "a later event overtook one that was refused");
    assert_eq!(first_deliveries(&tap, "a50")?, [1, 2]);

    server.control(&["eval", "application:set_env(rabbit, max_message_size, 1000000)."]).await?;
    yard.execute("UPDATE outbox_held SET next_attempt_at = now()").await?;
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    passes_until_none(&yard, &Mutex::new(relay), "published_at IS NULL").await?;
    arrived(&tap, 300).await?;
    assert_eq!(first_deliveries(&tap, "a7")?, [1, 2, 3]);
    Ok(())
}
