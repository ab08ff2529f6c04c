//! Routes of orders, and the router.

use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use semel_core::idempotency::{ClientId, Command as _, Scope};
use semel_payments::orders::{self, CreateOrder};
use uuid::Uuid;

use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::{self, in_time};
use crate::state::Api;
use crate::{body, json, key, keyed};

/// Route of all orders.
pub(crate) const ORDERS: &str = "/v1/orders";
/// Route of one order.
pub(crate) const ORDER: &str = "/v1/orders/{id}";

/// Builds the router.
pub(crate) fn router(api: Api) -> Router {
    Router::new()
        .route(ORDERS, post(create))
        .route(ORDER, get(find))
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(api.clone(), front::pass))
        .with_state(api)
}

/// Returns where an order is.
fn location(order_id: Uuid) -> String {
    format!("{ORDERS}/{order_id}")
}

async fn create(
    State(api): State<Api>,
    Extension(arrival): Extension<Arrival>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    body::expect_json(&head.headers)?;
    let body = body::read(body).await?;
    let key = key::from_headers(&head.headers)?;
    let command: CreateOrder = json::parse(&body).map_err(ApiError::Body)?;
    let scope = Scope { client, operation: CreateOrder::OPERATION, key };
    keyed::run(&api, arrival, api.place_order.clone(), scope, command, location).await
}

async fn find(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Ok(Path(id)) = id else { return Err(ApiError::NotFound) };
    let id = order_id(&id).ok_or(ApiError::NotFound)?;
    let order = in_time(orders::find(&api.pool, &client, id)).await?.ok_or(ApiError::NotFound)?;
    Ok(Json(order).into_response())
}

/// Reads an order's id as [`location`] writes it, and no other spelling of a UUID.
fn order_id(text: &str) -> Option<Uuid> {
    Uuid::try_parse(text).ok().filter(|id| id.to_string() == text)
}
