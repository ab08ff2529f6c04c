//! The API's description of itself, OpenAPI 3.1, at `GET /openapi.json`.
//!
//! Promise: a route that the router has is in the document and the other way round, with every status that it can be
//! answered with; the tests of this module compare both, and the fuzzing (`cargo xtask fuzz-api`) compares the answers.
//!
//! How: each kind of resource tells of its operations in a module of its own, as a list of what they take and what they
//! answer; the kinds of problems are those of [`crate::problem`], the limits those that the handlers enforce. A new resource
//! is a new module here and a line in [`describe`].
//!
//! The document says what *this* process serves: without a provider there are no payments in it. Of the provider's webhook it
//! never tells: that is for no client.

mod keys;
mod operation;
mod orders;
mod parts;
mod payments;
mod problems;
mod refunds;

use axum::Router;
use axum::body::Bytes;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use http::header;
use semel_payments::problem::ProblemBase;
use serde_json::{Map, Value, json};

use crate::state::Api;
use operation::Operation;

/// Route of the document. It takes no credential.
pub(crate) const OPENAPI: &str = "/openapi.json";

/// Which routes there are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Payments {
    Made,
    NotMade,
}

/// Makes the document once: it is large, and anyone may ask for it.
pub(crate) fn routes(api: &Api) -> Router<Api> {
    let payments = if api.make_payment.is_some() { Payments::Made } else { Payments::NotMade };
    let text = Bytes::from(text(payments, &api.settings.problem_base));
    Router::new().route(OPENAPI, get(async move || written(&text)))
}

fn written(text: &Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text.clone()).into_response()
}

/// Returns the document for people to read, too, with a line's end.
pub(crate) fn text(payments: Payments, base: &ProblemBase) -> String {
    format!("{:#}\n", document(payments, base))
}

fn describe(payments: Payments) -> (Vec<Operation>, Map<String, Value>) {
    let (mut operations, mut schemas) = (Vec::new(), Map::new());
    let mut add = |(more, named): (Vec<Operation>, Value)| {
        operations.extend(more);
        if let Value::Object(named) = named {
            schemas.extend(named);
        }
    };
    add(orders::describe());
    if payments == Payments::Made {
        add(payments::describe());
        add(refunds::describe());
    }
    add(keys::describe(payments));
    add((vec![itself()], Value::Null));
    (operations, schemas)
}

fn itself() -> Operation {
    Operation::open("GET", OPENAPI, "describeApi", "Tells what this API takes and answers.")
        .tag("description")
        .succeeds(200, "This document.", &json!({ "type": "object" }))
}

fn document(payments: Payments, base: &ProblemBase) -> Value {
    let (operations, mut schemas) = describe(payments);
    schemas.extend(problems::schemas(base, payments));
    let mut paths = Map::new();
    for operation in operations {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        let method = operation.method.to_ascii_lowercase();
        path[method] = operation.written();
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Semel",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Orders, payments and refunds, each under an idempotency key: at most one effect per key, and the same answer \
                to every repeat. After any answer, and after none, the same request with the same key is safe to send again.",
            "license": { "name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{ "bearer": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "parameters": parts::parameters(),
            "headers": parts::headers(),
            "responses": problems::elsewhere(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "sml_<id>_<secret>",
                    "description": "Made by `semel-api credentials create`. What an operation's `security` names is the scope that it \
                        needs; a credential has those that it was made with, by default all. How a key stands is told to \
                        whoever may read what the key is for.",
                },
            },
        },
    })
}

#[cfg(test)]
mod tests;
