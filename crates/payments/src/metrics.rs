//! The names of the domain's metrics.

use metrics::counter;
use semel_core::metrics::{Label, Metric};

/// Counter of calls to the provider; labels `call` and `outcome`.
pub const PROVIDER_CALLS: &str = "semel_provider_calls_total";
/// Histogram of calls to the provider; label `call`.
pub const PROVIDER_SECONDS: &str = "semel_provider_call_seconds";
/// Counter of what recovery came to; label `outcome`.
pub const RECOVERY: &str = "semel_recovery_total";
/// Counter of answers that contradict what was written: a charge of a payment that was rolled back, a refund
/// that had failed, money that moved otherwise than it was asked. Never anything but 0.
pub const CONTRADICTIONS: &str = "semel_provider_contradictions_total";

/// What driving a payment or refund on came to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Recovery {
    /// Settled by an answer or by evidence.
    Completed,
    /// The stored request was sent again.
    Resent,
    /// Fenced, and rolled back.
    RolledBack,
    /// Driven on later.
    Waiting,
    /// Left to a person.
    NeedsPerson,
}

impl Recovery {
    const ALL: [Self; 5] =
        [Self::Completed, Self::Resent, Self::RolledBack, Self::Waiting, Self::NeedsPerson];

    const fn label(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Resent => "resent",
            Self::RolledBack => "rolled_back",
            Self::Waiting => "waiting",
            Self::NeedsPerson => "needs_person",
        }
    }

    /// Counts it.
    pub(crate) fn count(self) {
        counter!(RECOVERY, "outcome" => self.label()).increment(1);
    }
}

/// The labels of calls to the provider.
pub(crate) const CALLS: [&str; 8] =
    ["prepare", "charge", "get", "cancel", "refund", "get_refund", "list", "list_refunds"];
/// The labels of their outcomes.
pub(crate) const CALL_OUTCOMES: [&str; 8] =
    ["succeeded", "declined", "fenced", "in_progress", "not_found", "not_executed", "unknown", "mismatch"];

const RECOVERIES: [&str; Recovery::ALL.len()] = {
    let mut labels = [""; Recovery::ALL.len()];
    let mut at = 0;
    while at < labels.len() {
        labels[at] = Recovery::ALL[at].label();
        at += 1;
    }
    labels
};

/// The metrics of payments and refunds.
pub const METRICS: [Metric; 4] = [
    Metric::counter(PROVIDER_CALLS, "Calls to the provider by what was answered.")
        .with(&[Label::of("call", &CALLS), Label::of("outcome", &CALL_OUTCOMES)]),
    Metric::histogram(PROVIDER_SECONDS, "One call to the provider, answered or not.")
        .with(&[Label::of("call", &CALLS)]),
    Metric::counter(RECOVERY, "What driving a payment or refund on came to.")
        .with(&[Label::of("outcome", &RECOVERIES)]),
    Metric::counter(
        CONTRADICTIONS,
        "Charges of a payment that was settled without one; refunds that were made though they had been settled as failed, or \
         failed though they had been settled as made; and money that moved under a key of ours by another name or of another \
         amount. An event that is repeated counts again. Anything but 0 is money in the wrong place; the log names payment and \
         refund.",
    ),
];
