//! What the API's statements need.

use semel_core::grants::{Grant, VERSIONS};

/// Beside writing events.
pub(crate) const API: [Grant; 6] = [
    VERSIONS,
    Grant::of("SELECT", &["api_credentials"]),
    Grant::of("SELECT, INSERT", &["orders"]),
    Grant::of("SELECT, INSERT, UPDATE", &["idempotency_keys", "payments", "refunds"]),
    Grant::of("SELECT, INSERT", &["provider_answers"]),
    Grant::of("USAGE", &["idempotency_fence"]),
];
