//! The relay: every committed event reaches the broker at least once, and first deliveries of one aggregate's events are
//! in id order, whatever number of relays runs.
//!
//! One *prober* per process asks which lanes have work; *workers* take lanes that nobody holds, read them, publish in
//! waves and mark what was confirmed, all in one transaction that owns the lanes and nothing else. A crash frees the lanes
//! with the connection; what was published and not marked is published again, with the same id.
//!
//! The prober polls, sooner when it is hinted at something, and keeps a floor per lane below which nothing is read again.
//!
//! An event that cannot be published is set aside with its aggregate's later ones and retried with growing waits; after
//! some attempts it is dead and waits for a person, who decides by the command `events`.
//!
//! It does not deduplicate: consumers do, by that id.

mod batch;
mod complaints;
mod error;
mod events;
pub mod failpoints;
mod floors;
mod grants;
pub mod metrics;
mod options;
mod patience;
mod prober;
mod routing;
mod sending;
mod turns;
mod unmarked;
mod waves;
mod worker;

use std::error::Error;
use std::time::Duration;

use semel_core::daemon::{Daemon, print_metrics};
use semel_core::disposition::chain;
use semel_core::grants::grant;
use semel_core::lifecycle::{Lifecycle, Pace, drive};
use semel_core::metrics as names;
use semel_core::outbox::hint;
use semel_core::sampler::{Sampler, Scope};
use semel_core::schema::{self, ENGINE};
use semel_core::{database, telemetry};

use tokio::sync::mpsc::Sender;

pub use error::RelayError;
pub use options::{Config, Options, TopologyMode};
pub use prober::{Broker, Prober, Shared};
pub use routing::RoutingKey;
pub use worker::Worker;

use options::Command;

/// Runs the relay until it is asked to stop.
///
/// # Errors
///
/// When the configuration cannot be used, or database or broker refuse for good.
pub async fn run(options: Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    telemetry::start_logs(&options.process.logs);
    match &options.command {
        Some(Command::Migrate) => {
            schema::migrate(&options.database.url()?, &[&ENGINE]).await?;
            return Ok(());
        }
        Some(Command::Grant { role, operator }) => {
            let rights = if *operator { &grants::OPERATOR } else { &grants::RELAY };
            return Ok(grant(&options.database.url()?, role, &[&ENGINE], &[rights]).await?);
        }
        Some(Command::Metrics) => {
            return Ok(print_metrics(&[&names::OUTBOX, &metrics::METRICS, &names::POOL])?);
        }
        Some(Command::Events(command)) => return events::run(&command.action, &options).await,
        None => {}
    }
    let config = options.config()?;
    if options.process.check {
        return Ok(());
    }
    let daemon = Daemon::start("semel-relay", env!("CARGO_PKG_VERSION"), &options.process).await?;
    names::describe(&metrics::METRICS);
    // For the gauges; prober and workers have connections of their own.
    let pool = database::pool(&config.database, "semel-relay", 2);
    daemon.report_pool(&pool);
    let result =
        match database::wait_until_usable(&config.database, "semel-relay", &[&ENGINE], &daemon.life).await {
            Ok(()) => relay(&config, &daemon, pool.clone()).await,
            Err(database::Unusable::Stopped) => Ok(()),
            Err(error) => Err(error.into()),
        };
    daemon.finish(&[&pool]).await;
    result
}

async fn relay(
    config: &Config,
    daemon: &Daemon,
    pool: sqlx::PgPool,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    config.suits_server(&pool).await?;
    let shared = Shared::new(daemon.health.clone(), config.workers);
    let (failed, mut failure) = tokio::sync::mpsc::channel::<RelayError>(1);
    for number in 0..config.workers {
        let mut worker = Worker::new(config.clone(), shared.clone(), number);
        let pace = Pace {
            shortest: Duration::from_millis(50),
            longest: Duration::from_secs(1),
            wake: Some(shared.wake_of(number)),
            heartbeat: Some(daemon.health.watch("worker")),
        };
        let alarm = Alarm { life: daemon.life.clone(), failed: failed.clone() };
        daemon.life.spawn(async move {
            if let Err(error) = drive("relay worker", &mut worker, &pace, &alarm.life).await {
                alarm.raise(error);
            }
            worker.close().await;
        });
    }
    let mut prober = Prober::new(config.clone(), shared.clone());
    let pace = Pace {
        shortest: Duration::from_millis(5),
        longest: Duration::from_millis(250),
        wake: Some(shared.progress()),
        heartbeat: Some(daemon.health.watch("prober")),
    };
    let (listen_at, wake, life) = (config.listen.clone(), shared.progress(), daemon.life.clone());
    daemon.life.spawn(async move { hint::listen(&listen_at, "semel-relay listener", &wake, &life).await });
    let alarm = Alarm { life: daemon.life.clone(), failed };
    daemon.life.spawn(async move {
        if let Err(error) = drive("relay prober", &mut prober, &pace, &alarm.life).await {
            alarm.raise(error);
        }
    });
    let (life, of_lanes) = (daemon.life.clone(), shared.clone());
    daemon.life.spawn(async move {
        let scope = Scope::Outbox(Box::new(move || of_lanes.floors()));
        let period = Duration::from_secs(5);
        let pace = Pace { shortest: period, longest: period, wake: None, heartbeat: None };
        if let Err(error) = drive("outbox gauges", &mut Sampler::new(pool, scope), &pace, &life).await {
            tracing::warn!("the gauges of the outbox are gone: {}", chain(&error));
        }
    });
    daemon.life.stopping().await;
    // The grace bounds the wait for the tasks, in `Daemon::finish`.
    match failure.try_recv() {
        Ok(error) => Err(error.into()),
        Err(_) => Ok(()),
    }
}

/// Ends the process when a part of it fails for good, or panics: without it the rest would stand idle and look well.
struct Alarm {
    life: Lifecycle,
    failed: Sender<RelayError>,
}

impl Alarm {
    fn raise(&self, error: RelayError) {
        let _ = self.failed.try_send(error);
        self.life.stop();
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.raise(RelayError::Panicked);
        }
    }
}
