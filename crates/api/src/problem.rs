//! Problem details (RFC 9457): what kinds of problems there are, and how one is written.
//!
//! Each kind has a page under `docs/errors/`. A `type` is an identifier before it is a link: clients compare its last
//! segment. Nothing of a key, a body or a secret ever stands in a problem.

use std::borrow::Cow;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode, header};
use semel_payments::problem::ProblemBase;
use serde_json::{Map, Value, json};
use tonic::Code;
use uuid::Uuid;

/// The kinds of problems.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Kind {
    KeyMissing,
    KeyInvalid,
    RequestInvalid,
    Unauthenticated,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    RequestInProgress,
    PaymentInProgress,
    KeyExpired,
    ContentTooLarge,
    UnsupportedMediaType,
    KeyReused,
    RateLimited,
    Internal,
    OutcomeUnknown,
    NeedsAttention,
    TemporarilyUnavailable,
    DeadlineExceeded,
    SignatureInvalid,
}

impl Kind {
    pub(crate) const ALL: [Self; 21] = [
        Self::KeyMissing,
        Self::KeyInvalid,
        Self::RequestInvalid,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::RequestInProgress,
        Self::PaymentInProgress,
        Self::KeyExpired,
        Self::ContentTooLarge,
        Self::UnsupportedMediaType,
        Self::KeyReused,
        Self::RateLimited,
        Self::Internal,
        Self::OutcomeUnknown,
        Self::NeedsAttention,
        Self::TemporarilyUnavailable,
        Self::DeadlineExceeded,
        Self::SignatureInvalid,
    ];

    /// Status, last segment of the `type`, title.
    const fn description(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::KeyMissing => {
                (StatusCode::BAD_REQUEST, "idempotency-key-missing", "The Idempotency-Key is missing")
            }
            Self::KeyInvalid => {
                (StatusCode::BAD_REQUEST, "idempotency-key-invalid", "The Idempotency-Key is not acceptable")
            }
            Self::RequestInvalid => {
                (StatusCode::BAD_REQUEST, "request-invalid", "The request is not acceptable")
            }
            Self::Unauthenticated => {
                (StatusCode::UNAUTHORIZED, "unauthenticated", "A valid credential is needed")
            }
            Self::Forbidden => {
                (StatusCode::FORBIDDEN, "forbidden", "The credential may not be used for this")
            }
            Self::NotFound => (StatusCode::NOT_FOUND, "not-found", "There is nothing here"),
            Self::MethodNotAllowed => {
                (StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "The method is not for this resource")
            }
            Self::RequestTimeout => {
                (StatusCode::REQUEST_TIMEOUT, "request-timeout", "The request took too long to arrive")
            }
            Self::RequestInProgress => {
                (StatusCode::CONFLICT, "request-in-progress", "A request with this key is at work")
            }
            Self::PaymentInProgress => {
                (StatusCode::CONFLICT, "payment-in-progress", "The payment has no outcome yet")
            }
            Self::KeyExpired => (StatusCode::GONE, "idempotency-key-expired", "The key's time is over"),
            Self::ContentTooLarge => {
                (StatusCode::PAYLOAD_TOO_LARGE, "content-too-large", "The body is too large")
            }
            Self::UnsupportedMediaType => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "The body must be JSON")
            }
            Self::KeyReused => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "idempotency-key-reused",
                "The key belongs to another request",
            ),
            Self::RateLimited => (StatusCode::TOO_MANY_REQUESTS, "rate-limited", "Too many new requests"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal", "The server failed"),
            Self::OutcomeUnknown => {
                (StatusCode::SERVICE_UNAVAILABLE, "outcome-unknown", "The outcome is not known yet")
            }
            Self::NeedsAttention => {
                (StatusCode::SERVICE_UNAVAILABLE, "needs-attention", "A person has to find out the outcome")
            }
            Self::TemporarilyUnavailable => {
                (StatusCode::SERVICE_UNAVAILABLE, "temporarily-unavailable", "The service is unavailable")
            }
            Self::DeadlineExceeded => {
                (StatusCode::GATEWAY_TIMEOUT, "deadline-exceeded", "The call's own deadline passed")
            }
            Self::SignatureInvalid => {
                (StatusCode::BAD_REQUEST, "signature-invalid", "The event is not believed")
            }
        }
    }

    /// Says whether clients are told of it over HTTP; what they are not is told to calls, or to the provider, alone.
    pub(crate) const fn is_of_http(self) -> bool {
        !matches!(self, Self::DeadlineExceeded | Self::SignatureInvalid)
    }

    /// The gRPC status code.
    const fn code(self) -> Code {
        match self {
            Self::KeyMissing | Self::KeyInvalid | Self::RequestInvalid | Self::SignatureInvalid => {
                Code::InvalidArgument
            }
            Self::Unauthenticated => Code::Unauthenticated,
            Self::Forbidden => Code::PermissionDenied,
            Self::NotFound => Code::NotFound,
            Self::MethodNotAllowed | Self::UnsupportedMediaType => Code::Unimplemented,
            Self::RequestTimeout | Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::RequestInProgress | Self::PaymentInProgress => Code::Aborted,
            Self::KeyExpired | Self::KeyReused => Code::FailedPrecondition,
            Self::ContentTooLarge | Self::RateLimited => Code::ResourceExhausted,
            Self::Internal => Code::Internal,
            Self::OutcomeUnknown | Self::NeedsAttention | Self::TemporarilyUnavailable => Code::Unavailable,
        }
    }

    pub(crate) const fn status(self) -> StatusCode {
        self.description().0
    }

    /// The last segment of the `type`, and the name of the page.
    pub(crate) const fn suffix(self) -> &'static str {
        self.description().1
    }

    /// Says in words what kind it is.
    pub(crate) const fn title(self) -> &'static str {
        self.description().2
    }

    /// When to ask again, for the kinds where asking again may help; only those carry `Retry-After`.
    pub(crate) const fn retry_after(self) -> Option<Duration> {
        match self {
            Self::RequestTimeout
            | Self::RequestInProgress
            | Self::PaymentInProgress
            | Self::RateLimited
            | Self::OutcomeUnknown
            | Self::TemporarilyUnavailable
            | Self::DeadlineExceeded => Some(Duration::from_secs(1)),
            Self::Internal => Some(Duration::from_secs(5)),
            Self::NeedsAttention => Some(Duration::from_mins(1)),
            _ => None,
        }
    }

    /// Whether the answer links to the page, as the Idempotency-Key draft asks for what concerns the key.
    pub(crate) const fn is_linked(self) -> bool {
        matches!(self, Self::KeyMissing | Self::KeyInvalid | Self::KeyReused)
    }
}

/// One occurrence of a problem.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    code: Option<Code>,
    pub(crate) detail: Cow<'static, str>,
    pub(crate) members: Map<String, Value>,
    headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) retry_after: Option<Duration>,
}

impl Problem {
    pub(crate) fn new(kind: Kind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            code: None,
            detail: detail.into(),
            members: Map::new(),
            headers: Vec::new(),
            retry_after: kind.retry_after(),
        }
    }

    pub(crate) fn with(mut self, member: &str, value: Value) -> Self {
        self.members.insert(member.to_owned(), value);
        self
    }

    pub(crate) fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    pub(crate) fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Replaces the kind's own gRPC status code.
    pub(crate) fn told_as(mut self, code: Code) -> Self {
        self.code = Some(code);
        self
    }

    /// The gRPC status code.
    pub(crate) fn code(&self) -> Code {
        self.code.unwrap_or(self.kind.code())
    }

    /// Writes the problem into a response, keeping what others have put among its headers (`Allow`).
    pub(crate) fn write(self, response: Response, base: &ProblemBase, request: Uuid) -> Response {
        let (status, _, title) = self.kind.description();
        let kind = base.of(self.kind.suffix());
        let mut members = self.members;
        // The registered members win over extensions of the same name.
        members.insert("type".to_owned(), json!(kind));
        members.insert("title".to_owned(), json!(title));
        members.insert("status".to_owned(), json!(status.as_u16()));
        members.insert("detail".to_owned(), json!(self.detail));
        members.insert("instance".to_owned(), json!(format!("urn:uuid:{request}")));

        let (mut parts, _) = response.into_parts();
        parts.status = status;
        parts.headers.remove(header::CONTENT_LENGTH);
        parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(wait) = self.retry_after {
            parts.headers.insert(header::RETRY_AFTER, HeaderValue::from(in_seconds(wait).as_secs()));
        }
        if self.kind.is_linked()
            && let Ok(link) = HeaderValue::try_from(format!("<{kind}>; rel=\"describedby\""))
        {
            parts.headers.insert(header::LINK, link);
        }
        parts.headers.extend(self.headers);
        Response::from_parts(parts, Body::from(Value::Object(members).to_string()))
    }
}

/// Rounds a wait up to whole seconds, the smallest that the header can say.
pub(crate) fn in_seconds(wait: Duration) -> Duration {
    Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use semel_payments::problem::FINAL_KINDS;

    use super::*;

    #[test]
    fn every_kind_has_its_page() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        for kind in Kind::ALL {
            let page = pages.join(format!("{}.md", kind.suffix()));
            let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page:?}: {error}"));
            assert!(text.contains(kind.description().2), "{page:?} lacks the title");
            assert!(text.contains(&kind.status().as_u16().to_string()), "{page:?} lacks the status");
            assert_eq!(
                text.contains("`Retry-After`"),
                kind.retry_after().is_some(),
                "{page:?} and the kind disagree on Retry-After"
            );
        }
    }
    #[test]
    fn every_page_belongs_to_a_kind_and_is_in_the_list() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        let list = std::fs::read_to_string(pages.join("README.md")).unwrap();
        let stored = FINAL_KINDS.map(|kind| (kind.page, kind.code));
        let told = Kind::ALL.map(|kind| (kind.suffix(), kind.status().as_u16()));
        let kinds: std::collections::BTreeMap<_, _> = told.into_iter().chain(stored).collect();
        for (page, status) in &kinds {
            assert!(
                list.contains(&format!("| {status} | [{page}]({page}.md) |")),
                "{page} is not in the list"
            );
        }
        for file in std::fs::read_dir(&pages).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let page = name.strip_suffix(".md").unwrap();
            assert!(page == "README" || kinds.contains_key(page), "{name} belongs to no kind");
        }
    }
}
