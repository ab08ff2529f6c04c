//! Problems as OpenAPI has them: a schema per kind, and a response per status.

use semel_payments::problem::{
    FINAL_KINDS, FinalKind, PAYMENT_DECLINED, ProblemBase, REFUND_EXCEEDS_PAYMENT, REFUND_FAILED,
};
use serde_json::{Map, Value, json};

use super::Payments;
use super::parts::{header, id, schema};
use crate::problem::Kind;

/// The schemas of all kinds that HTTP tells of, under the names of their pages.
pub(super) fn schemas(base: &ProblemBase, payments: Payments) -> Map<String, Value> {
    let mut schemas = Map::new();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_of_http()) {
        let described = one(&base.of(kind.suffix()), kind.status().as_u16(), &members(kind));
        schemas.insert(kind.suffix().to_owned(), described);
    }
    let finals: &[FinalKind] = if payments == Payments::Made { &FINAL_KINDS } else { &[] };
    for &kind in finals {
        let members = if kind == PAYMENT_DECLINED {
            json!({ "payment": schema("Payment") })
        } else if [REFUND_EXCEEDS_PAYMENT, REFUND_FAILED].contains(&kind) {
            json!({ "refund": schema("Refund") })
        } else {
            json!({})
        };
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
        Kind::Forbidden => json!({ "scope": { "type": "string" } }),
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
        (
            "WWW-Authenticate",
            kinds.iter().any(|kind| [Kind::Unauthenticated, Kind::Forbidden].contains(kind)),
        ),
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

/// Describes the response of a status that final outcomes have, and maybe passing problems, too.
pub(super) fn final_response(
    finals: &[FinalKind],
    passing: &[Kind],
    stored_headers: &Map<String, Value>,
) -> Value {
    let named: Vec<_> =
        finals.iter().map(|kind| kind.page).chain(passing.iter().map(|kind| kind.suffix())).collect();
    let mut titles: Vec<_> = finals
        .iter()
        .map(|kind| {
            format!("{} (`{}`). It is final, stored with the key and replayed.", kind.title, kind.page)
        })
        .collect();
    titles.extend(passing.iter().map(|kind| format!("{} (`{}`).", kind.title(), kind.suffix())));
    let mut headers = stored_headers.clone();
    if !passing.is_empty() {
        // Each of these comes with some of the answers only.
        headers.retain(|name, _| name == "Request-Id");
    }
    json!({
        "description": titles.join(" "),
        "headers": headers,
        "content": { "application/problem+json": { "schema": either(&named) } },
    })
}

/// What is answered where there is no operation: other paths and other methods.
pub(super) fn elsewhere() -> Value {
    json!({ "NoSuchRoute": response(&[Kind::NotFound]), "NoSuchMethod": response(&[Kind::MethodNotAllowed]) })
}
