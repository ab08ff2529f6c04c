//! What every daemon's `run` begins and ends with.

use std::error::Error;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use sqlx::PgPool;

use crate::admin::{self, CannotListen, Health};
use crate::disposition::chain;
use crate::lifecycle::{Drained, Lifecycle};
use crate::metrics::{self, Metric};
use crate::options::ProcessOptions;
use crate::telemetry;

/// How long closing the database's connections may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// A process with logs, metrics, admin endpoint and signals.
#[derive(Debug)]
pub struct Daemon {
    /// Its name, `semel-relay`.
    pub name: &'static str,
    /// Its stop tokens and tasks.
    pub life: Lifecycle,
    /// What its admin endpoint tells.
    pub health: Health,
    grace: Duration,
}

/// A daemon that could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The metrics recorder could not be installed.
    #[error("starting metrics")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// Signal handlers could not be installed.
    #[error("listening to signals")]
    Signals(#[source] io::Error),
    /// The admin endpoint's address cannot be used.
    #[error(transparent)]
    Admin(#[from] CannotListen),
}

impl Daemon {
    /// Starts signals, metrics and the admin endpoint; logs have been started before.
    ///
    /// # Errors
    ///
    /// When the admin address is taken, or the process may not install its handlers.
    pub async fn start(
        name: &'static str,
        version: &'static str,
        options: &ProcessOptions,
    ) -> Result<Self, StartError> {
        let life = Lifecycle::new();
        life.listen_to_signals().map_err(StartError::Signals)?;
        let recorder = telemetry::start_metrics(version)?;
        let health = Health::default();
        let listener = admin::bind(options.admin_listen, "--admin-listen").await?;
        admin::serve(listener, health.clone(), recorder, version, life.clone());
        tracing::info!(daemon = name, version, admin = %options.admin_listen, "starts");
        Ok(Self { name, life, health, grace: options.grace() })
    }

    /// Reports the connections of a pool until the process stops.
    pub fn report_pool(&self, pool: &PgPool) {
        metrics::describe(&metrics::POOL);
        let (pool, life) = (pool.clone(), self.life.clone());
        self.life.spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_secs(5));
            loop {
                tokio::select! {
                    _ = tick.tick() => metrics::report_pool(&pool),
                    () = life.stopping() => return,
                }
            }
        });
    }

    /// Finishes: not ready, waits for the tracked tasks within the grace, and closes the pools where nothing uses them.
    pub async fn finish(self, pools: &[&PgPool]) {
        self.health.stopping();
        match self.life.drain(self.grace).await {
            Drained::Finished => {
                // A server that does not answer must not keep a process that has nothing left to do.
                let closing = async {
                    for pool in pools {
                        pool.close().await;
                    }
                };
                let _ = tokio::time::timeout(CLOSE_LIMIT, closing).await;
                tracing::info!(daemon = self.name, "stopped");
            }
            Drained::CutOff => {
                tracing::warn!(daemon = self.name, "stopped before all work in flight was finished");
            }
        }
    }
}

/// Prints the metrics of a daemon, those that every daemon has last: a row of a table each.
///
/// # Errors
///
/// When standard output takes nothing.
pub fn print_metrics(own: &[&[Metric]]) -> io::Result<()> {
    let all = own.iter().copied().flatten().chain(&telemetry::METRICS);
    let mut out = io::stdout();
    out.write_all(metrics::table(all).as_bytes())?;
    out.flush()
}

/// Turns the result of a daemon's `run` into its exit code, telling the error in one line.
#[must_use]
pub fn exit(result: Result<(), Box<dyn Error + Send + Sync>>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    tracing::error!("{}", chain(&*error));
    ExitCode::FAILURE
}
