//! How much is measured.

use std::time::Duration;

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// How often throughput is measured; the best counts.
    pub(crate) rounds: usize,
    /// For how long requests are sent in one round.
    pub(crate) window: Duration,
    /// Events of one round.
    pub(crate) drain: i64,
    /// Events of the great backlog.
    pub(crate) backlog: i64,
    /// Events at its two ends whose rates are compared.
    pub(crate) slice: i64,
    /// Events that are drained while a snapshot is held.
    pub(crate) snapshot: i64,
    /// For how long latencies are measured.
    pub(crate) steady: Duration,
    /// How many single events wake an idle system.
    pub(crate) alone: usize,
    /// How many relays are killed.
    pub(crate) kills: usize,
    /// For how long an idle relay is watched.
    pub(crate) idle: Duration,
    /// For how long each variant of the textbook loop may run.
    pub(crate) textbook: Duration,
    /// Messages of one round of a consumer.
    pub(crate) messages: usize,
}

impl Scale {
    /// About ten minutes on two cores.
    pub(crate) fn full() -> Self {
        Self {
            rounds: 3,
            window: Duration::from_secs(6),
            drain: 100_000,
            backlog: 1_000_000,
            slice: 100_000,
            snapshot: 200_000,
            steady: Duration::from_secs(15),
            alone: 20,
            kills: 5,
            idle: Duration::from_secs(30),
            textbook: Duration::from_secs(15),
            messages: 20_000,
        }
    }

    /// Less than two minutes.
    pub(crate) fn quick() -> Self {
        Self {
            rounds: 1,
            window: Duration::from_secs(3),
            drain: 20_000,
            backlog: 60_000,
            slice: 10_000,
            snapshot: 20_000,
            steady: Duration::from_secs(4),
            alone: 5,
            kills: 2,
            idle: Duration::from_secs(8),
            textbook: Duration::from_secs(2),
            messages: 4_000,
        }
    }
}
