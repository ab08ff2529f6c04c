//! The engine's tables against a real Postgres: each test in a database of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod admission;
mod credentials;
mod database;
mod drain;
mod driven;
mod engine;
mod held;
mod hint;
mod horizon;
mod inbox;
mod keys;
mod outbox;
mod reaping;
mod schema;
mod stuck;
