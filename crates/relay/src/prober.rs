//! One prober per process finds the lanes that have work, and wakes the workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::gauge;
use semel_core::admin::Health;
use semel_core::database;
use semel_core::lifecycle::{Pass, Work};
use semel_core::outbox::drain;
use sqlx::PgConnection;
use tokio::sync::Notify;

use crate::error::RelayError;
use crate::metrics as names;
use crate::options::Config;

/// For how long a lane rests after one of its events could not be published.
const REST: Duration = Duration::from_secs(1);

/// What prober and workers of a process share; clones share it.
#[derive(Clone, Debug)]
pub struct Shared {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    health: Health,
    lanes: Mutex<Lanes>,
    workers: Vec<Seat>,
    progress: Arc<Notify>,
}

/// A worker as the others see it.
#[derive(Debug, Default)]
struct Seat {
    wake: Arc<Notify>,
    has_broker: AtomicBool,
}

#[derive(Debug, Default)]
struct Lanes {
    /// Lanes that have work, oldest head first.
    waiting: Vec<i16>,
    resting: HashMap<i16, Instant>,
}

impl Shared {
    /// Starts without lanes and without a broker: not ready.
    #[must_use]
    pub fn new(health: Health, workers: u16) -> Self {
        health.not_ready("waiting for the broker");
        let workers = (0..workers).map(|_| Seat::default()).collect();
        let progress = Arc::new(Notify::new());
        Self { inner: Arc::new(Inner { health, lanes: Mutex::default(), workers, progress }) }
    }

    /// What wakes a worker.
    #[must_use]
    pub fn wake_of(&self, worker: u16) -> Arc<Notify> {
        Arc::clone(&self.inner.workers[usize::from(worker)].wake)
    }

    /// What wakes the prober.
    #[must_use]
    pub fn progress(&self) -> Arc<Notify> {
        Arc::clone(&self.inner.progress)
    }

    /// Returns the lanes that have work, oldest head first.
    #[must_use]
    pub fn waiting(&self) -> Vec<i16> {
        self.lanes().waiting.clone()
    }

    /// Lets lanes rest for a second, so that an event that cannot be published is not tried in a tight loop.
    pub fn rest(&self, lanes: &[i16]) {
        let until = Instant::now() + REST;
        let mut known = self.lanes();
        known.resting.extend(lanes.iter().map(|&lane| (lane, until)));
        known.waiting.retain(|lane| !lanes.contains(lane));
    }

    /// Notes whether a worker has the broker. Without any, the process is not ready and does not poll.
    pub fn broker(&self, worker: u16, has_broker: bool) {
        let seat = &self.inner.workers[usize::from(worker)];
        if seat.has_broker.swap(has_broker, Ordering::Relaxed) != has_broker {
            if self.has_broker() {
                self.inner.health.ready();
                self.inner.progress.notify_one();
            } else {
                self.inner.health.not_ready("waiting for the broker");
            }
        }
        gauge!(names::BROKER_UP).set(if self.has_broker() { 1.0 } else { 0.0 });
    }

    fn has_broker(&self) -> bool {
        self.inner.workers.iter().any(|seat| seat.has_broker.load(Ordering::Relaxed))
    }

    fn offer(&self, heads: &[drain::LaneHead]) -> bool {
        let now = Instant::now();
        let mut lanes = self.lanes();
        lanes.resting.retain(|_, until| *until > now);
        lanes.waiting =
            heads.iter().map(|head| head.lane).filter(|lane| !lanes.resting.contains_key(lane)).collect();
        let any = !lanes.waiting.is_empty();
        drop(lanes);
        if any {
            for seat in &self.inner.workers {
                seat.wake.notify_one();
            }
        }
        any
    }

    fn lanes(&self) -> std::sync::MutexGuard<'_, Lanes> {
        self.inner.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the database which lanes have work.
#[derive(Debug)]
pub struct Prober {
    config: Config,
    shared: Shared,
    connection: Option<PgConnection>,
}

impl Prober {
    /// Probes for the workers that share `shared`.
    #[must_use]
    pub fn new(config: Config, shared: Shared) -> Self {
        Self { config, shared, connection: None }
    }
}

impl Work for Prober {
    type Error = RelayError;

    async fn run_once(&mut self) -> Result<Pass, RelayError> {
        if !self.shared.has_broker() {
            return Ok(Pass::Idle);
        }
        // Taken out, so that a connection that failed is not used again.
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => database::connect(&self.config.database, "semel-relay prober")
                .await
                .map_err(RelayError::database("connecting to the database"))?,
        };
        let heads = drain::probe(&mut connection)
            .await
            .map_err(RelayError::database("looking for lanes that have work"))?;
        self.connection = Some(connection);
        Ok(if self.shared.offer(&heads) { Pass::Worked } else { Pass::Idle })
    }
}
