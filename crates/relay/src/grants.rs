//! What the relay's statements need.

use semel_core::grants::{Grant, VERSIONS};

/// The relay.
pub(crate) const RELAY: [Grant; 4] = [
    VERSIONS,
    Grant::of("SELECT", &["outbox_id_seq"]),
    Grant::of(
        "SELECT, UPDATE (published_at, attempts, first_error, last_error, held_at, dead_at, skipped_at)",
        &["outbox"],
    ),
    Grant::of("SELECT, INSERT, UPDATE, DELETE", &["outbox_held"]),
];

/// A person with the command `events`.
pub(crate) const OPERATOR: [Grant; 4] = [
    VERSIONS,
    Grant::of(
        "SELECT, UPDATE (attempts, dead_at, skipped_at, discarded_at, discarded_by, discard_reason)",
        &["outbox"],
    ),
    Grant::of("SELECT, INSERT, UPDATE, DELETE", &["outbox_held"]),
    Grant::of("INSERT", &["operator_actions"]),
];
