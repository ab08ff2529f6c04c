//! Why a request has no success to tell of, and the one place that turns it into a problem.

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use semel_core::idempotency::engine::EngineError;
use semel_core::idempotency::{InvalidCommand, InvalidKey};
use semel_payments::hearing::Unheard;
use semel_payments::provider::stripe::webhook::InvalidSignature;
use serde_json::{Value, json};
use tonic::Code;
use uuid::Uuid;

use crate::json::InvalidBody;
use crate::problem::{Kind, Problem};

/// Why a request has no success to tell of.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("no credential")]
    CredentialMissing,
    #[error("a credential that is malformed, unknown, wrong or revoked")]
    CredentialRefused,
    #[error("a credential without the scope {scope}")]
    Forbidden { scope: &'static str },
    #[error("no such route or resource")]
    NotFound,
    #[error("not exactly one Host")]
    Host,
    #[error("no such method here")]
    MethodNotAllowed,
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the body is not said to be plain JSON")]
    MediaType,
    #[error("the body is too large")]
    BodyTooLarge { limit: usize },
    #[error("the body is too slow")]
    BodyTooSlow { within: Duration },
    #[error("the body ended early")]
    BodyBroken,
    #[error("no key")]
    KeyMissing,
    #[error("more than one key")]
    KeyDoubled,
    #[error("no such key can be")]
    KeyInvalid(#[source] InvalidKey),
    #[error("the body is no such command")]
    Body(#[source] InvalidBody),
    #[error("the query is not acceptable")]
    Query(#[source] InvalidBody),
    #[error("the command is not acceptable")]
    Command(#[source] InvalidCommand),
    #[error("the key belongs to another intent")]
    KeyReused,
    #[error("another request with the key is at work")]
    InProgress { retry_after: Duration },
    #[error("the payment has no outcome yet")]
    Unsettled { retry_after: Duration },
    #[error("the client begins too much")]
    Limited { retry_after: Duration },
    #[error("an event that is not believed")]
    Signature(#[source] InvalidSignature),
    #[error("no event that can be read")]
    NoEvent(#[source] serde_json::Error),
    #[error(transparent)]
    Unheard(#[from] Unheard),
    #[error("the key has expired")]
    KeyExpired { resource_id: Uuid, location: HeaderValue },
    #[error("whether it was executed is not known")]
    Unknown { resource_id: Uuid, retry_after: Duration },
    #[error("whether it was executed is for a person to find out")]
    NeedsAttention { resource_id: Uuid },
    #[error("the key was written by a newer binary")]
    Unreadable,
    #[error("too many requests are at work")]
    Full,
    #[error("the database has not been usable yet")]
    NotOpen,
    #[error("the database could not be asked, the provider does not answer, or others hold what is acted on")]
    Unavailable,
    #[error("the database could not be asked")]
    Database(#[from] sqlx::Error),
    #[error("the database did not answer in time")]
    DatabaseTooSlow,
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("a response that cannot be sent")]
    Response(#[from] http::Error),
    #[error("a panic, told of where it happened")]
    Panicked,
}

/// Why a request is no gRPC call that can be answered with a message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("no such call")]
    Unknown,
    #[error("a call over HTTP/1")]
    NotHttp2,
    #[error("the message is compressed, or in another encoding")]
    Encoding,
    #[error("no such timeout can be")]
    Timeout,
    #[error("the caller's deadline passed")]
    DeadlinePassed,
}

impl ApiError {
    /// Returns the problem to tell the client of. Nothing that the client or the database said goes into it.
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::CredentialMissing => {
                Problem::new(Kind::Unauthenticated, "Send one header `Authorization: Bearer <token>`.")
                    .header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"semel\""))
            }
            Self::CredentialRefused => {
                let challenge = HeaderValue::from_static("Bearer realm=\"semel\", error=\"invalid_token\"");
                Problem::new(Kind::Unauthenticated, "The token is malformed, unknown, wrong or revoked.")
                    .header(header::WWW_AUTHENTICATE, challenge)
            }
            Self::Forbidden { scope } => forbidden(scope),
            Self::NotFound => {
                Problem::new(Kind::NotFound, "There is no such route, or no such resource of yours.")
            }
            Self::MethodNotAllowed => {
                Problem::new(Kind::MethodNotAllowed, "The header `Allow` names the methods that are.")
            }
            Self::Call(error) => error.problem(),
            Self::Host => Problem::new(Kind::RequestInvalid, "Send one header `Host`.").with("errors", json!([])),
            Self::MediaType => Problem::new(
                Kind::UnsupportedMediaType,
                "Send one `Content-Type: application/json`, in UTF-8, and no `Content-Encoding`.",
            ),
            Self::BodyTooLarge { limit } => {
                Problem::new(Kind::ContentTooLarge, format!("A body has at most {limit} bytes."))
                    .with("max_bytes", json!(limit))
            }
            Self::BodyTooSlow { within } => Problem::new(
                Kind::RequestTimeout,
                format!("A body must arrive within {} seconds.", within.as_secs()),
            ),
            Self::BodyBroken => invalid("", "The body ended early or is malformed."),
            Self::KeyMissing => {
                Problem::new(Kind::KeyMissing, "This operation needs a header `Idempotency-Key`; a UUID is a good one.")
            }
            Self::KeyDoubled => Problem::new(Kind::KeyInvalid, "Send one header `Idempotency-Key`, not several."),
            Self::KeyInvalid(error) => Problem::new(Kind::KeyInvalid, sentence(&error.to_string())),
            Self::Body(error) => invalid(&error.field, &error.reason),
            Self::Query(error) => {
                let named = if error.field.is_empty() { "The query".to_owned() } else { format!("`{}`", error.field) };
                let errors = json!([{ "field": error.field, "reason": error.reason }]);
                Problem::new(Kind::RequestInvalid, format!("{named} {}.", error.reason)).with("errors", errors)
            }
            Self::Command(error) => invalid(error.field, &error.reason),
            Self::KeyReused => Problem::new(
                Kind::KeyReused,
                "The key was used with other parameters. Use a new key for a new intent.",
            ),
            Self::InProgress { retry_after } => Problem::new(
                Kind::RequestInProgress,
                "Another request with this key is at work. Ask again with the same key and body.",
            )
            .retry_after(*retry_after),
            Self::Unsettled { retry_after } => Problem::new(
                Kind::PaymentInProgress,
                "The payment has no outcome yet, so it cannot be said whether it can be refunded. Ask again with the same key \
                 and body.",
            )
            .retry_after(*retry_after),
            Self::Limited { retry_after } => Problem::new(
                Kind::RateLimited,
                "You begin more new requests than are taken from one client. Ask again with the same key and body.",
            )
            .retry_after(*retry_after),
            Self::KeyExpired { resource_id, location } => Problem::new(
                Kind::KeyExpired,
                "The request was executed, and its answer is no longer kept. The resource tells what became of it.",
            )
            .with("resource_id", json!(resource_id))
            .header(header::LOCATION, location.clone()),
            Self::Unknown { resource_id, retry_after } => Problem::new(
                Kind::OutcomeUnknown,
                "The request may have been executed. Ask again with the same key and body: it is executed at most once.",
            )
            .with("resource_id", json!(resource_id))
            .retry_after(*retry_after),
            Self::NeedsAttention { resource_id } => Problem::new(
                Kind::NeedsAttention,
                "Whether the request was executed is being found out by a person. Ask again later with the same key and body: \
                 it is executed at most once.",
            )
            .with("resource_id", json!(resource_id)),
            Self::Unreadable => Problem::new(
                Kind::TemporarilyUnavailable,
                "A newer version of the service knows this key. Ask again with the same key and body.",
            ),
            Self::Signature(error) => Problem::new(Kind::SignatureInvalid, sentence(&error.to_string())),
            Self::Unheard(Unheard::OtherMode) => invalid("livemode", "is that of another endpoint"),
            Self::NoEvent(_) => invalid("", "is no event that can be read"),
            Self::Unheard(Unheard::Database(_)) | Self::Full | Self::NotOpen | Self::Unavailable | Self::Database(_) | Self::DatabaseTooSlow => {
                Problem::new(
                    Kind::TemporarilyUnavailable,
                    "The request was not executed. Ask again, with the same key if it has one.",
                )
            }
            Self::Engine(_) | Self::Response(_) | Self::Panicked => Problem::new(
                Kind::Internal,
                "A failure of ours. A retry with the same key is safe: the request is executed at most once.",
            ),
        }
    }
}

impl CallError {
    fn problem(&self) -> Problem {
        match self {
            Self::Unknown => {
                Problem::new(Kind::NotFound, "There is no such call here.").told_as(Code::Unimplemented)
            }
            Self::NotHttp2 => {
                Problem::new(Kind::RequestInvalid, "gRPC needs HTTP/2.").with("errors", json!([]))
            }
            Self::Encoding => Problem::new(
                Kind::UnsupportedMediaType,
                "Send `application/grpc`, in protobuf and not compressed.",
            ),
            Self::Timeout => {
                Problem::new(Kind::RequestInvalid, "`grpc-timeout` must be up to eight digits and a unit.")
                    .with("errors", json!([]))
            }
            Self::DeadlinePassed => Problem::new(
                Kind::DeadlineExceeded,
                "The call's deadline passed first; what it began goes on. Ask again, with the same key if it has one.",
            ),
        }
    }
}

/// As RFC 6750 has it, section 3.1.
fn forbidden(scope: &'static str) -> Problem {
    let detail = format!("The credential does not have the scope `{scope}`.");
    let problem = Problem::new(Kind::Forbidden, detail).with("scope", json!(scope));
    let challenge = format!("Bearer realm=\"semel\", error=\"insufficient_scope\", scope=\"{scope}\"");
    match HeaderValue::try_from(challenge) {
        Ok(challenge) => problem.header(header::WWW_AUTHENTICATE, challenge),
        Err(_) => problem,
    }
}

fn invalid(field: &str, reason: &str) -> Problem {
    let detail = if field.is_empty() {
        sentence(&format!("the body {reason}"))
    } else {
        format!("`{field}` {reason}.")
    };
    let errors: Vec<Value> = vec![json!({ "field": field, "reason": reason })];
    Problem::new(Kind::RequestInvalid, detail).with("errors", Value::Array(errors))
}

fn sentence(text: &str) -> String {
    let mut rest = text.chars();
    let first = rest.next().map(|c| c.to_ascii_uppercase()).into_iter();
    first.chain(rest).chain(['.']).collect()
}

impl IntoResponse for ApiError {
    /// Leaves itself in the response, for [`crate::front`] to log and to write.
    fn into_response(self) -> Response {
        let mut response = StatusCode::INTERNAL_SERVER_ERROR.into_response();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}
