//! What the ledger's statements need.

use semel_core::grants::{Grant, VERSIONS};

/// Beside writing events.
pub(crate) const LEDGER: [Grant; 5] = [
    VERSIONS,
    Grant::of("SELECT, INSERT", &["processed_events"]),
    Grant::of("SELECT, INSERT, UPDATE, DELETE", &["parked_events"]),
    Grant::of("SELECT, INSERT, UPDATE", &["aggregate_versions"]),
    Grant::of("SELECT, INSERT", &["ledger_transactions", "ledger_entries"]),
];

/// A person with the commands `dead` and `parked`.
pub(crate) const OPERATOR: [Grant; 4] = [
    VERSIONS,
    Grant::of("SELECT", &["processed_events", "parked_events"]),
    Grant::of("UPDATE (next_attempt_at, attempts), DELETE", &["parked_events"]),
    Grant::of("SELECT, INSERT", &["operator_actions"]),
];
