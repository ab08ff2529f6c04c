//! Prometheus with the shipped configuration sees the running system, and what it is to wake people up for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_proto::health::v1::HealthCheckRequest;
use semel_proto::health::v1::health_client::HealthClient;
use semel_tests::client::{Client, Intent, Payment, Refund};
use semel_tests::prometheus::{Prometheus, Target};
use semel_tests::services::Services;
use semel_tests::system::{Running, Shape, System};
use semel_tests::wait::eventually;
use semel_tests::workspace::root;
use serde_json::Value;
use sqlx::Executor as _;
use tonic::transport::Channel;

/// For what is scraped and evaluated every five seconds.
const SOON: Duration = Duration::from_mins(2);

/// Every query of every dashboard, as Grafana sends it.
fn queries() -> Result<Vec<(String, String)>> {
    let mut queries = Vec::new();
    for entry in std::fs::read_dir(root()?.join("deploy/grafana/dashboards"))? {
        let dashboard: Value = serde_json::from_slice(&std::fs::read(entry?.path())?)?;
        let title = dashboard["title"].as_str().context("no title")?;
        for panel in dashboard["panels"].as_array().context("no panels")? {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let expr = target["expr"].as_str().context("no expression")?;
                let expr = expr
                    .replace("$__rate_interval", "30s")
                    .replace("$namespace", ".*")
                    .replace("$group", ".+");
                queries.push((format!("{title}: {}", panel["title"].as_str().unwrap_or_default()), expr));
            }
        }
    }
    Ok(queries)
}

/// Orders, payments, refunds and a gRPC call, again and again until told to stop.
async fn load(client: Client, address: std::net::SocketAddr, stop: Arc<AtomicBool>) -> Result<()> {
    let channel = Channel::from_shared(format!("http://{address}"))?.connect_lazy();
    while !stop.load(Ordering::Relaxed) {
        client.place_until_final(&Intent::new("order", 100)).await?;
        let payment = Payment::new("payment", 300);
        let told = client.pay_until_final(&payment).await?.told(&payment.key)?;
        client.refund_until_final(&Refund::new(told.payment_id, 100)).await?;
        client.payment(told.payment_id).await?;
        HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

fn targets(system: &System) -> Vec<Target> {
    let of = |daemon, group, running: &Running| Target { daemon, group, admin: running.admin };
    let mut targets = vec![
        of("reaper", "payments", &system.reaper),
        of("ledger", "ledger", &system.ledger),
        of("relay", "ledger", &system.ledger_relay),
    ];
    targets.extend(system.apis.iter().map(|api| of("api", "payments", api)));
    targets.extend(system.relays.iter().map(|relay| of("relay", "payments", relay)));
    targets
}

#[tokio::test]
async fn prometheus_sees_the_running_system_and_alerts_when_the_relay_stops() -> Result<()> {
    let services = Services::from_env()?;
    let env = &[("SEMEL_REAPER_AUDIT_PERIOD", "5")];
    let mut system = System::start(&services, Shape { apis: 1, relays: 1, env }).await?;
    let full = std::env::var_os("SEMEL_TEST_FULL").is_some();
    // The rules as they ship, but that an alert need not last for minutes; the long run has them unchanged.
    let edit = |rules: String| if full { rules } else { shorten(&rules) };
    let prometheus = Prometheus::start(&targets(&system), edit).await?;

    let stop = Arc::new(AtomicBool::new(false));
    let address = system.apis[0].address.context("no address")?;
    let load = tokio::spawn(load(system.client(0)?, address, Arc::clone(&stop)));

    let all = targets(&system).len();
    let up = || async {
        match prometheus.query("up == 1").await {
            Ok(found) if found.len() == all => Ok(()),
            other => Err(format!("{other:?} of {all}")),
        }
    };
    eventually("every daemon to be scraped", SOON, up).await?;

    let rules = prometheus.ask("rules", &[]).await?;
    let groups = rules["groups"].as_array().context("no groups")?;
    let rules: Vec<_> =
        groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten()).collect();
    assert_eq!(rules.len(), 24);
    let sound = || async {
        let groups = prometheus.ask("rules", &[]).await.map_err(|error| error.to_string())?;
        let text = groups.to_string();
        if text.contains("\"health\":\"unknown\"") { Err("a rule was not evaluated yet") } else { Ok(text) }
            .map_err(str::to_owned)
    };
    let evaluated = eventually("every rule to be evaluated", SOON, sound).await?;
    ensure!(!evaluated.contains("\"health\":\"err\""), "{evaluated}");

    let queries = queries()?;
    ensure!(queries.len() > 50, "{} queries", queries.len());
    let answered = || async {
        let mut silent = BTreeMap::new();
        for (panel, expr) in &queries {
            match prometheus.query(expr).await {
                Ok(values) if !values.is_empty() => {}
                other => {
                    silent.insert(panel.clone(), format!("{expr}: {other:?}"));
                }
            }
        }
        if silent.is_empty() { Ok(()) } else { Err(format!("{silent:#?}")) }
    };
    eventually("every query of the dashboards to have data", SOON, answered).await?;
    for alert in ["SemelEventsNotPublished", "SemelNoRelay", "SemelDaemonDown", "SemelBacklogUnknown"] {
        ensure!(!prometheus.fires(alert, "payments").await?, "{alert} fires while all is well");
    }

    stop.store(true, Ordering::Relaxed);
    load.await??;
    let relay = system.relays.remove(0);
    relay.daemon.terminate()?;
    relay.daemon.wait_exit(Duration::from_secs(30)).await?;
    let client = system.client(0)?;
    for number in 0..3 {
        client.place_until_final(&Intent::new(&format!("left-{number}"), 100)).await?;
    }
    if !full {
        let older =
            "UPDATE outbox SET created_at = created_at - INTERVAL '2 minutes' WHERE published_at IS NULL";
        system.place.payments.connect().await?.execute(older).await?;
    }
    prometheus.wait("SemelEventsNotPublished", "payments", true, Duration::from_mins(6)).await?;
    prometheus.wait("SemelNoRelay", "payments", true, SOON).await?;
    ensure!(!prometheus.fires("SemelEventsNotPublished", "ledger").await?, "the ledger's relay runs");

    system.relays.push(system.place.relay("relay-again", &[]).await?);
    prometheus.scrape(&targets(&system))?;
    prometheus.wait("SemelEventsNotPublished", "payments", false, SOON).await?;
    prometheus.wait("SemelNoRelay", "payments", false, SOON).await?;
    system.stop().await
}

fn shorten(rules: &str) -> String {
    let lines = rules
        .lines()
        .map(|line| if line.trim_start().starts_with("for: ") { "        for: 5s" } else { line });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn every_metric_that_a_daemon_shows_is_in_the_reference() -> Result<()> {
    let services = Services::from_env()?;
    let system = System::start(&services, Shape { apis: 1, relays: 1, env: &[] }).await?;
    let client = system.client(0)?;
    client.place_until_final(&Intent::new("order", 100)).await?;
    client.pay_until_final(&Payment::new("payment", 300)).await?;
    system.place.settled(Duration::from_secs(30)).await?;
    let page = std::fs::read_to_string(root()?.join("docs/reference/metrics.md"))?;
    let rows: Vec<(&str, &str)> =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | ")).collect();
    let all = [
        ("semel-api", &system.apis[0]),
        ("semel-relay", &system.relays[0]),
        ("semel-reaper", &system.reaper),
        ("semel-ledger", &system.ledger),
    ];
    for (program, running) in all {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", running.admin)).await?.text().await?;
        let shown: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        ensure!(shown.len() > 10, "{program} shows {shown:?}");
        for metric in shown {
            let (name, kind) = metric.split_once(' ').context("no type")?;
            let row = rows.iter().find(|(known, _)| *known == name);
            let (_, row) =
                row.with_context(|| format!("{program} shows {name}, which the reference does not know"))?;
            let cells: Vec<&str> = row.split(" | ").collect();
            ensure!(cells[0] == kind, "{program} shows {name} as a {kind}: {row}");
            let from = cells[cells.len() - 2];
            ensure!(from == "all" || from.contains(program), "{program} shows {name}: {row}");
        }
    }
    system.stop().await
}
