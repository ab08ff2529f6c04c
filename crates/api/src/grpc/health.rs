//! The health service: whether calls are taken, as the readiness of the API has it.
//!
//! Only [`CHECK`] is served. Streams that stay open for strangers are not, and the protocol lets clients do without.

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::post;
use semel_proto::health::v1::health_check_response::ServingStatus;
use semel_proto::health::v1::{HealthCheckRequest, HealthCheckResponse};
use semel_proto::payments::SERVICE;

use super::unary::{self, Call};
use crate::error::ApiError;
use crate::state::Api;

pub(crate) const CHECK: &str = "/grpc.health.v1.Health/Check";

/// The longest request, in bytes; the names that are known take some thirty. Strangers may send it, and to any number of
/// streams, so that what is read for them has to be little.
const LONGEST: usize = 256;

pub(crate) fn routes() -> Router<Api> {
    Router::new().route(CHECK, post(check))
}

async fn check(State(api): State<Api>, request: Request) -> Result<Response, ApiError> {
    let HealthCheckRequest { service } = Call::receive_up_to(LONGEST, request).await?.read()?;
    if !["", SERVICE].contains(&service.as_str()) {
        return Err(ApiError::NotFound);
    }
    let takes_calls = api.is_open() && !api.life.is_stopping();
    let status = if takes_calls { ServingStatus::Serving } else { ServingStatus::NotServing };
    Ok(unary::reply(&HealthCheckResponse { status: status.into() }))
}
