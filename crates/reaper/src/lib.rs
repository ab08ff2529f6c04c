//! The reaper: deletes completed idempotency keys past their retention, oldest first, in bounded batches, and reports the
//! database's gauges.
//!
//! It never deletes a key in progress, whatever its age, and never waits for a row that somebody has locked. A crash loses
//! nothing: the next pass finds the same rows.

pub mod failpoints;
pub mod metrics;
mod options;

use std::error::Error;
use std::time::Duration;

use ::metrics::counter;
use semel_core::daemon::Daemon;
use semel_core::disposition::chain;
use semel_core::idempotency::store;
use semel_core::lifecycle::{Pace, Pass, Work, drive};
use semel_core::sampler::{Sampler, Scope};
use semel_core::schema::{self, ENGINE};
use semel_core::{database, failpoint, telemetry};
use sqlx::PgPool;

pub use options::{Config, Options};

use options::Command;

/// Deletes what is past its retention.
#[derive(Debug)]
pub struct Reaper {
    pool: PgPool,
    batch: u32,
}

impl Reaper {
    /// Reaps this database, at most `batch` rows a pass.
    #[must_use]
    pub fn new(pool: PgPool, batch: u32) -> Self {
        Self { pool, batch }
    }
}

impl Work for Reaper {
    type Error = sqlx::Error;

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        // An error drops the transaction; its connection is then rolled back before it is lent again.
        let reaped = store::reap_expired(&mut tx, i64::from(self.batch)).await?;
        failpoint!(failpoints::BEFORE_COMMIT);
        tx.commit().await?;
        counter!(metrics::REAPED, "kind" => metrics::KEYS).increment(reaped);
        Ok(match reaped {
            0 => Pass::Idle,
            reaped if reaped < u64::from(self.batch) => Pass::Worked,
            _ => Pass::Full,
        })
    }
}

/// Runs the reaper until it is asked to stop.
///
/// # Errors
///
/// When the configuration cannot be used, or the database refuses for good.
pub async fn run(options: Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    telemetry::start_logs(&options.process.logs);
    if let Some(Command::Migrate) = options.command {
        schema::migrate(&options.database.url()?, &[&ENGINE]).await?;
        return Ok(());
    }
    let config = options.config()?;
    if options.process.check {
        return Ok(());
    }
    let daemon = Daemon::start("semel-reaper", env!("CARGO_PKG_VERSION"), &options.process).await?;
    metrics::describe();
    let pool = database::pool(&config.database, "semel-reaper", 3);
    let result = match database::wait_until_usable(&pool, &config.database, &[&ENGINE], &daemon.life).await {
        Ok(()) => reap(&config, &daemon, &pool).await,
        Err(database::Unusable::Stopped) => Ok(()),
        Err(error) => Err(error.into()),
    };
    daemon.finish().await;
    pool.close().await;
    result
}

async fn reap(config: &Config, daemon: &Daemon, pool: &PgPool) -> Result<(), Box<dyn Error + Send + Sync>> {
    daemon.health.ready();
    let (life, sampled) = (daemon.life.clone(), pool.clone());
    daemon.life.spawn(async move {
        let period = Duration::from_secs(5);
        let pace = Pace { shortest: period, longest: period, wake: None, heartbeat: None };
        if let Err(error) =
            drive("gauges", &mut Sampler::new(sampled, Scope::OutboxAndKeys), &pace, &life).await
        {
            tracing::warn!("the gauges of the database are gone: {}", chain(&error));
        }
    });
    let heartbeat = Some(daemon.health.watch("reaper"));
    let pace = Pace { shortest: config.period, longest: config.period, wake: None, heartbeat };
    let (life, mut reaper) = (daemon.life.clone(), Reaper::new(pool.clone(), config.batch));
    let driven = daemon.life.spawn(async move { drive("reaper", &mut reaper, &pace, &life).await }).await;
    Ok(driven??)
}
