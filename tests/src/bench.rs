//! `semel-bed bench`: figures, each beside a floor that is measured in the same run on the same services.
//!
//! It promises that a figure can be compared between machines: it is told as a ratio to what the services themselves can
//! do, without us. Absolute figures stand beside it. What is measured is checked too: an event that is lost or comes out
//! of order makes the run fail, whatever the rates.
//!
//! Real daemons run as processes, built in release mode, over loopback. Each phase has a deadline and says what it waits
//! for; a row that fails is a fault of the report, and the next row is measured all the same. A goal that is missed is
//! told, and fails the run only with `--strict`. After a crash nothing is left but databases and virtual hosts, which the
//! next command sweeps.

mod api;
mod arrivals;
mod audit;
mod consumer;
mod pgbench;
mod phase;
mod pipe;
mod relay;
mod report;
mod scale;
mod stage;
mod statistics;
mod usage;
mod writers;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use self::phase::phase;
use self::report::{Machine, Report};
use self::scale::Scale;
use crate::output::say;
use crate::progress::Progress;
use crate::services::Services;

/// How long a whole run may take; a full one takes about ten minutes on two cores.
const RUN_LIMIT: Duration = Duration::from_mins(25);

/// What is measured, and how the result is told.
#[derive(Debug, Args)]
pub struct Options {
    /// The parts to measure; all of them if none is named.
    parts: Vec<Part>,
    /// Measures less of everything, in about two minutes: good for trying, not for comparing.
    #[arg(long)]
    quick: bool,
    /// Measures these rows only.
    #[arg(long = "row", value_name = "ROW")]
    rows: Vec<Row>,
    /// Writes the report there, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fails when a goal is missed.
    #[arg(long)]
    strict: bool,
    /// Sets a variable in the environment of every relay, to try a setting.
    #[arg(long = "relay-env", value_name = "NAME=VALUE", value_parser = variable)]
    relay_env: Vec<(String, String)>,
    /// Sets a variable in the environment of every API, to try a setting.
    #[arg(long = "api-env", value_name = "NAME=VALUE", value_parser = variable)]
    api_env: Vec<(String, String)>,
    /// Sets a variable in the environment of every ledger, to try a setting.
    #[arg(long = "ledger-env", value_name = "NAME=VALUE", value_parser = variable)]
    ledger_env: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Part {
    /// Client → database: fresh requests, replays.
    Api,
    /// Outbox → broker: throughput, latency, crashes, idleness.
    Relay,
    /// Broker → database: bookings one by one, in batches, and delivered twice.
    Consumer,
}

/// A row of any part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Row {
    Api(api::Row),
    Relay(relay::Row),
    Consumer(consumer::Row),
}

impl ValueEnum for Row {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Row>> = LazyLock::new(|| {
            let api = api::Row::value_variants().iter().copied().map(Row::Api);
            let relay = relay::Row::value_variants().iter().copied().map(Row::Relay);
            let consumer = consumer::Row::value_variants().iter().copied().map(Row::Consumer);
            api.chain(relay).chain(consumer).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Api(row) => row.to_possible_value(),
            Self::Relay(row) => row.to_possible_value(),
            Self::Consumer(row) => row.to_possible_value(),
        }
    }
}

impl Options {
    /// The rows of each part that is to be measured; all of its rows where none is named.
    fn parts(&self) -> Vec<(Part, Rows)> {
        let all = if self.parts.is_empty() { Part::value_variants() } else { &self.parts };
        let rows = |part: Part| {
            let mut rows = Rows::default();
            for row in &self.rows {
                match (part, row) {
                    (Part::Api, Row::Api(row)) => rows.api.push(*row),
                    (Part::Relay, Row::Relay(row)) => rows.relay.push(*row),
                    (Part::Consumer, Row::Consumer(row)) => rows.consumer.push(*row),
                    _ => {}
                }
            }
            (part, rows)
        };
        // Where rows are named, a part of which none is has nothing to measure.
        let is_meant = |rows: &Rows| self.rows.is_empty() || *rows != Rows::default();
        all.iter().copied().map(rows).filter(|(_, rows)| is_meant(rows)).collect()
    }
}

#[derive(Debug, Default, Eq, PartialEq)]
struct Rows {
    api: Vec<api::Row>,
    relay: Vec<relay::Row>,
    consumer: Vec<consumer::Row>,
}

/// What every measurement is made with.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) services: Services,
    pub(crate) scale: Scale,
    pub(crate) relay_env: Vec<(String, String)>,
    pub(crate) api_env: Vec<(String, String)>,
    pub(crate) ledger_env: Vec<(String, String)>,
}

/// Measures, prints the table, and writes the report.
///
/// # Errors
///
/// The services cannot be had, the run takes too long, or the report cannot be written.
pub async fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let began = Instant::now();
    let services = Services::find_or_start(root, Progress::Stderr).await?;
    let machine =
        phase("asking the machine what it is", Duration::from_secs(30), Machine::ask(&services)).await?;
    let scale = if options.quick { Scale::quick() } else { Scale::full() };
    let bench = Bench {
        services,
        scale,
        relay_env: options.relay_env.clone(),
        api_env: options.api_env.clone(),
        ledger_env: options.ledger_env.clone(),
    };
    let mut report = Report::new(machine, options.quick);
    let measuring = async {
        for (part, rows) in options.parts() {
            match part {
                Part::Api => api::measure(&bench, &rows.api, &mut report).await,
                Part::Relay => relay::measure(&bench, &rows.relay, &mut report).await,
                Part::Consumer => consumer::measure(&bench, &rows.consumer, &mut report).await,
            }
        }
    };
    if tokio::time::timeout(RUN_LIMIT, measuring).await.is_err() {
        report.fault(format!("the run was given up after {} min", RUN_LIMIT.as_secs() / 60));
    }
    report.took = began.elapsed();
    say(report.table());
    if let Some(file) = &options.json {
        let json = serde_json::to_vec_pretty(&report.json()).context("encoding the report")?;
        std::fs::write(file, json).with_context(|| format!("writing {}", file.display()))?;
    }
    let missed = options.strict && report.missed() > 0;
    Ok(if missed || report.is_faulty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn parts(arguments: &[&str]) -> Vec<(Part, Rows)> {
        Command::parse_from(std::iter::once("bench").chain(arguments.iter().copied())).options.parts()
    }

    #[test]
    fn named_rows_are_measured_and_no_part_without_one() {
        let all = Rows::default;
        assert_eq!(parts(&[]), [(Part::Api, all()), (Part::Relay, all()), (Part::Consumer, all())]);
        assert_eq!(parts(&["relay"]), [(Part::Relay, all())]);
        let orders = Rows { api: vec![api::Row::Orders], ..all() };
        assert_eq!(parts(&["--row", "orders"]), [(Part::Api, orders)]);
        assert_eq!(parts(&["relay", "--row", "orders"]), []);
    }

    #[test]
    fn a_row_belongs_to_one_part() {
        let names: Vec<_> = Row::value_variants()
            .iter()
            .filter_map(|row| Some(row.to_possible_value()?.get_name().to_owned()))
            .collect();
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
    }
}
