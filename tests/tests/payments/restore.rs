//! The payments database is set back to a copy from before a payment; the provider and the ledger remember it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use semel_tests::client::{Payment, ToldPayment};
use semel_tests::payments::{Ids, charges};
use semel_tests::system::{Running, System};
use sqlx::Row as _;
use uuid::Uuid;

use crate::support::{EXIT, start, told};

/// Stops what works on the payments database.
async fn stop(system: &System) -> Result<()> {
    let all: Vec<&Running> =
        system.apis.iter().chain(&system.relays).chain(std::iter::once(&system.reaper)).collect();
    for running in &all {
        running.daemon.terminate()?;
    }
    for running in &all {
        ensure!(running.daemon.wait_exit(EXIT).await?.success(), "{} fails", running.daemon.name());
    }
    Ok(())
}

async fn start_again(system: &mut System, name: &str) -> Result<()> {
    system.apis = vec![system.place.api(&format!("api-{name}"), &[]).await?];
    system.relays = vec![system.place.relay(&format!("relay-{name}"), &[]).await?];
    system.reaper = system.place.reaper(&format!("reaper-{name}"), &[]).await?;
    Ok(())
}

/// The one event of each payment.
async fn events(system: &System) -> Result<BTreeMap<String, (Uuid, String)>> {
    let mut connection = system.place.payments.connect().await?;
    let all = "SELECT aggregate_id, event_id, event_type FROM outbox WHERE aggregate_type = 'payment'";
    let rows = sqlx::query(all).fetch_all(&mut connection).await?;
    let mut events = BTreeMap::new();
    for row in rows {
        let event = (row.try_get("event_id")?, row.try_get("event_type")?);
        let second = events.insert(row.try_get("aggregate_id")?, event);
        ensure!(second.is_none(), "two events of one payment");
    }
    Ok(events)
}

async fn bookings(system: &System, payment: Uuid) -> Result<i64> {
    let mut books = system.place.books.connect().await?;
    let count = sqlx::query("SELECT count(*) FROM ledger_transactions WHERE source_id = $1");
    Ok(count.bind(payment.to_string()).fetch_one(&mut books).await?.try_get(0)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_after_a_restore_makes_the_same_payment_by_the_same_charge_and_books_it_once() -> Result<()> {
    let mut system = start(1, &[]).await?;
    let control = system.place.control()?;
    let before = Payment::new("before the copy", 1000);
    let kept = told(&system.client(0)?, &before).await?.0;
    system.place.settled(EXIT).await?;
    stop(&system).await?;
    let backup = system.place.payments.back_up().await?;
    start_again(&mut system, "again").await?;

    let mut payments =
        vec![Payment::new("lost 1", 1100), Payment::new("lost 2", 1200), Payment::new("lost 3", 1300)];
    "tok_declined".clone_into(&mut payments[2].source);
    let mut first: BTreeMap<Uuid, ToldPayment> = BTreeMap::new();
    for payment in &payments {
        let told = told(&system.client(0)?, payment).await?.0;
        first.insert(told.payment_id, told);
    }
    system.place.settled(EXIT).await?;
    let events_before = events(&system).await?;
    stop(&system).await?;
    system.place.payments.restore(backup).await?;
    start_again(&mut system, "restored").await?;
    assert_eq!(events(&system).await?.len(), 1, "it was not set back");

    let mut all = vec![kept];
    // In another order than the first time, so that versions and serial numbers fall to others.
    for payment in payments.iter().rev() {
        let (told, answer) = told(&system.client(0)?, payment).await?;
        ensure!(!answer.is_replay(), "its key was not lost");
        assert_eq!(Some(&told), first.get(&told.payment_id));
        all.push(told);
    }
    system.place.settled(EXIT).await?;
    assert_eq!(events(&system).await?, events_before);
    // Each is published again, and known there.
    let met = || async {
        let met = system.ledger.metric("semel_inbox_messages_total", "outcome=\"duplicate\"").await.ok()?;
        (met >= 2.0).then_some(())
    };
    semel_tests::wait::eventually("the ledger to meet both bookings again", Duration::from_secs(30), met)
        .await?;
    for told in &all {
        let succeeded = usize::from(told.status == "succeeded");
        assert_eq!(charges(&control, &Ids::of(&told.key)?.provider_key)?, succeeded, "{told:?}");
        assert_eq!(bookings(&system, told.payment_id).await?, i64::try_from(succeeded)?, "{told:?}");
    }
    system.stop().await
}
