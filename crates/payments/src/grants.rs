//! What driving payments and refunds on changes: what was asked for, by whom and under which key stays as it was made.

use semel_core::grants::Grant;

/// Taking keys over, settling them, and leaving them to a person; beside reading them.
pub const DRIVE: [Grant; 3] = [
    Grant::of(
        "UPDATE (status, recovery_point, fence, lease_until, attempts, next_check_at, needs_person_at, needs_person_reason, \
         command, provider_request, provider_reference, response_code, response_headers, response_body, completed_at, \
         expires_at)",
        &["idempotency_keys"],
    ),
    Grant::of(
        "UPDATE (status, version, provider_reference, decline_code, refund_reserved, settled_at)",
        &["payments"],
    ),
    Grant::of("UPDATE (status, provider_reference, failure_code, settled_at)", &["refunds"]),
];
