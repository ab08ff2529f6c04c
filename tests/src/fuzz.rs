//! The API against requests that nobody would write: `schemathesis` makes them from the API's own description.
//!
//! It starts a database, a provider and an API of their own, lets the tool loose on them, twice: with valid requests, and with
//! any; and then judges by itself what was answered. No answer is a failure of ours (5xx), each has a status that its
//! operation is described with, and of each operation's a part succeeded, without which the rest would prove little.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::output::say;
use crate::polyglot;
use crate::progress::Progress;
use crate::services::Services;
use crate::system::Place;
use crate::workspace;

/// Requests at least.
const REQUESTS: u64 = 2_000;
/// How much of each operation's must succeed, in percent.
const SUCCEED: u64 = 30;
/// How long one run may take.
const DEADLINE: Duration = Duration::from_mins(10);

/// What is judged by the tool itself, answer by answer.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                      response_schema_conformance,negative_data_rejection,missing_required_header,unsupported_method,\
                      ignored_auth";

/// How to fuzz.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Repeats an earlier run's choices; by default they are new ones.
    #[arg(long)]
    seed: Option<u32>,
    /// Requests of each operation and run, about.
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..), value_name = "COUNT")]
    examples: u32,
}

/// How often each operation was answered with which status.
type Tally = BTreeMap<String, BTreeMap<u16, u64>>;

/// Fuzzes; the exit code tells whether all was as described.
///
/// # Errors
///
/// A service, a daemon or the tool cannot be started.
pub async fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let hooks = workspace::root()?.join("tests/fuzz/hooks.py");
    let tool = polyglot::python_packages("fuzz").await?.join("bin/st");
    let services = Services::find_or_start(root, Progress::Stderr).await?;
    let place = Place::make(&services).await?;
    let _provider = place.provider("provider", &[]).await?;
    let api = place.api("api", &[]).await?;
    let base = format!("http://{}", api.address.context("no address")?);
    let document: Value = reqwest::get(format!("{base}/openapi.json")).await?.json().await?;
    let seed = options.seed.unwrap_or_else(|| fastrand::u32(..));
    say(format_args!("seed {seed}: --seed {seed} makes the same choices again"));

    let mut faults = Vec::new();
    let mut tally = Tally::new();
    for (mode, phases) in [("positive", "examples,fuzzing,stateful"), ("all", "coverage,fuzzing")] {
        let fuzz = Fuzz {
            tool: &tool,
            hooks: &hooks,
            base: &base,
            token: &place.token,
            seed,
            examples: options.examples,
        };
        let (counted, passed) = fuzz.run(mode, phases).await?;
        if !passed {
            faults.push(format!("the run of {mode} requests failed: see above"));
        }
        for (operation, statuses) in counted {
            for (status, count) in statuses {
                *tally.entry(operation.clone()).or_default().entry(status).or_default() += count;
            }
        }
    }
    ensure!(api.daemon.is_running(), "the API died");
    for line in table(&tally) {
        say(line);
    }
    faults.extend(judge(&tally, &document));
    for fault in &faults {
        say(format_args!("error: {fault}"));
    }
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Fuzz<'a> {
    tool: &'a Path,
    hooks: &'a Path,
    base: &'a str,
    token: &'a str,
    seed: u32,
    examples: u32,
}

impl Fuzz<'_> {
    /// Lets the tool run; returns what was answered, and whether the tool was content.
    async fn run(&self, mode: &str, phases: &str) -> Result<(Tally, bool)> {
        let tally = std::env::temp_dir().join(crate::net::unique_name("semel_fuzz"));
        let mut command = tokio::process::Command::new(self.tool);
        command
            .args(["run", &format!("{}/openapi.json", self.base), "--no-color", "--workers", "1"])
            .args(["--mode", mode, "--phases", phases, "--checks", CHECKS, "--continue-on-failure"])
            .args(["--max-examples", &self.examples.to_string(), "--seed", &self.seed.to_string()])
            .args(["--generation-database", "none", "--suppress-health-check", "all", "--warnings", "off"])
            .args(["--header", &format!("Authorization: Bearer {}", self.token)])
            .args(["--output-sanitize", "true", "--request-timeout", "40"])
            .current_dir(std::env::temp_dir())
            .env("SCHEMATHESIS_HOOKS", self.hooks)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("SEMEL_FUZZ_TALLY", &tally)
            .env("SEMEL_FUZZ_SEED", self.seed.to_string())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let status = tokio::time::timeout(DEADLINE, command.status()).await;
        let status =
            status.with_context(|| format!("the tool did not end within {} s", DEADLINE.as_secs()))?;
        let passed = status.with_context(|| format!("starting {}", self.tool.display()))?.success();
        Ok((read(&tally)?, passed))
    }
}

fn read(path: &Path) -> Result<Tally> {
    let text =
        std::fs::read(path).with_context(|| format!("the tool left no tally in {}", path.display()))?;
    std::fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    serde_json::from_slice(&text).context("reading the tally")
}

/// Says in which ways the answers differ from what they should be.
fn judge(tally: &Tally, document: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    let requests: u64 = tally.values().flat_map(BTreeMap::values).sum();
    if requests < REQUESTS {
        faults.push(format!("{requests} requests were made, and not {REQUESTS}"));
    }
    for (operation, statuses) in tally {
        for (status, count) in statuses.iter().filter(|(status, _)| **status >= 500) {
            faults.push(format!("{operation}: {count} answers {status}"));
        }
    }
    for (operation, responses) in operations(document) {
        let Some(statuses) = tally.get(&operation) else {
            faults.push(format!("{operation}: never asked"));
            continue;
        };
        for (status, count) in
            statuses.iter().filter(|(status, _)| responses.get(status.to_string()).is_none())
        {
            faults.push(format!("{operation}: {count} answers {status}, which is not described"));
        }
        let (all, good) = (total(statuses, 100..600), total(statuses, 200..300));
        if good * 100 < all * SUCCEED {
            faults.push(format!("{operation}: {good} of {all} succeeded, and not {SUCCEED} %"));
        }
    }
    faults
}

/// Every operation of the document, named as the tool names it, with its responses. For the document itself, the tool asks
/// once.
fn operations(document: &Value) -> Vec<(String, &Value)> {
    let paths =
        document["paths"].as_object().into_iter().flatten().filter(|(path, _)| *path != "/openapi.json");
    let operations = paths.flat_map(|(path, item)| {
        let methods = item.as_object().into_iter().flatten();
        methods.map(move |(method, operation)| {
            (format!("{} {path}", method.to_ascii_uppercase()), &operation["responses"])
        })
    });
    operations.collect()
}

fn total(statuses: &BTreeMap<u16, u64>, range: std::ops::Range<u16>) -> u64 {
    statuses.range(range).map(|(_, count)| count).sum()
}

fn table(tally: &Tally) -> Vec<String> {
    let mut lines = vec![format!("{:<42} {:>8} {:>6}  by status", "operation", "requests", "2xx")];
    let mut requests = 0;
    for (operation, statuses) in tally {
        let (all, good) = (total(statuses, 100..600), total(statuses, 200..300));
        let each: Vec<_> = statuses.iter().map(|(status, count)| format!("{status}: {count}")).collect();
        requests += all;
        lines.push(format!("{operation:<42} {all:>8} {:>4} %  {}", good * 100 / all.max(1), each.join(", ")));
    }
    lines.push(format!("{:<42} {requests:>8}", "all"));
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tally(statuses: &[(u16, u64)]) -> Tally {
        BTreeMap::from([("GET /a".to_owned(), statuses.iter().copied().collect())])
    }

    #[test]
    fn tells_of_failures_of_undescribed_answers_and_of_too_little_success() {
        let document =
            json!({ "paths": { "/a": { "get": { "responses": { "200": {}, "400": {}, "500": {} } } } } });
        let judged = |statuses: &[(u16, u64)]| judge(&tally(statuses), &document);
        assert_eq!(judged(&[(200, 600), (400, 1400)]), [""; 0]);
        assert_eq!(judged(&[(200, 599), (400, 1401)]), ["GET /a: 599 of 2000 succeeded, and not 30 %"]);
        assert_eq!(judged(&[(200, 1999)]), ["1999 requests were made, and not 2000"]);
        assert_eq!(judged(&[(200, 2000), (404, 1)]), ["GET /a: 1 answers 404, which is not described"]);
        assert_eq!(judged(&[(200, 2000), (500, 2)]), ["GET /a: 2 answers 500"]);
        let other = Tally::from([("GET /b".to_owned(), BTreeMap::from([(200, 2000)]))]);
        assert_eq!(judge(&other, &document), ["GET /a: never asked"]);
    }
}
