//! The names of the reaper's metrics.

use semel_core::metrics::{Label, Metric};

use crate::retention::Kept;

/// Counter of deleted rows; label `kind`.
pub const REAPED: &str = "semel_reaped_rows_total";
/// Gauge: charges of the provider that no payment accounts for.
pub const ORPHAN_CHARGES: &str = "semel_provider_orphan_charges";
/// Gauge: refunds of the provider that no refund of ours accounts for.
pub const ORPHAN_REFUNDS: &str = "semel_provider_orphan_refunds";

/// The label of expired idempotency keys.
pub const KEYS: &str = "idempotency_keys";

const KINDS: [&str; Kept::ALL.len() + 1] = {
    let mut labels = [KEYS; Kept::ALL.len() + 1];
    let mut at = 0;
    while at < Kept::ALL.len() {
        labels[at + 1] = Kept::ALL[at].label();
        at += 1;
    }
    labels
};

/// The reaper's own metrics.
pub const METRICS: [Metric; 1] = [Metric::counter(
    REAPED,
    "Rows deleted because they were past their retention; `published_events` counts discarded ones, too.",
)
.with(&[Label::of("kind", &KINDS)])];

/// Those that it has with a provider.
pub const PROVIDER: [Metric; 2] = [
    Metric::gauge(
        ORPHAN_CHARGES,
        "With a provider only: charges within the audit's look-back that no payment accounts for, up to 10,000, and of \
         more the log tells; absent while the provider has no such list.",
    ),
    Metric::gauge(
        ORPHAN_REFUNDS,
        "Likewise, of refunds within the look-back, however old their charges are.",
    ),
];
