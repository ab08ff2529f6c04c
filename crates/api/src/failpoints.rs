//! The places where a test makes the API fail, see [`mod@semel_core::failpoint`].

/// In the request's task, before the engine looks the key up.
pub const BEFORE_EXECUTE: &str = "api.before_execute";
/// In the request's task, after the engine has answered: a fresh order is committed.
pub const AFTER_COMMIT: &str = "api.after_commit";
/// In the connection's future, before the answer is written.
pub const BEFORE_RESPOND: &str = "api.before_respond";
