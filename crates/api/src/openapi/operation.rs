//! One operation: what it takes, and everything that it can be answered with.

use std::collections::BTreeMap;

use http::Method;
use semel_payments::problem::FinalKind;
use serde_json::{Map, Value, json};

use super::parts::{header, parameter, schema};
use super::problems;
use crate::access::Access;
use crate::problem::Kind;

/// What any request that needs a credential can be answered with.
const ALWAYS: [Kind; 5] = [
    Kind::RequestInvalid,
    Kind::Unauthenticated,
    Kind::Forbidden,
    Kind::Internal,
    Kind::TemporarilyUnavailable,
];
/// What any request under a key can be answered with, beside those.
const KEYED: [Kind; 9] = [
    Kind::KeyMissing,
    Kind::KeyInvalid,
    Kind::RequestTimeout,
    Kind::RequestInProgress,
    Kind::KeyExpired,
    Kind::ContentTooLarge,
    Kind::UnsupportedMediaType,
    Kind::KeyReused,
    Kind::RateLimited,
];

/// One operation.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    id: &'static str,
    summary: &'static str,
    tag: &'static str,
    is_open: bool,
    is_keyed: bool,
    parameters: Vec<Value>,
    body: Option<(&'static str, Value)>,
    success: Value,
    status: u16,
    problems: Vec<Kind>,
    finals: Vec<FinalKind>,
}

impl Operation {
    /// Begins one that takes no credential.
    pub(super) fn open(
        method: &'static str,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> Self {
        Self {
            method,
            path,
            id,
            summary,
            tag: "",
            is_open: true,
            is_keyed: false,
            parameters: Vec::new(),
            body: None,
            success: Value::Null,
            status: 200,
            problems: vec![Kind::RequestInvalid, Kind::Internal, Kind::TemporarilyUnavailable],
            finals: Vec::new(),
        }
    }

    /// Begins a GET.
    pub(super) fn get(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        let problems = ALWAYS.to_vec();
        Self { is_open: false, problems, ..Self::open("GET", path, id, summary) }
    }

    /// Begins a POST under an idempotency key; the body's schema is a named one.
    pub(super) fn keyed(
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        body: &'static str,
        example: Value,
    ) -> Self {
        Self {
            is_open: false,
            is_keyed: true,
            body: Some((body, example)),
            parameters: vec![parameter("IdempotencyKey"), parameter("Traceparent")],
            problems: ALWAYS.into_iter().chain(KEYED).chain([Kind::OutcomeUnknown]).collect(),
            ..Self::open("POST", path, id, summary)
        }
    }

    pub(super) fn tag(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// Takes a parameter of the named ones.
    pub(super) fn takes(mut self, name: &str) -> Self {
        self.parameters.push(parameter(name));
        self
    }

    /// Takes the id of a resource as a part of the path.
    pub(super) fn takes_id(mut self) -> Self {
        self.parameters.push(json!({
            "name": "id",
            "in": "path",
            "required": true,
            "description": "As `Location` writes it: a UUID in small letters, with hyphens.",
            "schema": { "type": "string", "format": "uuid" },
        }));
        self.fails(&[Kind::NotFound])
    }

    /// Takes one of these words as a part of the path; another is no route.
    pub(super) fn takes_one_of(mut self, name: &str, description: &str, words: &[&str]) -> Self {
        self.parameters.push(json!({
            "name": name,
            "in": "path",
            "required": true,
            "description": description,
            "schema": { "enum": words },
        }));
        self.fails(&[Kind::NotFound])
    }

    /// Can be answered with these problems, too.
    pub(super) fn fails(mut self, kinds: &[Kind]) -> Self {
        self.problems.extend(kinds);
        self
    }

    /// Can be answered with these final outcomes, which are stored and replayed.
    pub(super) fn ends(mut self, kinds: &[FinalKind]) -> Self {
        self.finals.extend(kinds);
        self
    }

    /// Is answered with this when it succeeds.
    pub(super) fn succeeds(mut self, status: u16, description: &str, schema: &Value) -> Self {
        let mut headers = Map::from_iter([("Request-Id".to_owned(), header("Request-Id"))]);
        if self.is_keyed {
            headers.extend(stored_headers());
        }
        self.status = status;
        self.success = json!({
            "description": description,
            "headers": headers,
            "content": { "application/json": { "schema": schema } },
        });
        self
    }

    /// Leads on to other operations, by what it answers.
    pub(super) fn leads_to(mut self, links: Value) -> Self {
        self.success["links"] = links;
        self
    }

    /// Writes the operation as OpenAPI does.
    pub(super) fn written(self) -> Value {
        let mut by_status: BTreeMap<u16, (Vec<Kind>, Vec<FinalKind>)> = BTreeMap::new();
        for kind in self.problems {
            by_status.entry(kind.status().as_u16()).or_default().0.push(kind);
        }
        for kind in self.finals {
            by_status.entry(kind.code).or_default().1.push(kind);
        }
        let mut responses = Map::from_iter([(self.status.to_string(), self.success)]);
        for (status, (kinds, finals)) in by_status {
            let response = if finals.is_empty() {
                problems::response(&kinds)
            } else {
                problems::final_response(&finals, &kinds, &stored_headers())
            };
            responses.insert(status.to_string(), response);
        }
        let mut operation = json!({
            "operationId": self.id,
            "summary": self.summary,
            "tags": [self.tag],
            "responses": responses,
        });
        if self.is_open {
            operation["security"] = json!([]);
        }
        if let Some(access) = Access::of_request(&method(self.method), self.path) {
            // As of version 3.1 such a list names what the credential must allow.
            operation["security"] = json!([{ "bearer": [access.name()] }]);
        }
        if !self.parameters.is_empty() {
            operation["parameters"] = json!(self.parameters);
        }
        if let Some((body, example)) = self.body {
            operation["requestBody"] = json!({
                "required": true,
                "description": format!("At most {} bytes.", crate::body::MAX_BYTES),
                "content": { "application/json": { "schema": schema(body), "example": example } },
            });
        }
        operation
    }
}

fn method(name: &str) -> Method {
    name.parse().unwrap_or_default()
}

fn stored_headers() -> Map<String, Value> {
    ["Request-Id", "Location", "Idempotency-Key-Expires", "Idempotent-Replayed", "Original-Request-Id"]
        .into_iter()
        .map(|name| (name.to_owned(), header(name)))
        .collect()
}
