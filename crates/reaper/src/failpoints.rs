//! The reaper's failpoints.

/// Rows are deleted, nothing is committed.
pub const BEFORE_COMMIT: &str = "reaper.before_commit";
