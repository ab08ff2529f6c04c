//! The route that tells how a key stands: for a client that crashed and lost its request, and still has the key.
//!
//! It tells the state and the resource, never the stored answer: only the same request gets that. The key is in its header,
//! as everywhere; one in a URL would end up in logs. Not found is no proof that nothing was done: the request may still be
//! on its way.

use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::HeaderMap;
use semel_core::credentials::Scopes;
use semel_core::idempotency::engine::{self, Found, Operation};
use semel_core::idempotency::store::{KeyState, KnownKey};
use semel_core::idempotency::{ClientId, Command, Scope};
use semel_payments::refunds::create::MakeRefund;
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::access::{self, Access};
use crate::error::ApiError;
use crate::front::in_time;
use crate::state::Api;
use crate::{key, orders, payments, refunds};

/// Route of the keys of an operation.
pub(crate) const KEYS: &str = "/v1/idempotency-keys/{operation}";

pub(crate) fn routes() -> Router<Api> {
    Router::new().route(KEYS, get(find))
}

/// How a key stands, as its owner is told.
#[derive(Debug, Serialize)]
pub(crate) struct Told {
    pub(crate) operation: &'static str,
    pub(crate) state: &'static str,
    /// What the operation makes under this key.
    pub(crate) resource_id: Uuid,
    location: String,
    /// The request that claimed the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<Uuid>,
    /// Status of the stored answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// Until when that is replayed.
    #[serde(skip_serializing_if = "Option::is_none", with = "time::serde::rfc3339::option")]
    pub(crate) expires_at: Option<OffsetDateTime>,
}

async fn find(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    Extension(scopes): Extension<Scopes>,
    operation: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Ok(Path(operation)) = operation else { return Err(ApiError::NotFound) };
    Ok(Json(told_of(&api, client, &scopes, &operation, &headers).await?).into_response())
}

/// Tells how the key in these headers stands.
pub(crate) async fn told_of(
    api: &Api,
    client: ClientId,
    scopes: &Scopes,
    operation: &str,
    headers: &HeaderMap,
) -> Result<Told, ApiError> {
    access::check(scopes, Access::of_key(operation))?;
    if operation == name(&api.place_order) {
        return tell(api, &api.place_order, client, headers, orders::location).await;
    }
    let Some(make_payment) = &api.make_payment else { return Err(ApiError::NotFound) };
    let make_refund = MakeRefund::of(make_payment);
    if operation == name(make_payment) {
        tell(api, make_payment, client, headers, payments::location).await
    } else if operation == name(&make_refund) {
        tell(api, &make_refund, client, headers, refunds::location).await
    } else {
        Err(ApiError::NotFound)
    }
}

fn name<O: Operation>(_: &O) -> &'static str {
    O::Command::OPERATION
}

async fn tell<O: Operation>(
    api: &Api,
    operation: &O,
    client: ClientId,
    headers: &HeaderMap,
    location: fn(Uuid) -> String,
) -> Result<Told, ApiError> {
    let scope = Scope { client, operation: name(operation), key: key::from_headers(headers)? };
    let found = in_time(engine::find(&api.pool, operation, &scope)).await?.ok_or(ApiError::NotFound)?;
    Ok(told(scope.operation, found, location))
}

fn told(operation: &'static str, found: Found, location: fn(Uuid) -> String) -> Told {
    let (resource_id, request_id, state, status, expires_at) = match found {
        Found::Outcome { resource_id } => (resource_id, None, "expired", None, None),
        Found::Key(KnownKey { resource_id, request_id, state, .. }) => {
            let (state, status, expires_at) = match state {
                KeyState::InProgress { needs_person: true, .. } => ("needs_attention", None, None),
                KeyState::InProgress { .. } => ("in_progress", None, None),
                KeyState::Completed { response, expires_at } => {
                    ("completed", Some(response.code), Some(expires_at))
                }
                KeyState::Expired => ("expired", None, None),
            };
            (resource_id, Some(request_id), state, status, expires_at)
        }
    };
    Told { operation, state, resource_id, location: location(resource_id), request_id, status, expires_at }
}
