//! What a relay promises, driven pass by pass.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use semel_core::lifecycle::{Pass, Work as _};
use semel_relay::RelayError;
use semel_tests::wait::eventually;
use sqlx::{Connection as _, Executor as _, Row as _};

use crate::yard::{Relay, Yard, arrived, first_deliveries};

#[tokio::test(flavor = "multi_thread")]
async fn publishes_every_event_in_order_per_aggregate() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(40, 25).await?;
    Relay::new(&yard.config(4)?).drain().await?;
    assert_eq!(yard.unpublished().await?, 0);
    arrived(&tap, 1000).await?;
    for aggregate in 1..=40 {
        let versions = first_deliveries(&tap, &format!("a{aggregate}"))?;
        assert_eq!(versions, (1..=25).collect::<Vec<_>>(), "a{aggregate}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_relays_share_the_work_without_publishing_an_event_twice_or_out_of_order() -> Result<()> {
    // `cargo xtask test --full` sets it.
    let versions: i64 = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 400 } else { 40 };
    let events = usize::try_from(30 * versions)?;
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let writer = async {
        for version in 1..=versions {
            let mut connection = yard.connect().await?;
            for aggregate in 1..=30 {
                yard.insert(&mut connection, &format!("a{aggregate}"), version, "Happened").await?;
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    let yard = &yard;
    let relay = async |config| {
        let mut relay = Relay::new(&config);
        // Far more turns than needed; ends when nothing is left after all was written.
        for _ in 0..20_000 {
            relay = relay.drain().await?;
            if published(yard).await? == events {
                return Ok(());
            }
        }
        Err(anyhow!("the relays never caught up"))
    };
    tokio::try_join!(writer, relay(yard.config(3)?), relay(yard.config(3)?))?;
    arrived(&tap, events).await?;
    assert_eq!(tap.messages()?.len(), events, "an event was published twice without a crash");
    for aggregate in 1..=30 {
        let delivered = first_deliveries(&tap, &format!("a{aggregate}"))?;
        assert_eq!(delivered, (1..=versions).collect::<Vec<_>>(), "a{aggregate}");
    }
    Ok(())
}

async fn published(yard: &Yard) -> Result<usize> {
    let query = "SELECT count(*) FROM outbox WHERE published_at IS NOT NULL";
    let published: i64 = sqlx::query(query).fetch_one(&mut yard.connect().await?).await?.try_get(0)?;
    Ok(usize::try_from(published)?)
}

#[tokio::test]
async fn an_unroutable_event_stops_its_aggregate_alone_and_goes_out_in_order_once_it_has_a_queue()
-> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut connection = yard.connect().await?;
    yard.insert(&mut connection, "stuck", 1, "Happened").await?;
    yard.insert(&mut connection, "stuck", 2, "Unheard").await?;
    yard.insert(&mut connection, "stuck", 3, "Happened").await?;
    yard.insert(&mut connection, "free", 1, "Happened").await?;
    yard.insert(&mut connection, "free", 2, "Happened").await?;
    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    while relay.pass().await? != Pass::Idle {}
    arrived(&tap, 3).await?;
    assert_eq!(first_deliveries(&tap, "free")?, [1, 2]);
    assert_eq!(first_deliveries(&tap, "stuck")?, [1], "a later event overtook an unroutable one");
    let unpublished =
        "SELECT array_agg(aggregate_version ORDER BY id) FROM outbox WHERE published_at IS NULL";
    let versions: Vec<i64> = sqlx::query(unpublished).fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(versions, [2, 3], "a returned event was marked as published");

    let heard = semel_tests::tap::Tap::open(
        &yard.vhost.url(),
        &yard.exchange,
        &yard.vhost.scoped("heard"),
        &["thing.Unheard", "thing.Happened"],
    )
    .await?;
    let yard = &yard;
    let relay = tokio::sync::Mutex::new(relay);
    let published = || async {
        // The lane rests for a second after a failure.
        relay.lock().await.pass().await.map_err(|error| error.to_string())?;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("the stuck events to be published", Duration::from_secs(20), published).await?;
    arrived(&heard, 2).await?;
    assert_eq!(first_deliveries(&heard, "stuck")?, [2, 3]);
    Ok(())
}

#[tokio::test]
async fn a_missing_exchange_marks_nothing_and_blames_no_event() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(5, 2).await?;
    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    let broker = semel_broker::Connection::open(&yard.vhost.url().parse()?, "test").await?;
    semel_broker::inspect::delete_exchange(&broker, &yard.exchange).await?;
    let refused = relay.pass().await;
    ensure!(matches!(refused, Err(RelayError::Broker(_))), "{refused:?}");
    assert_eq!(yard.unpublished().await?, 10);
    let blamed = "SELECT count(*) FROM outbox WHERE attempts > 0 OR held_at IS NOT NULL";
    let blamed: i64 = sqlx::query(blamed).fetch_one(&mut yard.connect().await?).await?.try_get(0)?;
    assert_eq!(blamed, 0);
    // Once the topology is back, so are the events.
    drop(tap);
    let tap = yard.tap(&["thing.Happened"]).await?;
    Relay::new(&yard.config(1)?).drain().await?;
    arrived(&tap, 10).await?;
    assert_eq!(yard.unpublished().await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_nacked_event_is_not_marked() -> Result<()> {
    let yard = Yard::new().await?;
    let broker = semel_broker::Connection::open(&yard.vhost.url().parse()?, "test").await?;
    semel_broker::topology::declare_exchange(&broker, &yard.exchange).await?;
    let full = yard.vhost.scoped("full");
    yard.full_queue(&full, "thing.Happened").await?;
    yard.fill(3, 1).await?;
    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    relay.pass().await?;
    // One message fits. Whichever event it was, the others were refused and stay.
    let left = yard.unpublished().await?;
    let held = u32::try_from(3 - left)?;
    let there = || async {
        let count =
            semel_broker::inspect::message_count(&broker, &full).await.map_err(|error| error.to_string())?;
        if count == held { Ok(()) } else { Err(count.to_string()) }
    };
    eventually("as many messages as marks", Duration::from_secs(10), there).await?;
    ensure!(left > 0, "a full queue confirmed everything");
    Ok(())
}

#[tokio::test]
async fn a_lane_that_somebody_holds_is_left_alone() -> Result<()> {
    let yard = Yard::new().await?;
    let _tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(1, 3).await?;
    let mut connection = yard.connect().await?;
    let mut owner = connection.begin().await?;
    let lanes: Vec<i16> = (0..semel_core::outbox::drain::LANES).collect();
    let taken = semel_core::outbox::drain::take_lanes(&mut owner, &lanes, 64).await?;
    assert_eq!(taken.len(), 64);
    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    assert_eq!(relay.pass().await?, Pass::Idle);
    assert_eq!(yard.unpublished().await?, 3);
    owner.rollback().await?;
    assert_ne!(relay.pass().await?, Pass::Idle);
    assert_eq!(yard.unpublished().await?, 0);
    Ok(())
}

#[tokio::test]
async fn an_event_that_commits_late_is_published_though_later_ids_went_before() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut late = yard.connect().await?;
    late.execute("BEGIN").await?;
    yard.insert(&mut late, "late", 1, "Happened").await?;
    let mut connection = yard.connect().await?;
    yard.insert(&mut connection, "early", 1, "Happened").await?;
    let relay = Relay::new(&yard.config(2)?).drain().await?;
    arrived(&tap, 1).await?;
    late.execute("COMMIT").await?;
    relay.drain().await?;
    arrived(&tap, 2).await?;
    assert_eq!(yard.unpublished().await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_message_carries_the_events_identity_place_and_trace() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["order.OrderPlaced"]).await?;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let event_id = uuid::Uuid::new_v4();
    let event = semel_core::outbox::NewEvent {
        event_id,
        aggregate_type: "order",
        aggregate_id: "o-1".to_owned(),
        aggregate_version: Some(7),
        event_type: "OrderPlaced",
        payload: serde_json::from_value(serde_json::json!({"amount": 5}))?,
        trace_context: Some(trace.to_owned()),
    };
    semel_core::outbox::append(&mut yard.connect().await?, &[event]).await?;
    Relay::new(&yard.config(1)?).drain().await?;
    arrived(&tap, 1).await?;
    let message = tap.messages()?.remove(0);
    assert_eq!((message.event_id, message.event_type.as_str()), (event_id, "OrderPlaced"));
    assert_eq!((message.aggregate_id.as_str(), message.aggregate_version), ("o-1", Some(7)));
    assert_eq!(message.headers.get("traceparent").map(String::as_str), Some(trace));
    assert_eq!(message.payload, serde_json::json!({"amount": 5, "event_id": event_id.to_string()}));
    Ok(())
}

#[tokio::test]
async fn without_a_broker_no_lane_is_held_and_the_table_is_not_polled() -> Result<()> {
    let yard = Yard::new().await?;
    yard.fill(2, 2).await?;
    let mut config = yard.config(1)?;
    config.broker = format!("amqp://guest:guest@127.0.0.1:{}", semel_tests::net::free_port()?).parse()?;
    let mut relay = Relay::new(&config);
    assert_eq!(relay.prober.run_once().await?, Pass::Idle, "the prober polled without a broker");
    ensure!(matches!(relay.workers[0].run_once().await, Err(RelayError::Broker(_))), "a broker answered");
    assert_eq!(yard.lanes_held().await?, 0);
    assert_eq!(yard.unpublished().await?, 4);
    Ok(())
}

#[tokio::test]
async fn a_routing_key_is_made_by_the_template() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["shop.Happened"]).await?;
    yard.fill(3, 1).await?;
    let mut config = yard.config(1)?;
    config.routing_key = "shop.{event_type}".parse().map_err(anyhow::Error::msg)?;
    Relay::new(&config).drain().await?;
    arrived(&tap, 3).await
}
