//! The names of the API's metrics, and what may stand in their labels.

use std::time::Duration;

use axum::response::Response;
use http::StatusCode;
use metrics::{counter, histogram};
use semel_core::idempotency::Command as _;
use semel_core::metrics::{Label, Metric, OUTCOME, requests};
use semel_payments::orders::CreateOrder;
use semel_payments::payments::CreatePayment;
use semel_payments::refunds::CreateRefund;
use tonic::{Code, Status};

use crate::grpc::CALLS;
use crate::keys::KEYS;
use crate::openapi::OPENAPI;
use crate::orders::{ORDER, ORDERS};
use crate::payments::{PAYMENT, PAYMENTS};
use crate::problem::Kind;
use crate::refunds::{ALL_REFUNDS, REFUND, REFUNDS};
use crate::webhooks::STRIPE;

/// Counter of answered requests; labels `route` and `status`, a class such as `2xx`.
pub const REQUESTS: &str = "semel_http_requests_total";
/// Counter of problems told; label `problem`, the last segment of its type.
pub const PROBLEMS: &str = "semel_http_problems_total";
/// Histogram: from a request's head to its answer; label `route`.
pub const SECONDS: &str = "semel_http_request_seconds";

/// Counter of answered gRPC calls; labels `method` and `code`.
pub const CALLS_ANSWERED: &str = "semel_grpc_requests_total";
/// Histogram: from a gRPC call's head to its answer; label `method`.
pub const CALL_SECONDS: &str = "semel_grpc_request_seconds";

const UNMATCHED: &str = "unmatched";
const ROUTES: [&str; 11] =
    [ORDERS, ORDER, PAYMENTS, PAYMENT, REFUNDS, ALL_REFUNDS, REFUND, KEYS, OPENAPI, STRIPE, UNMATCHED];
const CLASSES: [&str; 3] = ["2xx", "4xx", "5xx"];
/// The codes that calls are answered with.
const CODES: [(Code, &str); 12] = [
    (Code::Ok, "OK"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];
const OTHER: &str = "OTHER";

const CODE_LABELS: [&str; CODES.len() + 1] = {
    let mut labels = [OTHER; CODES.len() + 1];
    let mut at = 0;
    while at < CODES.len() {
        labels[at] = CODES[at].1;
        at += 1;
    }
    labels
};
const METHODS: [&str; CALLS.len() + 1] = {
    let mut labels = [UNMATCHED; CALLS.len() + 1];
    let mut at = 0;
    while at < CALLS.len() {
        // A path is a slash and the method.
        labels[at] = match CALLS[at].split_at_checked(1) {
            Some((_, method)) => method,
            None => UNMATCHED,
        };
        at += 1;
    }
    labels
};
const PROBLEM_LABELS: [&str; Kind::ALL.len()] = {
    let mut labels = [""; Kind::ALL.len()];
    let mut at = 0;
    while at < labels.len() {
        labels[at] = Kind::ALL[at].suffix();
        at += 1;
    }
    labels
};
const OPERATIONS: [&str; 3] = [CreateOrder::OPERATION, CreatePayment::OPERATION, CreateRefund::OPERATION];

/// The API's own metrics.
pub const METRICS: [Metric; 6] = [
    Metric::counter(REQUESTS, "Answered requests by route and class of status.")
        .with(&[Label::of("route", &ROUTES), Label::of("status", &CLASSES)]),
    Metric::counter(PROBLEMS, "Problems told, by the last segment of their `type`; final ones that are stored and replayed are not among them.")
        .with(&[Label::of("problem", &PROBLEM_LABELS)]),
    Metric::histogram(SECONDS, "From a request's head to its answer.").with(&[Label::of("route", &ROUTES)]),
    Metric::counter(CALLS_ANSWERED, "Answered gRPC calls by method and code.")
        .with(&[Label::of("method", &METHODS), Label::of("code", &CODE_LABELS)]),
    Metric::histogram(CALL_SECONDS, "From a gRPC call's head to its answer.").with(&[Label::of("method", &METHODS)]),
    requests(&[Label::of("operation", &OPERATIONS), OUTCOME]),
];

/// Returns the label of a matched route.
pub(crate) fn route(matched: Option<&str>) -> &'static str {
    ROUTES.into_iter().find(|route| Some(*route) == matched).unwrap_or(UNMATCHED)
}

/// Returns the label of the call at a path.
pub(crate) fn method(path: &str) -> &'static str {
    CALLS.into_iter().find(|call| *call == path).map_or(UNMATCHED, |call| call.trim_start_matches('/'))
}

/// Records an answered call. One whose code is not in its head has an answer.
pub(crate) fn record_call(method: &'static str, response: &Response, took: Duration) {
    let status = response.headers().get(Status::GRPC_STATUS);
    let code = status.map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()));
    let code = CODES.into_iter().find(|(known, _)| *known == code).map_or(OTHER, |(_, name)| name);
    counter!(CALLS_ANSWERED, "method" => method, "code" => code).increment(1);
    histogram!(CALL_SECONDS, "method" => method).record(took);
}

/// Records a problem that a client is told of.
pub(crate) fn record_problem(kind: Kind) {
    counter!(PROBLEMS, "problem" => kind.suffix()).increment(1);
}

/// Records an answered request.
pub(crate) fn record(route: &'static str, status: StatusCode, took: Duration) {
    let class = match status.as_u16() {
        ..400 => "2xx",
        400..500 => "4xx",
        _ => "5xx",
    };
    counter!(REQUESTS, "route" => route, "status" => class).increment(1);
    histogram!(SECONDS, "route" => route).record(took);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_makes_up_is_no_label() {
        assert_eq!(
            method("/semel.payments.v1.Payments/CreateOrder"),
            "semel.payments.v1.Payments/CreateOrder"
        );
        for path in [
            "",
            "/",
            "/v1/orders",
            "/semel.payments.v1.Payments/Other",
            "semel.payments.v1.Payments/CreateOrder",
        ] {
            assert_eq!(method(path), UNMATCHED, "{path}");
        }
        assert_eq!(route(Some(ORDER)), ORDER);
        assert_eq!(route(Some("/v1/other")), UNMATCHED);
    }
}
