//! The names of the relay's metrics.

use semel_broker::Outcome;
use semel_core::metrics::{Label, Metric};

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

/// The relay's own metrics.
pub const METRICS: [Metric; 11] = [
    Metric::counter(PUBLISHED, "Events marked as published."),
    Metric::counter(
        OUTCOMES,
        "Publishing attempts by what became of them; an event that is tried again counts again.",
    )
    .with(&[Label::of("outcome", &OUTCOME_LABELS)]),
    Metric::histogram(
        LATENCY,
        "From an event's insertion to the mark after its confirm, by the database's clock.",
    ),
    Metric::histogram(CONFIRM, "One wave, from its first message to its last confirm."),
    Metric::histogram(BATCH, "Events of one batch that held any."),
    Metric::histogram(CLAIM, "Taking lanes and reading their events."),
    Metric::gauge(BROKER_UP, "1 while at least one worker finds that the broker takes messages."),
    Metric::gauge(BROKER_BLOCKED, "1 while at least one worker finds it blocked by an alarm."),
    Metric::gauge(LANES_HELD, "Lanes that this process holds at the moment."),
    Metric::gauge(
        LAST_PROGRESS,
        "Unix time at which this process last marked a batch; absent before the first.",
    ),
    Metric::counter(
        BELOW_FLOOR,
        "Lanes in which a probe without floors found an event below the floor, late by up to half a minute. Anything but 0 is a \
         bug of ours, an `id` that a producer set, or an event that somebody made unpublished by hand.",
    ),
];
