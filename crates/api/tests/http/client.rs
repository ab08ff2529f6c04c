//! A client that sends what it is told to, byte for byte, and keeps nothing back of what it receives.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Within which an answer must arrive.
const WITHIN: Duration = Duration::from_secs(30);

/// One HTTP/1.1 request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    line: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Option<Vec<u8>>,
}

impl Ask {
    pub(crate) fn new(method: &str, path: &str) -> Self {
        let headers =
            vec![("Host".to_owned(), b"test".to_vec()), ("Connection".to_owned(), b"close".to_vec())];
        Self { line: format!("{method} {path} HTTP/1.1"), headers, body: None }
    }

    /// Adds a header line.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Takes all lines of a header away.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(other, _)| !other.eq_ignore_ascii_case(name));
        self
    }

    pub(crate) fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = Some(body.as_ref().to_vec());
        self
    }

    /// Returns the request's bytes; a body is announced by its length unless a header says otherwise.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let framed = |name: &str| self.headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name));
        let chunked = framed("Transfer-Encoding");
        let mut bytes = format!("{}\r\n", self.line).into_bytes();
        for (name, value) in &self.headers {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        let body = self.body.as_deref().unwrap_or_default();
        if !chunked && !framed("Content-Length") && self.body.is_some() {
            bytes.extend(format!("Content-Length: {}\r\n", body.len()).into_bytes());
        }
        bytes.extend(b"\r\n");
        if chunked {
            for chunk in body.chunks(10_000) {
                bytes.extend([format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat());
            }
            bytes.extend(b"0\r\n\r\n");
        } else {
            bytes.extend(body);
        }
        bytes
    }

    /// Sends the request on a connection of its own, and waits for the answer.
    pub(crate) async fn send(&self, to: SocketAddr) -> Answer {
        exchange(to, &self.bytes()).await.unwrap_or_else(|| panic!("no answer to {}", self.line))
    }
}

/// Sends bytes, reads until the server closes, and returns the answer, if there is one.
pub(crate) async fn exchange(to: SocketAddr, bytes: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(to).await.unwrap();
    // The server may have answered and closed before it has read everything.
    let _ = stream.write_all(bytes).await;
    read_answer(stream).await
}

/// Reads until the server closes, and returns the answer, if there is one.
pub(crate) async fn read_answer(mut stream: impl AsyncRead + Unpin) -> Option<Answer> {
    let mut received = Vec::new();
    let reading = async { while stream.read_buf(&mut received).await.is_ok_and(|read| read > 0) {} };
    assert!(tokio::time::timeout(WITHIN, reading).await.is_ok(), "the server neither answers nor closes");
    Answer::parse(&received)
}

/// One HTTP/1.1 answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// In order, names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Some(Self { status, headers, body: bytes[end + 4..].to_vec() })
    }

    /// Returns the value of a header that stands there once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines =
            self.headers.iter().filter(|(other, _)| other == name).map(|(_, value)| value.as_str());
        let line = lines.next();
        assert_eq!(lines.next(), None, "{name} stands there twice");
        line
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Checks that this is a problem of this kind, whole and as RFC 9457 has it; returns it.
    pub(crate) fn expect_problem(&self, status: u16, suffix: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let problem = self.json();
        assert_eq!(problem["type"], format!("https://semel.example/errors/{suffix}"), "{problem}");
        assert_eq!(problem["status"], status);
        assert_eq!(problem["instance"], format!("urn:uuid:{}", self.header("request-id").unwrap()));
        assert!(problem["title"].is_string() && problem["detail"].is_string(), "{problem}");
        for header in ["idempotency-key-expires", "idempotent-replayed", "original-request-id"] {
            assert_eq!(self.header(header), None);
        }
        problem
    }

    /// Returns the headers that a replay must repeat.
    pub(crate) fn stored_headers(&self) -> Vec<&(String, String)> {
        let of_this_answer = ["date", "request-id", "idempotent-replayed", "original-request-id"];
        self.headers.iter().filter(|(name, _)| !of_this_answer.contains(&name.as_str())).collect()
    }
}
