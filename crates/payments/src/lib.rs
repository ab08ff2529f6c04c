//! The domain that ships with Semel: its operations over the engine.
//!
//! The model to copy for another domain: a command type, what it writes, what it answers. Nothing here knows HTTP's
//! machinery; the responses that are stored with a key are bytes.
//!
//! [`orders`] live wholly in our database. [`payments`] move money at a [`provider`], which is in no transaction of ours.

pub mod currency;
pub mod failpoints;
pub mod metrics;
#[cfg(feature = "options")]
pub mod options;
pub mod orders;
pub mod page;
pub mod payments;
pub mod problem;
pub mod provider;
pub mod schema;
