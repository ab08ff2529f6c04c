//! The domain that ships with Semel: its operations over the engine.
//!
//! The model to copy for another domain: a command type, what it writes, what it answers. Nothing here knows HTTP.

pub mod orders;
pub mod schema;
