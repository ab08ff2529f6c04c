//! What a relay costs that has nothing to do, after it had.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use sqlx::{Executor as _, PgConnection, Row as _};

use super::super::Bench;
use super::super::phase::phase;
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{self, Stage};
use super::super::usage::processor_time;
use super::drain_limit;

/// How many events it has drained before.
const BEFORE: i64 = 10_000;

/// The server hears of what a session did only once that has been idle for ten seconds.
const SETTLE: Duration = Duration::from_secs(11);

pub(super) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    let limit = drain_limit(BEFORE) + bench.scale.idle * 2 + Duration::from_mins(1);
    let (statements, percent, resident) = phase("an idle relay", limit, async {
        let stage = Stage::build(bench).await?;
        stage.fill(BEFORE).await?;
        let relays = [stage.relay("bench-idle").await?];
        stage.drained(&relays, BEFORE, drain_limit(BEFORE)).await?;
        let mut connection = stage.connect().await?;
        // Its autovacuum would be counted too.
        connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)").await?;
        let pid = relays[0].daemon.id().pid();
        let mut settling = tokio::time::interval(SETTLE);
        settling.tick().await;
        settling.tick().await;
        let began = Instant::now();
        let before = (transactions(&mut connection).await?, processor_time(pid)?);
        let mut watching = tokio::time::interval(bench.scale.idle);
        watching.tick().await;
        watching.tick().await;
        let after = (transactions(&mut connection).await?, processor_time(pid)?);
        let seconds = began.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "memory lies far below 2^53 bytes")]
        let resident = relays[0].daemon.id().resident_bytes()? as f64 / (1024.0 * 1024.0);
        stage::stop(&relays).await?;
        // One of the transactions was our own look.
        let statements = (after.0 - before.0 - 1.0) / seconds;
        let percent = after.1.saturating_sub(before.1).as_secs_f64() / seconds * 100.0;
        Ok((statements, percent, resident))
    })
    .await?;
    for (what, unit, value, bound) in [
        ("statements", Unit::StatementsPerSecond, statements, 5.0),
        ("processor", Unit::PercentOfCore, percent, 1.0),
        ("resident memory", Unit::Mebibytes, resident, 40.0),
    ] {
        report.line(Line {
            name: format!("idle relay: {what}"),
            unit,
            figure: Figure::one(value),
            floor: None,
            goal: Goal::AtMost(bound),
        });
    }
    Ok(())
}

/// Transactions of this database so far. An idle relay's statements are each a transaction of its own.
async fn transactions(connection: &mut PgConnection) -> Result<f64> {
    let look = "SELECT (xact_commit + xact_rollback)::FLOAT8 FROM pg_stat_database WHERE datname = current_database()";
    let row = sqlx::query(look).fetch_one(connection).await.context("asking for the statistics")?;
    Ok(row.try_get(0)?)
}
