//! The names of the reaper's metrics.

use metrics::{counter, describe_counter};

/// Counter of deleted rows; label `kind`.
pub const REAPED: &str = "semel_reaped_rows_total";

/// The label of expired idempotency keys.
pub const KEYS: &str = "idempotency_keys";

/// Describes the metrics and sets the counters to 0.
pub fn describe() {
    describe_counter!(REAPED, "Rows deleted because they were past their retention.");
    counter!(REAPED, "kind" => KEYS).increment(0);
}
