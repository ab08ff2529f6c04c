//! Problem details (RFC 9457) that are final outcomes, and so stored with a key and replayed.

use std::str::FromStr;

use semel_core::idempotency::StoredResponse;
use serde_json::{Map, Value, json};

/// What the `type` of every problem begins with: an absolute `http` or `https` URL, or a path on the server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ProblemBase(String);

impl ProblemBase {
    /// The default. `.example` belongs to nobody for ever (RFC 2606), so an identifier under it can lead nobody astray.
    pub const DEFAULT: &str = "https://semel.example/errors/";

    /// Returns the `type` of a problem whose page has this name.
    #[must_use]
    pub fn of(&self, page: &str) -> String {
        format!("{}{page}", self.0)
    }
}

/// A base that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("not an http or https URL, or a path that begins with '/', without query and fragment")]
pub struct InvalidProblemBase;

impl FromStr for ProblemBase {
    type Err = InvalidProblemBase;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let begins_well = ["https://", "http://", "/"].iter().any(|start| text.starts_with(start));
        let allowed = |b: u8| b.is_ascii_graphic() && !matches!(b, b'<' | b'>' | b'"' | b'\\' | b'?' | b'#');
        if !begins_well || text.len() > 1024 || !text.bytes().all(allowed) {
            return Err(InvalidProblemBase);
        }
        Ok(Self(format!("{}/", text.trim_end_matches('/'))))
    }
}

/// A kind of problem that is a final outcome. Each has a page under `docs/errors/`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FinalKind {
    /// HTTP status.
    pub code: u16,
    /// Last segment of the `type`, and the name of the page.
    pub page: &'static str,
    /// Says in words what kind it is.
    pub title: &'static str,
}

/// The provider declined a payment.
pub const PAYMENT_DECLINED: FinalKind =
    FinalKind { code: 402, page: "payment-declined", title: "The payment was declined" };
/// A payment was fenced, and no money moved.
pub const PAYMENT_ROLLED_BACK: FinalKind =
    FinalKind { code: 424, page: "payment-rolled-back", title: "The payment was rolled back" };
/// The payment has less left than was to be refunded.
pub const REFUND_EXCEEDS_PAYMENT: FinalKind = FinalKind {
    code: 409,
    page: "refund-exceeds-payment",
    title: "The refund is larger than what is left of the payment",
};
/// The provider did not give the money back, and will not.
pub const REFUND_FAILED: FinalKind =
    FinalKind { code: 402, page: "refund-failed", title: "The refund failed" };
/// All of them.
pub const FINAL_KINDS: [FinalKind; 4] =
    [PAYMENT_DECLINED, PAYMENT_ROLLED_BACK, REFUND_EXCEEDS_PAYMENT, REFUND_FAILED];

/// Writes a final problem about the resource at this path as the response to store.
pub(crate) fn about(
    base: &ProblemBase,
    kind: FinalKind,
    detail: &str,
    location: &str,
    members: Map<String, Value>,
) -> StoredResponse {
    let FinalKind { code, page, title } = kind;
    let mut body = members;
    body.insert("type".to_owned(), json!(base.of(page)));
    body.insert("title".to_owned(), json!(title));
    body.insert("status".to_owned(), json!(code));
    body.insert("detail".to_owned(), json!(detail));
    body.insert("instance".to_owned(), json!(location));
    StoredResponse {
        code,
        headers: vec![
            ("content-type".to_owned(), "application/problem+json".to_owned()),
            ("location".to_owned(), location.to_owned()),
        ],
        body: Value::Object(body).to_string().into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_final_kind_has_its_page_and_is_not_to_be_retried() {
        let pages = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        for kind in FINAL_KINDS {
            let page = pages.join(format!("{}.md", kind.page));
            let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page:?}: {error}"));
            assert!(text.contains(kind.title), "{page:?} lacks the title");
            assert!(text.contains(&format!("status {}.", kind.code)), "{page:?} lacks the status");
            assert!(!text.contains("`Retry-After`"), "{page:?} speaks of a retry");
        }
    }

    #[test]
    fn a_base_ends_with_one_slash() {
        for text in ["https://semel.example/errors", "https://semel.example/errors//"] {
            let base: ProblemBase = text.parse().unwrap();
            assert_eq!(base.of("not-found"), "https://semel.example/errors/not-found");
        }
        assert_eq!("/errors".parse::<ProblemBase>().unwrap().of("internal"), "/errors/internal");
        for text in ["", "errors", "ftp://x/", "https://x/?a=", "https://x/>; rel=next", "https://x/ä"] {
            assert!(text.parse::<ProblemBase>().is_err(), "{text}");
        }
    }
}
