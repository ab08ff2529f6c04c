//! The relay's failpoints.

/// Lanes are taken and read, nothing is sent.
pub const AFTER_TAKE: &str = "relay.after_take";
/// A wave is confirmed, nothing is marked.
pub const AFTER_CONFIRM: &str = "relay.after_confirm";
/// The batch is marked, the transaction is open.
pub const BEFORE_COMMIT: &str = "relay.before_commit";
/// Events are set aside behind their aggregate's chain, nothing is sent.
pub const AFTER_DIVERT: &str = "relay.after_divert";
/// Failed events are set aside, the transaction is open.
pub const AFTER_HOLD: &str = "relay.after_hold";
/// A person's decision is written, the transaction is open.
pub const BEFORE_DECISION: &str = "relay.before_decision";
