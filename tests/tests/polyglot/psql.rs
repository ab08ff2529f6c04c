//! psql as a producer: the cases as the statements that a person would type.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::process::Daemon;
use semel_tests::progress::Progress;
use semel_tests::services::Package;

use crate::yard::{Event, Yard};

/// How long the statements of one case may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Writes the cases; returns the constraints that psql says it was refused by.
pub(crate) async fn produce(yard: &Yard) -> Result<Vec<String>> {
    for event in &yard.cases.accepted {
        let (is_accepted, said) = psql(yard, event).await?;
        ensure!(is_accepted, "psql was refused: {said}");
    }
    let mut refusals = Vec::new();
    for event in yard.cases.refused.values() {
        let (is_accepted, said) = psql(yard, event).await?;
        ensure!(!is_accepted, "psql was not refused");
        let constraint = said.lines().find_map(|line| line.strip_prefix("CONSTRAINT NAME:"));
        refusals.push(constraint.with_context(|| format!("no constraint: {said}"))?.trim().to_owned());
    }
    Ok(refusals)
}

/// Runs the transaction of one event; says whether it was accepted, and what psql said.
async fn psql(yard: &Yard, event: &Event) -> Result<(bool, String)> {
    let program = Package::Psql.find_or_install(Progress::Stderr).await?;
    let shipment = literal(&event["aggregate_id"]);
    let columns: Vec<&str> = event.keys().map(String::as_str).collect();
    let values: Vec<String> = event.values().map(|value| literal(value)).collect();
    let change = format!("INSERT INTO shipments (shipment_id) VALUES ({shipment})");
    let told = format!("INSERT INTO outbox ({}) VALUES ({})", columns.join(", "), values.join(", "));
    let psql = Daemon::command("polyglot-psql", program)
        .args(["--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--set", "VERBOSITY=verbose"])
        .args(["--command", "BEGIN", "--command", &change, "--command", &told, "--command", "COMMIT"])
        .args(["--dbname", &yard.database.url()])
        .env("PGCLIENTENCODING", "UTF8")
        .start()
        .await?;
    let status = psql.wait_exit(LIMIT).await?;
    Ok((status.success(), psql.lines().join("\n")))
}

fn literal(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}
