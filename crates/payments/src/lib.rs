//! The domain that ships with Semel: its operations over the engine.
//!
//! The model to copy for another domain: a command type, what it writes, what it answers. Nothing here knows HTTP's
//! machinery; the responses that are stored with a key are bytes.
//!
//! [`orders`] live wholly in our database. [`payments`] and [`refunds`] move money at a [`provider`], which is in no
//! transaction of ours; [`driven`] drives on what another process left of them, and [`operator`] is for people.

pub mod audit;
pub mod currency;
pub mod driven;
pub mod evidence;
pub mod failpoints;
pub mod grants;
pub mod hearing;
mod held;
pub mod metrics;
pub mod operator;
#[cfg(feature = "options")]
pub mod options;
pub mod orders;
pub mod page;
pub mod payments;
pub mod problem;
pub mod provider;
pub mod refunds;
pub mod schema;
