//! HTTP/2: the same answers, on one connection, and its end.

use axum::body::Body;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::bed::{DEADLINE, Database, Server, with_database};

async fn connect(server: &Server) -> (SendRequest<Body>, JoinHandle<hyper::Result<()>>) {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    (sender, tokio::spawn(connection))
}

fn order(server: &Server, amount: i64) -> Request<Body> {
    Request::post("http://test/v1/orders")
        .header("authorization", format!("Bearer {}", server.token))
        .header("idempotency-key", "k")
        .header("content-type", "application/json")
        .body(Body::from(format!(r#"{{"reference":"A-1","amount":{amount},"currency":"EUR"}}"#)))
        .unwrap()
}

async fn body(response: Response<Incoming>) -> Vec<u8> {
    response.into_body().collect().await.unwrap().to_bytes().to_vec()
}

#[tokio::test]
async fn a_retry_may_switch_the_protocol() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let (mut sender, _connection) = connect(&server).await;
        let first = sender.send_request(order(&server, 1200)).await.unwrap();
        assert_eq!(first.status(), 201);
        let id = first.headers()["request-id"].to_str().unwrap().to_owned();
        let first = body(first).await;

        let again = server.order("k", 1200).send(server.address).await;
        assert_eq!((again.status, &again.body), (201, &first));
        assert_eq!(again.header("original-request-id"), Some(id.as_str()));

        let other = sender.send_request(order(&server, 1300)).await.unwrap();
        assert_eq!(other.status(), 422);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_reset_stream_ends_the_waiting_and_not_the_work() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        let (mut sender, _connection) = connect(&server).await;
        let waiting = tokio::spawn(sender.send_request(order(&server, 1200)));
        db.until_one_is_blocked().await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        stopped.rollback().await.unwrap();
        let retry = sender.send_request(order(&server, 1200)).await.unwrap();
        assert_eq!(
            (retry.status().as_u16(), &retry.headers()["idempotent-replayed"]),
            (201, &"true".parse().unwrap())
        );
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_stop_finishes_the_streams_at_work_and_closes_the_connection() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        let (mut sender, connection) = connect(&server).await;
        let waiting = tokio::spawn(sender.send_request(order(&server, 1200)));
        db.until_one_is_blocked().await;
        server.life.stop();
        stopped.rollback().await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().status(), 201);
        let closed = tokio::time::timeout(DEADLINE, connection).await;
        assert!(closed.is_ok(), "the server did not close");
    })
    .await;
}
