//! The engine of Semel: what makes a state change safe to repeat, and what the daemons built on it share.
//!
//! A service that is not a payment service uses this crate as it is: [`idempotency`] at its edge, [`outbox`] in its
//! transactions, [`inbox`] where it consumes. The feature `daemon` adds what a process needs around that: command line
//! options, logs, metrics, an admin endpoint.
//!
//! It knows no web framework, no broker and no domain.

pub mod backoff;
pub mod credentials;
pub mod database;
pub mod derive;
pub mod disposition;
pub mod failpoint;
pub mod grants;
pub mod idempotency;
pub mod inbox;
pub mod lifecycle;
pub mod lines;
pub mod metrics;
pub mod operators;
pub mod outbox;
pub mod sampler;
pub mod schema;
pub mod trace;
pub mod walk;

#[cfg(feature = "daemon")]
pub mod admin;
#[cfg(feature = "daemon")]
pub mod daemon;
#[cfg(feature = "daemon")]
pub mod options;
#[cfg(feature = "daemon")]
pub mod shown;
#[cfg(feature = "daemon")]
pub mod telemetry;
