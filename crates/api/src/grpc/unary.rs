//! One message in, one message out, as gRPC frames them over HTTP/2.
//!
//! Each is five bytes and the message: whether it is compressed, which it never is here, and its length.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, header};
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use prost::Message;
use tonic::Status;

use crate::body::{self, MAX_BYTES};
use crate::error::{ApiError, CallError};
use crate::json::InvalidBody;

/// Bytes before a message.
const PREFIX: usize = 5;

/// A call, read whole.
pub(crate) struct Call {
    /// Its metadata.
    pub(crate) metadata: HeaderMap,
    message: Bytes,
}

impl Call {
    /// Reads the one message of a call, within the bounds of any other body.
    pub(crate) async fn receive(request: Request) -> Result<Self, ApiError> {
        Self::receive_up_to(MAX_BYTES, request).await
    }

    /// As [`receive`](Self::receive), of a message of so many bytes at most.
    pub(crate) async fn receive_up_to(limit: usize, request: Request) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        expect_proto(&head.headers)?;
        let framed =
            body::read_bounded(body, PREFIX + limit, body::WITHIN).await.map_err(|error| match error {
                // Of the message, without what frames it.
                ApiError::BodyTooLarge { .. } => ApiError::BodyTooLarge { limit },
                error => error,
            })?;
        Ok(Self { metadata: head.headers, message: unframed(&framed)? })
    }

    /// Reads the message as what the call takes. Fields that are not known here are dropped.
    pub(crate) fn read<M: Message + Default>(&self) -> Result<M, ApiError> {
        M::decode(self.message.clone()).map_err(|_| invalid("is not the message that this call takes"))
    }
}

/// Checks that messages are said to be in the one encoding there is.
fn expect_proto(metadata: &HeaderMap) -> Result<(), ApiError> {
    let kind = metadata.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let media_type = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match media_type.strip_prefix("application/grpc") {
        Some("" | "+proto") => Ok(()),
        _ => Err(CallError::Encoding.into()),
    }
}

fn unframed(framed: &Bytes) -> Result<Bytes, ApiError> {
    let Some((prefix, message)) = framed.split_first_chunk::<PREFIX>() else {
        return Err(invalid("must be one message"));
    };
    let [compressed, length @ ..] = *prefix;
    // Its length is announced before it has arrived.
    match (compressed, usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX)) {
        (0, length) if length > MAX_BYTES => Err(ApiError::BodyTooLarge { limit: MAX_BYTES }),
        (0, length) if length == message.len() => Ok(framed.slice(PREFIX..)),
        (1, _) => Err(CallError::Encoding.into()),
        _ => Err(invalid("must be one message")),
    }
}

fn invalid(reason: &str) -> ApiError {
    ApiError::Body(InvalidBody { field: String::new(), reason: reason.to_owned() })
}

/// Answers a call with its message.
pub(crate) fn reply(message: &impl Message) -> Response {
    let length = message.encoded_len();
    let mut framed = Vec::with_capacity(PREFIX + length);
    framed.push(0);
    framed.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend(message.encode_to_vec());
    let mut trailers = HeaderMap::new();
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let sent = [Frame::data(Bytes::from(framed)), Frame::trailers(trailers)];
    let body = StreamBody::new(stream::iter(sent.map(Ok::<_, Infallible>)));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Reads a `grpc-timeout`: up to eight digits and a unit.
pub(crate) fn timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let amount: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    match unit {
        b'H' => Some(Duration::from_hours(amount)),
        b'M' => Some(Duration::from_mins(amount)),
        b'S' => Some(Duration::from_secs(amount)),
        b'm' => Some(Duration::from_millis(amount)),
        b'u' => Some(Duration::from_micros(amount)),
        b'n' => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_exactly_one_plain_message() {
        let of = |bytes: &[u8]| unframed(&Bytes::copy_from_slice(bytes));
        assert_eq!(of(b"\0\0\0\0\x02ab").unwrap(), "ab");
        assert_eq!(of(b"\0\0\0\0\0").unwrap(), "");
        assert!(matches!(of(b"\x01\0\0\0\x02ab"), Err(ApiError::Call(CallError::Encoding))));
        assert!(matches!(of(b"\0\0\x01\0\x01ab"), Err(ApiError::BodyTooLarge { .. })));
        for bytes in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x03ab", b"\0\0\0\0\x01ab", b"\x02\0\0\0\x02ab"] {
            assert!(matches!(of(bytes), Err(ApiError::Body(_))), "{bytes:?}");
        }
    }

    #[test]
    fn reads_timeouts_as_grpc_writes_them() {
        for (text, read) in [
            ("1H", Duration::from_hours(1)),
            ("2M", Duration::from_mins(2)),
            ("3S", Duration::from_secs(3)),
            ("100m", Duration::from_millis(100)),
            ("4u", Duration::from_micros(4)),
            ("99999999n", Duration::from_nanos(99_999_999)),
        ] {
            assert_eq!(timeout(text.as_bytes()), Some(read), "{text}");
        }
        for text in ["", "m", "1", "1s", "-1S", "1.5S", "123456789n", "1 S"] {
            assert_eq!(timeout(text.as_bytes()), None, "{text}");
        }
    }
}
