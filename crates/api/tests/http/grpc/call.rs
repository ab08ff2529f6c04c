//! A client that sends the calls it is told to, and keeps nothing back of what it receives.

use axum::body::Body;
use http::{HeaderMap, Request, Version};
use http_body_util::BodyExt as _;
use hyper::client::conn::http2::handshake;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use prost::bytes::Bytes;
use semel_proto::payments::{DOMAIN, v1};
use tokio::net::TcpStream;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::bed::Server;

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    path: String,
    metadata: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

/// What was answered.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// Metadata before the message, or beside a status without one.
    pub(crate) metadata: HeaderMap,
    pub(crate) status: Status,
    body: Bytes,
}

impl Call {
    /// A call of the payments service by the client `acme`, without a key.
    pub(crate) fn new(server: &Server, method: &str, message: &impl Message) -> Self {
        Self::at(&format!("/semel.payments.v1.Payments/{method}"), message)
            .with("authorization", format!("Bearer {}", server.token))
    }

    /// A call of any path by nobody.
    pub(crate) fn at(path: &str, message: &impl Message) -> Self {
        Self {
            path: path.to_owned(),
            metadata: vec![("content-type".to_owned(), b"application/grpc".to_vec())],
            body: framed(&message.encode_to_vec()),
        }
    }

    /// Adds a line of metadata.
    pub(crate) fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.metadata.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Takes all lines of a name away.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.metadata.retain(|(other, _)| other != name);
        self
    }

    /// Replaces the frame, prefix and all.
    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// As a request of HTTP/2.
    pub(crate) fn request(&self) -> Request<Body> {
        let mut request = Request::post(format!("http://test{}", self.path))
            .version(Version::HTTP_2)
            .header("te", "trailers");
        for (name, value) in &self.metadata {
            request = request.header(name, value.as_slice());
        }
        request.body(Body::from(self.body.clone())).unwrap()
    }

    /// Makes the call on a connection of its own, and waits for the answer.
    pub(crate) async fn send(&self, server: &Server) -> Reply {
        self.send_with(server, Body::from(self.body.clone())).await
    }

    /// As [`Call::send`], with another body.
    pub(crate) async fn send_with(&self, server: &Server, body: Body) -> Reply {
        let stream = TcpStream::connect(server.address).await.unwrap();
        let (mut sender, connection) =
            handshake::<_, _, Body>(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let response = sender.send_request(self.request().map(|_| body)).await.unwrap();
        assert_eq!(response.status(), 200, "{response:?}");
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let metadata = response.headers().clone();
        assert!(metadata.contains_key("request-id"), "{metadata:?}");
        let body = response.into_body().collect().await.unwrap();
        let trailers = body.trailers().cloned();
        let told = trailers.as_ref().unwrap_or(&metadata);
        let status = Status::from_header_map(told).unwrap_or_else(|| panic!("no status in {told:?}"));
        connection.abort();
        Reply { metadata, status, body: body.to_bytes() }
    }
}

impl Reply {
    /// Reads the message of an answer.
    pub(crate) fn message<M: Message + Default>(&self) -> M {
        assert_eq!(self.status.code(), Code::Ok, "{:?}", self.status);
        let (prefix, message) = self.body.split_at(5);
        assert_eq!(prefix, framed(message).split_at(5).0);
        M::decode(message).unwrap()
    }

    /// Checks that this is a refusal of this kind, whole; returns its details.
    pub(crate) fn expect_refusal(&self, code: Code, reason: &str) -> ErrorDetails {
        assert_eq!(self.status.code(), code, "{:?}", self.status);
        let details = self.status.get_error_details();
        let info = details.error_info().unwrap_or_else(|| panic!("no info: {:?}", self.status));
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, DOMAIN), "{:?}", self.status);
        assert!(!self.status.message().is_empty() && self.body.is_empty(), "{self:?}");
        details
    }

    /// The value of a line of metadata that stands there once.
    pub(crate) fn metadata(&self, name: &str) -> Option<&str> {
        let mut lines = self.metadata.get_all(name).iter().map(|line| line.to_str().unwrap());
        let line = lines.next();
        assert_eq!(lines.next(), None, "{name} stands there twice");
        line
    }
}

/// Frames a message as plain.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// A call for an order of this amount under this key, as [`Server::order`] is over HTTP.
pub(crate) fn order(server: &Server, key: &str, amount: i64) -> Call {
    Call::new(server, "CreateOrder", &order_of(amount)).with("idempotency-key", key)
}

pub(crate) fn order_of(amount: i64) -> v1::CreateOrderRequest {
    v1::CreateOrderRequest { reference: "A-1".to_owned(), amount, currency: "EUR".to_owned() }
}

/// A call for a payment of this amount under this key, as [`Server::payment`] is over HTTP.
pub(crate) fn payment(server: &Server, key: &str, amount: i64) -> Call {
    Call::new(server, "CreatePayment", &payment_of(amount, "tok_visa")).with("idempotency-key", key)
}

pub(crate) fn payment_of(amount: i64, source: &str) -> v1::CreatePaymentRequest {
    v1::CreatePaymentRequest {
        reference: "A-1".to_owned(),
        amount,
        currency: "EUR".to_owned(),
        source: source.to_owned(),
    }
}
