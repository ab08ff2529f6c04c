//! One of two relays is killed under load: how long until the events that were there then have arrived; and how long that
//! takes from a moment at which nobody is killed.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::super::Bench;
use super::super::arrivals::{Arrivals, Keep};
use super::super::phase::phase;
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, AGGREGATES, Stage};
use super::super::writers::{Load, Sent};
use super::latency::ARRIVE;
use crate::wait::eventually;

/// For how long the load goes on at most, per killed relay; it ends with the last one.
const PER_KILL: Duration = Duration::from_secs(30);
/// Events between one kill and the next: a second of load.
const BETWEEN: usize = 1_000;

/// How long the last of the events took, each time.
#[derive(Debug, Default)]
struct Measured {
    undisturbed: Vec<f64>,
    killed: Vec<f64>,
}

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    let kills = bench.scale.kills;
    let duration = PER_KILL * u32::try_from(kills)?;
    let load =
        Load { per_second: 100, per_statement: 10, aggregates: usize::try_from(AGGREGATES)?, duration };
    let what = format!("{kills} relays killed at 1,000 events/s");
    let measured = phase(&what, duration + ARRIVE, async {
        let stage = Stage::build(bench).await?;
        let arrivals = Arrivals::open(&stage.pipe, Keep::Times).await?;
        let mut relays = vec![stage.relay("bench-crash-0").await?, stage.relay("bench-crash-1").await?];
        let sent = Sent::default();
        let killing = async {
            let mut measured = Measured::default();
            for kill in 1..=kills {
                arrivals.wait_for(sent.count() + BETWEEN, ARRIVE).await?;
                under_way(&sent, &arrivals).await?;
                measured.undisturbed.push(last_of(Instant::now(), &sent, &arrivals).await?);
                let victim = relays.remove(0);
                under_way(&sent, &arrivals).await?;
                let killed = Instant::now();
                victim.daemon.kill().await?;
                measured.killed.push(last_of(killed, &sent, &arrivals).await?);
                relays.push(stage.relay(&format!("bench-crash-{}", kill + 1)).await?);
            }
            sent.enough();
            anyhow::Ok(measured)
        };
        let ((), measured) = tokio::try_join!(load.write(&stage, &sent), killing)?;
        arrivals.wait_for(sent.count(), ARRIVE).await?;
        stage::stop(&relays).await?;
        let audit = arrivals.close().await;
        for fault in audit.faults(sent.count()) {
            report.fault(format!("crash: {fault}"));
        }
        report.note(format!("crash: {kills} kills, {} events arrived twice", audit.repeats));
        Ok(measured)
    })
    .await?;
    report.line(Line {
        name: "one of two relays killed: last of its events, slowest".to_owned(),
        unit: Unit::Milliseconds,
        figure: Figure::greatest(&measured.killed),
        floor: Some(("without a kill", Figure::greatest(&measured.undisturbed))),
        goal: Goal::AtMost(2_000.0),
    });
    Ok(())
}

/// Waits for a moment at which events are on their way: just after an arrival there are often none.
async fn under_way(sent: &Sent, arrivals: &Arrivals) -> Result<()> {
    let look = || async { (sent.count() > arrivals.count()).then_some(()) };
    eventually("events on their way", ARRIVE, look).await
}

/// How many milliseconds after a moment the last of the events arrives that had been sent before it.
async fn last_of(moment: Instant, sent: &Sent, arrivals: &Arrivals) -> Result<f64> {
    let before: Vec<_> = sent.times().into_iter().filter(|&(_, at)| at < moment).map(|(id, _)| id).collect();
    let last = || async {
        let arrived = arrivals.times();
        let missing = before.iter().filter(|id| !arrived.contains_key(id)).count();
        if missing == 0 {
            Ok(before.iter().filter_map(|id| arrived.get(id)).max().copied())
        } else {
            Err(missing)
        }
    };
    let last = eventually("the last of the events that had been sent", ARRIVE, last).await?;
    let last = last.context("nothing had been sent")?;
    Ok(last.saturating_duration_since(moment).as_secs_f64() * 1000.0)
}
