//! Who asks: what a request is known by before anybody has looked at it.

use std::sync::Arc;

use http::{HeaderMap, HeaderName};
use semel_core::idempotency;
use semel_core::trace::TraceContext;
use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

/// The header that names a request in every answer.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// A request's identity, and its place among those at work.
#[derive(Clone, Debug)]
pub(crate) struct Arrival {
    pub(crate) request: idempotency::Request,
    /// Given back when the last clone goes: a request whose client went away keeps its place while its work runs.
    pub(crate) place: Arc<OwnedSemaphorePermit>,
}

/// Makes a request's identity. The id is ours, never the client's: it tells one's own commit from another's.
pub(crate) fn identify(headers: &HeaderMap) -> idempotency::Request {
    idempotency::Request { id: Uuid::new_v4(), trace_context: trace_context(headers) }
}

/// Returns the request's `traceparent` where it is one, as W3C Trace Context has it; a malformed one is as none.
fn trace_context(headers: &HeaderMap) -> Option<String> {
    let mut lines = headers.get_all(TRACEPARENT).iter();
    let line = lines.next()?.to_str().ok()?;
    (lines.next().is_none() && line.parse::<TraceContext>().is_ok()).then(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn hands_a_valid_traceparent_on() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, GOOD.parse().unwrap());
        assert_eq!(trace_context(&headers).as_deref(), Some(GOOD));
        headers.append(TRACEPARENT, GOOD.parse().unwrap());
        assert_eq!(trace_context(&headers), None, "two of them are none");
    }

    #[test]
    fn a_malformed_traceparent_is_none() {
        let headers = HeaderMap::from_iter([(TRACEPARENT, GOOD.to_uppercase().parse().unwrap())]);
        assert_eq!(trace_context(&headers), None);
    }
}
