//! Routes of payments.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use semel_core::idempotency::ClientId;
use semel_payments::payments;
use semel_payments::payments::create::MakePayment;
use semel_payments::provider::chosen::Chosen;
use uuid::Uuid;

use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::in_time;
use crate::keyed;
use crate::listing::{self, Asked};
use crate::routes::resource_id;
use crate::state::Api;

/// Route of all payments.
pub(crate) const PAYMENTS: &str = "/v1/payments";
/// Route of one payment.
pub(crate) const PAYMENT: &str = "/v1/payments/{id}";

pub(crate) fn routes(make_payment: MakePayment<Chosen>) -> Router<Api> {
    Router::new()
        .route(PAYMENTS, post(create).get(list))
        .route(PAYMENT, get(find))
        .layer(Extension(make_payment))
}

/// Returns where a payment is.
pub(crate) fn location(payment_id: Uuid) -> String {
    format!("{PAYMENTS}/{payment_id}")
}

async fn create(
    State(api): State<Api>,
    Extension(arrival): Extension<Arrival>,
    Extension(client): Extension<ClientId>,
    Extension(make_payment): Extension<MakePayment<Chosen>>,
    request: Request,
) -> Result<Response, ApiError> {
    keyed::create(&api, arrival, client, request, make_payment, location).await
}

async fn find(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let payment = in_time(payments::find(&api.pool, &client, resource_id(id)?)).await?;
    Ok(Json(payment.ok_or(ApiError::NotFound)?).into_response())
}

async fn list(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (found, next) = in_time(payments::list(&api.pool, &client, listing::page(query)?)).await?;
    Ok(listing::written("payments", found, next))
}
