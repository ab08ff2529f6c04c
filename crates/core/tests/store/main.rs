//! The engine's tables against a real Postgres: each test in a database of its own.

mod credentials;
mod database;
mod drain;
mod engine;
mod inbox;
mod keys;
mod outbox;
mod reaping;
mod schema;
