//! The reaper: keeps one database from filling up and its payments from being stuck.
//!
//! * [`Reaper`] deletes completed idempotency keys past their retention, [`retention`] what else is past its own.
//! * [`recovery`] drives payments and refunds on whose owner is gone; [`audit`] looks for charges and refunds that nothing of
//!   ours accounts for. Both only where a provider is given.
//! * It reports the database's gauges.
//! * The subcommand `keys` is for payments and refunds that wait for a person.
//!
//! Each is a loop of its own. None deletes a key in progress, whatever its age, or waits for a row that somebody has locked.
//! A crash loses nothing: the next pass finds the same rows.

pub mod audit;
pub mod failpoints;
mod grants;
mod health;
mod keys;
pub mod metrics;
mod options;
pub mod recovery;
pub mod retention;

use std::error::Error;
use std::time::Duration;

use ::metrics::counter;
use semel_core::daemon::{Daemon, print_metrics};
use semel_core::disposition::chain;
use semel_core::grants::{Grant, WRITE_EVENTS, grant, grant_statistics};
use semel_core::idempotency::store;
use semel_core::lifecycle::{Pace, Pass, Work, drive};
use semel_core::metrics::{self as names, Metric};
use semel_core::sampler::{Sampler, Scope};
use semel_core::schema::{self, ENGINE, MigrationSet};
use semel_core::{database, failpoint, telemetry};
use semel_payments::grants::DRIVE;
use semel_payments::payments::create::MakePayment;
use semel_payments::schema::PAYMENTS;
use sqlx::{Connection as _, PgPool};
use tokio::task::JoinSet;

pub use options::{Config, Options, Payments, Settling};

use audit::Audit;
use health::Telling;
use options::Command;
use recovery::Recovery;
use retention::{Kept, Retention, Walks};

const NAME: &str = "semel-reaper";

/// Connections for what is always done, and beside them for payments and refunds that are driven on.
const CONNECTIONS: (u32, u32) = (4, 8);

/// Deletes completed keys past their retention.
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
        let reaped = database::call(&self.pool, async |connection| {
            // An error drops the transaction; its connection is then rolled back before it is lent again.
            let mut tx = connection.begin().await?;
            let reaped = store::reap_expired(&mut tx, i64::from(self.batch)).await?;
            failpoint!(failpoints::BEFORE_COMMIT);
            tx.commit().await?;
            Ok(reaped)
        })
        .await?;
        counter!(metrics::REAPED, "kind" => metrics::KEYS).increment(reaped);
        Ok(match reaped {
            0 => Pass::Idle,
            reaped if reaped < u64::from(self.batch) => Pass::Worked,
            _ => Pass::Full,
        })
    }
}

/// Runs the reaper until it is asked to stop, or the subcommand that was given.
///
/// # Errors
///
/// When the configuration cannot be used, or the database refuses for good.
pub async fn run(options: Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    telemetry::start_logs(&options.process.logs);
    match &options.command {
        Some(Command::Migrate) => {
            let with_payments = options.provider_config()?.is_some();
            let sets: &[&MigrationSet] = if with_payments { &[&ENGINE, &PAYMENTS] } else { &[&ENGINE] };
            return Ok(schema::migrate(&options.database.url()?, sets).await?);
        }
        Some(Command::Grant { role, with_payments, operator }) => {
            let (sets, rights): (&[&MigrationSet], &[&[Grant]]) = match (*operator, *with_payments) {
                (true, _) => (&[&ENGINE, &PAYMENTS], &[&grants::OPERATOR, &DRIVE, &WRITE_EVENTS]),
                (false, true) => {
                    (&[&ENGINE, &PAYMENTS], &[&grants::REAPER, &grants::PAYMENTS, &DRIVE, &WRITE_EVENTS])
                }
                (false, false) => (&[&ENGINE], &[&grants::REAPER]),
            };
            let url = options.database.url()?;
            grant(&url, role, sets, rights).await?;
            if !*operator {
                grant_statistics(&url, role).await?;
            }
            return Ok(());
        }
        Some(Command::Metrics) => {
            let database: [&[Metric]; 3] = [&names::OUTBOX, &names::KEYS, &names::POOL];
            let own: [&[Metric]; 3] =
                [&metrics::METRICS, &metrics::PROVIDER, &semel_payments::metrics::METRICS];
            return Ok(print_metrics(&[database, own].concat())?);
        }
        Some(Command::Keys(command)) => return keys::run(&command.action, &options).await,
        None => {}
    }
    let config = options.config()?;
    if options.process.check {
        return Ok(());
    }
    let daemon = Daemon::start(NAME, env!("CARGO_PKG_VERSION"), &options.process).await?;
    names::describe(&metrics::METRICS);
    let (sets, connections): (&[&MigrationSet], _) = match &config.payments {
        Some(_) => (&[&ENGINE, &PAYMENTS], CONNECTIONS.0 + CONNECTIONS.1),
        None => (&[&ENGINE], CONNECTIONS.0),
    };
    let pool = database::pool(&config.database, NAME, connections);
    daemon.report_pool(&pool);
    let result = match database::wait_until_usable(&config.database, NAME, sets, &daemon.life).await {
        Ok(()) => work(&config, &daemon, &pool).await,
        Err(database::Unusable::Stopped) => Ok(()),
        Err(error) => Err(error.into()),
    };
    daemon.life.stop();
    daemon.finish(&[&pool]).await;
    result
}

/// Starts every loop, and waits for the stop or for the first of them that cannot go on.
async fn work(config: &Config, daemon: &Daemon, pool: &PgPool) -> Result<(), Box<dyn Error + Send + Sync>> {
    daemon.health.ready();
    sample(daemon, pool);
    let mut loops = Loops { daemon, period: config.period, running: JoinSet::new() };
    let reaper = Reaper::new(pool.clone(), config.batch);
    let (health, life) = (daemon.health.clone(), daemon.life.clone());
    loops.start("keys", Telling { work: reaper, health, life });
    let walks = [
        (Kept::PublishedEvents, config.events),
        (Kept::ProcessedEvents, config.processed),
        // Without either, an event that comes late takes effect.
        (Kept::AggregateVersions, config.processed),
        (Kept::ProviderAnswers, config.evidence),
        (Kept::OperatorActions, config.actions),
    ]
    .map(|(kept, age)| Retention::new(pool.clone(), kept, age, config.batch));
    loops.start("retention", Walks::new(walks.into()));
    if let Some(payments) = &config.payments {
        start_payments(&mut loops, payments, pool)?;
    } else {
        tracing::info!("without a provider no payment is recovered or audited");
    }
    loops.end().await
}

fn start_payments(
    loops: &mut Loops<'_>,
    payments: &Payments,
    pool: &PgPool,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    names::describe(&metrics::PROVIDER);
    names::describe(&semel_payments::metrics::METRICS);
    let provider = payments.provider.open()?;
    tracing::info!(provider = payments.provider.place(), "recovers payments and refunds");
    let settling = payments.settling.clone();
    let operation = MakePayment::new(settling.namespace, provider.clone(), settling.problems)
        .with_window(payments.provider.send_window);
    loops.start("recovery", Recovery::new(pool.clone(), operation, settling.key_retention));
    if let Some(look_back) = payments.audit_look_back {
        loops.start("audit", Audit::new(pool.clone(), provider, payments.audit_period, look_back));
    }
    Ok(())
}

/// Reports the database's gauges until the stop. Nothing depends on them, so their end ends nothing.
fn sample(daemon: &Daemon, pool: &PgPool) {
    let (life, pool) = (daemon.life.clone(), pool.clone());
    daemon.life.spawn(async move {
        let period = Duration::from_secs(5);
        let pace = Pace { shortest: period, longest: period, wake: None, heartbeat: None };
        if let Err(error) = drive("gauges", &mut Sampler::new(pool, Scope::OutboxAndKeys), &pace, &life).await
        {
            tracing::warn!("the gauges of the database are gone: {}", chain(&error));
        }
    });
}

/// The loops that run.
struct Loops<'a> {
    daemon: &'a Daemon,
    period: Duration,
    running: JoinSet<Result<(), Box<dyn Error + Send + Sync>>>,
}

impl Loops<'_> {
    fn start<W: Work + 'static>(&mut self, name: &'static str, mut work: W) {
        let heartbeat = Some(self.daemon.health.watch(name));
        let pace = Pace { shortest: self.period, longest: self.period, wake: None, heartbeat };
        let life = self.daemon.life.clone();
        let driven = self.daemon.life.spawn(async move { drive(name, &mut work, &pace, &life).await });
        self.running.spawn(async move { Ok(driven.await??) });
    }

    /// Waits until all have ended, after the stop, or one cannot go on.
    async fn end(mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        while let Some(ended) = self.running.join_next().await {
            ended??;
        }
        Ok(())
    }
}
