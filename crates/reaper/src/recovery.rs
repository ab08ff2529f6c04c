//! Recovery: drives the payments and refunds on whose owner is gone.
//!
//! Promise: a payment or refund that nobody works at is taken up again, and either settled, looked at again later, or left to a
//! person. Several reapers share the work, and none of them, nor a failure of one of them, keeps the others waiting.
//!
//! How: keys whose lease is dead are taken over, of each client the oldest first, and driven on from their recovery point
//! by the operation itself, some at a time. What is taken over is begun at once, so that no lease ends while it waits
//! here; what a slow provider draws out takes a place, and keeps no other place from being filled again. Keys of operations
//! that are not driven here are left alone.
//!
//! In a crash, or when a stop cuts it off, the leases end, and another pass, another reaper or the client's retry goes on.

use std::time::Duration;

use semel_core::database;
use semel_core::disposition::chain;
use semel_core::idempotency::engine::LEASE;
use semel_core::idempotency::store::{self, StuckKey};
use semel_core::lifecycle::{Pass, Work};
use semel_payments::driven::{Driven, OPERATIONS};
use semel_payments::payments::create::MakePayment;
use semel_payments::provider::Provider;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument as _;

/// How many are driven at a time.
const AT_A_TIME: usize = 16;
/// How many places are free before more is taken over while others are being freed.
const REFILL: usize = 8;
/// Most of one pass.
const BATCH: usize = 64;
/// How long a pass waits for those that it drives. What takes longer goes on beside the next one, and is finished at the
/// stop.
const PASS: Duration = Duration::from_secs(5);
/// How long it waits for one of them before it looks for more: others may have come due meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Drives payments and refunds on whose owner is gone.
#[derive(Debug)]
pub struct Recovery<P> {
    pool: PgPool,
    operations: Driven<P>,
    names: Vec<String>,
    retention: Duration,
    driven: JoinSet<()>,
    pass: Duration,
}

impl<P: Provider> Recovery<P> {
    /// Recovers the payments of this database and their refunds; a key that is completed is replayed for `retention`.
    #[must_use]
    pub fn new(pool: PgPool, payments: MakePayment<P>, retention: Duration) -> Self {
        Self {
            pool,
            operations: Driven::new(payments),
            names: OPERATIONS.map(str::to_owned).into(),
            retention,
            driven: JoinSet::new(),
            pass: PASS,
        }
    }

    /// Replaces how long a pass waits for those that it drives.
    #[must_use]
    pub fn with_pass(mut self, pass: Duration) -> Self {
        self.pass = pass;
        self
    }

    async fn take_over(&self, limit: usize) -> Result<Vec<StuckKey>, sqlx::Error> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        database::call(&self.pool, async |connection| {
            store::take_over_stuck(connection, &self.names, limit, LEASE).await
        })
        .await
    }

    /// Drives one on, in a task of its own: what goes wrong with it stays with it.
    fn drive(&mut self, stuck: &StuckKey) {
        let Some(scope) = Driven::<P>::scope(stuck) else {
            tracing::error!(client = stuck.client_id, "a stuck key is none that this version can read");
            return;
        };
        let (pool, operations, retention) = (self.pool.clone(), self.operations.clone(), self.retention);
        let (fence, operation, resource) = (stuck.fence, scope.operation, operations.resource_id(&scope));
        let work = async move {
            if let Err(error) = operations.proceed(&pool, &scope, fence, retention).await {
                tracing::warn!("what is stuck could not be driven on: {}", chain(&error));
            }
        };
        self.driven.spawn(work.instrument(tracing::info_span!("recovery", operation, %resource)));
    }
}

impl<P: Provider> Work for Recovery<P> {
    type Error = sqlx::Error;

    async fn finish(&mut self) {
        // A panic was told where it happened; its key waits for its lease to end.
        while self.driven.join_next().await.is_some() {}
    }

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        let began = Instant::now();
        let (mut found, mut more) = (0, true);
        let mut failed = None;
        // At the beginning, and when nothing has been freed for a while, any place is worth a look.
        let mut enough = 1;
        loop {
            while self.driven.try_join_next().is_some() {}
            let free = AT_A_TIME - self.driven.len();
            if more && free >= enough && found < BATCH {
                let limit = free.min(BATCH - found);
                match self.take_over(limit).await {
                    Ok(stuck) => {
                        found += stuck.len();
                        more = stuck.len() == limit && found < BATCH;
                        for key in &stuck {
                            self.drive(key);
                        }
                    }
                    // What has begun is finished first.
                    Err(error) => (more, failed) = (false, Some(error)),
                }
            }
            if began.elapsed() >= self.pass {
                break;
            }
            match tokio::time::timeout(LOOK_AGAIN, self.driven.join_next()).await {
                Ok(None) => break,
                // A panic was told where it happened; its key waits for its lease to end.
                Ok(Some(_)) => enough = REFILL,
                Err(_) => (more, enough) = (failed.is_none(), 1),
            }
        }
        match failed {
            Some(error) => Err(error),
            None if found == 0 => Ok(Pass::Idle),
            None if more || found == BATCH => Ok(Pass::Full),
            None => Ok(Pass::Worked),
        }
    }
}
