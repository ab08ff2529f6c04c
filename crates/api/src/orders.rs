//! Routes of orders.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use semel_core::idempotency::ClientId;
use semel_payments::orders;
use uuid::Uuid;

use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::in_time;
use crate::keyed;
use crate::listing::{self, Asked};
use crate::routes::resource_id;
use crate::state::Api;

/// Route of all orders.
pub(crate) const ORDERS: &str = "/v1/orders";
/// Route of one order.
pub(crate) const ORDER: &str = "/v1/orders/{id}";

pub(crate) fn routes() -> Router<Api> {
    Router::new().route(ORDERS, post(create).get(list)).route(ORDER, get(find))
}

/// Returns where an order is.
pub(crate) fn location(order_id: Uuid) -> String {
    format!("{ORDERS}/{order_id}")
}

async fn create(
    State(api): State<Api>,
    Extension(arrival): Extension<Arrival>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    keyed::create(&api, arrival, client, request, api.place_order.clone(), location).await
}

async fn find(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let order = in_time(orders::find(&api.pool, &client, resource_id(id)?)).await?;
    Ok(Json(order.ok_or(ApiError::NotFound)?).into_response())
}

async fn list(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (found, next) = in_time(orders::list(&api.pool, &client, listing::page(query)?)).await?;
    Ok(listing::written("orders", found, next))
}
