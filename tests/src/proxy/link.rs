//! The connections of a proxy.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::pump::{Broken, Pump};
use super::{Counts, Direction, Fault, Rule, Rules};

/// How long the server may take to accept.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// What the connections of one proxy share.
pub(super) struct Link {
    target: SocketAddr,
    rules: Box<dyn Rules>,
    to_server: watch::Sender<Fault>,
    to_client: watch::Sender<Fault>,
    accepted: AtomicU64,
    /// Bytes that arrived at the server and at the client.
    arrived: [AtomicU64; 2],
    dropped: AtomicU64,
    open: Mutex<Vec<Open>>,
    end: CancellationToken,
}

/// A connection that may still be open.
struct Open {
    cut: CancellationToken,
    task: JoinHandle<()>,
}

impl Link {
    pub(super) fn new(target: SocketAddr, rules: Box<dyn Rules>, end: CancellationToken) -> Self {
        Self {
            target,
            rules,
            to_server: watch::Sender::new(Fault::Pass),
            to_client: watch::Sender::new(Fault::Pass),
            accepted: AtomicU64::new(0),
            arrived: Default::default(),
            dropped: AtomicU64::new(0),
            open: Mutex::default(),
            end,
        }
    }

    pub(super) fn fault(&self, direction: Direction) -> &watch::Sender<Fault> {
        match direction {
            Direction::ToServer => &self.to_server,
            Direction::ToClient => &self.to_client,
        }
    }

    pub(super) fn rule(&self, direction: Direction) -> Option<Box<dyn Rule>> {
        self.rules.rule(direction)
    }

    pub(super) fn count_arrived(&self, direction: Direction, bytes: usize) {
        self.arrived[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn count_dropped(&self, bytes: usize) {
        self.dropped.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            accepted: self.accepted.load(Ordering::Relaxed),
            open: self.open().iter().filter(|connection| !connection.task.is_finished()).count(),
            to_server: self.arrived[Direction::ToServer as usize].load(Ordering::Relaxed),
            to_client: self.arrived[Direction::ToClient as usize].load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }

    /// Takes a new connection to the server and carries its bytes, in the background.
    pub(super) fn carry(self: &Arc<Self>, client: TcpStream) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let cut = self.end.child_token();
        let task = tokio::spawn(carry(self.clone(), client, cut.clone()));
        let mut open = self.open();
        open.retain(|connection| !connection.task.is_finished());
        open.push(Open { cut, task });
    }

    pub(super) async fn sever(&self) -> usize {
        let mut open = std::mem::take(&mut *self.open());
        open.retain(|connection| !connection.task.is_finished());
        for connection in &open {
            connection.cut.cancel();
        }
        let severed = open.len();
        for connection in open {
            // It ends of itself now; that it panicked is told on the standard error stream.
            let _ = connection.task.await;
        }
        severed
    }

    fn open(&self) -> MutexGuard<'_, Vec<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("target", &self.target)
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

/// Carries one connection to its end. It ends with a reset unless both sides ended it in order.
async fn carry(link: Arc<Link>, mut client: TcpStream, cut: CancellationToken) {
    let connecting = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(link.target));
    let Some(Ok(Ok(mut server))) = cut.run_until_cancelled(connecting).await else {
        reset(&client);
        return;
    };
    // Small frames shall not wait for each other: the proxy adds no delay of its own.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let outcome = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let forth = Pump::new(&link, Direction::ToServer);
        let back = Pump::new(&link, Direction::ToClient);
        let both =
            async { tokio::try_join!(forth.run(from_client, to_server), back.run(from_server, to_client)) };
        cut.run_until_cancelled(both).await.unwrap_or(Err(Broken))
    };
    if outcome.is_err() {
        reset(&client);
        reset(&server);
    }
}

/// Lets the closing of a socket send a reset: what is under way in it is thrown away.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}
