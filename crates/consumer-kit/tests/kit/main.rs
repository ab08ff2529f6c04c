//! A consumer against a real Postgres and a real RabbitMQ. Every test has a database and a queue of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod batches;
mod broker;
mod counters;
mod database;
mod dead;
mod effects;
mod failures;
mod life;
mod line;
mod order;
mod parked;
mod poison;
mod rehearsals;
mod script;
mod support;
