//! Slow, large and endless: what a connection may not do, and how it ends at the stop.

use std::time::Duration;

use semel_core::lifecycle::Drained;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bed::{DEADLINE, Database, Server, with_database};
use crate::client::{exchange, read_answer};

/// Within which the server must have closed a connection whose head does not arrive.
const CLOSED_WITHIN: Duration = Duration::from_secs(15);

/// Sends bytes and nothing more; returns what the server says before it closes.
pub(crate) async fn stall(server: &Server, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut received = Vec::new();
    let closed = async { while stream.read_buf(&mut received).await.is_ok_and(|read| read > 0) {} };
    let shown = String::from_utf8_lossy(bytes);
    assert!(tokio::time::timeout(CLOSED_WITHIN, closed).await.is_ok(), "{shown:?} holds its connection");
    received
}

#[tokio::test]
async fn a_head_that_does_not_arrive_ends_the_connection() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let (nothing, half_a_head, half_a_preface, a_preface) = tokio::join!(
            stall(&server, b""),
            stall(&server, b"POST /v1/orders HTTP/1.1\r\nHost: te"),
            stall(&server, b"PRI * HTTP/2.0\r\n\r\n"),
            stall(&server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        );
        assert_eq!((nothing, half_a_preface), (Vec::new(), Vec::new()));
        assert!(!half_a_head.starts_with(b"HTTP/1.1 2") && !a_preface.is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_head_that_arrives_drop_by_drop_ends_the_connection() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let (reader, mut writer) = TcpStream::connect(server.address).await.unwrap().into_split();
        let dripping = tokio::spawn(async move {
            let mut drops = b"GET / HTTP/1.1\r\nX-Long: ".iter().copied().chain(std::iter::repeat(b'x'));
            while writer.write_all(&[drops.next().unwrap_or(b'x')]).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let answer = tokio::time::timeout(CLOSED_WITHIN, read_answer(reader)).await;
        assert_eq!(answer.expect("it holds its connection"), None);
        dripping.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_connection_is_kept_between_requests_for_longer_than_a_head_may_take() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&server.get("/v1/nothing").without("Connection").bytes()).await.unwrap();
        let mut received = Vec::new();
        let closed = async { while stream.read_buf(&mut received).await.is_ok_and(|read| read > 0) {} };
        assert!(
            tokio::time::timeout(Duration::from_secs(8), closed).await.is_err(),
            "closed under the client"
        );
        assert!(received.starts_with(b"HTTP/1.1 404"), "{}", String::from_utf8_lossy(&received));
        stream.write_all(&server.get("/v1/nothing").bytes()).await.unwrap();
        read_answer(stream).await.unwrap().expect_problem(404, "not-found");
    })
    .await;
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_told_so() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let whole = server.order("k", 1200).bytes();
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&whole[..whole.len() - 1]).await.unwrap();
        let answer = read_answer(stream).await.unwrap();
        answer.expect_problem(408, "request-timeout");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let many = (0..200).fold(server.order("k", 1), |ask, n| ask.header(&format!("x-{n}"), "x"));
        for ask in [server.order("k", 1).header("x-large", "x".repeat(20_000)), many] {
            let status = exchange(server.address, &ask.bytes()).await.map(|answer| answer.status);
            assert!(matches!(status, None | Some(431)), "{status:?}");
        }
        let fits = server.order("k", 1).header("x-large", "x".repeat(8_000)).send(server.address).await;
        assert_eq!(fits.status, 201);
    })
    .await;
}

#[tokio::test]
async fn a_stop_finishes_what_is_at_work_and_takes_nothing_new() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        // Not asked to close: the server says so itself.
        let mut at_work = TcpStream::connect(server.address).await.unwrap();
        at_work.write_all(&server.order("k", 1200).without("Connection").bytes()).await.unwrap();
        let idle = TcpStream::connect(server.address).await.unwrap();
        db.until_one_is_blocked().await;

        let drained = tokio::spawn({
            let life = server.life.clone();
            async move { life.drain(DEADLINE).await }
        });
        assert_eq!(read_answer(idle).await, None, "a connection without a request is closed");
        if let Ok(mut late) = TcpStream::connect(server.address).await {
            let _ = late.write_all(&server.order("late", 1).bytes()).await;
            assert_eq!(read_answer(late).await, None);
        }
        assert!(!drained.is_finished());
        stopped.rollback().await.unwrap();
        let answer = read_answer(at_work).await.unwrap();
        assert_eq!((answer.status, answer.header("connection")), (201, Some("close")));
        assert_eq!(drained.await.unwrap(), Drained::Finished);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}
