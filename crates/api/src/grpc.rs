//! The API over gRPC: the same operations, through the same front and the same engine.
//!
//! A request is a call when its media type says so ([`is_call`]); it then has routes of its own, and whatever becomes of it is
//! told as a gRPC status, never as a problem document. Calls of [`SERVICE`](semel_proto::payments::SERVICE) are one message
//! in and one out, so they are read within the bounds of any other body ([`unary`]) and answered whole. What a call answers
//! is made from what HTTP answers ([`status`], [`messages`]): the same key, stored answer, refusal.
//!
//! The health service needs no credential and takes no place; reflection needs a credential as everything else does, for it
//! is the one call that stays open.

mod health;
mod messages;
pub(crate) mod service;
pub(crate) mod status;
mod unary;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderName, Version, header};
use http_body_util::BodyExt as _;
use tokio::sync::Semaphore;
use tower::ServiceExt as _;

use crate::error::{ApiError, CallError};
use crate::front;
use crate::state::Api;

pub(crate) use health::CHECK as HEALTH_CHECK;

const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// The paths of all calls.
pub(crate) const CALLS: [&str; 12] = [
    service::CREATE_ORDER,
    service::GET_ORDER,
    service::LIST_ORDERS,
    service::CREATE_PAYMENT,
    service::GET_PAYMENT,
    service::LIST_PAYMENTS,
    service::CREATE_REFUND,
    service::GET_REFUND,
    service::LIST_REFUNDS,
    service::GET_IDEMPOTENCY_KEY,
    HEALTH_CHECK,
    REFLECTION,
];

/// Streams of reflection that are open at a time.
const MAX_REFLECTIONS: usize = 32;

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Says whether a request is a gRPC call: `application/grpc`, or with `+` and how its messages are encoded.
pub(crate) fn is_call(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let media_type = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    media_type == "application/grpc" || media_type.starts_with("application/grpc+")
}

/// Adds the calls beside the routes of HTTP.
pub(crate) fn beside(http: Router, api: Api) -> Router {
    let calls = router(api);
    http.layer(from_fn(move |request: Request, next: Next| {
        let call = is_call(request.headers()).then(|| calls.clone());
        async move {
            match call {
                Some(calls) => calls.oneshot(request).await.into_response(),
                None => next.run(request).await,
            }
        }
    }))
}

fn router(api: Api) -> Router {
    let mut calls = service::routes(api.make_payment.clone()).merge(health::routes());
    match reflection() {
        Ok(reflection) => {
            let streams = Arc::new(Semaphore::new(MAX_REFLECTIONS));
            let reflection = Router::new().route_service(REFLECTION, reflection);
            calls = calls.merge(reflection.layer(from_fn_with_state(streams, bound_streams)));
        }
        Err(error) => tracing::error!("there is no reflection: {error}"),
    }
    calls
        .fallback(async || ApiError::from(CallError::Unknown))
        .method_not_allowed_fallback(async || ApiError::from(CallError::Unknown))
        .layer(from_fn(expect_call))
        .layer(from_fn_with_state(api.clone(), front::pass))
        .with_state(api)
}

fn reflection() -> Result<
    tonic_reflection::server::v1::ServerReflectionServer<impl tonic_reflection::server::v1::ServerReflection>,
    tonic_reflection::server::Error,
> {
    let service = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(semel_proto::API_DESCRIPTORS)
        .build_v1()?;
    Ok(service.max_decoding_message_size(crate::body::MAX_BYTES))
}

/// How long a caller waits; none when it does not say, or not so that it can be read, which is told later on.
pub(crate) fn deadline(headers: &HeaderMap) -> Option<Duration> {
    unary::timeout(headers.get(GRPC_TIMEOUT)?.as_bytes())
}

/// Checks what every call must be.
async fn expect_call(request: Request, next: Next) -> Result<Response, ApiError> {
    if request.version() != Version::HTTP_2 {
        return Err(CallError::NotHttp2.into());
    }
    if request.headers().contains_key(GRPC_TIMEOUT) && deadline(request.headers()).is_none() {
        return Err(CallError::Timeout.into());
    }
    Ok(next.run(request).await)
}

/// Lets so many streams of reflection be open at a time: they last as long as their callers want, and so take no place among
/// the requests.
async fn bound_streams(
    State(streams): State<Arc<Semaphore>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let place = streams.try_acquire_owned().map_err(|_| ApiError::Full)?;
    let response = next.run(request).await;
    Ok(response.map(|body| {
        // Given back with the body: when the stream has ended, or the caller is gone.
        Body::new(body.map_frame(move |frame| {
            let _held = &place;
            frame
        }))
    }))
}

#[cfg(test)]
mod tests {
    use axum::routing::post;
    use prost::Message as _;
    use prost_types::FileDescriptorSet;
    use semel_core::lifecycle::Lifecycle;
    use semel_payments::problem::ProblemBase;
    use sqlx::postgres::PgPoolOptions;
    use tonic::{Code, Status};
    use tonic_types::StatusExt as _;

    use super::*;
    use crate::state::Settings;

    /// An API that takes requests, and whose database is asked for nothing.
    fn api() -> Api {
        let settings = Settings {
            namespace: "test".parse().unwrap(),
            key_retention: Duration::from_hours(24),
            problem_base: ProblemBase::DEFAULT.parse().unwrap(),
        };
        let pool = PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/nothing").unwrap();
        let api = Api::new(pool, settings, Lifecycle::new());
        api.open();
        api
    }

    /// Makes an empty call; returns the status that came without a message.
    async fn refused(calls: Router, path: &str) -> Status {
        let call = Request::post(path).version(Version::HTTP_2).header("content-type", "application/grpc");
        let response = calls.oneshot(call.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        assert!(response.headers().contains_key("request-id"));
        Status::from_header_map(response.headers()).unwrap()
    }

    #[tokio::test]
    async fn beyond_the_cap_a_call_is_told_to_come_back() {
        let api = api();
        let everything = u32::try_from(api.places.available_permits()).unwrap();
        let taken = api.places.clone().try_acquire_many_owned(everything).unwrap();
        let calls = crate::routes::router(api.clone());
        let status = refused(calls.clone(), service::CREATE_ORDER).await;
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(status.get_details_error_info().unwrap().reason, "TEMPORARILY_UNAVAILABLE");
        assert!(status.get_details_retry_info().is_some());
        drop(taken);
        assert_eq!(refused(calls, service::CREATE_ORDER).await.code(), Code::Unauthenticated);
        assert_eq!(
            u32::try_from(api.places.available_permits()),
            Ok(everything),
            "a refused call gives its place back"
        );
    }

    #[tokio::test]
    async fn a_panic_is_told_as_a_status() {
        let api = api();
        let panics = async || -> Response { panic!("a bug of ours") };
        // At a path that needs no credential.
        let calls = Router::new()
            .route(HEALTH_CHECK, post(panics))
            .layer(from_fn_with_state(api.clone(), front::pass))
            .with_state(api);
        let status = refused(calls, HEALTH_CHECK).await;
        assert_eq!(
            (status.code(), status.get_details_error_info().unwrap().reason.as_str()),
            (Code::Internal, "INTERNAL")
        );
        assert!(status.get_details_retry_info().is_some() && !status.message().contains("bug"), "{status:?}");
    }

    #[test]
    fn every_method_of_the_interface_is_a_call() {
        let described = FileDescriptorSet::decode(semel_proto::API_DESCRIPTORS).unwrap();
        let mut methods = Vec::new();
        for file in &described.file {
            for service in &file.service {
                let of = |method: &str| format!("/{}.{}/{method}", file.package(), service.name());
                methods.extend(service.method.iter().map(|method| of(method.name())));
            }
        }
        // Of the health service one is not offered; reflection describes itself.
        methods.retain(|method| method != "/grpc.health.v1.Health/Watch");
        methods.push(REFLECTION.to_owned());
        methods.sort();
        let mut calls = CALLS.to_vec();
        calls.sort_unstable();
        assert_eq!(methods, calls);
    }

    #[test]
    fn a_call_is_known_by_its_media_type() {
        let said = |kind: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
            is_call(&headers)
        };
        for kind in
            ["application/grpc", "application/grpc+proto", "Application/GRPC; x=y", "application/grpc+json"]
        {
            assert!(said(kind), "{kind}");
        }
        for kind in
            ["", "application/json", "application/grpc-web", "application/grpc-web+proto", "text/grpc"]
        {
            assert!(!said(kind), "{kind}");
        }
        assert!(!is_call(&HeaderMap::new()));
    }
}
