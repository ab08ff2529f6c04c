//! What a relay holds in memory while the broker takes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use semel_tests::pid::ProcessId;
use semel_tests::progress::Progress;
use semel_tests::services::Services;
use semel_tests::system::READY;
use semel_tests::wait::eventually;
use tokio::task::JoinHandle;

use crate::processes::{metric, start};
use crate::yard::{Yard, arrived};

const MEBIBYTE: u64 = 1024 * 1024;

/// How long the alarm lasts.
const ALARM: Duration = Duration::from_secs(10);
/// Events of a statement, each tenth of a second.
const EVENTS: i64 = 500;
/// Statements before the alarm.
const BEFORE: usize = 30;
/// Statements in all: some come after the alarm, too.
const STATEMENTS: usize = 160;

/// The most memory that a process had resident since it was last asked.
struct Highest {
    bytes: Arc<AtomicU64>,
    watching: JoinHandle<()>,
}

impl Highest {
    fn watch(process: ProcessId) -> Self {
        let bytes = Arc::new(AtomicU64::new(0));
        let highest = Arc::clone(&bytes);
        let watching = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(20));
            while let Ok(now) = process.resident_bytes() {
                highest.fetch_max(now, Ordering::Relaxed);
                ticks.tick().await;
            }
        });
        Self { bytes, watching }
    }

    fn take(&self) -> u64 {
        self.bytes.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Highest {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_an_alarm_lasts_a_relay_grows_by_ten_mebibytes_at_most_and_drains_afterwards() -> Result<()> {
    // A server of this test's own, since an alarm is everybody's.
    let place = Services::from_env()?.place().own("memory");
    let services = Services::start_private(place, Progress::Silent).await?;
    let outcome = under_load(&services).await;
    services.remove(Progress::Silent).await?;
    outcome
}

async fn under_load(services: &Services) -> Result<()> {
    let server = services.rabbitmq.private().context("a private server")?;
    let yard = Yard::on(services).await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let (relay, admin) = start(&yard, "loaded", &[]).await?;
    relay.wait_ready(admin, READY).await?;
    let mut connection = yard.connect().await?;
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    let highest = Highest::watch(relay.id());
    let mut before = 0;
    let mut alarm: Option<(JoinHandle<Result<String>>, Instant)> = None;
    for statement in 0..STATEMENTS {
        // Late ones follow at once, so that it is 5,000 events a second.
        ticks.tick().await;
        sqlx::query(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'thing', 'a' || n, 'Happened', jsonb_build_object('reference', md5(n::TEXT), 'amount', n)
             FROM generate_series(1, $1) AS n",
        )
        .bind(EVENTS)
        .execute(&mut connection)
        .await?;
        if statement == BEFORE {
            before = highest.take();
            let server = server.clone();
            let raise =
                async move { server.control(&["set_vm_memory_high_watermark", "absolute", "1"]).await };
            alarm = Some((tokio::spawn(raise), Instant::now()));
        }
    }
    let (raised, since) = alarm.context("no alarm")?;
    raised.await??;
    ensure!(since.elapsed() >= ALARM, "the alarm lasted for {:?}", since.elapsed());
    let published = metric(admin, "semel_outbox_published_total").await?;
    let all = EVENTS * i64::try_from(STATEMENTS)?;
    let waiting = yard.unpublished().await?;
    ensure!(waiting > all / 2, "{waiting} wait, {published} are published: it was not blocked");

    server.control(&["set_vm_memory_high_watermark", "0.8"]).await?;
    let none = || async {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?} unpublished")),
        }
    };
    eventually("everything to be published", READY * 4, none).await?;
    let grown = highest.take().saturating_sub(before);
    ensure!(before > 0 && grown <= 10 * MEBIBYTE, "it grew by {grown} bytes, from {before}");
    assert_eq!(yard.count("attempts > 0 OR held_at IS NOT NULL").await?, 0);
    arrived(&tap, usize::try_from(all)?).await
}
