//! Lanes that others hold.

use anyhow::Result;
use semel_core::lifecycle::{Pass, Work as _};
use semel_relay::Broker;
use sqlx::{Connection as _, Executor as _};

use crate::yard::{Relay, Yard};

#[tokio::test(flavor = "multi_thread")]
async fn lanes_that_others_hold_are_looked_at_without_hurry() -> Result<()> {
    let yard = Yard::new().await?;
    yard.fill(10, 1).await?;
    let mut other = yard.connect().await?;
    let mut holds = other.begin().await?;
    holds.execute("SELECT pg_advisory_xact_lock('outbox'::REGCLASS::OID::INT, lane) FROM generate_series(0, 63) AS lane").await?;

    let mut relay = Relay::new(&yard.config(1)?);
    relay.shared.broker(0, Broker::Up);
    for _ in 0..3 {
        assert_eq!(relay.prober.run_once().await?, Pass::Idle, "the prober's pauses do not grow");
        assert_eq!(relay.workers[0].run_once().await?, Pass::Idle, "it works on lanes that are held");
    }
    holds.rollback().await?;
    relay.prober.run_once().await?;
    relay.workers[0].run_once().await?;
    assert_eq!(
        yard.count("held_at IS NOT NULL").await?,
        10,
        "nobody has bound a queue, so all are set aside"
    );
    Ok(())
}
