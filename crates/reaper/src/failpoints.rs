//! The reaper's failpoints.

/// Expired keys are deleted, nothing is committed.
pub const BEFORE_COMMIT: &str = "reaper.before_commit";
