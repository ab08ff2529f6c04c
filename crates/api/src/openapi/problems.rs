//! Problems as OpenAPI has them: a schema per kind, and a response per status.

use semel_payments::problem::{FINAL_KINDS, FinalKind, PAYMENT_DECLINED, ProblemBase};
use serde_json::{Map, Value, json};

use super::parts::{header, id, schema};
use crate::problem::Kind;

/// The schemas of all kinds, under the names of their pages.
pub(super) fn schemas(base: &ProblemBase) -> Map<String, Value> {
    let mut schemas = Map::new();
    for kind in Kind::ALL {
        let described = one(&base.of(kind.suffix()), kind.status().as_u16(), &members(kind));
        schemas.insert(kind.suffix().to_owned(), described);
    }
    for kind in FINAL_KINDS {
        let members =
            if kind == PAYMENT_DECLINED { json!({ "payment": schema("Payment") }) } else { json!({}) };
        schemas.insert(kind.page.to_owned(), one(&base.of(kind.page), kind.code, &members));
    }
    schemas
}

fn one(name: &str, status: u16, members: &Value) -> Value {
    let mut properties = json!({
        "type": { "const": name },
        "title": { "type": "string" },
        "status": { "const": status },
        "detail": { "type": "string" },
        "instance": { "type": "string" },
    });
    let mut required = vec!["type", "title", "status", "detail", "instance"];
    for (name, described) in members.as_object().into_iter().flatten() {
        properties[name] = described.clone();
        required.push(name);
    }
    json!({ "type": "object", "required": required, "properties": properties })
}

/// What a kind tells beside the five members of RFC 9457.
fn members(kind: Kind) -> Value {
    match kind {
        Kind::RequestInvalid => json!({
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["field", "reason"],
                    "properties": { "field": { "type": "string" }, "reason": { "type": "string" } },
                },
            },
        }),
        Kind::ContentTooLarge => json!({ "max_bytes": { "type": "integer" } }),
        Kind::KeyExpired | Kind::OutcomeUnknown | Kind::NeedsAttention => json!({ "resource_id": id() }),
        _ => json!({}),
    }
}

/// Describes the response of a status that these kinds share.
pub(super) fn response(kinds: &[Kind]) -> Value {
    let named: Vec<_> = kinds.iter().map(|kind| kind.suffix()).collect();
    let titles: Vec<_> =
        kinds.iter().map(|kind| format!("{} (`{}`).", kind.title(), kind.suffix())).collect();
    let mut headers = Map::from_iter([("Request-Id".to_owned(), header("Request-Id"))]);
    for (name, is_told) in [
        ("Retry-After", kinds.iter().all(|kind| kind.retry_after().is_some())),
        ("WWW-Authenticate", kinds.contains(&Kind::Unauthenticated)),
        ("Allow", kinds.contains(&Kind::MethodNotAllowed)),
        ("Location", kinds.contains(&Kind::KeyExpired)),
        ("Link", kinds.iter().all(|kind| kind.is_linked())),
    ] {
        if is_told {
            headers.insert(name.to_owned(), header(name));
        }
    }
    json!({
        "description": titles.join(" "),
        "headers": headers,
        "content": { "application/problem+json": { "schema": either(&named) } },
    })
}

fn either(names: &[&str]) -> Value {
    match names {
        [one] => schema(one),
        several => json!({ "oneOf": several.iter().map(|name| schema(name)).collect::<Vec<_>>() }),
    }
}

/// Describes the response of a final outcome.
pub(super) fn final_response(kind: FinalKind, headers: &Map<String, Value>) -> Value {
    json!({
        "description": format!("{} (`{}`). It is final, stored with the key and replayed.", kind.title, kind.page),
        "headers": headers,
        "content": { "application/problem+json": { "schema": schema(kind.page) } },
    })
}

/// What is answered where there is no operation: other paths and other methods.
pub(super) fn elsewhere() -> Value {
    json!({ "NoSuchRoute": response(&[Kind::NotFound]), "NoSuchMethod": response(&[Kind::MethodNotAllowed]) })
}
