//! A TCP proxy that injures the connections through it.
//!
//! One [`Proxy`] stands for one link, so the API can lose Postgres while the relay keeps it. Its
//! faults are set while connections are open and take hold at once; a [`Rule`] instead reads one
//! direction of one connection from its beginning, so it may decode frames and cut at a certain one.
//!
//! It promises that a byte which it does not drop arrives unchanged and in order. A connection that
//! lost bytes is reset, not continued with a gap, once the fault is lifted: a real network would not
//! deliver what came after either.

mod link;
mod pump;
mod rule;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::link::Link;
pub use self::rule::{Rule, Rules, Verdict};
use crate::net::free_port;
use crate::wait::eventually;

/// How long the listener may take to close or to open again.
const LISTEN_DEADLINE: Duration = Duration::from_secs(10);
/// How often another port is tried when one was taken.
const BIND_TRIES: usize = 5;

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client, which connected, to the server.
    ToServer,
    /// From the server back to the client.
    ToClient,
}

/// What befalls the bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: they pass.
    Pass,
    /// Each arrives this much later; the bandwidth stays.
    Delay(Duration),
    /// They wait until the fault is lifted, and arrive then.
    Stall,
    /// They vanish, as does the end of the stream, while both sides believe the connection open.
    BlackHole,
    /// They arrive at this many bytes per second; 0 counts as 1.
    Throttle(u32),
    /// They arrive in pieces of at most this many bytes; 0 counts as 1.
    Slice(usize),
    /// This many more arrive on each connection, then the connection is reset. With 0 the next byte
    /// resets it.
    CutAfter(u64),
}

/// What went through a proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were accepted, ever.
    pub accepted: u64,
    /// Connections that are open.
    pub open: usize,
    /// Bytes that arrived at the server.
    pub to_server: u64,
    /// Bytes that arrived at the client.
    pub to_client: u64,
    /// Bytes that vanished, both ways.
    pub dropped: u64,
}

/// A TCP proxy that injures the connections through it. Dropping it resets them.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    link: Arc<Link>,
    /// Whether new connections are wanted, and whether they are accepted.
    accept: (watch::Sender<bool>, watch::Receiver<bool>),
    end: CancellationToken,
}

impl Proxy {
    /// Starts a proxy before a server, on a free port of 127.0.0.1.
    ///
    /// # Errors
    ///
    /// No port was free.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        Self::start_with(target, |_| None).await
    }

    /// Starts a proxy that gives each direction of each new connection a rule of its own.
    ///
    /// # Errors
    ///
    /// No port was free.
    pub async fn start_with(target: SocketAddr, rules: impl Rules) -> Result<Self> {
        let listener = bind().await?;
        let addr = listener.local_addr().context("asking for the proxy's address")?;
        let end = CancellationToken::new();
        let link = Arc::new(Link::new(target, Box::new(rules), end.child_token()));
        let (want, wanted) = watch::channel(true);
        let (tell, accepts) = watch::channel(true);
        tokio::spawn(end.clone().run_until_cancelled_owned(listen(
            link.clone(),
            addr,
            listener,
            wanted,
            tell,
        )));
        Ok(Self { addr, link, accept: (want, accepts), end })
    }

    /// The address to connect to instead of the server's.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets the fault of one direction, for open and for new connections.
    pub fn set(&self, direction: Direction, fault: Fault) {
        self.link.fault(direction).send_replace(fault);
    }

    /// Sets the fault of both directions.
    pub fn set_both(&self, fault: Fault) {
        self.set(Direction::ToServer, fault);
        self.set(Direction::ToClient, fault);
    }

    /// Refuses new connections from now on, as if nobody listened; open ones stay.
    ///
    /// # Errors
    ///
    /// The listener did not close.
    pub async fn refuse(&self) -> Result<()> {
        self.set_accept(false).await
    }

    /// Resets all open connections, and waits until they are gone; says how many.
    pub async fn sever(&self) -> usize {
        self.link.sever().await
    }

    /// Lifts all faults and accepts connections again. Those that lost bytes are reset.
    ///
    /// # Errors
    ///
    /// The port was taken meanwhile.
    pub async fn heal(&self) -> Result<()> {
        self.set_both(Fault::Pass);
        self.set_accept(true).await
    }

    /// What went through so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.link.counts()
    }

    async fn set_accept(&self, accept: bool) -> Result<()> {
        let mut accepts = self.accept.1.clone();
        self.accept.0.send_replace(accept);
        let changed = tokio::time::timeout(LISTEN_DEADLINE, accepts.wait_for(|&now| now == accept)).await;
        let what = if accept { "listen again" } else { "stop listening" };
        changed
            .with_context(|| format!("the proxy on {} did not {what} in time", self.addr))?
            .context("the proxy has ended")?;
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Binds a free port that nobody else took between finding and binding it.
async fn bind() -> Result<TcpListener> {
    let mut tries = 1;
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, free_port()?)).await {
            Err(error) if tries < BIND_TRIES && error.kind() == std::io::ErrorKind::AddrInUse => tries += 1,
            outcome => return outcome.context("binding a port for a proxy"),
        }
    }
}

/// Accepts connections while they are wanted. While they are not, no socket listens.
async fn listen(
    link: Arc<Link>,
    addr: SocketAddr,
    listener: TcpListener,
    mut wanted: watch::Receiver<bool>,
    tell: watch::Sender<bool>,
) {
    let mut listener = Some(listener);
    loop {
        match &listener {
            Some(open) => {
                tokio::select! {
                    accepted = open.accept() => match accepted {
                        Ok((client, _)) => link.carry(client),
                        // The client is gone already, or we are out of file descriptors.
                        Err(_) => tokio::task::yield_now().await,
                    },
                    changed = wanted.changed() => if changed.is_err() { return },
                }
            }
            None => {
                if wanted.changed().await.is_err() {
                    return;
                }
            }
        }
        let want = *wanted.borrow_and_update();
        match (want, &listener) {
            (false, Some(_)) => listener = None,
            (true, None) => {
                let again = eventually("the proxy's port", LISTEN_DEADLINE, || TcpListener::bind(addr)).await;
                listener = again.ok();
            }
            _ => continue,
        }
        tell.send_replace(listener.is_some());
    }
}

#[cfg(test)]
mod tests;
