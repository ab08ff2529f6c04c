//! The relay: every committed event reaches the broker at least once, and first deliveries of one aggregate's events are
//! in id order, whatever number of relays runs.
//!
//! One *prober* per process asks which lanes have work; *workers* take lanes that nobody holds, read them, publish in
//! waves and mark what was confirmed, all in one transaction that owns the lanes and nothing else. A crash frees the lanes
//! with the connection; what was published and not marked is published again, with the same id.
//!
//! It does not deduplicate: consumers do, by that id.

mod error;
pub mod failpoints;
pub mod metrics;
mod options;
mod prober;
mod waves;
mod worker;

use std::error::Error;
use std::time::Duration;

use semel_core::daemon::Daemon;
use semel_core::disposition::chain;
use semel_core::lifecycle::{Pace, drive};
use semel_core::sampler::{Sampler, Scope};
use semel_core::schema::{self, ENGINE};
use semel_core::{database, telemetry};

pub use error::RelayError;
pub use options::{Config, Options, TopologyMode};
pub use prober::{Prober, Shared};
pub use worker::Worker;

use options::Command;

/// Runs the relay until it is asked to stop.
///
/// # Errors
///
/// When the configuration cannot be used, or database or broker refuse for good.
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
    let daemon = Daemon::start("semel-relay", env!("CARGO_PKG_VERSION"), &options.process).await?;
    metrics::describe();
    // For the gauges; prober and workers have connections of their own.
    let pool = database::pool(&config.database, "semel-relay", 2);
    let result = match database::wait_until_usable(&pool, &config.database, &[&ENGINE], &daemon.life).await {
        Ok(()) => relay(&config, &daemon, pool.clone()).await,
        Err(database::Unusable::Stopped) => Ok(()),
        Err(error) => Err(error.into()),
    };
    daemon.finish().await;
    pool.close().await;
    result
}

async fn relay(
    config: &Config,
    daemon: &Daemon,
    pool: sqlx::PgPool,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let shared = Shared::new(daemon.health.clone(), config.workers);
    let (failed, mut failure) = tokio::sync::mpsc::channel::<RelayError>(1);
    let mut tasks = Vec::new();
    for number in 0..config.workers {
        let mut worker = Worker::new(config.clone(), shared.clone(), number);
        let pace = Pace {
            shortest: Duration::from_millis(50),
            longest: Duration::from_secs(1),
            wake: Some(shared.wake_of(number)),
            heartbeat: Some(daemon.health.watch("worker")),
        };
        let (life, failed) = (daemon.life.clone(), failed.clone());
        tasks.push(daemon.life.spawn(async move {
            if let Err(error) = drive("relay worker", &mut worker, &pace, &life).await {
                let _ = failed.try_send(error);
                life.stop();
            }
            worker.close().await;
        }));
    }
    let mut prober = Prober::new(config.clone(), shared.clone());
    let pace = Pace {
        shortest: Duration::from_millis(5),
        longest: Duration::from_millis(250),
        wake: Some(shared.progress()),
        heartbeat: Some(daemon.health.watch("prober")),
    };
    let life = daemon.life.clone();
    let probe_failed = failed.clone();
    tasks.push(daemon.life.spawn(async move {
        if let Err(error) = drive("relay prober", &mut prober, &pace, &life).await {
            let _ = probe_failed.try_send(error);
            life.stop();
        }
    }));
    let life = daemon.life.clone();
    tasks.push(daemon.life.spawn(async move {
        let pace = Pace {
            shortest: Duration::from_secs(5),
            longest: Duration::from_secs(5),
            wake: None,
            heartbeat: None,
        };
        if let Err(error) = drive("outbox gauges", &mut Sampler::new(pool, Scope::Outbox), &pace, &life).await
        {
            tracing::warn!("the gauges of the outbox are gone: {}", chain(&error));
        }
    }));
    drop(failed);
    daemon.life.stopping().await;
    daemon.health.not_ready("stopping");
    // The grace bounds the wait for the tasks, in `Daemon::finish`.
    match failure.try_recv() {
        Ok(error) => Err(error.into()),
        Err(_) => Ok(()),
    }
}
