//! What the API's statements need.

use semel_core::grants::{Grant, VERSIONS};

/// Beside writing events and driving payments on.
pub(crate) const API: [Grant; 4] = [
    VERSIONS,
    Grant::of("SELECT", &["api_credentials"]),
    Grant::of("SELECT, INSERT", &["orders", "idempotency_keys", "payments", "refunds", "provider_answers"]),
    Grant::of("USAGE", &["idempotency_fence"]),
];
