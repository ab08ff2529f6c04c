//! Idempotency keys and faults before localstripe.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{Kept, lock};

/// What befalls a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The connection ends, and nothing was executed.
    Refuse,
    /// It is held on its way, before its key is looked at, until faults are lifted.
    HoldOnItsWay,
    /// It is held at work, its key in use, until faults are lifted; then it is executed.
    HoldAtWork,
    /// It is executed, and its answer held until faults are lifted.
    HoldAnswer,
    /// It is executed and kept, and the connection ends.
    DropAnswer,
    /// It is answered with this status, this type and this code, and not executed; nothing is kept.
    Say(u16, &'static str, &'static str),
    /// It fails with a 500 that is kept, and was executed.
    FailApplied,
    /// It fails with a 500 that is kept, and was not executed.
    Fail,
}

/// A call that came in.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Seen {
    /// Method and path.
    pub call: String,
    /// Its idempotency key.
    pub key: Option<String>,
    /// What it was answered with; none for a connection that ended, or while it is held.
    pub status: Option<u16>,
    /// Whether it has come to its end.
    pub is_over: bool,
}

/// What is known of a key.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    AtWork(Vec<u8>),
    Kept(Vec<u8>, Reply),
}

#[derive(Clone, Debug)]
pub(super) struct Reply {
    status: u16,
    body: Bytes,
    replayed: bool,
}

/// What is asked for.
struct Asked {
    method: hyper::Method,
    target: String,
    headers: hyper::HeaderMap,
    body: Bytes,
    key: Option<String>,
}

#[derive(Debug)]
pub(super) struct Layer {
    localstripe: SocketAddr,
    client: reqwest::Client,
    kept: Mutex<Kept>,
    faults: Mutex<Vec<(String, usize, Fault)>>,
    seen: Mutex<Vec<Seen>>,
    held: AtomicUsize,
    /// Counts how often faults were lifted.
    lifted: watch::Sender<u64>,
}

/// Serves the layer on a port of its own.
pub(super) async fn serve(
    localstripe: SocketAddr,
    client: reqwest::Client,
) -> Result<(Arc<Layer>, SocketAddr, AbortOnDropHandle<()>)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("listening for Stripe")?;
    let address = listener.local_addr()?;
    let layer = Arc::new(Layer {
        localstripe,
        client,
        kept: Mutex::default(),
        faults: Mutex::default(),
        seen: Mutex::default(),
        held: AtomicUsize::new(0),
        lifted: watch::channel(0).0,
    });
    let served = Arc::clone(&layer);
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let layer = Arc::clone(&served);
            let service = service_fn(move |request| Arc::clone(&layer).answer(request));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    Ok((layer, address, AbortOnDropHandle::new(serving)))
}

impl Layer {
    pub(super) fn order(&self, call: &str, times: usize, fault: Fault) {
        lock(&self.faults).push((call.to_owned(), times, fault));
    }

    pub(super) fn lift(&self) {
        lock(&self.faults).clear();
        self.lifted.send_modify(|times| *times += 1);
    }

    pub(super) fn forget(&self) {
        lock(&self.kept).clear();
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Answers a request, to its end even when whoever asked goes away: what has arrived has arrived.
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Box<dyn std::error::Error + Send + Sync>> {
        let (head, body) = request.into_parts();
        let key = head.headers.get("idempotency-key").and_then(|key| key.to_str().ok()).map(str::to_owned);
        let target = head.uri.path_and_query().map_or("/", hyper::http::uri::PathAndQuery::as_str).to_owned();
        let body = body.collect().await?.to_bytes();
        let asked = Asked { method: head.method, target, headers: head.headers, body, key };
        let reply = tokio::spawn(async move { self.settle(asked).await }).await?;
        let Some(reply) = reply else { return Err("the connection ends here".into()) };
        let mut response =
            Response::builder().status(reply.status).header("content-type", "application/json");
        if reply.replayed {
            response = response.header("idempotent-replayed", "true");
        }
        Ok(response.body(Full::new(reply.body))?)
    }

    async fn settle(&self, asked: Asked) -> Option<Reply> {
        let path = asked.target.split('?').next().unwrap_or_default().to_owned();
        let place = {
            let mut seen = lock(&self.seen);
            seen.push(Seen {
                call: format!("{} {path}", asked.method),
                key: asked.key.clone(),
                status: None,
                is_over: false,
            });
            seen.len() - 1
        };
        let fault = self.fault(&path, asked.key.as_deref());
        let reply = self.injured(&asked, fault).await;
        let mut all = lock(&self.seen);
        all[place].status = reply.as_ref().map(|reply| reply.status);
        all[place].is_over = true;
        drop(all);
        reply
    }

    fn fault(&self, path: &str, key: Option<&str>) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let meets = |call: &str| path.ends_with(call) || key == Some(call);
        let found = faults.iter().position(|(call, times, _)| *times > 0 && meets(call))?;
        faults[found].1 -= 1;
        Some(faults[found].2)
    }

    async fn injured(&self, asked: &Asked, fault: Option<Fault>) -> Option<Reply> {
        match fault {
            Some(Fault::Refuse) => return None,
            Some(Fault::Say(status, kind, code)) => return Some(error(status, kind, code)),
            Some(Fault::HoldOnItsWay) => self.hold().await,
            _ => {}
        }
        let reply = self.keyed(asked, fault).await;
        match fault {
            Some(Fault::HoldAnswer) => {
                self.hold().await;
                Some(reply)
            }
            Some(Fault::DropAnswer) => None,
            _ => Some(reply),
        }
    }

    async fn hold(&self) {
        let mut lifted = self.lifted.subscribe();
        self.held.fetch_add(1, Ordering::SeqCst);
        // Its sender lives as long as the layer.
        let _ = lifted.changed().await;
        self.held.fetch_sub(1, Ordering::SeqCst);
    }

    /// What Stripe does about a key: <https://docs.stripe.com/api/idempotent_requests>.
    async fn keyed(&self, asked: &Asked, fault: Option<Fault>) -> Reply {
        let Some(key) = asked.key.clone().filter(|_| asked.method == hyper::Method::POST) else {
            return self.executed(asked, fault).await;
        };
        let request = [asked.target.as_bytes(), b"\n", &asked.body].concat();
        let known = {
            let mut kept = lock(&self.kept);
            let known = kept.get(&key).cloned();
            if known.is_none() {
                kept.insert(key.clone(), Entry::AtWork(request.clone()));
            }
            known
        };
        match known {
            Some(Entry::AtWork(earlier) | Entry::Kept(earlier, _)) if earlier != request => {
                return error(400, "idempotency_error", "");
            }
            Some(Entry::AtWork(_)) => return error(409, "idempotency_error", "idempotency_key_in_use"),
            Some(Entry::Kept(_, reply)) => return Reply { replayed: true, ..reply },
            None => {}
        }
        let reply = self.executed(asked, fault).await;
        let mut kept = lock(&self.kept);
        // What was refused before anything was executed is not kept.
        if matches!(reply.status, 200..300 | 402 | 500..) {
            kept.insert(key, Entry::Kept(request, reply.clone()));
        } else {
            kept.remove(&key);
        }
        reply
    }

    async fn executed(&self, asked: &Asked, fault: Option<Fault>) -> Reply {
        match fault {
            Some(Fault::HoldAtWork) => self.hold().await,
            Some(Fault::Fail) => return error(500, "api_error", ""),
            _ => {}
        }
        let passed = self.pass_on(asked).await.unwrap_or_else(|_| error(502, "api_error", ""));
        if fault == Some(Fault::FailApplied) { error(500, "api_error", "") } else { passed }
    }

    async fn pass_on(&self, asked: &Asked) -> Result<Reply> {
        let url = format!("http://{}{}", self.localstripe, without_filter(&asked.target));
        let mut request = self.client.request(asked.method.clone(), url).body(asked.body.clone());
        for name in ["authorization", "content-type"] {
            if let Some(value) = asked.headers.get(name) {
                request = request.header(name, value);
            }
        }
        let response = request.send().await?;
        let status = response.status().as_u16();
        Ok(Reply { status, body: response.bytes().await?, replayed: false })
    }
}

/// localstripe lists all intents or refuses; what is made in a test is young enough for any filter by age.
fn without_filter(target: &str) -> String {
    let Some((path, query)) = target.split_once('?') else { return target.to_owned() };
    let kept: Vec<&str> = query.split('&').filter(|pair| !pair.starts_with("created%5B")).collect();
    format!("{path}?{}", kept.join("&"))
}

fn error(status: u16, kind: &str, code: &str) -> Reply {
    let mut error = serde_json::json!({"type": kind, "message": "a fault of the test"});
    if !code.is_empty() {
        error["code"] = code.into();
    }
    let body = serde_json::json!({"error": error}).to_string();
    Reply { status, body: body.into(), replayed: false }
}
