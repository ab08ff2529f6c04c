//! The relay's failpoints.

/// Lanes are taken and read, nothing is sent.
pub const AFTER_TAKE: &str = "relay.after_take";
/// A wave is confirmed, nothing is marked.
pub const AFTER_CONFIRM: &str = "relay.after_confirm";
/// The batch is marked, the transaction is open.
pub const BEFORE_COMMIT: &str = "relay.before_commit";
