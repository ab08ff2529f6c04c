//! The `Idempotency-Key` header.

use http::{HeaderMap, HeaderName};
use semel_core::idempotency::IdempotencyKey;

use crate::error::ApiError;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Reads the key from exactly one header line. One that is there but unusable is never treated as absent.
pub(crate) fn from_headers(headers: &HeaderMap) -> Result<IdempotencyKey, ApiError> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let line = lines.next().ok_or(ApiError::KeyMissing)?;
    if lines.next().is_some() {
        return Err(ApiError::KeyDoubled);
    }
    IdempotencyKey::from_header(line.as_bytes()).map_err(ApiError::KeyInvalid)
}
