//! Payments under idempotency keys against a real Postgres and a provider that does what it is told: each test with a
//! database and a provider of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod bed;
mod contradictions;
mod dropped;
mod fencing;
mod making;
mod owners;
mod preparing;
mod provider;
mod recovering;
mod refunds;
mod settling;
mod switched;
