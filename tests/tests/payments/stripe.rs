//! Payments and refunds by way of Stripe's adapter, against localstripe.

mod adapter;
mod crashes;

use std::sync::Arc;

use anyhow::{Result, ensure};
use semel_tests::client::Payment;
use semel_tests::payments::Ids;
use semel_tests::services::Services;
use semel_tests::stripe::{Fault, GOOD, Stripe};
use semel_tests::system::{Env, Place, Shape, System};

use crate::support::{place_to_start, told};

/// Starts a system that pays by Stripe.
async fn start(apis: usize, env: Env<'static>) -> Result<(Arc<Stripe>, System)> {
    let stripe = Arc::new(Stripe::start().await?);
    let _place = place_to_start().await?;
    let mut place = Place::make(&Services::from_env()?).await?;
    place.stripe = Some(stripe.base());
    let system = System::start_in(place, Shape { apis, relays: 1, env }).await?;
    Ok((stripe, system))
}

fn payment(reference: &str, amount: i64) -> Payment {
    Payment { source: GOOD.to_owned(), ..Payment::new(reference, amount) }
}

/// A decline is final, and would be stored: a request that is at fault is none, and is told to whoever can mend it.
#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_ours_is_no_decline_and_is_in_the_log() -> Result<()> {
    let (stripe, system) = start(1, &[]).await?;
    let payment = payment("a bug", 1250);
    let ids = Ids::of(&payment.key)?;
    let creation = format!("{}:create", ids.provider_key);
    stripe.order(&creation, 1, Fault::Say(400, "invalid_request_error", "parameter_unknown"));
    let answer = system.client(0)?.pay(&payment).await?;
    ensure!(answer.problem().as_deref() == Some("outcome-unknown"), "{answer:?}");
    let log = std::fs::read_to_string(system.apis[0].daemon.log())?;
    let told_so = log.lines().any(|line| {
        line.contains("ERROR")
            && line.contains(&ids.payment.to_string())
            && line.contains("parameter_unknown")
    });
    ensure!(told_so, "the log does not tell: {log}");
    assert_eq!(stripe.charges(&ids.provider_key).await?, 0);
    // It is mended.
    assert_eq!(told(&system.client(0)?, &payment).await?.0.status, "succeeded");
    assert_eq!(stripe.charges(&ids.provider_key).await?, 1);
    system.stop().await
}
