//! The textbook's loop, to compare with: one transaction that takes rows with FOR UPDATE SKIP LOCKED, publishes them and
//! marks them.
//!
//! It is given what the textbook gives it: a table ordered by a primary key, with a partial index over what is pending.

use std::time::Instant;

use anyhow::{Context as _, Result};
use futures_util::future::try_join_all;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use uuid::Uuid;

use super::super::Bench;
use super::super::arrivals::audited;
use super::super::phase::phase;
use super::super::pipe::{Pipe, Template, close, confirmed};
use super::super::report::{Figure, Goal, Line, Report, Unit};
use super::super::stage::{AGGREGATES, BURST};
use super::super::statistics::float;
use super::drain_limit;
use crate::services::Database;

/// Rows of one transaction. No multiple of a burst: batches end in the middle of one, as they do in life.
const BATCH: i64 = 96;

/// How a worker waits for confirms.
#[derive(Clone, Copy, Debug)]
enum Confirms {
    /// After each message.
    Each,
    /// After all messages of a batch.
    Batch,
}

/// What one run came to.
struct Outcome {
    rate: f64,
    overtaken: usize,
}

pub(super) async fn measure(bench: &Bench, template: &Template, report: &mut Report) -> Result<()> {
    let one_by_one = run(bench, template, Confirms::Each, 1, false).await?;
    let batches = run(bench, template, Confirms::Batch, 1, false).await?;
    let two = run(bench, template, Confirms::Batch, 2, false).await?;
    let snapshot = run(bench, template, Confirms::Batch, 1, true).await?;
    let mut line = |name: &str, unit, value, floor| {
        let (name, figure) = (format!("textbook loop: {name}"), Figure::one(value));
        report.line(Line { name, unit, figure, floor, goal: Goal::None });
    };
    line("confirmed one by one", Unit::PerSecond, one_by_one.rate, None);
    line("confirmed batch by batch", Unit::PerSecond, batches.rate, None);
    let floor = || Some(("one worker", Figure::one(batches.rate)));
    line("two workers", Unit::PerSecond, two.rate, floor());
    line("two workers: events out of order", Unit::Events, float(two.overtaken), None);
    let floor = Some(("without it", Figure::one(batches.rate)));
    line("a reader's snapshot held", Unit::PerSecond, snapshot.rate, floor);
    Ok(())
}

/// Drains a table of its own until it is empty or the time is up.
async fn run(
    bench: &Bench,
    template: &Template,
    confirms: Confirms,
    workers: usize,
    snapshot: bool,
) -> Result<Outcome> {
    let events = bench.scale.snapshot;
    let held = if snapshot { ", a snapshot held" } else { "" };
    let what = format!("textbook loop, {workers} workers, confirms per {confirms:?}{held}").to_lowercase();
    phase(&what, drain_limit(events) + bench.scale.textbook * 2, async {
        let database = bench.services.create_database("textbook").await?;
        let pipe = Pipe::lay(&bench.services).await?;
        fill(&database, events).await?;
        let mut reader = database.connect().await?;
        if snapshot {
            reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
            reader.execute("SELECT count(*) FROM textbook").await?;
        }
        let began = Instant::now();
        let until = began + bench.scale.textbook;
        let template = template.at(&pipe);
        let working = (0..workers).map(|_| work(&database, &pipe, &template, confirms, until));
        let published: usize = try_join_all(working).await?.into_iter().sum();
        let rate = float(published) / began.elapsed().as_secs_f64();
        let audit = audited(&pipe, published, drain_limit(events)).await?;
        Ok(Outcome { rate, overtaken: audit.overtaken })
    })
    .await
}

async fn fill(database: &Database, events: i64) -> Result<()> {
    let mut connection = database.connect().await?;
    connection
        .execute(
            "CREATE TABLE textbook (
                id BIGSERIAL PRIMARY KEY, aggregate TEXT NOT NULL, version BIGINT NOT NULL, payload JSONB NOT NULL,
                published_at TIMESTAMPTZ
            ) WITH (autovacuum_vacuum_scale_factor = 0.02);
            CREATE INDEX textbook_pending ON textbook (id) WHERE published_at IS NULL",
        )
        .await
        .context("making the textbook's table")?;
    sqlx::query(
        "INSERT INTO textbook (aggregate, version, payload)
        SELECT 'a' || n / $2 % $1, n / ($1 * $2) * $2 + n % $2 + 1,
               jsonb_build_object('order_id', md5(n::TEXT), 'client_id', 'acme', 'reference', 'A-' || n,
                                  'amount', n % 10000 + 1, 'currency', 'EUR', 'event_id', md5('e' || n))
        FROM generate_series(0::BIGINT, $3 - 1) AS n ORDER BY n",
    )
    .bind(AGGREGATES)
    .bind(BURST)
    .bind(events)
    .execute(&mut connection)
    .await
    .context("filling the textbook's table")?;
    connection.execute("VACUUM (ANALYZE) textbook").await.context("analysing the textbook's table")?;
    Ok(())
}

async fn work(
    database: &Database,
    pipe: &Pipe,
    template: &Template,
    confirms: Confirms,
    until: Instant,
) -> Result<usize> {
    let mut connection = database.connect().await?;
    let (broker, channel) = pipe.confirming_channel().await?;
    let mut published = 0;
    while Instant::now() < until {
        let mut tx = connection.begin().await.context("beginning a batch")?;
        let rows = sqlx::query(
            "SELECT id, aggregate, version, payload::TEXT FROM textbook WHERE published_at IS NULL
            ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
        )
        .bind(BATCH)
        .fetch_all(&mut *tx)
        .await
        .context("taking rows")?;
        if rows.is_empty() {
            break;
        }
        let mut ids: Vec<i64> = Vec::with_capacity(rows.len());
        let mut unconfirmed = Vec::new();
        for row in &rows {
            ids.push(row.try_get(0)?);
            let message = template.of(row.try_get(1)?, row.try_get(2)?, row.try_get::<&str, _>(3)?);
            let confirm = message.send(&channel, Uuid::new_v4()).await?;
            match confirms {
                Confirms::Each => confirmed(confirm).await?,
                Confirms::Batch => unconfirmed.push(confirm),
            }
        }
        for confirm in unconfirmed {
            confirmed(confirm).await?;
        }
        mark(&mut tx, &ids).await?;
        tx.commit().await.context("committing a batch")?;
        published += ids.len();
    }
    close(&broker).await;
    Ok(published)
}

async fn mark(connection: &mut PgConnection, ids: &[i64]) -> Result<()> {
    let mark = "UPDATE textbook SET published_at = clock_timestamp() WHERE id = ANY($1)";
    sqlx::query(mark).bind(ids).execute(connection).await.context("marking rows")?;
    Ok(())
}
