//! A TCP forwarder in front of the broker whose line can be cut or frozen.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use semel_broker::BrokerUrl;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use crate::support::raw_url;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Open,
    Frozen,
    Cut,
}

/// Forwards one connection to the broker at `AMQP_URL`.
pub(crate) struct Forwarder {
    address: SocketAddr,
    line: watch::Sender<Line>,
    inject: mpsc::UnboundedSender<Vec<u8>>,
    budget: Arc<Budget>,
}

/// How many more bytes pass from the broker before the line is cut.
struct Budget(AtomicUsize);

const UNLIMITED: usize = usize::MAX;

impl Forwarder {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (line, _) = watch::channel(Line::Open);
        let (inject, injected) = mpsc::unbounded_channel();
        let budget = Arc::new(Budget(AtomicUsize::new(UNLIMITED)));
        let (control, allowance) = (line.clone(), Arc::clone(&budget));
        tokio::spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let broker = TcpStream::connect(host_and_port()).await.unwrap();
            let (from_client, to_client) = client.into_split();
            let (from_broker, to_broker) = broker.into_split();
            let (_none, no_injections) = mpsc::unbounded_channel();
            let unlimited = Arc::new(Budget(AtomicUsize::new(UNLIMITED)));
            tokio::join!(
                pump(from_client, to_broker, control.clone(), no_injections, unlimited),
                pump(from_broker, to_client, control, injected, allowance),
            );
        });
        Self { address, line, inject, budget }
    }

    /// `AMQP_URL` by way of the forwarder, with more query parameters.
    pub(crate) fn url(&self, query: &str) -> BrokerUrl {
        let url = raw_url().replacen(&host_and_port(), &self.address.to_string(), 1);
        format!("{url}?{query}").parse().unwrap()
    }

    pub(crate) fn cut(&self) {
        self.line.send_replace(Line::Cut);
    }

    /// Cuts the line after so many more bytes from the broker.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.budget.0.store(bytes, Ordering::SeqCst);
    }

    /// Nothing passes any more, but both sides stay connected.
    pub(crate) fn freeze(&self) {
        self.line.send_replace(Line::Frozen);
    }

    /// Sends bytes to the client as if from the broker, which should be silent meanwhile.
    pub(crate) fn inject(&self, bytes: Vec<u8>) {
        self.inject.send(bytes).unwrap();
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    control: watch::Sender<Line>,
    mut injected: mpsc::UnboundedReceiver<Vec<u8>>,
    budget: Arc<Budget>,
) {
    let mut line = control.subscribe();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let state = *line.borrow_and_update();
        let read = tokio::select! {
            biased;
            changed = line.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            () = std::future::ready(()), if state == Line::Cut => return,
            Some(bytes) = injected.recv() => {
                to.write_all(&bytes).await.unwrap();
                continue;
            }
            read = from.read(&mut buffer), if state == Line::Open => read,
        };
        let Ok(count @ 1..) = read else { return };
        let left = budget.0.load(Ordering::SeqCst);
        let passing = count.min(left);
        if left != UNLIMITED {
            budget.0.store(left - passing, Ordering::SeqCst);
        }
        let written = to.write_all(&buffer[..passing]).await;
        if passing < count {
            control.send_replace(Line::Cut);
        }
        if written.is_err() {
            return;
        }
    }
}

/// `host:port` as in `AMQP_URL`.
fn host_and_port() -> String {
    let url = raw_url();
    let after_scheme = url.split_once("://").unwrap().1;
    let authority = after_scheme.split(['/', '?']).next().unwrap();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    assert!(host.contains(':'), "AMQP_URL must name the port for tests with a forwarder");
    host.to_owned()
}
