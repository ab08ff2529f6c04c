//! The gauges that describe the database, read from it every few seconds and never counted up and down.
//!
//! Relay and reaper both run it, so that the backlog stays visible when either is gone. A gauge whose refresh fails
//! disappears after a minute rather than lies.
//!
//! A transaction that stays open makes a look at the outbox slower and slower for whoever has no floors. So a sampler rests for
//! twenty times as long as its last look took, but no longer than the gauges last.

use std::fmt;
use std::time::{Duration, Instant};

use metrics::gauge;
use sqlx::PgPool;

use crate::idempotency::store;
use crate::lifecycle::{Pass, Work};
use crate::outbox::drain::Floors;
use crate::{database, metrics as names, outbox};

/// Which gauges a process reports.
pub enum Scope {
    /// The outbox's, from the floors that this returns.
    Outbox(Box<dyn Fn() -> Floors + Send + Sync>),
    /// The outbox's, and those of the idempotency keys.
    OutboxAndKeys,
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outbox(_) => "Outbox",
            Self::OutboxAndKeys => "OutboxAndKeys",
        })
    }
}

/// How much longer than a look the rest after it is.
const REST: u32 = 20;
/// From the end of one look to the end of the next at most, if that takes as long; gauges last for a minute.
const LONGEST: Duration = Duration::from_secs(45);

fn rest(look: Duration) -> Duration {
    (look * REST).min(LONGEST.saturating_sub(look))
}

/// Reads the gauges of one database.
#[derive(Debug)]
pub struct Sampler {
    pool: PgPool,
    scope: Scope,
    rests_until: Instant,
}

impl Sampler {
    /// Samples this database.
    #[must_use]
    pub fn new(pool: PgPool, scope: Scope) -> Self {
        names::describe(&names::OUTBOX);
        if matches!(scope, Scope::OutboxAndKeys) {
            names::describe(&names::KEYS);
        }
        Self { pool, scope, rests_until: Instant::now() }
    }
}

impl Work for Sampler {
    type Error = sqlx::Error;

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        let began = Instant::now();
        if began < self.rests_until {
            return Ok(Pass::Idle);
        }
        self.sample().await?;
        self.rests_until = Instant::now() + rest(began.elapsed());
        Ok(Pass::Worked)
    }
}

impl Sampler {
    async fn sample(&self) -> Result<(), sqlx::Error> {
        match &self.scope {
            Scope::Outbox(floors) => {
                outbox::report(&self.pool, &floors()).await?;
            }
            Scope::OutboxAndKeys => {
                outbox::report(&self.pool, &Floors::NONE).await?;
                report_keys(&self.pool).await?;
            }
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a gauge need not be exact beyond 2^53 rows")]
async fn report_keys(pool: &PgPool) -> Result<(), sqlx::Error> {
    let counts = database::call(pool, async |connection| store::count(connection).await).await?;
    gauge!(names::IDEMPOTENCY_KEYS, "status" => "in_progress").set(counts.in_progress as f64);
    gauge!(names::IDEMPOTENCY_KEYS, "status" => "completed").set(counts.completed_estimate as f64);
    gauge!(names::IDEMPOTENCY_WAITING_FOR_PERSON).set(counts.waiting_for_person as f64);
    gauge!(names::IDEMPOTENCY_OLDEST_IN_PROGRESS).set(counts.oldest_in_progress_age);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_longer_after_a_long_look_and_never_longer_than_gauges_last() {
        for (look, expected) in [(1, 20), (500, 10_000), (3_000, 42_000), (20_000, 25_000), (60_000, 0)] {
            assert_eq!(rest(Duration::from_millis(look)), Duration::from_millis(expected));
        }
    }
}
