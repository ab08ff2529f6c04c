//! SIGTERM under load: each daemon leaves with exit code 0 within its grace, and nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use semel_tests::client::{Acknowledged, Client, Intent};
use semel_tests::process::Daemon;
use semel_tests::reconcile::reconcile;
use semel_tests::services::Services;
use semel_tests::system::{Shape, System};
use semel_tests::wait::eventually;
use tokio::task::JoinHandle;

/// The daemons' default grace, and a little.
const GRACE: Duration = Duration::from_secs(25);

/// Clients that place orders until they are told to stop, each order until its answer is final.
struct Load {
    stop: Arc<AtomicBool>,
    placed: Arc<AtomicI64>,
    clients: Vec<JoinHandle<Result<Vec<Acknowledged>>>>,
}

impl Load {
    fn start(apis: &[Client], clients: i64) -> Self {
        let (stop, placed) = (Arc::<AtomicBool>::default(), Arc::<AtomicI64>::default());
        let clients = (0..clients).map(|number| {
            let (stop, placed, apis) = (Arc::clone(&stop), Arc::clone(&placed), apis.to_vec());
            tokio::spawn(async move {
                let mut acknowledged = Vec::new();
                for round in 0_i64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let intent = Intent::new(&format!("load-{number}-{round}"), 1 + number * 100_000 + round);
                    let answer = place_somewhere(&apis, &intent).await?;
                    acknowledged.push(answer);
                    placed.fetch_add(1, Ordering::Relaxed);
                }
                Ok(acknowledged)
            })
        });
        let clients = clients.collect();
        Self { stop, placed, clients }
    }

    /// Waits until so many more orders are placed than now.
    async fn more(&self, orders: i64) -> Result<()> {
        let wanted = self.placed.load(Ordering::Relaxed) + orders;
        let placed = &self.placed;
        let look = || async move { (placed.load(Ordering::Relaxed) >= wanted).then_some(()) };
        eventually("the load to go on", Duration::from_mins(1), look).await
    }

    async fn end(self) -> Result<Vec<Acknowledged>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for client in self.clients {
            all.extend(client.await??);
        }
        Ok(all)
    }
}

/// Asks one API after the other, as a client behind a balancer does, until the answer is final.
async fn place_somewhere(apis: &[Client], intent: &Intent) -> Result<Acknowledged> {
    let mut last = String::new();
    for attempt in 0..400 {
        match apis[attempt % apis.len()].place(intent).await {
            Ok(answer) if answer.headers.contains_key("retry-after") => last = answer.status.to_string(),
            Ok(answer) => return answer.acknowledged(&intent.key),
            Err(error) => last = format!("{error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("{}: no final answer; the last was {last}", intent.reference)
}

async fn stops_cleanly(daemon: &Daemon) -> Result<()> {
    daemon.terminate()?;
    let status = daemon.wait_exit(GRACE).await?;
    ensure!(status.success(), "{} left with {status}: {:?}", daemon.name(), daemon.lines());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_daemon_stops_under_load_with_exit_code_0_and_nothing_is_lost() -> Result<()> {
    let services = Services::from_env()?;
    let mut system = System::start(&services, Shape { apis: 2, relays: 2, env: &[] }).await?;
    let load = Load::start(&[system.client(0)?, system.client(1)?], 8);
    load.more(100).await?;
    stops_cleanly(&system.apis[0].daemon).await?;
    load.more(50).await?;
    stops_cleanly(&system.relays[0].daemon).await?;
    load.more(50).await?;
    stops_cleanly(&system.reaper.daemon).await?;
    stops_cleanly(&system.ledger_relay.daemon).await?;
    stops_cleanly(&system.ledger.daemon).await?;
    load.more(50).await?;
    system.ledger = system.place.ledger("ledger-again", &[]).await?;
    system.ledger_relay = system.place.ledger_relay("ledger-relay-again", &[]).await?;
    load.more(50).await?;
    let acknowledged = load.end().await?;
    ensure!(acknowledged.len() >= 300, "too little load: {}", acknowledged.len());
    system.place.settled(Duration::from_mins(1)).await?;
    let differences = reconcile(&system.sources(acknowledged).await?);
    assert_eq!(differences, []);
    system.stop().await
}
