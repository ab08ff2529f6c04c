//! Orders under idempotency keys against a real Postgres: each test in a database of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod database;
mod faults;
mod listing;
mod placing;
