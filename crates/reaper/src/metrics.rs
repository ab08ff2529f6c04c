//! The names of the reaper's metrics.

use metrics::{counter, describe_counter, describe_gauge};

use crate::retention::Kept;

/// Counter of deleted rows; label `kind`.
pub const REAPED: &str = "semel_reaped_rows_total";
/// Gauge: charges of the provider that no payment accounts for.
pub const ORPHAN_CHARGES: &str = "semel_provider_orphan_charges";
/// Gauge: refunds of the provider that no refund of ours accounts for.
pub const ORPHAN_REFUNDS: &str = "semel_provider_orphan_refunds";

/// The label of expired idempotency keys.
pub const KEYS: &str = "idempotency_keys";

/// Describes the metrics and sets the counters to 0.
pub fn describe() {
    describe_counter!(REAPED, "Rows deleted because they were past their retention.");
    counter!(REAPED, "kind" => KEYS).increment(0);
    for kept in Kept::ALL {
        counter!(REAPED, "kind" => kept.label()).increment(0);
    }
}

/// Describes the metrics of a reaper that asks a provider.
pub fn describe_provider() {
    describe_gauge!(
        ORPHAN_CHARGES,
        "Charges within the audit's look-back that no payment accounts for; never anything but 0."
    );
    describe_gauge!(
        ORPHAN_REFUNDS,
        "Refunds within the audit's look-back that no refund of ours accounts for; never anything but 0."
    );
    semel_payments::metrics::describe();
}
