//! Requests to Stripe's API, each sent once.
//!
//! Promise: a call sends its request at most once, follows nothing, reads no more than a bound, ends by its deadline, and
//! what never left says so. The number of connections is bounded.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT};
use http::uri::PathAndQuery;
use http::{Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::rustls::crypto::ring;

use super::account::{ApiBase, ApiKey};
use super::classify::Reply;

/// Most connections, and so most calls at a time.
const CONNECTIONS: usize = 64;
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(3);
/// How long an unused connection is kept: less than the other end keeps it.
const IDLE: Duration = Duration::from_secs(30);
/// Most bytes of a reply: a page of a list is the longest.
const BODY: usize = 2 * 1024 * 1024;
/// The version of the API that the objects here are of, whatever the account's default is.
const VERSION: HeaderValue = HeaderValue::from_static("2024-06-20");

/// A client of the API; clones share its connections.
#[derive(Clone)]
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    base: ApiBase,
    authorization: HeaderValue,
    places: Arc<Semaphore>,
}

/// What to send.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    /// A form; empty for none.
    pub(super) body: Vec<u8>,
    pub(super) key: Option<String>,
}

/// A call that brought no reply.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum NoReply {
    /// Nothing was sent: nobody is there.
    NotSent(String),
    /// Nothing was sent, for reasons of our own: too many calls are under way.
    Crowded,
    /// Whether it arrived is not known.
    Lost(String),
}

/// What a client cannot be made of.
#[derive(Debug, thiserror::Error)]
#[error("the machine's certificates of authorities cannot be used")]
pub struct NoAuthorities(#[source] std::io::Error);

impl Http {
    /// Uses the API at this place as whoever has this key.
    pub(super) fn new(base: ApiBase, key: &ApiKey) -> Result<Self, NoAuthorities> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        let connector = HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(ring::default_provider())
            .map_err(NoAuthorities)?
            // Plain text to this machine alone: `ApiBase` holds no other.
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(CONNECTIONS)
            .pool_idle_timeout(IDLE)
            .pool_timer(TokioTimer::new())
            .retry_canceled_requests(false)
            .build(connector);
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        Ok(Self { client, base, authorization: key.header(), places })
    }

    /// Sends a request, once.
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped the connection is closed; whether the request was executed is not known then.
    pub(super) async fn call(&self, call: Call, until: Instant) -> Result<Reply, NoReply> {
        let request = self.request(call).map_err(|error| NoReply::NotSent(chain(&error)))?;
        // The semaphore is never closed.
        let Ok(Ok(_place)) = timeout_at(until, self.places.acquire()).await else {
            return Err(NoReply::Crowded);
        };
        match timeout_at(until, self.exchange(request)).await {
            Ok(reply) => reply,
            Err(_) => Err(NoReply::Lost("no answer in time".to_owned())),
        }
    }

    fn request(&self, call: Call) -> Result<Request<Full<Bytes>>, http::Error> {
        let target: PathAndQuery = call.target.parse()?;
        let uri = Uri::builder()
            .scheme(self.base.scheme.clone())
            .authority(self.base.authority.clone())
            .path_and_query(target)
            .build()?;
        let mut request = Request::builder()
            .method(&call.method)
            .uri(uri)
            .header(AUTHORIZATION, self.authorization.clone())
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("semel/", env!("CARGO_PKG_VERSION")))
            .header("stripe-version", VERSION);
        if call.method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        }
        if let Some(key) = call.key {
            request = request.header("idempotency-key", key);
        }
        request.body(Full::new(call.body.into()))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Reply, NoReply> {
        let response = self.client.request(request).await.map_err(|error| {
            if error.is_connect() { NoReply::NotSent(chain(&error)) } else { NoReply::Lost(chain(&error)) }
        })?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, BODY).collect().await;
        let body = body.map_err(|error| NoReply::Lost(chain(&*error)))?.to_bytes();
        Ok(Reply {
            status: head.status.as_u16(),
            is_replayed: flag(&head.headers, "idempotent-replayed") == Some(true),
            should_retry: flag(&head.headers, "stripe-should-retry"),
            body,
        })
    }
}

fn flag(headers: &HeaderMap, name: &str) -> Option<bool> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// An error with its causes, which hold addresses and no part of a request.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// Shows the place alone.
impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http").field("base", &self.base).finish_non_exhaustive()
    }
}
