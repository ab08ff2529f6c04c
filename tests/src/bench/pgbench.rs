//! The floor: pgbench, which comes with Postgres, sends the statements that have to be, one by one.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::process::Command;

use crate::net::unique_name;
use crate::progress::Progress;
use crate::services::Package;

/// What a transaction consists of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Script {
    Order,
    Payment,
    Booking,
}

impl Script {
    const fn text(self) -> &'static str {
        match self {
            Self::Order => include_str!("pgbench/orders.sql"),
            Self::Payment => include_str!("pgbench/payments.sql"),
            Self::Booking => include_str!("pgbench/bookings.sql"),
        }
    }
}

/// A script in a file, for as long as it is needed.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        // It lies among temporary files.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a script over so many connections; returns how often it was run per second, without the time that connecting takes.
pub(crate) async fn floor(
    script: Script,
    database: &str,
    connections: usize,
    window: Duration,
) -> Result<f64> {
    let folder = Package::Postgres.find_or_install(Progress::Stderr).await?;
    let file = File(std::env::temp_dir().join(format!("{}.sql", unique_name("semel_pgbench"))));
    std::fs::write(&file.0, script.text()).context("writing the script for pgbench")?;
    let mut command = Command::new(folder.join("pgbench"));
    command.args(["--no-vacuum", "--protocol", "prepared", "--jobs", "2"]);
    command.args(["--client", &connections.to_string(), "--time", &window.as_secs().max(1).to_string()]);
    command.arg("--file").arg(&file.0).arg(database);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.context("running pgbench")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pgbench left with {}: {}", output.status, complaint.trim());
    per_second(&said).with_context(|| format!("pgbench told no rate: {said}"))
}

/// Reads the rate; none if a transaction failed.
fn per_second(said: &str) -> Option<f64> {
    let value = |name: &str| {
        let rest = said.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_ascii_whitespace().next()?.parse::<f64>().ok()
    };
    // Older ones do not count them, and end at the first.
    if value("number of failed transactions: ").is_some_and(|failed| failed > 0.0) {
        return None;
    }
    value("tps = ").filter(|&rate| rate > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_rate_of_a_run_without_failures() {
        let said = "transaction type: /tmp/x.sql\nnumber of failed transactions: 0 (0.000%)\n\
                    latency average = 7.310 ms\ntps = 4377.521093 (without initial connection time)\n";
        assert_eq!(per_second(said), Some(4_377.521_093));
        assert_eq!(per_second(&said.replace(": 0 (", ": 3 (")), None);
        assert_eq!(per_second("latency average = 7.310 ms\n"), None);
    }
}
