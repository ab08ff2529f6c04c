//! The API: the front door over HTTP and gRPC.
//!
//! Promise: of all requests under one key of one client and operation at most one takes effect, and no answer to a keyed
//! request leaves before what it tells is committed. A client that goes away ends the waiting, never the work.
//!
//! How: `server` accepts connections and bounds them, `front` admits requests (identity, trace, panic guard, cap,
//! credentials), handlers read them, and the engine of `semel-core` executes them in tasks that a stop waits for.
//!
//! It does not publish events or expire keys. In a crash the database decides: a request has taken effect
//! whole or not at all, and its retry is told which.

mod access;
mod arrival;
mod body;
mod credentials;
mod error;
pub mod failpoints;
mod front;
mod grants;
mod grpc;
mod json;
mod key;
mod keyed;
mod keys;
mod listing;
pub mod metrics;
mod openapi;
mod options;
mod orders;
mod payments;
mod problem;
mod refunds;
mod routes;
mod server;
mod state;
mod tls;
mod webhooks;

use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

use semel_core::daemon::{Daemon, print_metrics};
use semel_core::database::{self, Unusable};
use semel_core::grants::{WRITE_EVENTS, grant};
use semel_core::idempotency::admission::Admission;
use semel_core::metrics::{Metric, POOL};
use semel_core::outbox::hint::Hints;
use semel_core::schema::{self, ENGINE, MigrationSet};
use semel_core::{admin, telemetry};
use semel_payments::grants::DRIVE;
use semel_payments::options::{ProviderConfig, UnusableProvider};
use semel_payments::payments::create::MakePayment;
use semel_payments::provider::chosen::Chosen;
use semel_payments::schema::PAYMENTS;
use sqlx::PgPool;

pub use options::{Config, Options};
pub use routes::router;
pub use server::{Door, serve};
pub use state::{Api, Settings};
pub use tls::{Tls, TlsFiles};
pub use webhooks::Webhooks;

use options::Command;

const NAME: &str = "semel-api";

/// The tables that the API needs.
const SETS: [&MigrationSet; 2] = [&ENGINE, &PAYMENTS];

/// The metrics that it emits; those of payments stay at 0 without a provider.
const METRICS: [&[Metric]; 4] =
    [&metrics::METRICS, &semel_payments::metrics::METRICS, &semel_payments::hearing::METRICS, &POOL];

/// How often the pool's gauges are set.
const GAUGES_EVERY: Duration = Duration::from_secs(5);

/// Runs the API until it is asked to stop, or the subcommand that was given.
///
/// # Errors
///
/// When the configuration cannot be used, an address is taken, or the database refuses for good.
pub async fn run(options: Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    telemetry::start_logs(&options.process.logs);
    match &options.command {
        Some(Command::Migrate) => return Ok(schema::migrate(&options.database.url()?, &SETS).await?),
        Some(Command::Grant { role }) => {
            return Ok(
                grant(&options.database.url()?, role, &SETS, &[&grants::API, &DRIVE, &WRITE_EVENTS]).await?
            );
        }
        Some(Command::Credentials(command)) => {
            return credentials::run(command, &options.database.url()?).await;
        }
        Some(Command::Metrics) => return Ok(print_metrics(&METRICS)?),
        Some(Command::Openapi) => return Ok(print_openapi(&options)?),
        None => {}
    }
    let config = options.config()?;
    if options.process.check {
        return Ok(());
    }
    let daemon = Daemon::start(NAME, env!("CARGO_PKG_VERSION"), &options.process).await?;
    for metrics in METRICS {
        semel_core::metrics::describe(metrics);
    }
    let pool = database::pool(&config.database, NAME, config.database_connections);
    let result = serve_until_stopped(&config, &daemon, &pool).await;
    daemon.life.stop();
    daemon.finish(&[&pool]).await;
    result
}

/// Prints the whole description: of a process that makes payments.
fn print_openapi(options: &Options) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    out.write_all(openapi::text(openapi::Payments::Made, options.problem_base()).as_bytes())?;
    out.flush()
}

async fn serve_until_stopped(
    config: &Config,
    daemon: &Daemon,
    pool: &PgPool,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = admin::bind(config.listen, "--listen").await?;
    let hints = Hints::start(config.database.clone(), "semel-api hints", &daemon.life);
    let api = Api::new(pool.clone(), config.settings.clone(), daemon.life.clone())
        .with_hints(hints)
        .with_admission(Admission::new(config.rate, config.keys_in_progress));
    let api = if let Some(provider) = &config.provider {
        api.with_payments(make_payment(&config.settings, provider)?)
    } else {
        tracing::info!("without a provider there are no payments, and their routes answer 404");
        api
    };
    let api = match &config.webhooks {
        Some(webhooks) => api.with_webhooks(webhooks.clone()),
        None => api,
    };
    let door = match &config.tls {
        Some(tls) => {
            daemon.life.spawn(tls.clone().renew(daemon.life.clone()));
            Door::default().with_tls(tls.clone())
        }
        None => Door::default(),
    };
    daemon.life.spawn(serve(listener, door, api.clone(), daemon.life.clone()));
    daemon.life.spawn(report_pool(pool.clone(), daemon.health.watch("gauges"), daemon.life.clone()));
    tracing::info!(listen = %config.listen, "answers; requests are taken once the database is usable");
    match database::wait_until_usable(&config.database, NAME, &SETS, &daemon.life).await {
        Ok(()) => {}
        Err(Unusable::Stopped) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    // From here on ready whatever the database does: while it is away, somebody has to say so.
    api.open();
    daemon.health.ready();
    tracing::info!("ready");
    daemon.life.stopping().await;
    Ok(())
}

fn make_payment(
    settings: &Settings,
    provider: &ProviderConfig,
) -> Result<MakePayment<Chosen>, UnusableProvider> {
    let port = provider.open()?;
    tracing::info!(provider = provider.place(), "makes payments");
    Ok(MakePayment::new(settings.namespace.clone(), port, settings.problem_base.clone())
        .with_window(provider.send_window))
}

/// Sets the pool's gauges until the stop; its heartbeat shows that the process turns.
async fn report_pool(
    pool: PgPool,
    heartbeat: semel_core::lifecycle::Heartbeat,
    life: semel_core::lifecycle::Lifecycle,
) {
    while !life.is_stopping() {
        heartbeat.beat();
        semel_core::metrics::report_pool(&pool);
        tokio::select! {
            () = tokio::time::sleep(GAUGES_EVERY) => {}
            () = life.stopping() => {}
        }
    }
}
