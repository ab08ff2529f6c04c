//! The relay's figures.

mod backlog;
mod crash;
mod drain;
mod failing;
mod idle;
mod latency;
mod textbook;

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use super::Bench;
use super::phase::phase;
use super::pipe::Template;
use super::report::Report;
use super::stage::{self, Stage};

/// How long a drain may take before it is given up: a thousand events per second would be dreadful.
fn drain_limit(events: i64) -> Duration {
    Duration::from_secs(30 + u64::try_from(events).unwrap_or_default() / 1_000)
}

/// What is measured.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Row {
    /// Throughput of one and of two processes.
    Drain,
    /// A great backlog: its end as fast as its beginning.
    Backlog,
    /// A reader's snapshot, held open meanwhile.
    Snapshot,
    /// Insert → consumer at a steady rate.
    Latency,
    /// Insert → consumer in an idle system, without a hint.
    Alone,
    /// One of two relays is killed.
    Crash,
    /// What a relay costs that has nothing to do.
    Idle,
    /// An aggregate whose events cannot be routed, beside healthy ones.
    Failing,
    /// The textbook's loop, for comparison.
    Textbook,
}

/// Measures these rows, or all of them if none is named. One that fails is a fault of the report.
pub(crate) async fn measure(bench: &Bench, rows: &[Row], report: &mut Report) {
    let rows = if rows.is_empty() { Row::value_variants() } else { rows };
    let template = match template(bench).await {
        Ok(template) => template,
        Err(error) => return report.fault(format!("a first event: {error:#}")),
    };
    for row in rows {
        let measured = match row {
            Row::Drain => drain::measure(bench, &template, report).await,
            Row::Backlog => backlog::measure(bench, report).await,
            Row::Snapshot => backlog::measure_with_snapshot(bench, report).await,
            Row::Latency => latency::measure(bench, &template, report).await,
            Row::Alone => latency::measure_alone(bench, report).await,
            Row::Crash => crash::measure(bench, report).await,
            Row::Idle => idle::measure(bench, report).await,
            Row::Failing => failing::measure(bench, report).await,
            Row::Textbook => textbook::measure(bench, &template, report).await,
        };
        if let Err(error) = measured {
            let name = row.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            report.fault(format!("{name}: {error:#}"));
        }
    }
}

/// Lets a relay publish one event: the floors send its like, byte for byte but for the id.
async fn template(bench: &Bench) -> Result<Template> {
    phase("a first event, for the floors to copy", Duration::from_mins(1), async {
        let stage = Stage::build(bench).await?;
        stage.fill(1).await?;
        let relays = [stage.relay("bench-first").await?];
        stage.drained(&relays, 1, Duration::from_secs(30)).await?;
        let template = stage.pipe.template().await?;
        stage::stop(&relays).await?;
        Ok(template)
    })
    .await
}
