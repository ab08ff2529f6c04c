//! What every request passes, in this order: identity and trace, panic guard, cap, readiness, credentials; then its
//! handler. And what every answer passes on its way out: the problem, the request's id, log and metrics.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderValue, Version, header};
use semel_core::disposition::chain;
use semel_core::idempotency;
use semel_payments::provider::DEADLINE;
use tracing::Instrument as _;

use crate::access::{self, Access};
use crate::arrival::{self, Arrival, REQUEST_ID};
use crate::error::{ApiError, CallError};
use crate::openapi::OPENAPI;
use crate::state::Api;
use crate::webhooks::STRIPE;
use crate::{grpc, metrics};

/// How long a request waits for database and provider at most; beyond that somebody has to tell the client.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A provider that takes as long as it may is still told of by its answer.
const _: () = assert!(ANSWER_WITHIN.as_secs() > DEADLINE.as_secs());

/// Admits a request, and finishes its answer.
pub(crate) async fn pass(State(api): State<Api>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let is_call = grpc::is_call(request.headers());
    let route = if is_call {
        metrics::method(request.uri().path())
    } else {
        metrics::route(request.extensions().get::<MatchedPath>().map(MatchedPath::as_str))
    };
    let identity = arrival::identify(request.headers());
    let id = identity.id;
    // Of the highest level, so that no filter takes the id from the lines that remain.
    let span = tracing::error_span!("request", %id, route);

    // Work that has begun goes on: it is a task of its own.
    let deadline = is_call.then(|| grpc::deadline(request.headers())).flatten();
    let admitted = within(deadline, admit(&api, route, identity, request, next));
    let admitted = AssertUnwindSafe(admitted).catch_unwind();
    let response = match admitted.instrument(span.clone()).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => error.into_response(),
        Err(_) => ApiError::Panicked.into_response(),
    };
    let mut response = span.in_scope(|| tell(&api, id, is_call, response));
    if let Ok(id) = HeaderValue::try_from(id.to_string()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if is_call {
        metrics::record_call(route, &response, started.elapsed());
    } else {
        metrics::record(route, response.status(), started.elapsed());
    }
    response
}

/// Waits for the answer as long as the caller does.
async fn within(
    deadline: Option<Duration>,
    answer: impl Future<Output = Result<Response, ApiError>>,
) -> Result<Response, ApiError> {
    let Some(deadline) = deadline else { return answer.await };
    tokio::time::timeout(deadline, answer).await.unwrap_or_else(|_| Err(CallError::DeadlinePassed.into()))
}

async fn admit(
    api: &Api,
    route: &'static str,
    identity: idempotency::Request,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if grpc::is_call(request.headers()) && request.uri().path() == grpc::HEALTH_CHECK {
        // Whoever asks has no credential, and whether requests are taken is what is asked.
        return Ok(next.run(request).await);
    }
    // Its sender has no credential but the signature, which is over the body: until that is here, anybody may be it.
    let places = if route == STRIPE { &api.webhook_places } else { &api.places };
    let place = Arc::clone(places).try_acquire_owned().map_err(|_| ApiError::Full)?;
    // RFC 9112, section 3.2. A proxy in front may have gone by another of several.
    if request.version() == Version::HTTP_11 && request.headers().get_all(header::HOST).iter().count() != 1 {
        return Err(ApiError::Host);
    }
    // What the API takes is no secret, and needs no database.
    if route == OPENAPI {
        return Ok(next.run(request).await);
    }
    if !api.is_open() {
        return Err(ApiError::NotOpen);
    }
    let place = Arc::new(place);
    if route == STRIPE {
        request.extensions_mut().insert(Arrival { request: identity, place });
        return Ok(next.run(request).await);
    }
    let token = bearer(request.headers())?;
    let caller = in_time(api.authenticator.authenticate(token)).await?.ok_or(ApiError::CredentialRefused)?;
    let needed = if grpc::is_call(request.headers()) {
        Access::of_call(request.uri().path())
    } else {
        Access::of_request(request.method(), route)
    };
    access::check(&caller.scopes, needed)?;
    let extensions = request.extensions_mut();
    extensions.insert(Arrival { request: identity, place });
    extensions.insert(caller.scopes);
    extensions.insert(caller.client);
    Ok(next.run(request).await)
}

/// Returns the token of exactly one `Authorization: Bearer <token>` (RFC 6750).
fn bearer(headers: &HeaderMap) -> Result<&str, ApiError> {
    let mut lines = headers.get_all(header::AUTHORIZATION).iter();
    let line = lines.next().ok_or(ApiError::CredentialMissing)?;
    let (scheme, token) =
        line.to_str().ok().and_then(|line| line.split_once(' ')).ok_or(ApiError::CredentialRefused)?;
    if lines.next().is_some() || !scheme.eq_ignore_ascii_case("bearer") {
        return Err(ApiError::CredentialRefused);
    }
    Ok(token.trim())
}

/// Waits for a question to the database, but not for ever: a server that vanished never answers.
pub(crate) async fn in_time<T>(
    question: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, ApiError> {
    match tokio::time::timeout(ANSWER_WITHIN, question).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(ApiError::DatabaseTooSlow),
    }
}

/// Logs an error that a handler left in its response, and writes its problem, or the status of a call.
fn tell(api: &Api, id: uuid::Uuid, is_call: bool, mut response: Response) -> Response {
    let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() else { return response };
    let problem = error.problem();
    let (status, kind) = (problem.kind.status(), problem.kind.suffix());
    metrics::record_problem(problem.kind);
    let code = status.as_u16();
    // A panic is told where it happened.
    let is_told = matches!(*error, ApiError::Panicked);
    match (!is_told).then(|| api.lines.take(problem.kind)) {
        None => {}
        Some(Some(left_out)) if status.is_server_error() => {
            tracing::warn!(status = code, problem = kind, left_out, "failed: {}", chain(&*error));
        }
        Some(Some(left_out)) => {
            tracing::info!(status = code, problem = kind, left_out, "refused: {}", chain(&*error));
        }
        Some(None) => tracing::debug!(status = code, problem = kind, "refused or failed: {}", chain(&*error)),
    }
    if is_call {
        return grpc::status::of(&problem, &api.settings.problem_base).into_http();
    }
    problem.write(response, &api.settings.problem_base, id)
}
