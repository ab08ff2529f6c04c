//! Named places where a test makes a consumer fail; compiled out unless the feature `failpoints` is on.

/// The handler has succeeded, its transaction is not committed.
pub const BEFORE_COMMIT: &str = "inbox.before_commit";
/// The transaction is committed, the message is not acknowledged.
pub const AFTER_COMMIT: &str = "inbox.after_commit";
/// The message is acknowledged, as far as this side knows.
pub const AFTER_ACK: &str = "inbox.after_ack";
/// A replay is written down, its copies are not published.
pub const BEFORE_REPLAY: &str = "dead.before_replay";
/// A decision about dead letters is carried out, the letters are not acknowledged.
pub const BEFORE_LETTER_ACK: &str = "dead.before_ack";
