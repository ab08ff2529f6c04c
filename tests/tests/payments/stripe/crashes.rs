//! The crash table with Stripe: SIGKILL at every step of a payment, row by row. One intent per key has succeeded, and the
//! retry is told of it; or the payment was rolled back, and none has.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_proto::provider::v1::Call;
use semel_tests::client::ToldPayment;
use semel_tests::payments::{BOUND, Ids, all_agree, completed, key_row, longest_in_progress};
use semel_tests::stripe::{Fault, Stripe};
use semel_tests::system::System;
use tokio::task::JoinSet;

use super::{payment, start};
use crate::crashes::{Death, Doomed, Heir, Left, die, events_of, kill, standing};
use crate::support::{Asked, EXIT, STUCK_SOON, connected, joined, place_to_start, told};
use crate::wire::Loss;

/// How an API dies.
#[derive(Clone, Copy, Debug)]
enum Killed {
    /// As with any provider.
    As(Death),
    /// While Stripe has the call of this step at this fault's hold.
    Held(&'static str, Fault),
}

/// What dies when, what it leaves of the key, and how many intents have succeeded by then.
type Row = (&'static str, Killed, Left, usize);

/// The steps, as their idempotency keys end.
const CREATE: &str = "create";
const CONFIRM: &str = "confirm";

const ROWS: [Row; 13] = [
    ("before anything", Killed::As(Death::At("api.before_execute")), Left::Nothing, 0),
    ("tx 1 committed, its answer lost", Killed::As(Death::Claim(Loss::Answer)), Left::Sent, 0),
    ("prepared, before that is committed", Killed::As(Death::At("payments.after_prepare")), Left::Sent, 0),
    ("its reference committed", Killed::As(Death::At("payments.after_reference")), Left::Sent, 0),
    ("before the confirmation is sent", Killed::As(Death::At("payments.before_send")), Left::Sent, 0),
    ("answered, before tx 2", Killed::As(Death::At("payments.after_answer")), Left::Sent, 1),
    ("tx 2 never arrives", Killed::As(Death::Settlement(Loss::Statement)), Left::Sent, 1),
    ("tx 2 committed, its answer lost", Killed::As(Death::Settlement(Loss::Answer)), Left::Completed, 1),
    ("before it answers", Killed::As(Death::At("api.before_respond")), Left::Completed, 1),
    ("the creation's answer on its way", Killed::Held(CREATE, Fault::HoldAnswer), Left::Sent, 0),
    ("the confirmation at work", Killed::Held(CONFIRM, Fault::HoldAtWork), Left::Sent, 0),
    ("the confirmation's answer on its way", Killed::Held(CONFIRM, Fault::HoldAnswer), Left::Sent, 1),
    ("the confirmation on its way, and late", Killed::Held(CONFIRM, Fault::HoldOnItsWay), Left::Sent, 0),
];

#[tokio::test(flavor = "multi_thread")]
async fn whenever_an_api_dies_its_payment_by_stripe_is_settled_by_a_reaper_or_by_a_retry() -> Result<()> {
    // Side by side: what takes long is that a lease ends.
    let (by_reaper, by_retry) = tokio::try_join!(crash_table(Heir::Reaper), crash_table(Heir::Retry))?;
    println!("the longest was in progress for {by_reaper:?} with a reaper, {by_retry:?} without");
    Ok(())
}

/// All rows, each with an API of its own to die: one after the other until it is dead, since what is held is let go together,
/// and then side by side.
async fn crash_table(heir: Heir) -> Result<Duration> {
    let (stripe, system) = start(1, &[]).await?;
    if heir == Heir::Retry {
        system.reaper.daemon.kill().await?;
    }
    let system = Arc::new(system);
    let mut rows = JoinSet::new();
    for row in ROWS {
        let payment = payment(&format!("crash: {}", row.0), 4200);
        fall(&stripe, &system, row, &payment).await.with_context(|| row.0)?;
        let (stripe, system) = (Arc::clone(&stripe), Arc::clone(&system));
        rows.spawn(async move { inherit(&stripe, &system, row, payment, heir).await.context(row.0) });
    }
    let told = joined(rows).await?;
    assert_eq!(told.len(), ROWS.len());
    let longest = longest_in_progress(&system).await?;
    agree(&stripe, &system, told).await?;
    Arc::into_inner(system).context("a row still runs")?.stop().await?;
    Ok(longest)
}

/// Lets an API die, and sees what it has left.
async fn fall(
    stripe: &Stripe,
    system: &System,
    (name, killed, left, charged): Row,
    payment: &semel_tests::client::Payment,
) -> Result<()> {
    let ids = Ids::of(&payment.key)?;
    match killed {
        Killed::As(death) => {
            let doomed = Doomed {
                key: &payment.key,
                provider_key: &ids.provider_key,
                call: Call::Charge,
                claim: &payment.reference,
                settlement: "PaymentCreated",
            };
            die(system, &system.place.control()?, death, &doomed, |api| {
                let asked = Asked::of(system, api, payment.clone())?;
                Ok(tokio::spawn(async move { asked.answer().await.map(drop) }))
            })
            .await?;
        }
        Killed::Held(step, fault) => {
            let _place = place_to_start().await?;
            let api = system.place.api(&format!("doomed-{}", payment.key), &[]).await?;
            connected(system, &api).await?;
            stripe.order(&format!("{}:{step}", ids.provider_key), 1, fault);
            let asked = tokio::spawn(Asked::of(system, &api, payment.clone())?.answer());
            stripe.has_held().await?;
            kill(&api).await?;
            ensure!(asked.await?.is_err(), "an answer came from an API that died before it");
        }
    }
    let mut connection = system.place.payments.connect().await?;
    assert_eq!(standing(key_row(&mut connection, &payment.key).await?), left, "{name}");
    assert_eq!(stripe.charges(&ids.provider_key).await?, charged, "{name}");
    if !is_late(killed) {
        stripe.lift();
    }
    Ok(())
}

/// Its call stays on its way until the payment is settled; it is the last to fall, so that no other one lets it go.
fn is_late(killed: Killed) -> bool {
    matches!(killed, Killed::Held(_, Fault::HoldOnItsWay))
}

/// Drives on what the dead has left, to the end.
async fn inherit(
    stripe: &Stripe,
    system: &System,
    (name, killed, left, _): Row,
    payment: semel_tests::client::Payment,
    heir: Heir,
) -> Result<ToldPayment> {
    let ids = Ids::of(&payment.key)?;
    if heir == Heir::Reaper && left != Left::Nothing {
        completed(system, std::slice::from_ref(&payment.key), BOUND).await?;
    }
    let (settled, answer) = told(&system.client(0)?, &payment).await?;
    assert_eq!(settled.status, "succeeded", "{name}");
    if is_late(killed) {
        // It finds its key's answer there, and charges nothing.
        stripe.lift();
        let arrived = || async { if stripe.held_none() { Ok(()) } else { Err("held") } };
        semel_tests::wait::eventually("the late confirmation to arrive", EXIT, arrived).await?;
    }
    let again = system.client(0)?.pay(&payment).await?;
    ensure!(again.is_replay() && again.body == answer.body, "{name}: answered differently the second time");
    assert_eq!(stripe.charges(&ids.provider_key).await?, 1, "{name}");
    let mut connection = system.place.payments.connect().await?;
    let events = events_of(&mut connection, &ids).await?;
    assert_eq!(events, [("PaymentCreated".to_owned(), ids.created)], "{name}");
    Ok(settled)
}

/// All places agree with what the client was told, Stripe's own included.
async fn agree(stripe: &Stripe, system: &System, told: Vec<ToldPayment>) -> Result<()> {
    let lines = stripe.book().await?.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    std::fs::write(&system.place.book, lines.join("\n") + "\n")?;
    all_agree(system, told).await
}

/// Nobody sends any more once that is committed; the intent is canceled, and what was on its way meets that.
#[tokio::test(flavor = "multi_thread")]
async fn a_reaper_that_dies_while_it_cancels_at_stripe_is_succeeded_by_another() -> Result<()> {
    let (stripe, system) = start(1, STUCK_SOON).await?;
    system.reaper.daemon.kill().await?;
    let mut all = Vec::new();
    for step in ["payments.after_canceling", "payments.after_cancel"] {
        let payment = payment(step, 4300);
        let ids = Ids::of(&payment.key)?;
        stripe.order(&format!("{}:{CONFIRM}", ids.provider_key), 1, Fault::HoldOnItsWay);
        let asked = Asked::of(&system, &system.apis[0], payment.clone())?.answer().await?;
        ensure!(asked.problem().as_deref() == Some("outcome-unknown"), "{asked:?}");
        let _place = place_to_start().await?;
        let plan = format!("{step}=abort");
        let doomed = system.place.reaper("doomed", &[("SEMEL_FAILPOINTS", &plan)]).await?;
        ensure!(!doomed.daemon.wait_exit(EXIT).await?.success(), "it lives");
        let mut connection = system.place.payments.connect().await?;
        let row = key_row(&mut connection, &payment.key).await?.context("there is a key")?;
        assert_eq!(row.recovery_point, "canceling", "{step}");
        let heir = system.place.reaper("heir", &[]).await?;
        completed(&system, std::slice::from_ref(&payment.key), BOUND).await?;
        stripe.lift();
        let (settled, _) = told(&system.client(0)?, &payment).await?;
        assert_eq!(settled.status, "canceled", "{step}");
        let arrived = || async { if stripe.held_none() { Ok(()) } else { Err("held") } };
        semel_tests::wait::eventually("the late confirmation to arrive", EXIT, arrived).await?;
        assert_eq!(stripe.charges(&ids.provider_key).await?, 0, "{step}");
        heir.daemon.kill().await?;
        all.push(settled);
    }
    agree(&stripe, &system, all).await?;
    system.stop().await
}
