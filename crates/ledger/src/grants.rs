//! What the ledger's statements need.

use semel_core::grants::{Grant, VERSIONS};

/// Beside writing events.
pub(crate) const LEDGER: [Grant; 3] = [
    VERSIONS,
    Grant::of("INSERT, SELECT (event_id)", &["processed_events"]),
    Grant::of("SELECT, INSERT", &["ledger_transactions", "ledger_entries"]),
];
