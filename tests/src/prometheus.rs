//! A Prometheus of one's own, with the configuration that ships.
//!
//! It runs in a folder that holds `prometheus.yml` and `alerts.yml` as they are in `deploy/prometheus`, and a file of targets. It
//! ends with its value, and its folder goes.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::net::{free_port, unique_name};
use crate::process::Daemon;
use crate::progress::Progress;
use crate::services::Package;
use crate::wait::eventually;
use crate::workspace::root;

/// How long it may take to start.
const START: Duration = Duration::from_mins(1);

/// A process to scrape.
#[derive(Clone, Debug)]
pub struct Target {
    /// Which daemon it is: `relay`.
    pub daemon: &'static str,
    /// The database that it works on.
    pub group: &'static str,
    /// The port of its admin endpoint.
    pub admin: u16,
}

/// A running Prometheus.
#[derive(Debug)]
pub struct Prometheus {
    daemon: Daemon,
    address: SocketAddr,
    folder: PathBuf,
}

impl Prometheus {
    /// Starts it, and waits until it answers. `edit` may change the rules that it is given.
    ///
    /// # Errors
    ///
    /// It cannot be installed, or does not answer.
    pub async fn start(targets: &[Target], edit: impl Fn(String) -> String) -> Result<Self> {
        let program = Package::Prometheus.find_or_install(Progress::Silent).await?;
        let folder = std::env::temp_dir().join(unique_name("prometheus"));
        let shipped = root()?.join("deploy/prometheus");
        fs::create_dir_all(folder.join("targets"))?;
        fs::copy(shipped.join("prometheus.yml"), folder.join("prometheus.yml"))?;
        fs::write(folder.join("alerts.yml"), edit(fs::read_to_string(shipped.join("alerts.yml"))?))?;
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let daemon = Daemon::command("prometheus", program)
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .start()
            .await?;
        let prometheus = Self { daemon, address, folder };
        prometheus.scrape(targets)?;
        let ready = || async {
            let answer =
                reqwest::get(format!("http://{address}/-/ready")).await.map_err(|error| error.to_string())?;
            if answer.status().is_success() { Ok(()) } else { Err(answer.status().to_string()) }
        };
        eventually("Prometheus to be ready", START, ready)
            .await
            .with_context(|| prometheus.daemon.lines().join("\n"))?;
        Ok(prometheus)
    }

    /// Names the processes to scrape from now on.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn scrape(&self, targets: &[Target]) -> Result<()> {
        let groups = targets.iter().map(|Target { daemon, group, admin }| {
            json!({ "targets": [format!("127.0.0.1:{admin}")], "labels": { "daemon": daemon, "group": group } })
        });
        // JSON is YAML.
        let text = groups.collect::<Value>().to_string();
        Ok(fs::write(self.folder.join("targets/test.yml"), text)?)
    }

    /// Asks its API.
    ///
    /// # Errors
    ///
    /// It does not answer, or answers with an error.
    pub async fn ask(&self, path: &str, query: &[(&str, &str)]) -> Result<Value> {
        let mut url = reqwest::Url::parse(&format!("http://{}/api/v1/{path}", self.address))?;
        url.query_pairs_mut().extend_pairs(query);
        let answer: Value = reqwest::get(url).await?.json().await?;
        ensure!(answer["status"] == "success", "{path} {query:?}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The values that an expression has now; those that are no numbers are left out.
    ///
    /// # Errors
    ///
    /// As [`ask`](Self::ask).
    pub async fn query(&self, expr: &str) -> Result<Vec<f64>> {
        let data = self.ask("query", &[("query", expr)]).await?;
        let samples = data["result"].as_array().context("no vector")?;
        let values = samples.iter().filter_map(|sample| sample["value"][1].as_str()?.parse::<f64>().ok());
        Ok(values.filter(|value| !value.is_nan()).collect())
    }

    /// Whether an alert fires for a group.
    ///
    /// # Errors
    ///
    /// As [`ask`](Self::ask).
    pub async fn fires(&self, alert: &str, group: &str) -> Result<bool> {
        let data = self.ask("alerts", &[]).await?;
        let alerts = data["alerts"].as_array().context("no alerts")?;
        Ok(alerts.iter().any(|one| {
            one["labels"]["alertname"] == alert && one["labels"]["group"] == group && one["state"] == "firing"
        }))
    }

    /// Waits until an alert fires for a group, or until it does not.
    ///
    /// # Errors
    ///
    /// It is not so at the deadline.
    pub async fn wait(&self, alert: &str, group: &str, fires: bool, deadline: Duration) -> Result<()> {
        let what = format!("{alert} for {group} to {}", if fires { "fire" } else { "fall silent" });
        eventually(&what, deadline, || async {
            match self.fires(alert, group).await {
                Ok(found) if found == fires => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
