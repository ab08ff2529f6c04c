//! SIGKILL at named places: a retry gets the one answer there is, and every order is booked once.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Client, Intent};
use semel_tests::reconcile::{Sources, reconcile};
use semel_tests::services::Services;
use semel_tests::system::{Place, Shape, System};
use serde_json::Value;
use sqlx::Row as _;

const EXIT: Duration = Duration::from_secs(30);

/// An API that dies at a failpoint with a request in flight; the retry goes to another API.
async fn api_dies_at(failpoint: &str, executed: bool) -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let doomed = place.api("doomed", &[("SEMEL_FAILPOINTS", &format!("{failpoint}=abort"))]).await?;
    let heir = place.api("heir", &[]).await?;
    let intent = Intent::new("crash", 4200);
    let lost = Client::new(doomed.address.context("no address")?, &place.token)?.place(&intent).await;
    ensure!(lost.is_err(), "an answer came from an API that died before it");
    ensure!(!doomed.daemon.wait_exit(EXIT).await?.success(), "it lives");
    let mut connection = place.payments.connect().await?;
    let count = "SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM outbox) + (SELECT count(*) FROM idempotency_keys)";
    let rows: i64 = sqlx::query(count).fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(rows, if executed { 3 } else { 0 }, "order, event and key are there together or not at all");

    let client = Client::new(heir.address.context("no address")?, &place.token)?;
    let first = client.place_until_final(&intent).await?;
    assert_eq!(first.is_replay(), executed);
    let again = client.place_until_final(&intent).await?;
    ensure!(again.is_replay() && again.body == first.body, "the second retry is answered differently");
    let rows: i64 = sqlx::query(count).fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(rows, 3);
    Ok(())
}

#[tokio::test]
async fn an_api_killed_before_it_executes_leaves_nothing() -> Result<()> {
    api_dies_at("api.before_execute", false).await
}

#[tokio::test]
async fn an_api_killed_after_its_commit_leaves_the_whole_and_the_retry_replays_it() -> Result<()> {
    api_dies_at("api.after_commit", true).await
}

#[tokio::test]
async fn an_api_killed_before_it_answers_leaves_the_whole_and_the_retry_replays_it() -> Result<()> {
    api_dies_at("api.before_respond", true).await
}

#[tokio::test]
async fn a_panic_in_a_request_ends_neither_the_process_nor_another_request() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let plan = ("SEMEL_FAILPOINTS", "api.before_execute=1*panic->off");
    let api = place.api("panicking", &[plan, ("SEMEL_LOG_FORMAT", "json")]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    let intent = Intent::new("panic", 4300);
    assert_eq!(client.place(&intent).await?.status, 500);
    let retry = client.place(&intent).await?;
    ensure!(!retry.is_replay(), "a failure was stored as the answer");
    retry.acknowledged(&intent.key)?;
    ensure!(api.daemon.is_running(), "the panic ended the process");
    api.daemon.terminate()?;
    ensure!(api.daemon.wait_exit(EXIT).await?.success(), "it does not stop");
    // The log stays one JSON object a line: the panic is one, which names its request, and says nothing that it was told.
    let lines = api.daemon.lines();
    let lines: Vec<Value> = lines
        .iter()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}")))
        .collect::<Result<_>>()?;
    let panics: Vec<_> = lines.iter().filter(|line| line["message"] == "panicked").collect();
    let [panic] = panics.as_slice() else { anyhow::bail!("{panics:?}") };
    ensure!(panic["place"].as_str().is_some_and(|place| place.contains(".rs:")), "{panic}");
    ensure!(panic["span"]["id"].is_string() && panic["level"] == "ERROR", "{panic}");
    Ok(())
}

/// A ledger that dies at a failpoint; the next one books what is left, once.
async fn ledger_dies_at(failpoint: &str) -> Result<()> {
    let services = Services::from_env()?;
    let mut system = System::start(&services, Shape { apis: 1, relays: 1, env: &[] }).await?;
    system.ledger.daemon.kill().await?;
    let client = system.client(0)?;
    let mut acknowledged = Vec::new();
    for number in 0..20 {
        let intent = Intent::new(&format!("crash-{number}"), 100 + number);
        acknowledged.push(client.place_until_final(&intent).await?.acknowledged(&intent.key)?);
    }
    let plan = format!("{failpoint}=3*off->abort");
    let doomed = system.place.ledger("doomed", &[("SEMEL_FAILPOINTS", &plan)]).await;
    // It may die before it was seen to be ready.
    if let Ok(doomed) = doomed {
        ensure!(!doomed.daemon.wait_exit(EXIT).await?.success(), "it lives");
    }
    system.ledger = system.place.ledger("heir", &[]).await?;
    system.place.settled(Duration::from_mins(1)).await?;
    let sources: Sources = system.sources(acknowledged).await?;
    assert_eq!(sources.ledger.len(), 20);
    assert_eq!(reconcile(&sources), []);
    system.stop().await
}

#[tokio::test]
async fn a_ledger_killed_before_its_commit_books_every_order_once() -> Result<()> {
    ledger_dies_at("inbox.before_commit").await
}

#[tokio::test]
async fn a_ledger_killed_before_its_ack_books_every_order_once() -> Result<()> {
    ledger_dies_at("inbox.after_commit").await
}

#[tokio::test]
async fn a_reaper_killed_before_its_commit_deletes_nothing_and_the_next_one_what_is_due() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let api = place.api("api", &[]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    let (due, kept) = (Intent::new("due", 100), Intent::new("kept", 200));
    for intent in [&due, &kept] {
        client.place(intent).await?.acknowledged(&intent.key)?;
    }
    let mut connection = place.payments.connect().await?;
    let age = "UPDATE idempotency_keys SET completed_at = completed_at - INTERVAL '25 hours',
                      expires_at = expires_at - INTERVAL '25 hours' WHERE key = $1";
    sqlx::query(age).bind(&due.key).execute(&mut connection).await?;
    let doomed = place.reaper("doomed", &[("SEMEL_FAILPOINTS", "reaper.before_commit=abort")]).await;
    if let Ok(doomed) = doomed {
        ensure!(!doomed.daemon.wait_exit(EXIT).await?.success(), "it lives");
    }
    let count = "SELECT count(*) FROM idempotency_keys";
    let keys: i64 = sqlx::query(count).fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(keys, 2, "an uncommitted deletion deleted");
    let heir = place.reaper("heir", &[]).await?;
    let reaped = || async {
        let reaped = heir.metric("semel_reaped_rows_total", "idempotency_keys").await.ok()?;
        (reaped >= 1.0).then_some(())
    };
    semel_tests::wait::eventually("the expired key to be reaped", EXIT, reaped).await?;
    // The late retry is told what became of it; the other key is replayed as ever.
    let late = client.place(&due).await?;
    assert_eq!((late.status.as_u16(), late.problem().as_deref()), (410, Some("idempotency-key-expired")));
    ensure!(client.place(&kept).await?.is_replay(), "a key was reaped before its time");
    let orders: i64 =
        sqlx::query("SELECT count(*) FROM orders").fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(orders, 2);
    Ok(())
}
