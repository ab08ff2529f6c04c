//! The planner's trap: every statement of the hot path reads the hot index and nothing else, whatever the planner knows.
//!
//! Judged by what the server's own statistics say was touched, not by the text of a plan: the statements run as the relay
//! runs them, on a table with a million published rows, never analysed, analysed, and analysed before a backlog came, under
//! custom and generic plans.

use std::collections::BTreeMap;

use anyhow::Result;
use semel_core::database;
use semel_core::outbox::drain::Floors;
use semel_core::outbox::{self, drain, held};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};

use crate::yard::Yard;

const PUBLISHED: i64 = 1_000_000;
const PENDING: i64 = 5_000;
const BACKLOG: i64 = 40_000;

/// What a statement touched: blocks per index and in the table, and how often each was scanned.
#[derive(Clone, Debug, Default)]
pub(crate) struct Touched {
    sequential_scans: i64,
    index_scans: BTreeMap<String, i64>,
    pub(crate) blocks: i64,
}

/// Asks what was touched so far.
pub(crate) async fn touched(connection: &mut PgConnection) -> Result<Touched> {
    connection.execute("SELECT pg_stat_force_next_flush()").await?;
    connection.execute("SELECT pg_stat_clear_snapshot()").await?;
    let table = sqlx::query(
        "SELECT seq_scan::BIGINT, (heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::BIGINT
         FROM pg_stat_user_tables JOIN pg_statio_user_tables USING (relid)
         WHERE pg_stat_user_tables.relname = 'outbox'",
    )
    .fetch_one(&mut *connection)
    .await?;
    let indexes =
        "SELECT indexrelname::TEXT, idx_scan::BIGINT FROM pg_stat_user_indexes WHERE relname = 'outbox'";
    let indexes = sqlx::query(indexes).fetch_all(&mut *connection).await?;
    let index_scans =
        indexes.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?;
    Ok(Touched { sequential_scans: table.try_get(0)?, blocks: table.try_get(1)?, index_scans })
}

/// Checks what was touched since `before`: one index only, no sequential scan, and no more blocks than `blocks`.
async fn assert_touched(
    connection: &mut PgConnection,
    before: &Touched,
    what: &str,
    index: &str,
    blocks: i64,
) -> Result<()> {
    let after = touched(connection).await?;
    assert_eq!(after.sequential_scans, before.sequential_scans, "{what}: read the whole table");
    for (name, scans) in &after.index_scans {
        let scanned = scans - before.index_scans.get(name).copied().unwrap_or_default();
        if name == index {
            assert!(scanned > 0, "{what}: did not use {index}");
        } else {
            assert_eq!(scanned, 0, "{what}: used {name}");
        }
    }
    let used = after.blocks - before.blocks;
    assert!(used <= blocks, "{what}: touched {used} blocks, more than {blocks}");
    Ok(())
}

#[tokio::test]
async fn the_hot_path_touches_only_the_hot_index_beside_a_million_published_rows() -> Result<()> {
    let yard = Yard::new().await?;
    let mut connection = yard.connect().await?;
    connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)").await?;
    fill(&mut connection, PUBLISHED, "now()").await?;
    fill(&mut connection, PENDING, "NULL").await?;
    for state in ["never analysed", "analysed", "analysed before a backlog"] {
        let mut pending = PENDING;
        match state {
            "analysed" => {
                connection.execute("ANALYZE outbox").await?;
            }
            "analysed before a backlog" => {
                pending += BACKLOG;
                fill(&mut connection, BACKLOG, "NULL").await?;
            }
            _ => {}
        }
        for mode in ["force_custom_plan", "force_generic_plan"] {
            // What this session has read itself is told now, and not in the middle of a measurement.
            touched(&mut connection).await?;
            let (round, mode) = (format!("{state}, {mode}"), format!("SET plan_cache_mode = {mode}"));
            // Connections of its own, so that no plan is left from the round before. The gauges are read over a plain one.
            let mut plain = database::connect(&yard.database.url().parse()?, "plans").await?;
            plain.execute(AssertSqlSafe(mode.clone())).await?;
            gauges(&mut plain, &round, pending).await?;
            let mut relay = relay_connection(&yard).await?;
            relay.execute(AssertSqlSafe(mode)).await?;
            hot_path(&mut relay, &round).await?;
        }
    }
    Ok(())
}

/// A connection as a relay's.
async fn relay_connection(yard: &Yard) -> Result<PgConnection> {
    Ok(database::connect_with(&yard.database.url().parse()?, "plans", &drain::SETTINGS).await?)
}

async fn fill(connection: &mut PgConnection, count: i64, published: &str) -> Result<()> {
    let fill = format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at)
         SELECT 'thing', 'a' || n % 1000, 'Happened', '{{}}', {published} FROM generate_series(1, {count}) AS n"
    );
    connection.execute(AssertSqlSafe(fill)).await?;
    Ok(())
}

async fn hot_path(connection: &mut PgConnection, round: &str) -> Result<()> {
    // Floors that leave nothing out, so that there is something to read, and that hold for this server.
    let mut floors = Floors::on(drain::position(connection).await?.run);
    floors.raise(&[], PUBLISHED);
    let before = touched(connection).await?;
    let heads = drain::probe(connection, &floors).await?.heads;
    assert_eq!(heads.len(), 64, "{round}");
    // 64 descents of a small index, and a heap block for each.
    assert_touched(connection, &before, &format!("probe ({round})"), "outbox_hot", 64 * 8).await?;

    let lanes: Vec<i16> = heads.iter().map(|head| head.lane).take(16).collect();
    let before = touched(connection).await?;
    let mut tx = connection.begin().await?;
    assert_eq!(drain::take_lanes(&mut tx, &lanes, 16).await?.len(), 16);
    let events = drain::read(&mut tx, &lanes, &floors, 31, 1 << 20).await?;
    assert_eq!(events.len(), 16 * 31, "{round}");
    tx.rollback().await?;
    // 16 descents, and at most a heap block per event.
    assert_touched(connection, &before, &format!("read ({round})"), "outbox_hot", 16 * 8 + 16 * 31).await?;

    let ids: Vec<uuid::Uuid> = events.iter().map(|event| event.event_id).collect();
    let before = touched(connection).await?;
    let mut tx = connection.begin().await?;
    assert_eq!(drain::mark(&mut tx, &ids).await?.len(), ids.len());
    tx.rollback().await?;
    // A descent and an update per event.
    let blocks = i64::try_from(ids.len())? * 24;
    assert_touched(connection, &before, &format!("mark ({round})"), "outbox_pkey", blocks).await
}

/// The gauges count the pending events, so they may read each of them; but not the published ones.
async fn gauges(connection: &mut PgConnection, round: &str, pending: i64) -> Result<()> {
    let before = touched(connection).await?;
    outbox::sample(connection, &Floors::NONE).await?;
    let after = touched(connection).await?;
    assert_eq!(after.sequential_scans, before.sequential_scans, "sample ({round}): read the whole table");
    let used = after.blocks - before.blocks;
    assert!(used <= pending + 64 * 8, "sample ({round}): touched {used} blocks");
    Ok(())
}

/// What a batch asks about chains costs as much as what it gets, however long a chain or the list of dead ones is.
#[tokio::test]
async fn a_dead_head_with_many_followers_costs_a_batch_nothing() -> Result<()> {
    let yard = Yard::new().await?;
    let mut connection = yard.connect().await?;
    connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)").await?;
    let fill = "
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at)
            SELECT 'thing', 'a' || n % 1000, 'Happened', '{}', now() FROM generate_series(1, 200000) AS n;
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, held_at, attempts, first_error, last_error, dead_at)
            SELECT 'thing', 'dead' || n, 'Happened', '{}', now(), 1, 'e', 'e', now() FROM generate_series(1, 5000) AS n;
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, held_at)
            SELECT 'thing', 'dead1', 'Happened', '{}', now() FROM generate_series(1, 30000) AS n;
        INSERT INTO outbox_held (aggregate_type, aggregate_id, lane, next_attempt_at, dead_at)
            SELECT aggregate_type, aggregate_id, lane, 'infinity', now() FROM outbox WHERE dead_at IS NOT NULL;
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
            SELECT 'thing', CASE n % 2 WHEN 0 THEN 'dead1' ELSE 'free' || n END, 'Happened', '{}'
            FROM generate_series(1, 400) AS n;
        INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, held_at, attempts, first_error, last_error)
            SELECT 'thing', 'due' || n, 'Happened', '{}', now(), 1, 'e', 'e' FROM generate_series(1, 200) AS n;
        INSERT INTO outbox_held (aggregate_type, aggregate_id, lane, next_attempt_at)
            SELECT aggregate_type, aggregate_id, lane, now() - INTERVAL '1 s' FROM outbox WHERE aggregate_id LIKE 'due%'";
    connection.execute(fill).await?;
    for analysed in [false, true] {
        if analysed {
            connection.execute("ANALYZE outbox; ANALYZE outbox_held").await?;
        }
        for mode in ["force_custom_plan", "force_generic_plan"] {
            touched(&mut connection).await?;
            let mut relay = relay_connection(&yard).await?;
            relay.execute(AssertSqlSafe(format!("SET plan_cache_mode = {mode}"))).await?;
            about_chains(&mut relay, &format!("analysed: {analysed}, {mode}")).await?;
        }
    }
    Ok(())
}

async fn about_chains(connection: &mut PgConnection, round: &str) -> Result<()> {
    let lanes: Vec<i16> = (0..64).collect();
    let before = touched(connection).await?;
    assert_eq!(drain::probe(connection, &Floors::NONE).await?.heads.len(), 64, "{round}");
    assert_touched(connection, &before, &format!("probe ({round})"), "outbox_hot", 64 * 8).await?;

    let mut tx = connection.begin().await?;
    let before = touched_within(&mut tx).await?;
    drain::probe(&mut tx, &Floors::NONE).await?;
    let blocks = touched_within(&mut tx).await? - before;
    assert!(blocks <= 64 * 16, "probe ({round}): touched {blocks} blocks");
    let before = touched_within(&mut tx).await?;
    assert_eq!(held::lanes_with_chains(&mut tx, &lanes).await?.len(), 64, "{round}");
    let due = held::due(&mut tx, &lanes, 10, 1 << 20).await?;
    assert_eq!((due.events.len(), due.idle.len()), (200, 0), "{round}");
    let blocks = touched_within(&mut tx).await? - before;
    assert!(blocks <= 200 * 10 + 64 * 10, "due ({round}): touched {blocks} blocks");

    let hot = drain::read(&mut tx, &lanes, &Floors::NONE, 100, 1 << 20).await?;
    let ids: Vec<uuid::Uuid> = hot.iter().map(|event| event.event_id).collect();
    let before = touched_within(&mut tx).await?;
    // Lane by lane at most 100: those of the dead one are in one lane.
    assert!(held::divert(&mut tx, &ids).await?.len() >= 90, "{round}");
    let blocks = touched_within(&mut tx).await? - before;
    assert!(blocks <= i64::try_from(ids.len())? * 16, "divert ({round}): touched {blocks} blocks");

    let before = touched_within(&mut tx).await?;
    let failures: Vec<_> = due
        .events
        .iter()
        .map(|event| held::Failure { event_id: event.event_id, error: "e".to_owned() })
        .collect();
    let policy = held::Policy {
        shortest: std::time::Duration::from_secs(1),
        longest: std::time::Duration::from_secs(1),
        max_attempts: 10,
        skip_dead: Vec::new(),
    };
    assert_eq!(held::hold(&mut tx, &failures, &policy).await?.len(), 200, "{round}");
    let chains: Vec<_> = due
        .events
        .iter()
        .map(|event| held::Aggregate { kind: event.aggregate_type.clone(), id: event.aggregate_id.clone() })
        .collect();
    held::settle(&mut tx, &chains).await?;
    held::postpone(&mut tx, &chains, &policy).await?;
    let blocks = touched_within(&mut tx).await? - before;
    assert!(blocks <= 200 * 100, "hold and settle ({round}): touched {blocks} blocks");
    tx.rollback().await?;
    Ok(())
}

/// The blocks of both tables that this transaction's statements touched so far.
async fn touched_within(tx: &mut PgConnection) -> Result<i64> {
    let blocks = "SELECT sum(pg_stat_get_xact_blocks_fetched(oid))::BIGINT FROM pg_class
        WHERE relname ~ '^outbox' AND relkind IN ('r', 'i')";
    Ok(sqlx::query(blocks).fetch_one(tx).await?.try_get(0)?)
}
