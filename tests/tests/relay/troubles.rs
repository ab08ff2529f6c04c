//! The relay's troubles that are no event's fault: a broker under an alarm, a database that takes no marks.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_core::lifecycle::Work as _;
use semel_relay::RelayError;
use semel_tests::progress::Progress;
use semel_tests::services::Services;
use semel_tests::wait::eventually;
use tokio::sync::Mutex;

use crate::yard::{Relay, Yard, arrived};

const SOON: Duration = Duration::from_mins(1);

#[tokio::test]
async fn while_an_alarm_lasts_no_lane_is_held_nothing_is_sent_and_no_event_is_blamed() -> Result<()> {
    // A server of this test's own, since an alarm is everybody's.
    let place = Services::from_env()?.place().own("alarm");
    let services = Services::start_private(place, Progress::Silent).await?;
    let outcome = under_an_alarm(&services).await;
    services.remove(Progress::Silent).await?;
    outcome
}

async fn under_an_alarm(services: &Services) -> Result<()> {
    let server = services.rabbitmq.private().context("a private server")?;
    let yard = Yard::on(services).await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut config = yard.config(2)?;
    config.confirm_limit = Duration::from_secs(2);
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    server.control(&["set_vm_memory_high_watermark", "absolute", "1"]).await?;
    let alarmed = || async {
        match server.control(&["eval", "rabbit_alarm:get_alarms()."]).await {
            Ok(alarms) if alarms.contains("memory") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("the alarm", SOON, alarmed).await?;
    yard.fill(50, 2).await?;
    let blocked = relay.pass().await;
    ensure!(matches!(blocked, Err(RelayError::Blocked)), "{blocked:?}");
    // Whoever looks now knows without a wave of its own: the one that learned of it, and the other.
    for _ in 0..3 {
        for worker in &mut relay.workers {
            let began = std::time::Instant::now();
            let blocked = worker.run_once().await;
            ensure!(matches!(blocked, Err(RelayError::Blocked)), "{blocked:?}");
            ensure!(began.elapsed() < Duration::from_secs(1), "it tried a wave");
        }
    }
    assert_eq!(yard.lanes_held().await?, 0);
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL OR published_at IS NOT NULL").await?, 0);

    server.control(&["set_vm_memory_high_watermark", "0.8"]).await?;
    let relay = Mutex::new(relay);
    let none = || async {
        let passed = relay.lock().await.pass().await;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{passed:?}, {other:?}")),
        }
    };
    eventually("all to be published once the alarm is over", SOON, none).await?;
    arrived(&tap, 100).await
}

#[tokio::test]
async fn what_was_confirmed_and_cannot_be_marked_is_not_sent_again() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(20, 2).await?;
    let mut config = yard.config(1)?;
    config.batch = 64 * 100;
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    yard.execute(
        "CREATE FUNCTION refuse() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await?;
    for _ in 0..5 {
        let failed = relay.pass().await;
        ensure!(matches!(failed, Err(RelayError::Database { .. })), "{failed:?}");
    }
    arrived(&tap, 40).await?;
    yard.execute("DROP TRIGGER refuse ON outbox").await?;
    while yard.unpublished().await? > 0 {
        relay.pass().await?;
    }
    yard.fill(1, 1).await?;
    relay.pass().await?;
    arrived(&tap, 41).await?;
    assert_eq!(tap.messages()?.len(), 41, "an event was sent again");
    Ok(())
}

#[tokio::test]
async fn a_database_that_takes_no_marks_is_sent_nothing_for() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(20, 2).await?;
    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    // It knows already what there is to do, so its worker is the one who finds out.
    relay.prober.run_once().await?;
    let name = yard.database.name().to_owned();
    yard.execute(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await?;
    for _ in 0..3 {
        let failed = relay.workers[0].run_once().await;
        ensure!(matches!(failed, Err(RelayError::ReadOnly)), "{failed:?}");
    }
    let mut late = Relay::new(&yard.config(1)?);
    late.connect().await?;
    let failed = late.prober.run_once().await;
    ensure!(matches!(failed, Err(RelayError::ReadOnly)), "{failed:?}");
    ensure!(tap.messages()?.is_empty(), "events were sent that cannot be marked");
    yard.execute(&format!(
        "BEGIN READ WRITE; ALTER DATABASE {name} RESET default_transaction_read_only; COMMIT"
    ))
    .await?;
    while yard.unpublished().await? > 0 {
        relay.pass().await?;
    }
    arrived(&tap, 40).await?;
    assert_eq!(tap.messages()?.len(), 40);
    Ok(())
}
