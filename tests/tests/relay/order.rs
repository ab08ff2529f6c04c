//! Producers at their worst, relays that die and freeze: nothing lost, and first deliveries in order per aggregate.
//!
//! The same producers against two loops as one finds them in textbooks show that the test can fail: rows locked with `SKIP
//! LOCKED` come out of order, and a reader that goes by `id > cursor` loses those that commit late.

mod producers;
mod textbook;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::process::Daemon;
use semel_tests::system::READY;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;
use tokio_util::sync::CancellationToken;

use self::producers::{Produced, produce};
use self::textbook::{by_cursor, with_skip_locked};
use crate::processes::{metric, start};
use crate::yard::Yard;

/// What went wrong between producers and the broker.
#[derive(Debug, Default)]
struct Verdict {
    lost: usize,
    /// First deliveries that came after a later event of their aggregate.
    out_of_order: usize,
}

/// Compares what was committed with what arrived.
fn judge(produced: &Produced, tap: &Tap) -> Result<Verdict> {
    let (mut seen, mut arrived) = (BTreeSet::new(), BTreeMap::<String, Vec<i64>>::new());
    for message in tap.messages()? {
        if seen.insert(message.event_id) {
            let version = message.aggregate_version.context("no version")?;
            arrived.entry(message.aggregate_id).or_default().push(version);
        }
    }
    let mut verdict = Verdict::default();
    for (aggregate, &last) in &produced.versions {
        let versions = arrived.remove(aggregate).unwrap_or_default();
        verdict.lost += usize::try_from(last)? - versions.len();
        verdict.out_of_order += versions.windows(2).filter(|pair| pair[0] > pair[1]).count();
    }
    ensure!(arrived.is_empty(), "events that nobody committed: {arrived:?}");
    Ok(verdict)
}

/// Kills and freezes relays at random, and starts others in their place, until it is told to stop. Then all are well.
async fn torment(yard: &Yard, count: usize, stop: &CancellationToken) -> Result<Vec<(Daemon, u16)>> {
    let env = [("SEMEL_RELAY_WORKERS", "2"), ("SEMEL_RELAY_BATCH", "50")];
    let mut relays = Vec::new();
    for number in 0..count {
        relays.push(start(yard, &format!("relay-{number}"), &env).await?);
    }
    let (mut kills, mut freezes) = (0, 0);
    let pause = async |from: u64, to: u64| {
        let pause = Duration::from_millis(fastrand::u64(from..to));
        stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some()
    };
    while pause(200, 800).await {
        let victim = fastrand::usize(0..count);
        // Each of them once, and then as it falls.
        let kills_this_time = match (kills, freezes) {
            (0, _) => true,
            (_, 0) => false,
            _ => fastrand::bool(),
        };
        if kills_this_time {
            relays[victim].0.kill().await?;
            kills += 1;
            relays[victim] = start(yard, &format!("relay-{victim}"), &env).await?;
        } else {
            relays[victim].0.freeze().await?;
            freezes += 1;
            pause(50, 2500).await;
            relays[victim].0.cont()?;
        }
    }
    ensure!(kills > 0 && freezes > 0, "{kills} kills and {freezes} freezes are too few");
    Ok(relays)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_out_of_order_whatever_producers_do_while_relays_die_and_freeze() -> Result<()> {
    // `cargo xtask test --full` sets it.
    let events = if std::env::var_os("SEMEL_TEST_FULL").is_some() { 50_000 } else { 6_000 };
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let stop = CancellationToken::new();
    let writing = async {
        let produced = produce(&yard, events).await;
        stop.cancel();
        produced
    };
    let (produced, relays) = tokio::try_join!(writing, torment(&yard, 4, &stop))?;
    for (relay, admin) in &relays {
        relay.wait_ready(*admin, READY).await?;
    }
    let look = || async {
        match yard.unpublished().await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?} unpublished")),
        }
    };
    // A sweep may come to the help of a floor that is too high: the relay counts what it finds, see below.
    eventually("the backlog to be published", Duration::from_mins(1), look).await?;
    crate::yard::arrived(&tap, produced.events()?).await?;
    let verdict = judge(&produced, &tap)?;
    ensure!(verdict.lost == 0 && verdict.out_of_order == 0, "{verdict:?}");
    for (_, admin) in &relays {
        let hidden = metric(*admin, "semel_relay_events_below_floor_total").await?;
        ensure!(hidden < 1.0, "{hidden} events lay below their lane's floor");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_that_skips_locked_rows_publishes_out_of_order_under_these_producers() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let stop = CancellationToken::new();
    let writing = async {
        let produced = produce(&yard, 2_000).await;
        stop.cancel();
        produced
    };
    let (produced, (), ()) =
        tokio::try_join!(writing, with_skip_locked(&yard, &stop), with_skip_locked(&yard, &stop))?;
    crate::yard::arrived(&tap, produced.events()?).await?;
    let verdict = judge(&produced, &tap)?;
    ensure!(verdict.out_of_order > 0, "nothing out of order: these producers are too tame");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_with_a_cursor_loses_events_of_these_producers() -> Result<()> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    let stop = CancellationToken::new();
    let writing = async {
        let produced = produce(&yard, 2_000).await;
        stop.cancel();
        produced
    };
    let (produced, published) = tokio::try_join!(writing, by_cursor(&yard, &stop))?;
    crate::yard::arrived(&tap, published).await?;
    let verdict = judge(&produced, &tap)?;
    ensure!(verdict.lost > 0, "nothing lost: these producers are too tame");
    Ok(())
}
