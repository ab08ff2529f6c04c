//! From which id on a relay reads: high enough that published events cost nothing, and never so high that one is hidden.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_core::lifecycle::Work as _;
use semel_core::outbox;
use semel_core::outbox::drain::{self, Floors, LANES};
use semel_core::schema::{self, ENGINE};
use semel_tests::services::Services;
use semel_tests::wait::eventually;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

use crate::plans::touched;
use crate::yard::{Relay, Yard, arrived, first_deliveries};

const SOON: Duration = Duration::from_mins(1);

async fn last_id(connection: &mut PgConnection) -> Result<i64> {
    Ok(sqlx::query("SELECT last_value FROM outbox_id_seq").fetch_one(connection).await?.try_get(0)?)
}

/// The id of an aggregate's event, as its own transaction sees it.
async fn id_of(connection: &mut PgConnection, aggregate: &str) -> Result<i64> {
    let id = sqlx::query("SELECT max(id) FROM outbox WHERE aggregate_id = $1").bind(aggregate);
    Ok(id.fetch_one(connection).await?.try_get(0)?)
}

/// Probes until every floor is above this id.
async fn risen_above(relay: Relay, id: i64) -> Result<Relay> {
    let shared = relay.shared.clone();
    let relay = tokio::sync::Mutex::new(relay);
    let look = || async {
        relay.lock().await.prober.run_once().await.map_err(|error| error.to_string())?;
        let lowest = shared.floors().all().iter().copied().min().unwrap_or_default();
        if lowest > id { Ok(()) } else { Err(format!("the lowest floor is {lowest}")) }
    };
    eventually(&format!("every floor above {id}"), SOON, look).await?;
    Ok(relay.into_inner())
}

/// Works for as long as it takes the floors to rise as far as they may.
async fn settled(relay: Relay) -> Result<Relay> {
    let mut relay = relay;
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_millis(700) {
        relay = relay.drain().await?;
    }
    Ok(relay)
}

/// Checks that no floor hides an event.
async fn assert_nothing_is_hidden(connection: &mut PgConnection, floors: &Floors) -> Result<()> {
    for head in drain::probe(connection, &Floors::NONE).await?.heads {
        let is_hidden = head.id.is_some_and(|id| id < floors.of(head.lane));
        ensure!(!is_hidden, "{head:?} lies below its floor {}", floors.of(head.lane));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_drew_its_id_and_sleeps_is_waited_for_while_thousands_pass_it() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(64, 4).await?;
    let relay = Relay::new(&yard.config(2)?).drain().await?;
    let mut watch = yard.connect().await?;
    let before = last_id(&mut watch).await?;
    let relay = risen_above(relay, before).await?;

    let mut sleeper = yard.connect().await?;
    sleeper.execute("BEGIN").await?;
    yard.insert(&mut sleeper, "late", 1, "Happened").await?;
    let drawn = id_of(&mut sleeper, "late").await?;
    // One that has drawn an id and has no transaction id yet, so that no snapshot knows of it.
    let mut undecided = yard.connect().await?;
    undecided.execute("BEGIN").await?;
    let early: i64 = undecided.fetch_one("SELECT nextval('outbox_id_seq')").await?.try_get(0)?;
    yard.fill(100, 30).await?;
    let relay = settled(relay.drain().await?).await?;
    arrived(&tap, 256 + 3000).await?;
    let floors = relay.shared.floors();
    ensure!(floors.all().iter().all(|&floor| floor > before && floor <= drawn), "{drawn}: {floors:?}");

    sleeper.execute("COMMIT").await?;
    let relay = settled(relay.drain().await?).await?;
    arrived(&tap, 256 + 3001).await?;
    let floors = relay.shared.floors();
    ensure!(floors.all().iter().all(|&floor| floor <= early), "{early}: {floors:?}");
    undecided
        .execute(sqlx::AssertSqlSafe(format!(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type, payload)
             VALUES ({early}, 'thing', 'undecided', 1, 'Happened', '{{}}')"
        )))
        .await?;
    undecided.execute("COMMIT").await?;
    let relay = relay.drain().await?;
    arrived(&tap, 256 + 3002).await?;
    assert_eq!(yard.unpublished().await?, 0);
    let relay = risen_above(relay, last_id(&mut watch).await?).await?;
    assert_nothing_is_hidden(&mut watch, &relay.shared.floors()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_advisory_lock_as_the_aggregates_lock_keeps_order_and_floors_right() -> Result<()> {
    const LOCK: &str = "SELECT pg_advisory_xact_lock(hashtext('shared'))";
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let mut sleeper = yard.connect().await?;
    sleeper.execute("BEGIN").await?;
    sleeper.execute(LOCK).await?;
    yard.insert(&mut sleeper, "shared", 1, "Happened").await?;
    let drawn = id_of(&mut sleeper, "shared").await?;
    let mut next = yard.connect().await?;
    next.execute("SET lock_timeout = 0").await?;
    let waiting = {
        let mut next = next;
        tokio::spawn(async move {
            next.execute("BEGIN").await?;
            next.execute(LOCK).await?;
            let second =
                "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
                          VALUES ('thing', 'shared', 2, 'Happened', '{}')";
            next.execute(second).await?;
            next.execute("COMMIT").await
        })
    };
    yard.fill(100, 20).await?;
    let relay = settled(Relay::new(&yard.config(2)?).drain().await?).await?;
    arrived(&tap, 2000).await?;
    let floors = relay.shared.floors();
    ensure!(floors.all().iter().all(|&floor| floor <= drawn), "{drawn}: {floors:?}");
    sleeper.execute("COMMIT").await?;
    waiting.await??;
    let relay = relay.drain().await?;
    arrived(&tap, 2002).await?;
    assert_eq!(first_deliveries(&tap, "shared")?, [1, 2]);
    let mut watch = yard.connect().await?;
    let relay = risen_above(relay, last_id(&mut watch).await?).await?;
    assert_nothing_is_hidden(&mut watch, &relay.shared.floors()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_writer_in_another_database_of_the_server_holds_no_floor_down() -> Result<()> {
    let yard = Yard::new().await?;
    let elsewhere = Services::from_env()?.create_database("elsewhere").await?;
    schema::migrate(&elsewhere.url().parse()?, &[&ENGINE]).await?;
    let mut writer = elsewhere.connect().await?;
    writer.execute("BEGIN").await?;
    yard.insert(&mut writer, "elsewhere", 1, "Happened").await?;
    let _tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(64, 10).await?;
    let relay = Relay::new(&yard.config(2)?).drain().await?;
    let last = last_id(&mut yard.connect().await?).await?;
    risen_above(relay, last).await?;
    writer.execute("ROLLBACK").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_went_back_drops_the_floors() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.fill(64, 10).await?;
    let mut watch = yard.connect().await?;
    let last = last_id(&mut watch).await?;
    let relay = risen_above(Relay::new(&yard.config(1)?).drain().await?, last).await?;
    watch.execute("SELECT setval('outbox_id_seq', 10)").await?;
    yard.insert(&mut watch, "again", 1, "Happened").await?;
    let relay = tokio::sync::Mutex::new(relay);
    let look = || async {
        relay.lock().await.pass().await.map_err(|error| error.to_string())?;
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    // Sooner than a sweep below the floors would find it.
    eventually("the event with the low id", Duration::from_secs(20), look).await?;
    arrived(&tap, 641).await
}

/// Blocks that a probe, a read of every lane, and the gauges touch.
async fn cost(connection: &mut PgConnection, floors: &Floors) -> Result<[i64; 3]> {
    let lanes: Vec<i16> = (0..LANES).collect();
    let start = touched(connection).await?.blocks;
    drain::probe(connection, floors).await?;
    let probed = touched(connection).await?.blocks;
    let mut tx = connection.begin().await?;
    drain::read(&mut tx, &lanes, floors, 7, 1 << 20).await?;
    tx.commit().await?;
    let read = touched(connection).await?.blocks;
    outbox::sample(connection, floors).await?;
    let sampled = touched(connection).await?.blocks;
    Ok([probed - start, read - probed, sampled - read])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pass_costs_the_same_however_many_dead_entries_a_snapshot_keeps() -> Result<()> {
    let yard = Yard::new().await?;
    let mut admin = yard.connect().await?;
    admin.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)").await?;
    let _tap = yard.tap(&["thing.Happened"]).await?;
    let mut reader = yard.connect().await?;
    reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await?;
    reader.execute("SELECT count(*) FROM outbox").await?;

    let mut relay = Relay::new(&yard.config(2)?);
    let mut costs = Vec::new();
    for _ in 0..4 {
        yard.fill(200, 25).await?;
        relay = relay.drain().await?;
        relay = risen_above(relay, last_id(&mut admin).await?).await?;
        costs.push((cost(&mut admin, &relay.shared.floors()).await?, cost(&mut admin, &Floors::NONE).await?));
    }
    for (with, without) in &costs {
        // 64 descents of a small index that lead to nothing; twice for the gauges.
        ensure!(with[0] <= 64 * 5 && with[1] <= 64 * 5 && with[2] <= 2 * 64 * 5, "{costs:?}");
        ensure!(
            without.iter().all(|&blocks| blocks >= 64 * 5),
            "without floors it costs as little: {costs:?}"
        );
    }
    let (first, last) = (costs.first().context("no rounds")?, costs.last().context("no rounds")?);
    ensure!(last.1[0] > 3 * first.1[0], "dead entries do not add up, so this shows nothing: {costs:?}");
    ensure!(last.0.iter().zip(first.0).all(|(&last, first)| last <= 2 * first), "the cost grows: {costs:?}");
    // The snapshot was open all the time.
    reader.execute("COMMIT").await?;
    Ok(())
}
