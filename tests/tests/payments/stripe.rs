//! Payments and refunds by way of Stripe's adapter, against localstripe.

mod adapter;
mod crashes;

use std::sync::Arc;

use anyhow::Result;
use semel_tests::client::Payment;
use semel_tests::services::Services;
use semel_tests::stripe::{GOOD, Stripe};
use semel_tests::system::{Env, Place, Shape, System};

use crate::support::place_to_start;

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
