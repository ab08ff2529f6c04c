//! The reaper against a real Postgres, each test in a database of its own, and against a provider in memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod audit;
mod database;
mod expiry;
mod keys;
mod provider;
mod recovery;
mod refunds;
mod retention;
