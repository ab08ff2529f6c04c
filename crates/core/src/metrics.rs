//! The names of the metrics that the engine emits, and what may stand in their labels.

mod metric;

use metrics::{counter, gauge};

pub use metric::{Kind, Label, Metric, describe, table};

/// Counter of keyed requests; labels `operation` and `outcome`.
pub const IDEMPOTENCY_REQUESTS: &str = "semel_idempotency_requests_total";
/// Gauge of keys; label `status`.
pub const IDEMPOTENCY_KEYS: &str = "semel_idempotency_keys";
/// Gauge: keys in progress that wait for a person.
pub const IDEMPOTENCY_WAITING_FOR_PERSON: &str = "semel_idempotency_keys_waiting_for_person";
/// Gauge: age of the oldest key in progress.
pub const IDEMPOTENCY_OLDEST_IN_PROGRESS: &str = "semel_idempotency_oldest_in_progress_age_seconds";
/// Gauge: events that are ready to publish, counted up to 100,001.
pub const OUTBOX_PENDING: &str = "semel_outbox_pending_events";
/// Gauge: age of the oldest event that is neither published nor dead.
pub const OUTBOX_OLDEST_UNPUBLISHED: &str = "semel_outbox_oldest_unpublished_age_seconds";
/// Gauge: age of the oldest event that is ready to publish.
pub const OUTBOX_OLDEST_PENDING: &str = "semel_outbox_oldest_pending_age_seconds";
/// Gauge: events set aside.
pub const OUTBOX_HELD: &str = "semel_outbox_held_events";
/// Gauge: events given up on.
pub const OUTBOX_DEAD: &str = "semel_outbox_dead_events";
/// Gauge: age of the oldest open transaction.
pub const TRANSACTION_HORIZON: &str = "semel_outbox_transaction_horizon_age_seconds";
/// Gauge: connections of the pool; label `state`.
pub const DB_POOL_CONNECTIONS: &str = "semel_db_pool_connections";

/// What became of a keyed request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KeyOutcome {
    /// Executed now.
    Fresh,
    /// Answered from the stored response.
    Replayed,
    /// Another request with the key is at work.
    InProgress,
    /// The key belongs to another intent.
    Mismatch,
    /// The key's time is over.
    Expired,
    /// Executed on, by a retry that found the lease dead.
    TakenOver,
    /// Not known yet.
    Unknown,
    /// Not begun, since the client begins too much.
    Limited,
}

impl KeyOutcome {
    const ALL: [Self; 8] = [
        Self::Fresh,
        Self::Replayed,
        Self::InProgress,
        Self::Mismatch,
        Self::Expired,
        Self::TakenOver,
        Self::Unknown,
        Self::Limited,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Replayed => "replayed",
            Self::InProgress => "in_progress",
            Self::Mismatch => "mismatch",
            Self::Expired => "expired",
            Self::TakenOver => "taken_over",
            Self::Unknown => "unknown",
            Self::Limited => "limited",
        }
    }
}

/// Counts one keyed request.
pub(crate) fn count_request(operation: &'static str, outcome: Option<KeyOutcome>) {
    if let Some(outcome) = outcome {
        counter!(IDEMPOTENCY_REQUESTS, "operation" => operation, "outcome" => outcome.label()).increment(1);
    }
}

const OUTCOMES: [&str; KeyOutcome::ALL.len()] = {
    let mut labels = [""; KeyOutcome::ALL.len()];
    let mut at = 0;
    while at < labels.len() {
        labels[at] = KeyOutcome::ALL[at].label();
        at += 1;
    }
    labels
};

/// The label `outcome` of keyed requests.
pub const OUTCOME: Label = Label::of("outcome", &OUTCOMES);

/// The counter of keyed requests, for a daemon with these labels: its operations and [`OUTCOME`].
#[must_use]
pub const fn requests(labels: &'static [Label]) -> Metric {
    Metric::counter(IDEMPOTENCY_REQUESTS, "Keyed requests by what became of them.").with(labels)
}

/// The gauges of an outbox, read from the database by relay and reaper.
pub const OUTBOX: [Metric; 6] = [
    Metric::gauge(OUTBOX_PENDING, "Events ready to publish now, counted up to 100,001."),
    Metric::gauge(
        OUTBOX_OLDEST_UNPUBLISHED,
        "Age of the oldest event that is neither published nor dead, those included that are set aside; 0 without one.",
    ),
    Metric::gauge(OUTBOX_OLDEST_PENDING, "Age of the oldest event that is ready to publish; 0 without one."),
    Metric::gauge(
        OUTBOX_HELD,
        "Events set aside: those that failed, dead ones included, and those that wait behind them; counted up to 100,001.",
    ),
    Metric::gauge(
        OUTBOX_DEAD,
        "Events given up on, which wait for a person; counted up to 100,001 of their own.",
    ),
    Metric::gauge(TRANSACTION_HORIZON, "Age of the oldest open transaction of this database."),
];

/// The gauges of idempotency keys, read from the database by the reaper.
pub const KEYS: [Metric; 3] = [
    Metric::gauge(
        IDEMPOTENCY_KEYS,
        "Idempotency keys; those in progress are counted up to 100,001, completed ones are the planner's estimate.",
    )
    .with(&[Label::of("status", &["in_progress", "completed"])]),
    Metric::gauge(IDEMPOTENCY_WAITING_FOR_PERSON, "Keys in progress that recovery has left to a person."),
    Metric::gauge(
        IDEMPOTENCY_OLDEST_IN_PROGRESS,
        "Age of the oldest key in progress, counted from its first claim; 0 without one.",
    ),
];

/// The gauge of a process's pool of database connections.
pub const POOL: [Metric; 1] =
    [Metric::gauge(DB_POOL_CONNECTIONS, "Database connections of this process's pool.")
        .with(&[Label::of("state", &["idle", "used"])])];

/// Sets the gauges of a pool.
pub fn report_pool(pool: &sqlx::PgPool) {
    let idle = u32::try_from(pool.num_idle()).unwrap_or(u32::MAX);
    gauge!(DB_POOL_CONNECTIONS, "state" => "idle").set(idle);
    gauge!(DB_POOL_CONNECTIONS, "state" => "used").set(pool.size().saturating_sub(idle));
}
