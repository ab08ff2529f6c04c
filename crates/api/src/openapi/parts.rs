//! What several operations share: parameters, headers, and how both are referred to.

use semel_payments::currency::CODES;
use semel_payments::page::MAX_LIMIT;
use serde_json::{Value, json};

use crate::listing::LIMIT;

/// What a key may consist of: visible ASCII without `"`, `,`, `;` and `\`.
const KEY_PATTERN: &str = r#"^(?:[!#-+\--:<-\[\]-~]{1,255}|"[!#-+\--:<-\[\]-~]{1,255}")$"#;

/// Refers to a named schema.
pub(super) fn schema(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// Refers to a named parameter.
pub(super) fn parameter(name: &str) -> Value {
    json!({ "$ref": format!("#/components/parameters/{name}") })
}

/// Refers to a named header.
pub(super) fn header(name: &str) -> Value {
    json!({ "$ref": format!("#/components/headers/{name}") })
}

/// Describes a page of entries under their name.
pub(super) fn page(name: &str, entry: &str) -> Value {
    json!({
        "type": "object",
        "required": [name],
        "properties": {
            name: { "type": "array", "maxItems": MAX_LIMIT, "items": schema(entry) },
            "next_cursor": { "type": "string", "description": "Where the next page begins; absent on the last one." },
        },
    })
}

/// Describes a client's own name for something.
pub(super) fn reference() -> Value {
    json!({
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$",
        "description": "Your own name for it: at most 255 bytes in UTF-8, without control characters.",
    })
}

/// Describes an amount of money.
pub(super) fn amount() -> Value {
    json!({
        "type": "integer",
        "format": "int64",
        "minimum": 1,
        "maximum": semel_payments::orders::MAX_AMOUNT,
        "description": "In minor units of the currency, such as cents.",
    })
}

/// Describes a currency.
pub(super) fn currency() -> Value {
    json!({ "enum": CODES.as_slice(), "description": "The code of a currency in ISO 4217." })
}

/// Describes an id of ours.
pub(super) fn id() -> Value {
    json!({ "type": "string", "format": "uuid" })
}

/// The named parameters.
pub(super) fn parameters() -> Value {
    json!({
        "IdempotencyKey": {
            "name": "Idempotency-Key",
            "in": "header",
            "required": true,
            "description": "Names this request: a repeat with the same key and body is answered as the first one was, and takes no \
                effect. 1 to 255 visible ASCII characters without `\"`, `\\`, `,` and `;`, bare or in double quotes; a UUID is a \
                good one.",
            "schema": { "type": "string", "pattern": KEY_PATTERN },
            "example": "8e03978e-40d5-43dd-bc93-6894a57f9324",
        },
        "Traceparent": {
            "name": "traceparent",
            "in": "header",
            "required": false,
            "description": "W3C Trace Context, handed on with the event. A malformed one is as none.",
            "schema": { "type": "string" },
            "example": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        },
        "Limit": {
            "name": "limit",
            "in": "query",
            "required": false,
            "description": "Entries of a page at most.",
            "schema": { "type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": LIMIT },
        },
        "Cursor": {
            "name": "cursor",
            "in": "query",
            "required": false,
            "description": "Where the page begins: `next_cursor` of the page before.",
            "schema": { "type": "string" },
        },
    })
}

/// The named headers.
pub(super) fn headers() -> Value {
    let header = |description: &str, schema: Value| json!({ "description": description, "schema": schema });
    let required = |description: &str, schema: Value| json!({ "description": description, "required": true, "schema": schema });
    let text = || json!({ "type": "string" });
    json!({
        "Request-Id": required("Names this answer's request; quote it when you ask for help.", id()),
        "Location": required("Path of the resource.", text()),
        "Retry-After": required("Seconds after which the same request is worth another try.", json!({ "type": "integer", "minimum": 1 })),
        "Idempotency-Key-Expires": required("Until when this answer is replayed, an HTTP date.", text()),
        "Idempotent-Replayed": header("`true` where the request was executed before.", json!({ "const": "true" })),
        "Original-Request-Id": header("The request that was executed, where this one was not.", id()),
        "Link": required("The page about this problem, as `describedby`.", text()),
        "WWW-Authenticate": required("How to authenticate (RFC 6750).", text()),
        "Allow": required("The methods that the route has.", text()),
    })
}
