//! One prober per process finds the lanes that have work, and wakes the workers.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::{counter, gauge};
use semel_core::admin::Health;
use semel_core::database::{self, CALL_LIMIT, within};
use semel_core::lifecycle::{Pass, Work};
use semel_core::outbox::drain;
use sqlx::PgConnection;
use tokio::sync::Notify;

use crate::error::RelayError;
use crate::floors::{Keeper, Look};
use crate::metrics as names;
use crate::options::Config;
use crate::turns::Turns;
use crate::unmarked::Unmarked;

/// For how long it is remembered that a queue was silent.
const REMEMBERED_SILENCE: Duration = Duration::from_mins(1);

/// What prober and workers of a process share; clones share it.
#[derive(Clone, Debug)]
pub struct Shared {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    health: Health,
    lanes: Mutex<Lanes>,
    floors: Mutex<drain::Floors>,
    workers: Vec<Seat>,
    progress: Arc<Notify>,
    unmarked: Unmarked,
    turns: Turns,
    /// Whether the database does not answer the prober.
    database_away: AtomicBool,
    lanes_held: AtomicUsize,
    /// Whether a worker has taken a lane since the last probe.
    lanes_taken: AtomicBool,
    /// When a batch was last marked, in milliseconds since 1970; 0 before the first.
    last_progress: AtomicU64,
    /// When a queue was last found silent.
    silence: Mutex<Option<Instant>>,
}

/// How a worker finds the broker.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Broker {
    /// It has no connection that can be used.
    #[default]
    Away,
    /// An alarm blocks it.
    Blocked,
    /// It takes messages.
    Up,
}

/// A worker as the others see it.
#[derive(Debug, Default)]
struct Seat {
    wake: Arc<Notify>,
    broker: Mutex<Broker>,
}

impl Seat {
    fn broker(&self) -> MutexGuard<'_, Broker> {
        self.broker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Lanes {
    /// Lanes that have work, oldest head first.
    waiting: Vec<i16>,
}

impl Shared {
    /// Starts without lanes and without a broker: not ready.
    #[must_use]
    pub fn new(health: Health, workers: u16) -> Self {
        health.not_ready("waiting for the broker");
        let workers = (0..workers).map(|_| Seat::default()).collect();
        let inner = Inner {
            health,
            lanes: Mutex::default(),
            floors: Mutex::new(drain::Floors::NONE),
            workers,
            progress: Arc::default(),
            unmarked: Unmarked::default(),
            turns: Turns::default(),
            database_away: AtomicBool::default(),
            lanes_held: AtomicUsize::default(),
            lanes_taken: AtomicBool::default(),
            last_progress: AtomicU64::default(),
            silence: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
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

    /// What this process has had confirmed and could not mark.
    pub(crate) fn unmarked(&self) -> &Unmarked {
        &self.inner.unmarked
    }

    /// Whose turn it is to wait for chains for long.
    pub(crate) fn turns(&self) -> &Turns {
        &self.inner.turns
    }

    /// Says whether another worker than this one knows the broker to be blocked.
    #[must_use]
    pub fn is_blocked_beside(&self, worker: u16) -> bool {
        let mut others = self.inner.workers.iter().enumerate().filter(|(at, _)| *at != usize::from(worker));
        others.any(|(_, seat)| *seat.broker() == Broker::Blocked)
    }

    /// Returns the lanes that have work, oldest head first.
    #[must_use]
    pub fn waiting(&self) -> Vec<i16> {
        self.lanes().waiting.clone()
    }

    /// Returns from which id on each lane is read.
    #[must_use]
    pub fn floors(&self) -> drain::Floors {
        *self.inner.floors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_floors(&self, floors: &drain::Floors) {
        *self.inner.floors.lock().unwrap_or_else(PoisonError::into_inner) = *floors;
    }

    /// Notes how a worker finds the broker. While none finds it up, the process is not ready and does not poll.
    pub fn broker(&self, worker: u16, broker: Broker) {
        let before = std::mem::replace(&mut *self.inner.workers[usize::from(worker)].broker(), broker);
        if before != broker {
            self.tell_health();
            self.inner.progress.notify_one();
        }
    }

    /// Notes whether the database answers the prober.
    fn database(&self, is_away: bool) {
        if self.inner.database_away.swap(is_away, Ordering::Relaxed) != is_away {
            self.tell_health();
        }
    }

    fn tell_health(&self) {
        if !self.any(Broker::Up) {
            self.inner.health.not_ready("waiting for the broker");
        } else if self.inner.database_away.load(Ordering::Relaxed) {
            self.inner.health.not_ready("waiting for the database");
        } else {
            self.inner.health.ready();
        }
    }

    /// Counts lanes as held until the guard is dropped.
    #[must_use]
    pub fn hold(&self, lanes: usize) -> LanesHeld {
        self.inner.lanes_taken.store(true, Ordering::Relaxed);
        self.inner.lanes_held.fetch_add(lanes, Ordering::Relaxed);
        LanesHeld { shared: self.clone(), lanes }
    }

    /// Notes that a queue was found silent.
    pub(crate) fn fell_silent(&self) {
        *self.silence() = Some(Instant::now());
    }

    /// Says whether a queue was found silent lately, and most likely still is.
    pub(crate) fn was_silent(&self) -> bool {
        self.silence().is_some_and(|since| since.elapsed() < REMEMBERED_SILENCE)
    }

    fn silence(&self) -> MutexGuard<'_, Option<Instant>> {
        self.inner.silence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a batch was marked.
    pub fn progressed(&self) {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.inner.last_progress.store(now, Ordering::Relaxed);
    }

    /// Sets the gauges, each turn anew: one that nobody refreshes disappears.
    #[expect(clippy::cast_precision_loss, reason = "64 lanes, and milliseconds below 2^53")]
    fn report(&self) {
        gauge!(names::BROKER_UP).set(if self.any(Broker::Up) { 1.0 } else { 0.0 });
        gauge!(names::BROKER_BLOCKED).set(if self.any(Broker::Blocked) { 1.0 } else { 0.0 });
        gauge!(names::LANES_HELD).set(self.inner.lanes_held.load(Ordering::Relaxed) as f64);
        let last_progress = self.inner.last_progress.load(Ordering::Relaxed);
        if last_progress > 0 {
            gauge!(names::LAST_PROGRESS).set(last_progress as f64 / 1000.0);
        }
    }

    fn any(&self, broker: Broker) -> bool {
        self.inner.workers.iter().any(|seat| *seat.broker() == broker)
    }

    fn offer(&self, heads: &[drain::LaneHead]) {
        self.lanes().waiting = heads.iter().map(|head| head.lane).collect();
        if !heads.is_empty() {
            for seat in &self.inner.workers {
                seat.wake.notify_one();
            }
        }
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.inner.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lanes that count as held.
#[derive(Debug)]
pub struct LanesHeld {
    shared: Shared,
    lanes: usize,
}

impl Drop for LanesHeld {
    fn drop(&mut self) {
        self.shared.inner.lanes_held.fetch_sub(self.lanes, Ordering::Relaxed);
    }
}

/// Asks the database which lanes have work, and from which id on they are to be read.
#[derive(Debug)]
pub struct Prober {
    config: Config,
    shared: Shared,
    connection: Option<PgConnection>,
    floors: Keeper,
}

impl Prober {
    /// Probes for the workers that share `shared`.
    #[must_use]
    pub fn new(config: Config, shared: Shared) -> Self {
        Self { config, shared, connection: None, floors: Keeper::new(Instant::now()) }
    }

    async fn probe(&mut self) -> Result<Vec<drain::LaneHead>, RelayError> {
        // Taken out, so that a connection that failed is not used again.
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        self.look(&mut connection).await?;
        let sweeps = self.floors.is_sweep_due(Instant::now());
        let floors = if sweeps { &drain::Floors::NONE } else { self.floors.floors() };
        let probed = within(CALL_LIMIT, drain::probe(&mut connection, floors))
            .await
            .map_err(RelayError::database("looking for lanes that have work"))?;
        if probed.read_only {
            return Err(RelayError::ReadOnly);
        }
        if sweeps {
            for head in self.floors.swept(&probed) {
                counter!(names::BELOW_FLOOR).increment(1);
                tracing::error!(lane = head.lane, id = ?head.id, "an event lay below its lane's floor");
            }
        }
        self.floors.probed(&probed);
        self.shared.set_floors(self.floors.floors());
        self.connection = Some(connection);
        Ok(probed.heads)
    }

    async fn connect(&mut self) -> Result<PgConnection, RelayError> {
        let connection =
            database::connect_with(&self.config.database, "semel-relay prober", &drain::SETTINGS)
                .await
                .map_err(RelayError::database("connecting to the database"))?;
        self.floors = Keeper::new(Instant::now());
        self.shared.set_floors(&drain::Floors::NONE);
        Ok(connection)
    }

    /// Looks how far the sequence has come and who writes, when it is time to.
    async fn look(&mut self, connection: &mut PgConnection) -> Result<(), RelayError> {
        let look = self.floors.look(Instant::now());
        if look == Look::Sequence {
            let position = within(CALL_LIMIT, drain::position(connection))
                .await
                .map_err(RelayError::database("reading the outbox's sequence"))?;
            if !self.floors.came_to(position) {
                return Ok(());
            }
        }
        if look != Look::Nothing {
            let writers = within(CALL_LIMIT, drain::writers(connection))
                .await
                .map_err(RelayError::database("asking who writes to the outbox"))?;
            match look {
                Look::Sequence => self.floors.note(writers),
                _ => self.floors.settle(writers),
            }
        }
        Ok(())
    }
}

impl Work for Prober {
    type Error = RelayError;

    async fn run_once(&mut self) -> Result<Pass, RelayError> {
        self.shared.report();
        if !self.shared.any(Broker::Up) {
            return Ok(Pass::Idle);
        }
        let probed = self.probe().await;
        self.shared.database(probed.is_err());
        self.shared.offer(&probed?);
        // Work that others hold, another process or a worker that waits for its confirms, needs no hurry of ours. Work that
        // is ours wakes the prober when it is done.
        let is_ours = self.shared.inner.lanes_taken.swap(false, Ordering::Relaxed);
        Ok(if is_ours { Pass::Worked } else { Pass::Idle })
    }
}
