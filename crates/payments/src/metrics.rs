//! The names of the domain's metrics.

use metrics::{Unit, counter, describe_counter, describe_histogram};

/// Counter of calls to the provider; labels `call` and `outcome`.
pub const PROVIDER_CALLS: &str = "semel_provider_calls_total";
/// Histogram of calls to the provider; label `call`.
pub const PROVIDER_SECONDS: &str = "semel_provider_call_seconds";
/// Counter of what recovery came to; label `outcome`.
pub const RECOVERY: &str = "semel_recovery_total";
/// Counter of answers that contradict what was written: a charge of a payment that was rolled back, a refund
/// that had failed. Never anything but 0.
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

/// Describes the metrics and sets the counters to 0.
pub fn describe() {
    describe_counter!(PROVIDER_CALLS, "Calls to the provider by what was answered.");
    describe_histogram!(PROVIDER_SECONDS, Unit::Seconds, "Calls to the provider.");
    describe_counter!(RECOVERY, "What driving a stuck payment or refund on came to.");
    describe_counter!(CONTRADICTIONS, "Answers of the provider that contradict what was written.");
    counter!(CONTRADICTIONS).increment(0);
    for call in CALLS {
        for outcome in CALL_OUTCOMES {
            counter!(PROVIDER_CALLS, "call" => call, "outcome" => outcome).increment(0);
        }
    }
    for outcome in Recovery::ALL {
        counter!(RECOVERY, "outcome" => outcome.label()).increment(0);
    }
}
