//! The names of the metrics that a consumer emits, and what may stand in their labels.

use std::time::Duration;

use metrics::{counter, histogram};
use semel_core::metrics::{Label, Metric};

/// Counter of messages; labels `consumer` and `outcome`.
pub const MESSAGES: &str = "semel_inbox_messages_total";
/// Histogram of the time from taking a message to the end of its transaction; label `consumer`.
pub const HANDLE_SECONDS: &str = "semel_inbox_handle_seconds";

/// What became of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// It took effect.
    Effect,
    /// It had taken effect before.
    Duplicate,
    /// It was given back to the queue.
    Retried,
    /// It was given up on.
    Dead,
    /// It is no event, or not of the expected shape.
    Invalid,
    /// It was parked, to be handled in its aggregate's order.
    Parked,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Effect, Self::Duplicate, Self::Retried, Self::Dead, Self::Invalid, Self::Parked];

    /// Returns the value of the label `outcome`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Effect => "effect",
            Self::Duplicate => "duplicate",
            Self::Retried => "retried",
            Self::Dead => "dead",
            Self::Invalid => "invalid",
            Self::Parked => "parked",
        }
    }
}

const OUTCOMES: [&str; Outcome::ALL.len()] = {
    let mut labels = [""; Outcome::ALL.len()];
    let mut at = 0;
    while at < labels.len() {
        labels[at] = Outcome::ALL[at].label();
        at += 1;
    }
    labels
};

/// The metrics of a consumer; the label `consumer` is its name.
pub const METRICS: [Metric; 2] = [
    Metric::counter(MESSAGES, "Messages by what became of them.")
        .with(&[Label::open("consumer"), Label::of("outcome", &OUTCOMES)]),
    Metric::histogram(
        HANDLE_SECONDS,
        "From taking a message to the end of its transaction, an immediate repeat included.",
    )
    .with(&[Label::open("consumer")]),
];

/// Describes the metrics and sets the consumer's counters to 0; a daemon calls it once its recorder is installed, and
/// building a consumer does it too.
pub fn describe(consumer: &str) {
    semel_core::metrics::describe(&METRICS);
    for outcome in OUTCOMES {
        counter!(MESSAGES, "consumer" => consumer.to_owned(), "outcome" => outcome).increment(0);
    }
}

pub(crate) fn count(consumer: &str, outcome: Outcome) {
    counter!(MESSAGES, "consumer" => consumer.to_owned(), "outcome" => outcome.label()).increment(1);
}

pub(crate) fn record_time(consumer: &str, time: Duration) {
    histogram!(HANDLE_SECONDS, "consumer" => consumer.to_owned()).record(time);
}
