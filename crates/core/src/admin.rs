//! The admin endpoint: `/livez`, `/readyz`, `/metrics`, `/version`, on a port of its own that is never public.
//!
//! Liveness asks no dependency, only whether the process turns its loops; a database that is away must not restart pods.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::lifecycle::{Heartbeat, Lifecycle};

/// A loop that has not turned for this long stands still: a pass and a wait are both far shorter.
const STANDS_STILL_AFTER: Duration = Duration::from_mins(2);
/// How many admin connections are served at a time.
const MAX_CONNECTIONS: usize = 32;

/// What the endpoint tells; clones share it.
#[derive(Clone, Debug)]
pub struct Health {
    inner: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Once the process stops it is never ready again, whatever a loop that is finishing says.
    stopping: bool,
    not_ready: Option<String>,
    loops: Vec<(&'static str, Heartbeat)>,
}

impl Default for Health {
    fn default() -> Self {
        let state = State { stopping: false, not_ready: Some("starting".to_owned()), loops: Vec::new() };
        Self { inner: Arc::new(Mutex::new(state)) }
    }
}

impl Health {
    /// Says that the daemon can do its work.
    pub fn ready(&self) {
        self.state().not_ready = None;
    }

    /// Says that it stops, and so cannot ever again.
    pub fn stopping(&self) {
        self.state().stopping = true;
    }

    /// Says that it cannot, and why.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.state().not_ready = Some(reason.into());
    }

    /// Watches one more loop; hand the heartbeat to its [`Pace`](crate::lifecycle::Pace).
    #[must_use]
    pub fn watch(&self, name: &'static str) -> Heartbeat {
        let heartbeat = Heartbeat::default();
        self.state().loops.push((name, heartbeat.clone()));
        heartbeat
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn why_not_ready(&self) -> Option<String> {
        let state = self.state();
        if state.stopping { Some("stopping".to_owned()) } else { state.not_ready.clone() }
    }

    fn still(&self) -> Option<&'static str> {
        self.state().loops.iter().find(|(_, beat)| beat.age() > STANDS_STILL_AFTER).map(|(name, _)| *name)
    }
}

/// Serves the endpoint on a listener, until the hard stop.
pub fn serve(
    listener: TcpListener,
    health: Health,
    metrics: PrometheusHandle,
    version: &'static str,
    life: Lifecycle,
) {
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = life.hard_stop() => return,
            };
            let Ok((stream, _)) = accepted else {
                // Out of file descriptors, mostly; passes when some are freed.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            let (health, metrics) = (health.clone(), metrics.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let response = answer(&request, &health, &metrics, version);
                    async move { Ok::<_, std::convert::Infallible>(response) }
                });
                let mut http = hyper::server::conn::http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(Duration::from_secs(5)).keep_alive(false);
                let connection = http.serve_connection(TokioIo::new(stream), service);
                let _ = tokio::time::timeout(Duration::from_secs(10), connection).await;
                drop(place);
            });
        }
    });
}

/// Binds the address of an endpoint.
///
/// # Errors
///
/// When the address is taken or not ours; the error names the option to change.
pub async fn bind(address: SocketAddr, option: &'static str) -> Result<TcpListener, CannotListen> {
    TcpListener::bind(address).await.map_err(|source| CannotListen { address, option, source })
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}; choose another with {option}")]
pub struct CannotListen {
    address: SocketAddr,
    option: &'static str,
    source: std::io::Error,
}

fn answer(
    request: &Request<Incoming>,
    health: &Health,
    metrics: &PrometheusHandle,
    version: &'static str,
) -> Response<Full<Bytes>> {
    if request.method() != Method::GET {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
    }
    match request.uri().path() {
        "/livez" => match health.still() {
            None => text(StatusCode::OK, "alive\n"),
            Some(name) => text(StatusCode::SERVICE_UNAVAILABLE, format!("the loop {name} stands still\n")),
        },
        "/readyz" => match health.why_not_ready() {
            None => text(StatusCode::OK, "ready\n"),
            Some(reason) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        },
        "/metrics" => {
            crate::telemetry::refresh_process_metrics();
            let mut response = text(StatusCode::OK, metrics.render());
            let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        "/version" => text(StatusCode::OK, format!("{version}\n")),
        _ => text(StatusCode::NOT_FOUND, "/livez, /readyz, /metrics or /version\n"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
}
