//! The names of the API's metrics, and what may stand in their labels.

use std::time::Duration;

use http::StatusCode;
use metrics::{Unit, counter, describe_counter, describe_histogram, histogram};
use semel_core::idempotency::Command as _;
use semel_payments::orders::CreateOrder;
use semel_payments::payments::CreatePayment;

use crate::keys::KEYS;
use crate::openapi::OPENAPI;
use crate::orders::{ORDER, ORDERS};
use crate::payments::{PAYMENT, PAYMENTS};
use crate::problem::Kind;

/// Counter of answered requests; labels `route` and `status`, a class such as `2xx`.
pub const REQUESTS: &str = "semel_http_requests_total";
/// Counter of problems told; label `problem`, the last segment of its type.
pub const PROBLEMS: &str = "semel_http_problems_total";
/// Histogram: from a request's head to its answer; label `route`.
pub const SECONDS: &str = "semel_http_request_seconds";

const UNMATCHED: &str = "unmatched";
const ROUTES: [&str; 7] = [ORDERS, ORDER, PAYMENTS, PAYMENT, KEYS, OPENAPI, UNMATCHED];
const CLASSES: [&str; 3] = ["2xx", "4xx", "5xx"];

/// Describes the metrics and sets the counters to 0.
pub fn describe() {
    describe_counter!(REQUESTS, "Answered requests by route and class of status.");
    describe_histogram!(SECONDS, Unit::Seconds, "From a request's head to its answer.");
    for route in ROUTES {
        for class in CLASSES {
            counter!(REQUESTS, "route" => route, "status" => class).increment(0);
        }
    }
    describe_counter!(
        PROBLEMS,
        "Problems told, by kind; final ones that are stored and replayed are not among them."
    );
    for kind in Kind::ALL {
        counter!(PROBLEMS, "problem" => kind.suffix()).increment(0);
    }
    semel_core::metrics::describe_requests(&[CreateOrder::OPERATION, CreatePayment::OPERATION]);
    semel_payments::metrics::describe();
}

/// Returns the label of a matched route.
pub(crate) fn route(matched: Option<&str>) -> &'static str {
    ROUTES.into_iter().find(|route| Some(*route) == matched).unwrap_or(UNMATCHED)
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
