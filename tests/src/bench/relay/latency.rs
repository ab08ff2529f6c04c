//! From just before an INSERT is sent to the arrival at a consumer; against the bare publisher, from just before it sends.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use uuid::Uuid;

use super::super::Bench;
use super::super::arrivals::{Arrivals, Keep};
use super::super::phase::phase;
use super::super::pipe::{EVENT_TYPE, Pipe, Template};
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, AGGREGATES, Stage};
use super::super::statistics::percentile;
use super::super::writers::{Event, Load, Sent, insert};

/// How long the last event may take to arrive.
pub(super) const ARRIVE: Duration = Duration::from_secs(30);

/// A steady load of single events.
pub(super) fn load(bench: &Bench) -> Result<Load> {
    let aggregates = usize::try_from(AGGREGATES)?;
    Ok(Load { per_second: 150, per_statement: 1, aggregates, duration: bench.scale.steady })
}

pub(super) async fn measure(bench: &Bench, template: &Template, report: &mut Report) -> Result<()> {
    let load = load(bench)?;
    let limit = load.duration + ARRIVE * 3;
    let floor = phase("latency of the bare publisher at 150/s", limit, async {
        let pipe = Pipe::lay(&bench.services).await?;
        let arrivals = Arrivals::open(&pipe, Keep::TimesAlone).await?;
        let sent = Sent::default();
        load.publish(&pipe, template, &sent).await?;
        latencies(&sent, &arrivals).await
    })
    .await?;
    let ours = phase("latency of the relay at 150/s", limit, async {
        let stage = Stage::build(bench).await?;
        let relays = [stage.relay("bench-latency").await?];
        let measured = steady(&stage, load, report).await?;
        stage::stop(&relays).await?;
        Ok(measured)
    })
    .await?;
    for (percent, bound) in [(50, 5.0), (99, 15.0)] {
        let figure =
            |measured| percentile(measured, percent).map(Figure::milliseconds).context("nothing arrived");
        report.line(Line {
            name: format!("insert → consumer at 150/s, p{percent}"),
            unit: Unit::Milliseconds,
            figure: figure(&ours)?,
            floor: Some(("bare publisher → consumer", figure(&floor)?)),
            goal: Goal::AtMost(bound),
        });
    }
    Ok(())
}

/// Single events in an idle system: the prober is at its longest pause, and nobody tells it.
pub(super) async fn measure_alone(bench: &Bench, report: &mut Report) -> Result<()> {
    let measured = phase("single events in an idle system", ARRIVE * 4, async {
        let stage = Stage::build(bench).await?;
        let arrivals = Arrivals::open(&stage.pipe, Keep::Times).await?;
        let relays = [stage.relay("bench-alone").await?];
        let mut connection = stage.connect().await?;
        // Long enough for the prober's pauses to have grown, and of no beat with them.
        let mut ticks = tokio::time::interval(Duration::from_millis(1_370));
        ticks.tick().await;
        let mut measured = Vec::new();
        for number in 0..bench.scale.alone {
            ticks.tick().await;
            let event = Event { id: Uuid::new_v4(), aggregate: format!("alone-{number}"), version: 1 };
            let began = Instant::now();
            insert(&mut connection, std::slice::from_ref(&event), EVENT_TYPE).await?;
            arrivals.wait_for(number + 1, ARRIVE).await?;
            let arrived = arrivals.times().get(&event.id).copied().context("another event arrived")?;
            measured.push(arrived.saturating_duration_since(began));
        }
        stage::stop(&relays).await?;
        Ok(measured)
    })
    .await?;
    report.line(Line {
        name: "insert into an idle system, no hint → consumer, slowest".to_owned(),
        unit: Unit::Milliseconds,
        figure: Figure {
            value: percentile(&measured, 100).context("nothing arrived")?.as_secs_f64() * 1000.0,
            samples: measured.iter().map(|time| time.as_secs_f64() * 1000.0).collect(),
        },
        floor: None,
        goal: Goal::AtMost(300.0),
    });
    Ok(())
}

/// Writes a load while relays run, and checks what arrives.
pub(super) async fn steady(stage: &Stage, load: Load, report: &mut Report) -> Result<Vec<Duration>> {
    let arrivals = Arrivals::open(&stage.pipe, Keep::Times).await?;
    let sent = Sent::default();
    load.write(stage, &sent).await?;
    let measured = latencies(&sent, &arrivals).await;
    for fault in arrivals.close().await.faults(sent.count()) {
        report.fault(format!("steady load: {fault}"));
    }
    measured
}

/// Waits until everything has arrived, and says how long each took.
async fn latencies(sent: &Sent, arrivals: &Arrivals) -> Result<Vec<Duration>> {
    arrivals.wait_for(sent.count(), ARRIVE).await?;
    let (sent, arrived) = (sent.times(), arrivals.times());
    let taken = |(id, at): (&Uuid, &Instant)| Some(arrived.get(id)?.saturating_duration_since(*at));
    Ok(sent.iter().filter_map(taken).collect())
}
