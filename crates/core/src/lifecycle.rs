//! A process's life: signals, soft and hard stop, tracked tasks, and the loop that drives a daemon's work.
//!
//! A *soft* stop asks everyone to finish what runs and to take nothing new; when the grace is over, or a second signal
//! comes, the *hard* stop ends what is left. Nothing depends on a stop being soft: a crash is the same to the data.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backoff::Backoff;
use crate::disposition::{Disposed, Disposition, chain};

/// The stop tokens and the tracked tasks of a process; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Lifecycle {
    soft: CancellationToken,
    hard: CancellationToken,
    tasks: TaskTracker,
}

/// How a process's tasks ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Drained {
    /// All finished within the grace.
    Finished,
    /// Some were cut off.
    CutOff,
}

impl Lifecycle {
    /// Starts a life without signals; a daemon adds them with [`Lifecycle::listen_to_signals`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns SIGTERM and SIGINT into a soft stop, and the second of them into a hard one.
    ///
    /// # Errors
    ///
    /// When the process may not install signal handlers.
    pub fn listen_to_signals(&self) -> std::io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let life = self.clone();
        tokio::spawn(async move {
            for stop in [&life.soft, &life.hard] {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                stop.cancel();
            }
        });
        Ok(())
    }

    /// Asks for a soft stop.
    pub fn stop(&self) {
        self.soft.cancel();
    }

    /// Says whether a soft stop was asked for.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.soft.is_cancelled()
    }

    /// Waits for the soft stop.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn stopping(&self) {
        self.soft.cancelled().await;
    }

    /// Waits for the hard stop.
    ///
    /// # Cancel safety
    ///
    /// Safe.
    pub async fn hard_stop(&self) {
        self.hard.cancelled().await;
    }

    /// Runs a task that a stop waits for. Dropping the handle does not end the task.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tasks.spawn(task)
    }

    /// After a soft stop: waits for the tracked tasks, at most for `grace` and not beyond the hard stop.
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.soft.cancel();
        self.tasks.close();
        let drained = tokio::select! {
            () = self.tasks.wait() => Drained::Finished,
            () = tokio::time::sleep(grace) => Drained::CutOff,
            () = self.hard.cancelled() => Drained::CutOff,
        };
        self.hard.cancel();
        drained
    }
}

/// What a pass found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pass {
    /// Nothing to do: wait longer.
    Idle,
    /// Some work, and no more at the moment: wait a little.
    Worked,
    /// As much as fits into one pass: there is more, go on at once.
    Full,
}

/// One input-free turn of a daemon's loop; tests call it directly.
pub trait Work: Send {
    /// Why a pass failed.
    type Error: Disposed;

    /// Looks at the world and does one bounded piece of work.
    fn run_once(&mut self) -> impl Future<Output = Result<Pass, Self::Error>> + Send;
}

/// How a loop waits between passes.
#[derive(Clone, Debug)]
pub struct Pace {
    /// The wait after a pass that worked.
    pub shortest: Duration,
    /// The wait to which idle passes grow.
    pub longest: Duration,
    /// Ends a wait early.
    pub wake: Option<Arc<Notify>>,
    /// Told of each turn, so that liveness can tell a loop that stands still.
    pub heartbeat: Option<Heartbeat>,
}

/// When a loop last turned.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    last: Arc<std::sync::Mutex<Instant>>,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self { last: Arc::new(std::sync::Mutex::new(Instant::now())) }
    }
}

impl Heartbeat {
    /// Notes a turn.
    pub fn beat(&self) {
        *self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
    }

    /// Returns the time since the last turn.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner).elapsed()
    }
}

/// Drives `work` until the soft stop; a pass that runs is finished first.
///
/// # Errors
///
/// The error of a pass whose disposition is to fail. Others are logged here and retried with backoff.
pub async fn drive<W: Work>(name: &str, work: &mut W, pace: &Pace, life: &Lifecycle) -> Result<(), W::Error> {
    let mut idle = Backoff::new(pace.shortest, pace.longest).steady();
    let mut failing = Backoff::for_service();
    while !life.is_stopping() {
        if let Some(heartbeat) = &pace.heartbeat {
            heartbeat.beat();
        }
        // What failed is not hurried: a wake-up tells of work, not that the trouble is over.
        let (wait, wake) = match work.run_once().await {
            Ok(pass) => {
                failing.reset();
                match pass {
                    Pass::Full => {
                        idle.reset();
                        continue;
                    }
                    Pass::Worked => {
                        idle.reset();
                        (idle.next_wait(), pace.wake.as_ref())
                    }
                    Pass::Idle => (idle.next_wait(), pace.wake.as_ref()),
                }
            }
            Err(error) if error.disposition() == Disposition::Fail => return Err(error),
            Err(error) => {
                let wait = failing.next_wait();
                tracing::warn!(
                    work = name,
                    retry_in_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                    "{}",
                    chain(&error)
                );
                (wait, None)
            }
        };
        let woken = async {
            match wake {
                Some(wake) => wake.notified().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = woken => {}
            () = life.stopping() => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("failed")]
    struct Failed(Disposition);

    impl Disposed for Failed {
        fn disposition(&self) -> Disposition {
            self.0
        }
    }

    struct Script {
        passes: Vec<Result<Pass, Failed>>,
        life: Lifecycle,
        runs: usize,
    }

    impl Work for Script {
        type Error = Failed;

        async fn run_once(&mut self) -> Result<Pass, Failed> {
            self.runs += 1;
            if self.passes.is_empty() {
                self.life.stop();
                return Ok(Pass::Idle);
            }
            self.passes.remove(0)
        }
    }

    fn pace() -> Pace {
        Pace {
            shortest: Duration::from_millis(1),
            longest: Duration::from_millis(2),
            wake: None,
            heartbeat: None,
        }
    }

    #[tokio::test]
    async fn drives_through_passing_errors_until_the_stop() {
        let life = Lifecycle::new();
        let passes = vec![Ok(Pass::Full), Ok(Pass::Worked), Err(Failed(Disposition::Retry)), Ok(Pass::Idle)];
        let mut work = Script { passes, life: life.clone(), runs: 0 };
        drive("test", &mut work, &pace(), &life).await.unwrap();
        assert_eq!(work.runs, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wake_up_hurries_what_is_idle_and_not_what_failed() {
        for (pass, hurried) in [(Ok(Pass::Idle), true), (Err(Failed(Disposition::Retry)), false)] {
            let (life, wake) = (Lifecycle::new(), Arc::new(Notify::new()));
            let longest = Duration::from_secs(100);
            let pace = Pace { shortest: longest, longest, wake: Some(Arc::clone(&wake)), heartbeat: None };
            wake.notify_one();
            let mut work = Script { passes: vec![pass], life: life.clone(), runs: 0 };
            let began = tokio::time::Instant::now();
            drive("test", &mut work, &pace, &life).await.unwrap();
            assert_eq!(began.elapsed() < Duration::from_millis(50), hurried);
        }
    }

    #[tokio::test]
    async fn returns_the_error_that_does_not_pass() {
        let life = Lifecycle::new();
        let mut work = Script { passes: vec![Err(Failed(Disposition::Fail))], life: life.clone(), runs: 0 };
        assert!(drive("test", &mut work, &pace(), &life).await.is_err());
    }

    #[tokio::test]
    async fn a_drain_waits_for_tracked_tasks_and_cuts_off_those_that_stay() {
        let life = Lifecycle::new();
        let (finish, finished) = tokio::sync::oneshot::channel::<()>();
        let watch = life.clone();
        life.spawn(async move {
            watch.stopping().await;
            let _ = finish.send(());
        });
        assert_eq!(life.drain(Duration::from_secs(10)).await, Drained::Finished);
        finished.await.unwrap();

        let life = Lifecycle::new();
        life.spawn(std::future::pending::<()>());
        assert_eq!(life.drain(Duration::from_millis(5)).await, Drained::CutOff);
    }
}
