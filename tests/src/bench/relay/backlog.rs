//! A great backlog, and a snapshot that keeps what was published from being cleaned up.

use anyhow::{Context as _, Result};
use sqlx::Executor as _;

use super::super::Bench;
use super::super::phase::phase;
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, Stage};
use super::drain::check;
use super::drain_limit;

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    let (events, slice) = (bench.scale.backlog, bench.scale.slice);
    let stage = drained(bench, "backlog", events, Snapshot::None, report).await?;
    // Without the two ends, as in `Stage::drain_rate`.
    let end = slice / 10;
    let first = stage.rate(end, slice).await?;
    let last = stage.rate(events - slice, events - end).await?;
    report.line(Line {
        name: format!("backlog of {events}: its last {slice}"),
        unit: Unit::PerSecond,
        figure: Figure::one(last),
        floor: Some(("its first", Figure::one(first))),
        goal: Goal::RatioAtLeast(0.9),
    });
    Ok(())
}

pub(super) async fn measure_with_snapshot(bench: &Bench, report: &mut Report) -> Result<()> {
    let events = bench.scale.snapshot;
    let without =
        drained(bench, "no snapshot", events, Snapshot::None, report).await?.drain_rate(events).await?;
    let with = drained(bench, "snapshot", events, Snapshot::Held, report).await?.drain_rate(events).await?;
    report.line(Line {
        name: format!("a reader's snapshot held, {events} events"),
        unit: Unit::PerSecond,
        figure: Figure::one(with),
        floor: Some(("without it", Figure::one(without))),
        goal: Goal::RatioAtLeast(0.9),
    });
    Ok(())
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Snapshot {
    None,
    Held,
}

/// Fills an outbox and lets one relay drain it.
async fn drained(
    bench: &Bench,
    name: &str,
    events: i64,
    snapshot: Snapshot,
    report: &mut Report,
) -> Result<Stage> {
    let stage = Stage::build(bench).await?;
    phase(&format!("{name}: writing {events} events"), drain_limit(events), stage.fill(events)).await?;
    let mut reader = stage.connect().await?;
    if snapshot == Snapshot::Held {
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.context("beginning a transaction")?;
        reader.execute("SELECT count(*) FROM outbox").await.context("taking a snapshot")?;
    }
    let draining = async {
        let relays = [stage.relay("bench-backlog").await?];
        stage.drained(&relays, events, drain_limit(events)).await?;
        stage::stop(&relays).await
    };
    phase(&format!("{name}: one relay process, {events} events"), drain_limit(events) * 2, draining).await?;
    reader.execute("ROLLBACK").await.context("ending the reader's transaction")?;
    let checking = check(&stage, name, events, report);
    phase(&format!("{name}: reading the queue"), drain_limit(events) * 2, checking).await?;
    Ok(stage)
}
