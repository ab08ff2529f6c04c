//! The consumer's figures: bookings of the ledger against the same writes by pgbench, in batches, and delivered twice.
//!
//! A figure and its floor take turns over the same tables. The messages wait in the queue when a ledger starts; its rate is
//! that from the first tenth of them to the last, by its own counters. What it has booked is compared with what was sent.

mod stage;

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;

use self::stage::{Drained, Sent, Stage};
use super::Bench;
use super::pgbench::{self, Script};
use super::phase::phase;
use super::report::{Figure, Goal, Line, Report, Unit};
use super::statistics::float;

/// How long a measurement may take beside its window.
const AROUND: Duration = Duration::from_mins(3);
/// Messages that a batch holds at most.
const BATCH: usize = 50;

/// What is measured.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Row {
    /// One message per transaction, against pgbench; in batches, and delivered twice, against that.
    Bookings,
}

/// Measures these rows, or all of them if none is named. One that fails is a fault of the report.
pub(crate) async fn measure(bench: &Bench, rows: &[Row], report: &mut Report) {
    let rows = if rows.is_empty() { Row::value_variants() } else { rows };
    for row in rows {
        let measured = match row {
            Row::Bookings => bookings(bench, report).await,
        };
        if let Err(error) = measured {
            let name = row.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            report.fault(format!("{name}: {error:#}"));
        }
    }
}

/// How the ledger takes messages.
#[derive(Clone, Copy, Debug)]
struct Mode {
    name: &'static str,
    batch: usize,
    sent: Sent,
}

const MODES: [Mode; 3] = [
    Mode { name: "one message a transaction", batch: 1, sent: Sent::Once },
    Mode { name: "every message delivered twice", batch: 1, sent: Sent::Twice },
    Mode { name: "batches", batch: BATCH, sent: Sent::Once },
];

async fn bookings(bench: &Bench, report: &mut Report) -> Result<()> {
    let (window, rounds, messages) = (bench.scale.window, bench.scale.rounds, bench.scale.messages);
    let stage = phase("a database and a ledger's queue", AROUND, Stage::build(bench)).await?;
    let mut floors = Vec::new();
    let mut drained: [Vec<Drained>; MODES.len()] = Default::default();
    for round in 1..=rounds {
        stage.settle().await?;
        let what = format!("pgbench, a booking statement by statement, round {round}");
        let url = stage.url();
        let floor = pgbench::floor(Script::Booking, &url, stage::CONCURRENCY, window);
        floors.push(phase(&what, window + AROUND, floor).await?);
        for (mode, drained) in MODES.iter().zip(&mut drained) {
            let client = format!("round-{round}-{}-{}", mode.batch, mode.sent.times());
            phase("filling the queue", AROUND, stage.send(&client, messages, mode.sent)).await?;
            stage.settle().await?;
            let what = format!("ledger, {}, {messages} events, round {round}", mode.name);
            let expected = messages * mode.sent.times();
            drained.push(phase(&what, AROUND, stage.drain(bench, mode.batch, expected)).await?);
            if let Some(fault) = stage.compare(&client, messages).await? {
                report.fault(format!("ledger, {}, round {round}: {fault}", mode.name));
            }
        }
    }
    let [one, twice, batches] = drained;
    let (floor, plain) = (Figure::greatest(&floors), rates(&one));
    for (mode, figure, floor, goal) in [
        (MODES[0], plain.clone(), ("pgbench, the same statements", floor), 0.5),
        (MODES[1], rates(&twice), ("each delivered once", plain.clone()), 0.8),
        (MODES[2], rates(&batches), ("one message a transaction", plain), 2.0),
    ] {
        report.line(Line {
            name: format!("ledger, {}", mode.name),
            unit: Unit::PerSecond,
            figure,
            floor: Some(floor),
            goal: Goal::RatioAtLeast(goal),
        });
    }
    for (mode, drained) in MODES.iter().zip([&one, &twice, &batches]) {
        report.note(format!("ledger, {}: {}", mode.name, spent(drained)));
    }
    Ok(())
}

fn rates(drained: &[Drained]) -> Figure {
    Figure::greatest(&drained.iter().map(|drained| drained.rate).collect::<Vec<_>>())
}

fn spent(drained: &[Drained]) -> String {
    let time: Duration = drained.iter().map(|drained| drained.processor).sum();
    let messages: usize = drained.iter().map(|drained| drained.messages).sum();
    let each = time.as_secs_f64() * 1e6 / float(messages.max(1));
    format!("the ledger's own processor time is {each:.0} µs a message")
}
