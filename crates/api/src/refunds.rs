//! Routes of refunds.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use semel_core::idempotency::ClientId;
use semel_payments::page::{Cursor, Page};
use semel_payments::payments;
use semel_payments::payments::create::MakePayment;
use semel_payments::provider::chosen::Chosen;
use semel_payments::refunds::create::MakeRefund;
use semel_payments::refunds::{self, CreateRefund, Refund};
use serde::Deserialize;
use uuid::Uuid;

use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::in_time;
use crate::keyed;
use crate::listing::{self, Asked};
use crate::routes::resource_id;
use crate::state::Api;

pub(crate) use semel_payments::refunds::location;

/// Route of all refunds of a payment.
pub(crate) const REFUNDS: &str = "/v1/payments/{id}/refunds";
/// Route of all refunds of a client.
pub(crate) const ALL_REFUNDS: &str = "/v1/refunds";
/// Route of one refund.
pub(crate) const REFUND: &str = "/v1/refunds/{id}";

pub(crate) fn routes(make_payment: &MakePayment<Chosen>) -> Router<Api> {
    Router::new()
        .route(REFUNDS, post(create).get(list))
        .route(ALL_REFUNDS, get(list_all))
        .route(REFUND, get(find))
        .layer(Extension(MakeRefund::of(make_payment)))
}

/// What the body says of a refund; the path says of which payment.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Asking {
    amount: i64,
}

async fn create(
    State(api): State<Api>,
    Extension(arrival): Extension<Arrival>,
    Extension(client): Extension<ClientId>,
    Extension(make_refund): Extension<MakeRefund<Chosen>>,
    payment: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let payment_id = resource_id(payment)?;
    let command = |Asking { amount }| CreateRefund { payment_id, amount };
    keyed::create_with(&api, arrival, client, request, make_refund, location, command).await
}

async fn find(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let refund = in_time(refunds::find(&api.pool, &client, resource_id(id)?)).await?;
    Ok(Json(refund.ok_or(ApiError::NotFound)?).into_response())
}

async fn list(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    payment: Result<Path<String>, PathRejection>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (found, next) = page(&api, &client, Some(resource_id(payment)?), listing::page(query)?).await?;
    Ok(listing::written("refunds", found, next))
}

async fn list_all(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (found, next) = page(&api, &client, None, listing::page(query)?).await?;
    Ok(listing::written("refunds", found, next))
}

/// Returns a page of the refunds of one of the client's payments, or of all of them.
pub(crate) async fn page(
    api: &Api,
    client: &ClientId,
    payment_id: Option<Uuid>,
    page: Page,
) -> Result<(Vec<Refund>, Option<Cursor>), ApiError> {
    let Some(payment_id) = payment_id else {
        return in_time(refunds::list_all(&api.pool, client, page)).await;
    };
    let payment = in_time(payments::find(&api.pool, client, payment_id)).await?;
    payment.ok_or(ApiError::NotFound)?;
    in_time(refunds::list(&api.pool, client, payment_id, page)).await
}
