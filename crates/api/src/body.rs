//! Reading a request's body within bounds.

use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes};

use crate::error::ApiError;

/// Bytes of a body at most.
pub(crate) const MAX_BYTES: usize = 64 * 1024;
/// How long a whole body may take.
pub(crate) const WITHIN: Duration = Duration::from_secs(10);

/// Checks that a request says that its body is JSON, plain.
pub(crate) fn expect_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter();
    let kind = kinds.next().and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let (media_type, parameters) = kind.split_once(';').unwrap_or((kind, ""));
    let parameters = parameters.trim().to_ascii_lowercase();
    let is_json = media_type.trim().eq_ignore_ascii_case("application/json")
        && matches!(parameters.as_str(), "" | "charset=utf-8" | "charset=\"utf-8\"");
    if is_json && kinds.next().is_none() && !headers.contains_key(header::CONTENT_ENCODING) {
        Ok(())
    } else {
        Err(ApiError::MediaType)
    }
}

/// Reads a whole body, whether its length was announced or not.
pub(crate) async fn read(body: Body) -> Result<Bytes, ApiError> {
    read_bounded(body, MAX_BYTES, WITHIN).await
}

/// As [`read`], within bounds of one's own.
pub(crate) async fn read_bounded(body: Body, limit: usize, within: Duration) -> Result<Bytes, ApiError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge { limit });
    }
    match tokio::time::timeout(within, Limited::new(body, limit).collect()).await {
        Err(_) => Err(ApiError::BodyTooSlow { within }),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::BodyTooLarge { limit }),
        Ok(Err(_)) => Err(ApiError::BodyBroken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(kinds: &[&str]) -> bool {
        let mut headers = HeaderMap::new();
        for kind in kinds {
            headers.append(header::CONTENT_TYPE, kind.parse().unwrap());
        }
        expect_json(&headers).is_ok()
    }

    #[test]
    fn takes_json_in_utf_8_only() {
        for kind in ["application/json", "Application/JSON", "application/json; charset=UTF-8"] {
            assert!(judged(&[kind]), "{kind}");
        }
        for kinds in [
            &[][..],
            &[""],
            &["text/plain"],
            &["application/json; charset=utf-16"],
            &["application/jsonp"],
            &["application/json", "application/json"],
        ] {
            assert!(!judged(kinds), "{kinds:?}");
        }
    }
}
