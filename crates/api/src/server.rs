//! The accept loop, and the bounds of a connection.
//!
//! The loop is ours because a stock one sets no timers, without which the limit on reading headers never fires. A
//! connection that sends no request in time, or has none at work for a while, is asked to end and then ended. At the
//! stop nobody is accepted any more, and requests at work are finished: HTTP/1.1 by `Connection: close`, HTTP/2 by GOAWAY.
//!
//! Where there is a certificate, a connection begins with a handshake and plain text is refused. What is bounded there is
//! the same: a handshake has as long as a head, and takes one of the same places.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use semel_core::lifecycle::Lifecycle;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tower::ServiceExt as _;

use crate::routes;
use crate::state::Api;
use crate::tls::Tls;

/// Connections at a time; the next ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;
/// How long a handshake may take, and then the first head of a connection.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of a request's head at most.
const MAX_HEAD: u32 = 16 * 1024;
/// Requests of one HTTP/2 connection at a time.
const MAX_STREAMS: u32 = 64;
/// Streams that an HTTP/2 client opened and reset before we looked at them; beyond that the connection is ended. That is
/// the flood of CVE-2023-44487.
const MAX_RESET_STREAMS: usize = 20;
/// Streams of a connection that we reset for the client's faults; beyond that it is ended.
const MAX_FAULTY_STREAMS: usize = 64;
/// What an HTTP/2 client may send ahead of our reading: a whole body, and that of each stream at once.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// A connection without a request at work is asked to end after this, and a later head may take as long: clients and
/// proxies keep connections for about a minute, and one that is closed under them fails a request.
const IDLE: Duration = Duration::from_mins(1);
/// A connection that was asked to end and has no request at work is ended after this.
const LINGER: Duration = Duration::from_secs(5);

/// How connections are taken; by default in plain text.
#[derive(Clone, Debug)]
pub struct Door {
    tls: Option<Tls>,
    idle: Duration,
}

impl Default for Door {
    fn default() -> Self {
        Self { tls: None, idle: IDLE }
    }
}

impl Door {
    /// Takes connections over TLS alone.
    #[must_use]
    pub fn with_tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Ends connections without a request at work after another time.
    #[must_use]
    pub fn with_idle(mut self, idle: Duration) -> Self {
        self.idle = idle;
        self
    }
}

/// Accepts and serves connections until the soft stop; each is a task that the stop waits for.
pub async fn serve(listener: TcpListener, door: Door, api: Api, life: Lifecycle) {
    let router = routes::router(api);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut complaints = Complaints::default();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            () = life.stopping() => return,
        };
        match accepted {
            Ok((stream, place)) => {
                let (router, door, life_of_connection) = (router.clone(), door.clone(), life.clone());
                life.spawn(async move {
                    connection(stream, &door, router, &life_of_connection).await;
                    drop(place);
                });
            }
            Err(error) => {
                // Out of file descriptors, mostly; passes when some are freed.
                if let Some(left_out) = complaints.take() {
                    tracing::warn!(left_out, "cannot accept a connection: {error}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// What keeps failing is told of every ten seconds.
#[derive(Debug, Default)]
struct Complaints {
    told_at: Option<Instant>,
    left_out: u64,
}

impl Complaints {
    const EVERY: Duration = Duration::from_secs(10);

    /// Says whether one more failure is told of, and then how many were left out before it.
    fn take(&mut self) -> Option<u64> {
        if self.told_at.is_some_and(|at| at.elapsed() < Self::EVERY) {
            self.left_out += 1;
            return None;
        }
        self.told_at = Some(Instant::now());
        Some(std::mem::take(&mut self.left_out))
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

async fn connection(stream: TcpStream, door: &Door, router: Router, life: &Lifecycle) {
    // Answers are small and whole: waiting to fill a segment only delays them.
    let _ = stream.set_nodelay(true);
    let Some(tls) = &door.tls else { return requests(stream, door.idle, router, life).await };
    let handshake = tokio::time::timeout(HEAD_WITHIN, tls.accept(stream));
    let shaken = tokio::select! {
        shaken = handshake => shaken,
        () = life.stopping() => return,
    };
    match shaken {
        Ok(Ok(stream)) => requests(stream, door.idle, router, life).await,
        // Anyone can cause it, as often as they like.
        Ok(Err(error)) => tracing::debug!("a handshake failed: {error}"),
        Err(_) => tracing::debug!("a handshake took too long"),
    }
}

async fn requests<S>(stream: S, idle: Duration, router: Router, life: &Lifecycle)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let activity = Activity::default();
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            let at_work = activity.begin();
            let answer = router.clone().oneshot(request.map(Body::new));
            async move {
                let answer = answer.await;
                drop(at_work);
                answer
            }
        })
    };
    let http = http();
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
    // How a connection ended is the client's business: what was executed is known to the database.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = activity.quiet(HEAD_WITHIN, idle) => {}
        () = life.stopping() => {}
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection.as_mut() => {}
        () = activity.quiet(LINGER, LINGER) => {}
        () = life.hard_stop() => {}
    }
}

fn http() -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(MAX_HEAD as usize);
    http.http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD)
        .max_pending_accept_reset_streams(MAX_RESET_STREAMS)
        .max_local_error_reset_streams(MAX_FAULTY_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10));
    http
}

/// Whether a connection has requests at work; clones share it.
#[derive(Clone, Debug)]
struct Activity(Arc<watch::Sender<Work>>);

#[derive(Clone, Copy, Debug)]
struct Work {
    requests: usize,
    /// Whether there ever was one.
    begun: bool,
    /// When it last changed.
    since: Instant,
}

impl Default for Activity {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Work { requests: 0, begun: false, since: Instant::now() })))
    }
}

impl Activity {
    /// Counts a request as at work until the returned value is dropped, which a lost connection does too.
    fn begin(&self) -> AtWork {
        self.0.send_modify(|work| {
            *work = Work { requests: work.requests + 1, begun: true, since: Instant::now() }
        });
        AtWork(self.clone())
    }

    /// Waits until no request has been at work for `later`, or none ever for `first`, counted from now at the earliest.
    async fn quiet(&self, first: Duration, later: Duration) {
        let called = Instant::now();
        let mut changes = self.0.subscribe();
        loop {
            let work = *changes.borrow_and_update();
            let limit = if work.begun { later } else { first };
            let silence = async {
                if work.requests > 0 {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep_until(work.since.max(called) + limit).await;
            };
            tokio::select! {
                () = silence => return,
                // The sender lives as long as we do.
                _ = changes.changed() => {}
            }
        }
    }
}

struct AtWork(Activity);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.0.send_modify(|work| {
            work.requests -= 1;
            work.since = Instant::now();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn connections_that_cannot_be_accepted_fill_a_line_every_ten_seconds() {
        let mut complaints = Complaints::default();
        let mut told = Vec::new();
        // As often as the loop tries, for half a minute.
        for _ in 0..600 {
            told.extend(complaints.take());
            tokio::time::advance(Duration::from_millis(50)).await;
        }
        assert_eq!(told, [0, 199, 199]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_quiet_only_between_requests() {
        let activity = Activity::default();
        let (first, later) = (Duration::from_secs(5), Duration::from_mins(1));
        let started = Instant::now();
        activity.quiet(first, later).await;
        assert_eq!(started.elapsed(), first);

        let request = activity.begin();
        let quiet = activity.quiet(first, later);
        assert!(tokio::time::timeout(later * 10, quiet).await.is_err(), "a request is at work");
        drop(request);
        let ended = Instant::now();
        activity.quiet(first, later).await;
        assert_eq!(ended.elapsed(), later);
    }
}
