//! The router, and what its handlers have in common.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::{Router, middleware};
use semel_payments::hearing::Ear;
use uuid::Uuid;

use crate::error::ApiError;
use crate::state::Api;
use crate::webhooks::Webhooks;
use crate::{front, grpc, keys, openapi, orders, payments, refunds, webhooks};

/// Builds the router of HTTP and gRPC, for [`serve`](crate::serve) or a connection of one's own. Without a provider there are no
/// payments and refunds.
#[must_use = "a router serves nothing by itself"]
pub fn router(api: Api) -> Router {
    let mut routes = orders::routes().merge(keys::routes()).merge(openapi::routes(&api));
    if let Some(make_payment) = api.make_payment.clone() {
        if let Some(Webhooks { secrets, livemode }) = api.webhooks.clone() {
            let ear = Ear::new(make_payment.clone(), livemode, api.settings.key_retention);
            routes = routes.merge(webhooks::routes(ear, secrets));
        }
        routes = routes.merge(refunds::routes(&make_payment)).merge(payments::routes(make_payment));
    }
    let http = routes
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(api.clone(), front::pass))
        .with_state(api.clone());
    grpc::beside(http, api)
}

/// Reads a resource's id as a `Location` writes it, and no other spelling of a UUID.
pub(crate) fn resource_id(path: Result<Path<String>, PathRejection>) -> Result<Uuid, ApiError> {
    let Ok(Path(text)) = path else { return Err(ApiError::NotFound) };
    parse_id(&text)
}

/// As [`resource_id`], from its text.
pub(crate) fn parse_id(text: &str) -> Result<Uuid, ApiError> {
    Uuid::try_parse(text).ok().filter(|id| id.to_string() == text).ok_or(ApiError::NotFound)
}
