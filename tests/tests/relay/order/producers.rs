//! Producers that keep the outbox's contract and are otherwise as bad as they may be.
//!
//! Each transaction locks its aggregates before it draws an id. Beside that: transaction ids taken long before the lock,
//! rollbacks, transactions that stay open with ids drawn, bursts, several aggregates at once, and few aggregates that are hot.

use std::collections::BTreeMap;

use anyhow::Result;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

use crate::yard::Yard;

const PRODUCERS: usize = 8;
const HOT: usize = 6;
const COLD: usize = 150;

/// What was committed.
#[derive(Debug)]
pub(super) struct Produced {
    /// The last version of each aggregate; they begin at 1 and have no gaps.
    pub(super) versions: BTreeMap<String, i64>,
}

impl Produced {
    pub(super) fn events(&self) -> Result<usize> {
        Ok(usize::try_from(self.versions.values().sum::<i64>())?)
    }
}

/// Produces at least so many events.
pub(super) async fn produce(yard: &Yard, events: i64) -> Result<Produced> {
    let mut admin = yard.connect().await?;
    admin.execute("CREATE TABLE things (id TEXT PRIMARY KEY, version BIGINT NOT NULL DEFAULT 0)").await?;
    let fill = format!(
        "INSERT INTO things SELECT 'hot' || n FROM generate_series(1, {HOT}) AS n;
         INSERT INTO things SELECT 'cold' || n FROM generate_series(1, {COLD}) AS n"
    );
    admin.execute(AssertSqlSafe(fill)).await?;
    let share = events / i64::try_from(PRODUCERS)?;
    let mut producers = Vec::new();
    for _ in 0..PRODUCERS {
        producers.push(producer(yard.connect().await?, share));
    }
    futures_util::future::try_join_all(producers).await?;
    let rows = sqlx::query("SELECT id, version FROM things WHERE version > 0").fetch_all(&mut admin).await?;
    let versions = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?;
    Ok(Produced { versions })
}

async fn producer(mut connection: PgConnection, events: i64) -> Result<()> {
    // A hot aggregate is waited for, however long its owner sleeps.
    connection.execute("SET lock_timeout = 0").await?;
    let mut done = 0;
    while done < events {
        done += transaction(&mut connection).await?;
    }
    Ok(())
}

/// Runs one transaction, and returns how many events it committed.
async fn transaction(connection: &mut PgConnection) -> Result<i64> {
    connection.execute("BEGIN").await?;
    if fastrand::u8(0..3) == 0 {
        connection.execute("SELECT pg_current_xact_id()").await?;
        sleep(connection, 5).await?;
    }
    // In the order of their names, so that nobody waits in a circle.
    let mut aggregates: Vec<String> = (0..fastrand::usize(1..=2)).map(|_| aggregate()).collect();
    aggregates.sort();
    aggregates.dedup();
    let mut events = 0;
    for aggregate in &aggregates {
        let burst = if fastrand::u8(0..8) == 0 { fastrand::i64(5..25) } else { fastrand::i64(1..4) };
        let locked = "UPDATE things SET version = version + $2 WHERE id = $1 RETURNING version";
        let version: i64 =
            sqlx::query(locked).bind(aggregate).bind(burst).fetch_one(&mut *connection).await?.try_get(0)?;
        sqlx::query(
            "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
             SELECT 'thing', $1, v, 'Happened', '{}' FROM generate_series($2, $3) AS v ORDER BY v",
        )
        .bind(aggregate)
        .bind(version - burst + 1)
        .bind(version)
        .execute(&mut *connection)
        .await?;
        events += burst;
    }
    match fastrand::u8(0..100) {
        0 => sleep(connection, 1500).await?,
        1..20 => sleep(connection, 20).await?,
        _ => {}
    }
    if fastrand::u8(0..7) == 0 {
        connection.execute("ROLLBACK").await?;
        return Ok(0);
    }
    connection.execute("COMMIT").await?;
    Ok(events)
}

fn aggregate() -> String {
    if fastrand::bool() {
        format!("hot{}", fastrand::usize(1..=HOT))
    } else {
        format!("cold{}", fastrand::usize(1..=COLD))
    }
}

/// Lets the transaction stand open for up to so many milliseconds.
async fn sleep(connection: &mut PgConnection, longest: u64) -> Result<()> {
    let sleep = format!("SELECT pg_sleep({})", f64::from(u32::try_from(fastrand::u64(0..longest))?) / 1000.0);
    connection.execute(AssertSqlSafe(sleep)).await?;
    Ok(())
}
