//! One connection to the broker.
//!
//! It does not recover by itself: its owner drops it and opens another. Opening covers name
//! resolution, TCP, TLS and the AMQP handshake under one deadline. Dropping it cuts the socket, so
//! that nothing is left behind, whatever state the broker is in; [`Connection::close`] is the
//! polite way, and tries it for a bounded time first.

use std::fmt;
use std::io;
use std::time::Duration;

use lapin::tcp::{AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, ConnectionProperties};

use crate::error::{Error, within};
use crate::socket::OwnedSocket;
use crate::url::{Address, BrokerUrl};

/// How long opening a connection to one address may take as a whole.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// The same where there are others to try.
const CONNECT_LIMIT_OF_SEVERAL: Duration = Duration::from_secs(5);

/// How long the broker may take to answer one request on an open connection.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long each step of a polite close may take.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_secs(3);

pub(crate) const REPLY_SUCCESS: u16 = 200;

/// A connection to RabbitMQ that is cut when dropped.
pub struct Connection {
    inner: lapin::Connection,
    socket: OwnedSocket,
    target: String,
}

impl Connection {
    /// Connects; `name` is what the management UI shows. Several addresses are tried in turn, beginning with any of them.
    ///
    /// # Errors
    ///
    /// [`Error::Login`] and [`Error::VirtualHost`] need a person; [`Error::Connect`] and
    /// [`Error::TimedOut`] can be retried. [`Error::NoAddress`] names what became of each of several addresses.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future cuts the socket.
    pub async fn open(url: &BrokerUrl, name: &str) -> Result<Self, Error> {
        Self::open_with_frames(url, name, None).await
    }

    /// Does so with frames of at most this size in bytes, unless the URL says how large they may be.
    pub(crate) async fn open_with_frames(
        url: &BrokerUrl,
        name: &str,
        frame_max: Option<u32>,
    ) -> Result<Self, Error> {
        let addresses = url.addresses();
        let limit = if addresses.len() > 1 { CONNECT_LIMIT_OF_SEVERAL } else { CONNECT_LIMIT };
        let first = fastrand::usize(0..addresses.len());
        let mut refused = Vec::new();
        for address in addresses.iter().cycle().skip(first).take(addresses.len()) {
            match Self::open_within(limit, address, url.authorities(), name, frame_max).await {
                Ok(connection) => return Ok(connection),
                Err(error) => refused.push(error),
            }
        }
        Err(Error::no_address(refused))
    }

    async fn open_within(
        limit: Duration,
        address: &Address,
        authorities: Option<&str>,
        name: &str,
        frame_max: Option<u32>,
    ) -> Result<Self, Error> {
        let target = address.to_string();
        let socket = OwnedSocket::default();
        let handle = socket.handle();
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let runtime = lapin::runtime::default_runtime().map_err(|error| Error::connecting(&target, error))?;

        // The library calls this on its own thread, which outlives a dropped future: it needs a limit of its own.
        let reactor = runtime.clone();
        let trusted =
            OwnedTLSConfig { cert_chain: authorities.map(str::to_owned), ..OwnedTLSConfig::default() };
        let dial = async move |uri: AMQPUri, _| {
            silence_this_thread();
            let dialed = tokio::time::timeout(limit, async {
                let addresses = reactor.to_socket_addrs((uri.authority.host.clone(), uri.authority.port));
                let stream = AsyncTcpStream::connect(&reactor, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    handle.attach(plain.get_ref())?;
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => stream.into_tls(&uri.authority.host, trusted.as_ref()).await,
                }
            });
            dialed
                .await
                .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)))
                .map_err(lapin::Error::from)
        };

        let mut uri = address.uri();
        uri.query.frame_max = uri.query.frame_max.or(frame_max);
        let handshake = lapin::Connection::connector(uri, runtime, dial, properties);
        match tokio::time::timeout(limit, handshake).await {
            Ok(Ok(inner)) => Ok(Self { inner, socket, target }),
            Ok(Err(error)) => Err(Error::connecting(&target, error)),
            Err(_) => {
                let attempted = format!("connect to RabbitMQ at {target}");
                Err(Error::TimedOut { attempted, after: limit })
            }
        }
    }

    /// Whether the broker has raised an alarm and reads nothing from this connection.
    ///
    /// It says so only to a connection that has published since the alarm began.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.inner.status().blocked()
    }

    /// Whether the connection is open as far as this side knows.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.inner.status().connected() && !self.socket.is_cut()
    }

    /// Closes politely if that is possible within a few seconds, and cuts the connection otherwise.
    pub async fn close(self) {
        if !self.is_open() {
            return;
        }
        let close = self.inner.close(REPLY_SUCCESS, "OK".into());
        if let Err(error) = within(CLOSE_LIMIT, "close the connection", close).await {
            tracing::debug!(target = %self.target, %error, "connection was cut instead of closed");
        }
    }

    /// Opens a channel. Declarations get one of their own, because an error closes it.
    pub(crate) async fn channel(&self) -> Result<Channel, Error> {
        within(ANSWER_LIMIT, &format!("open a channel to {}", self.target), self.inner.create_channel()).await
    }

    /// The largest frame both sides agreed on, in bytes.
    pub(crate) fn frame_max(&self) -> usize {
        self.inner.configuration().frame_max() as usize
    }

    pub(crate) fn cut(&self) {
        self.socket.cut();
    }
}

/// Keeps the client library's thread from logging, for as long as it lives.
///
/// The library logs every returned message at WARN, payload included. No payload may reach a log,
/// and not every service that uses this crate filters its log as it should. What the thread has to
/// say about failures comes back as errors anyway.
fn silence_this_thread() {
    std::mem::forget(tracing::dispatcher::set_default(&tracing::Dispatch::none()));
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("target", &self.target).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Threads of the client library in this process; no other test of this binary makes any.
    fn library_threads() -> usize {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.filter(|name| name.trim() == "lapin-io-loop").count()
    }

    #[tokio::test]
    async fn giving_up_on_a_silent_peer_leaves_neither_socket_nor_thread() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: Address = format!("amqp://{}", listener.local_addr().unwrap()).parse().unwrap();
        for attempt in ["times out", "is dropped"] {
            let (greeted, greeting) = tokio::sync::oneshot::channel();
            let silent_peer = async {
                let (mut socket, _) = listener.accept().await.unwrap();
                let (mut received, mut rest) = ([0; 8], Vec::new());
                socket.read_exact(&mut received).await.unwrap();
                assert_eq!(&received, b"AMQP\0\0\x09\x01", "attempt that {attempt}");
                let _ = greeted.send(());
                socket.read_to_end(&mut rest).await.unwrap();
                assert!(rest.is_empty(), "attempt that {attempt}");
            };
            let giving_up = async {
                if attempt == "times out" {
                    let error =
                        Connection::open_within(Duration::from_secs(2), &address, None, "test", None).await;
                    assert!(matches!(error.unwrap_err(), Error::TimedOut { .. }));
                } else {
                    let open = Connection::open_within(SOON, &address, None, "test", None);
                    tokio::select! {
                        opened = open => panic!("the peer said nothing: {opened:?}"),
                        heard = greeting => heard.unwrap(),
                    }
                }
            };
            let both = async { tokio::join!(silent_peer, giving_up) };
            tokio::time::timeout(SOON, both).await.expect("the socket is cut");
        }
        let all_ended = async {
            while library_threads() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, all_ended).await.expect("the threads end");
    }
}
