//! Hints of the API to relays: after the commit, whether or not the client is still there, and at nobody's cost.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::Intent;
use semel_tests::gate::Gate;
use semel_tests::services::Services;
use semel_tests::system::Place;
use sqlx::Executor as _;
use sqlx::postgres::PgListener;

const SOON: Duration = Duration::from_secs(20);

async fn listener(place: &Place) -> Result<PgListener> {
    let mut listener = PgListener::connect(&place.payments.url()).await?;
    listener.listen("semel_outbox").await?;
    Ok(listener)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_client_goes_away_gives_its_hint_once_it_is_committed() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let gate = Gate::at("api.before_execute");
    let api = place.api("api", &gate.env()?).await?;
    let client = place.client(&api)?;
    let mut listener = listener(&place).await?;
    let asking = tokio::spawn(async move { client.place(&Intent::new("gone", 100)).await });
    gate.wait_for(1).await?;
    asking.abort();
    ensure!(asking.await.is_err_and(|error| error.is_cancelled()), "answered before it was executed");
    gate.open()?;
    tokio::time::timeout(SOON, listener.recv()).await.context("no hint")??;
    let mut connection = place.payments.connect().await?;
    let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&mut connection).await?;
    assert_eq!(orders, 1, "a hint before the commit");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_gives_no_hint() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let api = place.api("api", &[]).await?;
    let client = place.client(&api)?;
    let mut listener = listener(&place).await?;
    let intent = Intent::new("twice", 100);
    client.place_until_final(&intent).await?;
    tokio::time::timeout(SOON, listener.recv()).await.context("no hint")??;
    // A hint is not waited for, but one of so many would be there before the last answer.
    for _ in 0..50 {
        client.place_until_final(&intent).await?;
    }
    place.payments.connect().await?.execute("NOTIFY semel_outbox, 'after the replays'").await?;
    let next = tokio::time::timeout(SOON, listener.recv()).await.context("no notification")??;
    assert_eq!(next.payload(), "after the replays", "a hint of a replay");
    Ok(())
}
