//! Throughput: a prepared backlog, drained by one process and by two, against the bare publisher.
//!
//! The rounds of the three take turns, so that whatever else the machine does falls on all of them.

use anyhow::Result;

use super::super::Bench;
use super::super::arrivals::audited;
use super::super::phase::phase;
use super::super::pipe::{Pipe, Template};
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, Stage};
use super::drain_limit;
use crate::system::Running;

pub(super) async fn measure(bench: &Bench, template: &Template, report: &mut Report) -> Result<()> {
    let (mut floors, mut ones, mut twos) = (Vec::new(), Vec::new(), Vec::new());
    let events = bench.scale.drain;
    for round in 1..=bench.scale.rounds {
        let count = usize::try_from(events)?;
        floors.push(
            phase(&format!("bare publisher, {events} messages, round {round}"), drain_limit(events), async {
                Pipe::lay(&bench.services).await?.floor(template, count).await
            })
            .await?,
        );
        for (relays, rates) in [(1, &mut ones), (2, &mut twos)] {
            let what = format!("{relays} relay processes, {events} events, round {round}");
            rates.push(phase(&what, drain_limit(events) * 2, one_round(bench, relays, round, report)).await?);
        }
    }
    let (floor, one, two) = (Figure::greatest(&floors), Figure::greatest(&ones), Figure::greatest(&twos));
    report.line(Line {
        name: "drain, one process, strict order".to_owned(),
        unit: Unit::PerSecond,
        figure: one.clone(),
        floor: Some(("bare confirmed publisher", floor)),
        goal: Goal::RatioAtLeast(0.9),
    });
    report.line(Line {
        name: "drain, two processes".to_owned(),
        unit: Unit::PerSecond,
        figure: two,
        floor: Some(("one process", one)),
        goal: Goal::RatioAtLeast(1.0),
    });
    Ok(())
}

async fn one_round(bench: &Bench, count: usize, round: usize, report: &mut Report) -> Result<f64> {
    let events = bench.scale.drain;
    let stage = Stage::build(bench).await?;
    stage.fill(events).await?;
    let mut relays = Vec::new();
    for number in 1..=count {
        relays.push(stage.relay(&format!("bench-drain-{number}")).await?);
    }
    stage.drained(&relays, events, drain_limit(events)).await?;
    if count == 1 && round == 1 {
        report.note(times(&relays[0]).await?);
    }
    stage::stop(&relays).await?;
    check(&stage, "drain", events, report).await?;
    stage.drain_rate(events).await
}

/// Reads the queue to its end; what is wrong with it is a fault of the report.
pub(super) async fn check(stage: &Stage, what: &str, events: i64, report: &mut Report) -> Result<()> {
    let expected = usize::try_from(events)?;
    let audit = audited(&stage.pipe, expected, drain_limit(events)).await?;
    for fault in audit.faults(expected) {
        report.fault(format!("{what}: {fault}"));
    }
    if audit.repeats > 0 {
        report.note(format!("{what}: {} events arrived twice", audit.repeats));
    }
    Ok(())
}

/// Where a worker's time goes, by the relay's own histograms.
async fn times(relay: &Running) -> Result<String> {
    let of = async |name: &str, what: &str| relay.metric(&format!("{name}_{what}"), "").await;
    let (claim, confirm) =
        (of(semel_relay::metrics::CLAIM, "sum").await?, of(semel_relay::metrics::CONFIRM, "sum").await?);
    let (waves, batches) =
        (of(semel_relay::metrics::CONFIRM, "count").await?, of(semel_relay::metrics::BATCH, "count").await?);
    let events = of(semel_relay::metrics::BATCH, "sum").await?;
    Ok(format!(
        "drain by one process, on average: a batch has {:.0} events, is taken and read in {:.1} ms, and published in {:.1} waves \
         of {:.1} ms",
        events / batches,
        claim / batches * 1000.0,
        waves / batches,
        confirm / waves * 1000.0
    ))
}
