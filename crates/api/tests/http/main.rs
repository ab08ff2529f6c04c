//! The API over real sockets and a real Postgres: each test with a server and a database of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod authority;
mod bed;
mod client;
mod connections;
mod dropped;
mod faults;
mod floods;
mod grpc;
mod hostile;
mod http2;
mod keyed;
mod keys;
mod limits;
mod openapi;
mod over;
mod payments;
mod provider;
mod reading;
mod refunds;
mod rules;
mod scopes;
mod secured;
mod tls;
mod webhooks;
