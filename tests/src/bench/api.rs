//! The API's figures: fresh requests against the same writes by pgbench, and replays against fresh requests.
//!
//! A figure and its floor take turns over the same tables, so that whatever else the machine does, and however the tables
//! grow, falls on both.

mod load;
mod stage;

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use self::load::Answered;
use self::stage::{Asked, Stage};
use super::Bench;
use super::pgbench::{self, Script};
use super::phase::phase;
use super::report::{Figure, Goal, Line, Report, Unit};
use super::statistics::{float, percentile};
use super::usage::processor_time;

/// How long a measurement may take beside its windows.
const AROUND: Duration = Duration::from_mins(2);

/// What is measured.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Row {
    /// Orders under new keys, against pgbench.
    Orders,
    /// Payments under new keys, against pgbench.
    Payments,
    /// Orders under known keys, against new ones.
    Replays,
}

/// Measures these rows, or all of them if none is named. One that fails is a fault of the report.
pub(crate) async fn measure(bench: &Bench, rows: &[Row], report: &mut Report) {
    let rows = if rows.is_empty() { Row::value_variants() } else { rows };
    for row in rows {
        let measured = match row {
            Row::Orders => fresh(bench, Asked::Orders, report).await,
            Row::Payments => fresh(bench, Asked::Payments, report).await,
            Row::Replays => replays(bench, report).await,
        };
        if let Err(error) = measured {
            let name = row.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            report.fault(format!("{name}: {error:#}"));
        }
    }
}

async fn fresh(bench: &Bench, asked: Asked, report: &mut Report) -> Result<()> {
    let (window, rounds) = (bench.scale.window, bench.scale.rounds);
    let (script, goal) = match asked {
        Asked::Orders => (Script::Order, 0.9),
        Asked::Payments => (Script::Payment, 0.6),
    };
    let path = asked.path();
    let mut stage = building(bench, asked).await?;
    let (mut floors, mut rates, mut best) = (Vec::new(), Vec::new(), None::<Answered>);
    let mut spent = Spent::default();
    for round in 1..=rounds {
        stage.settle().await?;
        let what = format!("pgbench, the writes of POST {path} one by one, round {round}");
        let url = stage.url();
        let floor = pgbench::floor(script, &url, stage::CONNECTIONS, window);
        floors.push(phase(&what, window + AROUND, floor).await?);
        stage.settle().await?;
        let what = format!("POST {path}, {} connections, round {round}", stage::CONNECTIONS);
        let before = processor_time(stage.pid())?;
        let answered =
            phase(&what, window + AROUND, stage.send_fresh(&format!("round-{round}"), window)).await?;
        spent.add(processor_time(stage.pid())?.saturating_sub(before), answered.count());
        rates.push(answered.rate);
        if best.as_ref().is_none_or(|best| best.rate < answered.rate) {
            best = Some(answered);
        }
    }
    let best = best.context("no round was measured")?;
    report.line(Line {
        name: format!("POST {path}, fresh"),
        unit: Unit::RequestsPerSecond,
        figure: Figure::greatest(&rates),
        floor: Some(("pgbench, the same writes one by one", Figure::greatest(&floors))),
        goal: Goal::RatioAtLeast(goal),
    });
    for (name, percent) in [("half of all", 50), ("99 of 100", 99)] {
        let within = percentile(&best.latencies, percent).context("no request was answered in time")?;
        report.line(Line {
            name: format!("POST {path}, fresh: {name} within"),
            unit: Unit::Milliseconds,
            figure: Figure::milliseconds(within),
            floor: None,
            goal: Goal::None,
        });
    }
    report.note(format!("POST {path}, fresh: {}", spent.tell()));
    ended(stage, path, report).await
}

async fn replays(bench: &Bench, report: &mut Report) -> Result<()> {
    let (window, rounds) = (bench.scale.window, bench.scale.rounds);
    let mut stage = building(bench, Asked::Orders).await?;
    let (mut floors, mut rates, mut spent) = (Vec::new(), Vec::new(), Spent::default());
    for round in 1..=rounds {
        let run = format!("round-{round}");
        stage.settle().await?;
        let what = format!("POST /v1/orders under new keys, round {round}");
        let made = phase(&what, window + AROUND, stage.send_fresh(&run, window)).await?;
        stage.settle().await?;
        let what = format!("POST /v1/orders under the same keys, round {round}");
        let before = processor_time(stage.pid())?;
        let again = phase(&what, window + AROUND, stage.send_again(&run, &made, window)).await?;
        spent.add(processor_time(stage.pid())?.saturating_sub(before), again.count());
        floors.push(made.rate);
        rates.push(again.rate);
    }
    report.line(Line {
        name: "POST /v1/orders, replayed".to_owned(),
        unit: Unit::RequestsPerSecond,
        figure: Figure::greatest(&rates),
        floor: Some(("fresh ones", Figure::greatest(&floors))),
        goal: Goal::RatioAtLeast(2.0),
    });
    report.note(format!("POST /v1/orders, replayed: {}", spent.tell()));
    ended(stage, "replays", report).await
}

async fn building(bench: &Bench, asked: Asked) -> Result<Stage> {
    phase("a database, a provider and an API, warmed up", AROUND, Stage::build(bench, asked)).await
}

/// Stops the stage; what is not as the clients were told is a fault of the report.
async fn ended(stage: Stage, what: &str, report: &mut Report) -> Result<()> {
    for fault in phase("comparing what was told with what is there", AROUND, stage.end()).await? {
        report.fault(format!("{what}: {fault}"));
    }
    Ok(())
}

/// The processor time that the API has spent.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    time: Duration,
    requests: usize,
}

impl Spent {
    fn add(&mut self, time: Duration, requests: usize) {
        self.time += time;
        self.requests += requests;
    }

    fn tell(self) -> String {
        let each = self.time.as_secs_f64() * 1e6 / float(self.requests.max(1));
        format!("the API's own processor time is {each:.0} µs a request")
    }
}
