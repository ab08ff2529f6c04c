//! The crate against a real RabbitMQ.
//!
//! Every test makes exchanges and queues of its own and removes them. None sleeps: they wait on
//! conditions, under deadlines.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod connection;
mod forwarder;
mod publishing;
mod publishing_through_faults;
mod subscription;
mod support;
mod topology;
