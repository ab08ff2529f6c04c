//! What the reaper's statements need. `UPDATE` of one column is for their `FOR UPDATE`.

use semel_core::grants::{Grant, VERSIONS};

/// The reaper of any database; it passes over the tables that this one has not.
pub(crate) const REAPER: [Grant; 8] = [
    VERSIONS,
    Grant::of("SELECT, DELETE, UPDATE (lease_until)", &["idempotency_keys"]),
    Grant::of("SELECT, DELETE, UPDATE (published_at)", &["outbox"]),
    Grant::of("SELECT, DELETE, UPDATE (processed_at)", &["processed_events"]),
    Grant::of("SELECT, DELETE, UPDATE (effect_at)", &["aggregate_versions"]),
    Grant::of("SELECT, DELETE, UPDATE (answered_at)", &["provider_answers"]),
    Grant::of("SELECT, DELETE, UPDATE (acted_at)", &["operator_actions"]),
    Grant::of("SELECT", &["payments", "refunds"]),
];

/// With a provider, beside that, driving payments on and writing events.
pub(crate) const PAYMENTS: [Grant; 3] = [
    Grant::of("SELECT", &["api_credentials"]),
    Grant::of("INSERT", &["provider_answers"]),
    Grant::of("USAGE", &["idempotency_fence"]),
];

/// A person with the command `keys`, beside driving payments on and writing events.
pub(crate) const OPERATOR: [Grant; 4] = [
    VERSIONS,
    Grant::of("SELECT", &["idempotency_keys", "payments", "refunds"]),
    Grant::of("SELECT, INSERT", &["provider_answers", "operator_actions"]),
    Grant::of("USAGE", &["idempotency_fence"]),
];
