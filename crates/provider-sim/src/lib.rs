//! The provider simulator: a payment provider to develop and test against, over gRPC. It moves no money.
//!
//! Promise: it keeps the contract of `proto/semel/provider/v1/provider.proto`, and breaks it only as ordered through
//! `control.proto`. Whatever it applies (charges, declines, fences, refunds) is a durable line of its book before anybody
//! is told of it, and a restart knows it again.
//!
//! How: `desk` is the provider as a pure state machine; `clerk` is the one thread that owns it and writes the `book`;
//! `counter` takes calls in front of it and does to them what the ordered `faults` say; `service` and `control` are
//! gRPC.
//!
//! It authenticates nobody and ends no TLS. In a crash the book decides: what stands there happened, the rest did not, and
//! nobody was told otherwise. Ordered faults, holds and the clock are gone then.

mod asks;
pub mod book;
mod clerk;
mod clock;
mod control;
mod counter;
mod desk;
mod faults;
mod history;
mod holds;
pub mod metrics;
mod options;
mod service;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use semel_core::daemon::{Daemon, print_metrics};
use semel_core::lifecycle::Lifecycle;
use semel_core::{admin, telemetry};
use semel_proto::provider::v1::payment_provider_server::PaymentProviderServer;
use semel_proto::provider::v1::simulator_control_server::SimulatorControlServer;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

pub use options::{Config, Options};

use options::Command;

use book::{Book, BookError, Entry, Storage};
use clerk::Clerk;
use clock::Clock;
use control::Control;
use counter::Counter;
use desk::Desk;
use history::History;
use service::Provider;

/// The largest message either way.
const LARGEST_MESSAGE: usize = 64 * 1024;
/// How many calls a connection may have open at a time.
const CALLS_PER_CONNECTION: u32 = 1024;
/// A connection whose other end is gone is noticed after this long.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// A simulator, served or not.
#[derive(Debug)]
pub struct Simulator {
    counter: Arc<Counter>,
    life: Lifecycle,
}

/// A simulator that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The book cannot be used.
    #[error(transparent)]
    Book(#[from] BookError),
    /// The thread that writes the book could not be started.
    #[error("starting the thread that writes the book")]
    Thread(#[source] io::Error),
}

impl Simulator {
    /// Opens the simulator over a storage that holds these entries, with a horizon or for ever. Its tasks belong to `life`.
    ///
    /// # Errors
    ///
    /// When the entries contradict one another.
    pub fn open(
        storage: Box<dyn Storage>,
        entries: &[Entry],
        horizon: Option<Duration>,
        life: Lifecycle,
    ) -> Result<Self, OpenError> {
        let horizon = horizon.and_then(|horizon| time::Duration::try_from(horizon).ok());
        let desk = Desk::new(entries, horizon)?;
        let clock = Clock::default();
        let history = History::new(clock.clone());
        let clerk = Clerk::start(desk, storage, clock.clone(), history.clone()).map_err(OpenError::Thread)?;
        let counter = Arc::new(Counter::new(clerk, history, clock, life.clone()));
        Ok(Self { counter, life })
    }

    /// Serves both services on a listener, until the soft stop and until the calls in flight are answered.
    ///
    /// # Errors
    ///
    /// When the listener fails.
    pub async fn serve(&self, listener: TcpListener) -> Result<(), tonic::transport::Error> {
        let provider = PaymentProviderServer::new(Provider(Arc::clone(&self.counter)))
            .max_decoding_message_size(LARGEST_MESSAGE)
            .max_encoding_message_size(LARGEST_MESSAGE);
        let control = SimulatorControlServer::new(Control(Arc::clone(&self.counter)))
            .max_decoding_message_size(LARGEST_MESSAGE)
            .max_encoding_message_size(LARGEST_MESSAGE);
        Server::builder()
            .max_concurrent_streams(CALLS_PER_CONNECTION)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(provider)
            .add_service(control)
            .serve_with_incoming_shutdown(
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                self.life.stopping(),
            )
            .await
    }

    /// Waits until the book is closed; no call may be in flight.
    pub async fn close(self) {
        let gone = self.counter.clerk.gone();
        drop(self.counter);
        gone.await;
    }
}

/// Runs the simulator until it is asked to stop.
///
/// # Errors
///
/// When an address is taken, or the book cannot be used.
pub async fn run(options: Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    telemetry::start_logs(&options.process.logs);
    if let Some(Command::Metrics) = options.command {
        return Ok(print_metrics(&[&metrics::METRICS])?);
    }
    let config = options.config();
    if options.process.check {
        return Ok(());
    }
    let daemon = Daemon::start("semel-provider-sim", env!("CARGO_PKG_VERSION"), &options.process).await?;
    semel_core::metrics::describe(&metrics::METRICS);
    let result = simulate(&config, &daemon).await;
    daemon.finish(&[]).await;
    result
}

async fn simulate(config: &Config, daemon: &Daemon) -> Result<(), Box<dyn Error + Send + Sync>> {
    // First the address: whoever has it also has the book, mostly, and then this says what to change.
    let listener = admin::bind(config.listen, "--listen").await?;
    let listen = listener.local_addr()?;
    let (book, entries) = Book::open(&config.book)?;
    let simulator = Arc::new(Simulator::open(Box::new(book), &entries, config.horizon, daemon.life.clone())?);
    let gone = simulator.counter.clerk.gone();
    tracing::info!(%listen, book = %config.book.display(), entries = entries.len(), "serves");
    daemon.health.ready();
    // The simulator stays here as well: as long as it can be asked, its clerk goes only when it panicked.
    let serving = Arc::clone(&simulator);
    let served = daemon.life.spawn(async move { serving.serve(listener).await });
    tokio::select! {
        served = served => Ok(served??),
        () = gone => Err("the thread that writes the book is gone".into()),
    }
}
