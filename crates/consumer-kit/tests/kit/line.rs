//! A TCP line to Postgres or RabbitMQ that can fall silent: nothing comes from the server any more, and both sides stay
//! connected. It can also be cut.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use semel_broker::BrokerUrl;
use semel_core::database::{self, DatabaseUrl};
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::support::{World, service};

pub(crate) struct Line {
    /// The server's URL, by way of this line.
    url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// How many connections there have been.
    opened: AtomicUsize,
    /// Those before this one are silent.
    silent: AtomicUsize,
    trap: Mutex<Option<Trap>>,
    /// Cuts the connections that there are.
    cut: Mutex<CancellationToken>,
    /// What the server is sent instead of what.
    swap: Mutex<Option<(&'static [u8], &'static [u8])>>,
}

/// Makes the connection silent on which the server sends these bytes.
struct Trap {
    bytes: &'static [u8],
    passes: Passes,
}

/// Whether what springs a trap still arrives.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Passes {
    Yes,
    No,
}

impl Line {
    pub(crate) async fn to_database_of(world: &World) -> Self {
        let url = service("SEMEL_TEST_POSTGRES_URL");
        let (server, _) = url.rsplit_once('/').unwrap();
        Self::to(&format!("{server}/{}", world.name)).await
    }

    pub(crate) async fn to_broker() -> Self {
        Self::to(&service("AMQP_URL")).await
    }

    async fn to(url: &str) -> Self {
        let (login, rest) = url.rsplit_once('@').expect("the URL names a user");
        let (place, path) = rest.split_once('/').expect("the URL names a database or a virtual host");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        tokio::spawn(forward(listener, place.to_owned(), Arc::clone(&state)));
        Self { url: format!("{login}@{address}/{path}"), state }
    }

    pub(crate) fn pool(&self, connections: u32) -> PgPool {
        let database: DatabaseUrl = self.url.parse().unwrap();
        database::pool(&database, "kit-test line", connections)
    }

    pub(crate) fn url(&self) -> String {
        self.url.clone()
    }

    pub(crate) fn broker(&self) -> BrokerUrl {
        self.url.parse().unwrap()
    }

    /// Sends the server the one instead of the other, which is as long.
    pub(crate) fn swap(&self, text: &'static [u8], by: &'static [u8]) {
        assert_eq!(text.len(), by.len());
        *self.state.swap.lock().unwrap() = Some((text, by));
    }

    /// Cuts the connections that there are. New ones work.
    pub(crate) fn cut(&self) {
        std::mem::take(&mut *self.state.cut.lock().unwrap()).cancel();
    }

    /// Silences the connections that there are. New ones work.
    pub(crate) fn silence(&self) {
        self.state.silent.store(self.state.opened.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Silences every connection, those to come included.
    pub(crate) fn silence_for_good(&self) {
        self.state.silent.store(usize::MAX, Ordering::SeqCst);
    }

    /// Silences the connection that is the next to be told that its transaction has committed.
    pub(crate) fn silence_at_commit(&self, passes: Passes) {
        *self.state.trap.lock().unwrap() = Some(Trap { bytes: b"COMMIT\0", passes });
    }

    pub(crate) fn is_trap_sprung(&self) -> bool {
        self.state.trap.lock().unwrap().is_none()
    }
}

async fn forward(listener: TcpListener, place: String, state: Arc<State>) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let number = state.opened.fetch_add(1, Ordering::SeqCst);
        let cut = state.cut.lock().unwrap().clone();
        let (from_client, to_client) = client.into_split();
        // A server that is away just now: the client is told so.
        let Ok(server) = TcpStream::connect(&place).await else { continue };
        let (from_server, to_server) = server.into_split();
        let questions = questions(from_client, to_server, Arc::clone(&state));
        tokio::spawn(cut.clone().run_until_cancelled_owned(questions));
        let answers = answers(from_server, to_client, number, Arc::clone(&state));
        tokio::spawn(cut.run_until_cancelled_owned(answers));
    }
}

async fn questions(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, state: Arc<State>) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let bytes = &mut buffer[..count];
        if let Some((text, by)) = *state.swap.lock().unwrap() {
            for start in 0..(count + 1).saturating_sub(text.len()) {
                if bytes[start..].starts_with(text) {
                    bytes[start..start + by.len()].copy_from_slice(by);
                }
            }
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

/// Reads on when it is silent, so that the server is not held up.
async fn answers(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, number: usize, state: Arc<State>) {
    let mut buffer = vec![0; 64 * 1024];
    let mut is_silent = false;
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..count];
        is_silent = is_silent || number < state.silent.load(Ordering::SeqCst);
        if is_silent {
            continue;
        }
        let sprung = {
            let mut trap = state.trap.lock().unwrap();
            trap.take_if(|trap| bytes.windows(trap.bytes.len()).any(|window| window == trap.bytes))
        };
        is_silent = sprung.is_some();
        if sprung.is_none_or(|trap| trap.passes == Passes::Yes) && to.write_all(bytes).await.is_err() {
            return;
        }
    }
    if is_silent {
        // The server has gone, which the client does not learn.
        std::future::pending::<()>().await;
    }
}
