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
    serve_answers(listener, life, move |asked| {
        std::future::ready(answer(&asked, &health, &metrics, version))
    });
}

/// What an endpoint that is not public is asked, by GET.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The path.
    pub path: String,
    /// What stands behind the `?`.
    pub query: String,
}

/// What it answers.
#[derive(Clone, Debug)]
pub struct Answer {
    status: StatusCode,
    content_type: &'static str,
    body: String,
}

impl Answer {
    /// An answer of this status, media type and body; a number that is no status becomes 500.
    #[must_use]
    pub fn new(status: u16, content_type: &'static str, body: String) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self { status, content_type, body }
    }
}

/// Serves questions by GET on a listener, until the hard stop: a few connections, one request each, 10 s at most. It asks
/// nobody who they are, so the address must not be a public one.
pub fn serve_answers<A, F>(listener: TcpListener, life: Lifecycle, answer: A)
where
    A: Fn(Asked) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
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
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let answering = (request.method() == Method::GET).then(|| answer(asked(&request)));
                    async move {
                        let answer = match answering {
                            Some(answering) => answering.await,
                            None => text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n"),
                        };
                        Ok::<_, std::convert::Infallible>(response(answer))
                    }
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

fn asked(request: &Request<Incoming>) -> Asked {
    let uri = request.uri();
    Asked { path: uri.path().to_owned(), query: uri.query().unwrap_or_default().to_owned() }
}

fn answer(asked: &Asked, health: &Health, metrics: &PrometheusHandle, version: &'static str) -> Answer {
    match asked.path.as_str() {
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
            let content_type = "text/plain; version=0.0.4; charset=utf-8";
            Answer { content_type, ..text(StatusCode::OK, metrics.render()) }
        }
        "/version" => text(StatusCode::OK, format!("{version}\n")),
        _ => text(StatusCode::NOT_FOUND, "/livez, /readyz, /metrics or /version\n"),
    }
}

fn text(status: StatusCode, body: impl Into<String>) -> Answer {
    Answer { status, content_type: "", body: body.into() }
}

fn response(answer: Answer) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(answer.body)));
    *response.status_mut() = answer.status;
    if !answer.content_type.is_empty() {
        let kind = header::HeaderValue::from_static(answer.content_type);
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}
