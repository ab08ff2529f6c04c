//! The gauges that describe the database, read from it every few seconds and never counted up and down.
//!
//! Relay and reaper both run it, so that the backlog stays visible when either is gone. A gauge whose refresh fails
//! disappears after a minute rather than lies.

use metrics::gauge;
use sqlx::PgPool;

use crate::idempotency::store;
use crate::lifecycle::{Pass, Work};
use crate::{database, metrics as names, outbox};

/// Which gauges a process reports beside the outbox's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// None.
    Outbox,
    /// Those of the idempotency keys.
    OutboxAndKeys,
}

/// Reads the gauges of one database.
#[derive(Debug)]
pub struct Sampler {
    pool: PgPool,
    scope: Scope,
}

impl Sampler {
    /// Samples this database.
    #[must_use]
    pub fn new(pool: PgPool, scope: Scope) -> Self {
        names::describe_database();
        Self { pool, scope }
    }
}

impl Work for Sampler {
    type Error = sqlx::Error;

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        outbox::report(&self.pool).await?;
        if self.scope == Scope::OutboxAndKeys {
            report_keys(&self.pool).await?;
        }
        Ok(Pass::Worked)
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
