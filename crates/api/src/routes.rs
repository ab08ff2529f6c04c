//! The router, and what its handlers have in common.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::{Router, middleware};
use uuid::Uuid;

use crate::error::ApiError;
use crate::state::Api;
use crate::{front, keys, orders, payments};

/// Builds the router, for [`serve`](crate::serve) or a connection of one's own. Without a provider there are no payments.
#[must_use = "a router serves nothing by itself"]
pub fn router(api: Api) -> Router {
    let mut routes = orders::routes().merge(keys::routes());
    if let Some(make_payment) = api.make_payment.clone() {
        routes = routes.merge(payments::routes(make_payment));
    }
    routes
        .fallback(async || ApiError::NotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(middleware::from_fn_with_state(api.clone(), front::pass))
        .with_state(api)
}

/// Reads a resource's id as a `Location` writes it, and no other spelling of a UUID.
pub(crate) fn resource_id(path: Result<Path<String>, PathRejection>) -> Result<Uuid, ApiError> {
    let Ok(Path(text)) = path else { return Err(ApiError::NotFound) };
    Uuid::try_parse(&text).ok().filter(|id| id.to_string() == text).ok_or(ApiError::NotFound)
}
