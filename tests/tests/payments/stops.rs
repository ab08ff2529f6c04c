//! SIGTERM to an API while the provider holds its answer.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind};
use semel_tests::client::Payment;
use semel_tests::payments::{BOUND, Ids, all_agree, charges, completed, key_row};
use semel_tests::provider::Fault;
use semel_tests::system::{Running, System};

use crate::support::{Asked, EXIT, connected, place_to_start, start, told};

/// An API with a payment whose charge is made and whose answer the provider holds.
async fn held(system: &System, name: &str, env: &[(&str, &str)]) -> Result<(Running, Asked)> {
    let _place = place_to_start().await?;
    let api = system.place.api(name, env).await?;
    connected(system, &api).await?;
    let payment = Payment::new(name, 5300);
    let hold = Ids::of(&payment.key)?.provider_key;
    let control = system.place.control()?;
    control
        .order(Fault::new(FaultKind::HoldAfterApply, Call::Charge).key(&hold).times(1).hold(&hold))
        .await?;
    let asked = Asked::of(system, &api, payment)?;
    control.wait_for("the answer to be held", &hold, |happening| happening.what() == What::Held).await?;
    Ok((api, asked))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_is_stopped_waits_for_the_provider_within_its_grace_and_no_longer() -> Result<()> {
    tokio::try_join!(one_waits_and_one_does_not(), nobody_hangs())?;
    Ok(())
}

async fn one_waits_and_one_does_not() -> Result<()> {
    let system = start(1, &[]).await?;
    let control = system.place.control()?;
    let (patient, first) = held(&system, "patient", &[]).await?;
    let (hasty, second) = held(&system, "hasty", &[("SEMEL_GRACE", "1")]).await?;
    patient.daemon.terminate()?;
    hasty.daemon.terminate()?;

    // The hasty one does not wait for what takes longer than its grace.
    let (keys, ids) = ([second.payment.key.clone()], second.ids.clone());
    let payment = second.payment.clone();
    let status = hasty.daemon.wait_exit(EXIT).await?;
    ensure!(status.success(), "it left with {status}: {:?}", hasty.daemon.lines());
    let unanswered = second.answer().await;
    ensure!(
        unanswered.as_ref().map_or(true, |answer| answer.told(&payment.key).is_err()),
        "a final answer before the provider's: {unanswered:?}"
    );
    let mut connection = system.place.payments.connect().await?;
    let key = key_row(&mut connection, &payment.key).await?.context("the key is gone")?;
    assert_eq!((key.status.as_str(), key.recovery_point.as_str()), ("in_progress", "sent"));

    // The patient one still has its own.
    ensure!(patient.daemon.is_running(), "it left with work in its hands: {:?}", patient.daemon.lines());
    control.release(&first.ids.provider_key).await?;
    let asked = first.payment.clone();
    let answer = first.answer().await?;
    let first = answer.told(&asked.key)?;
    ensure!(first.status == "succeeded" && !answer.is_replay(), "{first:?}");
    let status = patient.daemon.wait_exit(EXIT).await?;
    ensure!(status.success(), "it left with {status}: {:?}", patient.daemon.lines());

    // What the hasty one left behind is finished for it.
    control.release(&ids.provider_key).await?;
    completed(&system, &keys, BOUND).await?;
    let (second, answer) = told(&system.client(0)?, &payment).await?;
    ensure!(second.status == "succeeded" && answer.is_replay(), "{second:?}");
    assert_eq!(charges(&control, &ids.provider_key)?, 1);
    all_agree(&system, vec![first, second]).await?;
    system.stop().await
}

/// An answer that never comes is given up within the grace, and the client told that nothing is known.
async fn nobody_hangs() -> Result<()> {
    let system = start(1, &[]).await?;
    let control = system.place.control()?;
    let (api, asked) = held(&system, "stopping", &[]).await?;
    api.daemon.terminate()?;
    let payment = asked.payment.clone();
    let answer = asked.answer().await?;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.problem().as_deref(), Some("outcome-unknown"));
    let status = api.daemon.wait_exit(Duration::from_secs(25)).await?;
    ensure!(status.success(), "it left with {status}: {:?}", api.daemon.lines());
    control.release(&Ids::of(&payment.key)?.provider_key).await?;
    let (told, _) = told(&system.client(0)?, &payment).await?;
    assert_eq!(told.status, "succeeded");
    all_agree(&system, vec![told]).await?;
    system.stop().await
}
