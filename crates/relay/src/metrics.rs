//! The names of the relay's metrics.

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram};
use semel_broker::Outcome;

/// Counter: events marked as published.
pub const PUBLISHED: &str = "semel_outbox_published_total";
/// Counter of publishing attempts; label `outcome`.
pub const OUTCOMES: &str = "semel_outbox_publish_outcomes_total";
/// Histogram: from an event's insertion to the mark after its confirm, by the database's clock.
pub const LATENCY: &str = "semel_outbox_delivery_latency_seconds";
/// Histogram: a wave, from its first message to its last confirm.
pub const CONFIRM: &str = "semel_outbox_confirm_seconds";
/// Histogram: events of a batch.
pub const BATCH: &str = "semel_outbox_batch_events";
/// Histogram: taking lanes and reading them.
pub const CLAIM: &str = "semel_outbox_claim_seconds";
/// Gauge: 1 while a worker has the broker.
pub const BROKER_UP: &str = "semel_relay_broker_up";
/// Gauge: 1 while the broker is blocked by an alarm.
pub const BROKER_BLOCKED: &str = "semel_relay_broker_blocked";
/// Gauge: lanes that this process holds.
pub const LANES_HELD: &str = "semel_relay_lanes_held";
/// Gauge: when a batch was last marked.
pub const LAST_PROGRESS: &str = "semel_relay_last_progress_timestamp_seconds";
/// Counter: lanes with an event below their floor, found by a sweep. Always 0.
pub const BELOW_FLOOR: &str = "semel_relay_events_below_floor_total";

const OUTCOME_LABELS: [&str; 5] = ["confirmed", "returned", "nacked", "refused", "unknown"];

/// Returns an outcome's label.
#[must_use]
pub fn label(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Confirmed => "confirmed",
        Outcome::Returned { .. } => "returned",
        Outcome::Nacked => "nacked",
        Outcome::Refused { .. } => "refused",
        Outcome::Unconfirmed | Outcome::Unknown { .. } => "unknown",
    }
}

/// Describes the metrics and sets the counters to 0.
pub fn describe() {
    describe_counter!(PUBLISHED, "Events marked as published.");
    describe_counter!(OUTCOMES, "Publishing attempts by what became of them.");
    describe_histogram!(LATENCY, Unit::Seconds, "From an event's insertion to the mark after its confirm.");
    describe_histogram!(CONFIRM, Unit::Seconds, "A wave, from its first message to its last confirm.");
    describe_histogram!(BATCH, "Events of a batch.");
    describe_histogram!(CLAIM, Unit::Seconds, "Taking lanes and reading their events.");
    describe_gauge!(BROKER_UP, "1 while a worker has the broker.");
    describe_gauge!(BROKER_BLOCKED, "1 while the broker is blocked by an alarm.");
    describe_gauge!(LANES_HELD, "Lanes that this process holds.");
    describe_gauge!(LAST_PROGRESS, Unit::Seconds, "When a batch was last marked, Unix time.");
    describe_counter!(
        BELOW_FLOOR,
        "Events that a sweep found below their lane's floor. Anything but 0 is a bug."
    );
    counter!(PUBLISHED).increment(0);
    counter!(BELOW_FLOOR).increment(0);
    for outcome in OUTCOME_LABELS {
        counter!(OUTCOMES, "outcome" => outcome).increment(0);
    }
}
