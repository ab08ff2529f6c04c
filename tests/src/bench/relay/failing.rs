//! An aggregate whose events cannot be routed, among a thousand healthy ones: what the healthy ones notice.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sqlx::Row as _;
use uuid::Uuid;

use super::super::Bench;
use super::super::phase::phase;
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, Stage};
use super::super::statistics::percentile;
use super::super::writers::{Event, insert};
use super::latency::{ARRIVE, load, steady};

/// An event type that no queue is bound to.
const UNHEARD: &str = "Unheard";
/// How many events of the failing aggregate wait.
const FAILING: i64 = 100;

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    let without = healthy(bench, "healthy aggregates alone", 0, report).await?;
    let with = healthy(bench, "healthy aggregates beside a failing one", FAILING, report).await?;
    for (percent, goal) in [(99, Goal::RatioAtMost(1.2)), (100, Goal::None)] {
        let figure = |measured: &[Duration]| {
            percentile(measured, percent).map(Figure::milliseconds).context("nothing arrived")
        };
        report.line(Line {
            name: format!("beside an unroutable aggregate at 150/s, p{percent}"),
            unit: Unit::Milliseconds,
            figure: figure(&with)?,
            floor: Some(("without it", figure(&without)?)),
            goal,
        });
    }
    Ok(())
}

async fn healthy(bench: &Bench, what: &str, failing: i64, report: &mut Report) -> Result<Vec<Duration>> {
    let load = load(bench)?;
    phase(&format!("{what}, latency at 150/s"), load.duration + ARRIVE * 3, async {
        let stage = Stage::build(bench).await?;
        let relays = [stage.relay("bench-failing").await?];
        let mut connection = stage.connect().await?;
        for version in 1..=failing {
            let event = Event { id: Uuid::new_v4(), aggregate: "failing".to_owned(), version };
            insert(&mut connection, &[event], UNHEARD).await?;
        }
        let measured = steady(&stage, load, report).await?;
        stage::stop(&relays).await?;
        let left = "SELECT count(*) FROM outbox WHERE published_at IS NULL";
        let left: i64 = sqlx::query(left).fetch_one(&mut connection).await?.try_get(0)?;
        ensure!(left == failing, "{left} events are not published, of which {failing} cannot be");
        Ok(measured)
    })
    .await
}
