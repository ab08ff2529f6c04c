//! The adapter to Stripe.

pub mod classify;
pub mod objects;
pub mod webhook;
