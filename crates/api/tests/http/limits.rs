//! How much a client may begin, and how much all of them may have at work.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures_util::future::join_all;
use http::Request;
use http_body_util::BodyExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use semel_api::Door;
use semel_core::idempotency::admission::{Admission, Rate};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::bed::{Database, Server, until, with_database};
use crate::client::Answer;
use crate::over::Over;
use crate::provider::{Provider, Script};

fn expect_limited(answer: &Answer) {
    answer.expect_problem(429, "rate-limited");
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1, "{answer:?}");
}

#[tokio::test]
async fn a_replay_is_answered_though_the_client_may_begin_nothing_new() {
    with_database(async |db: Database| {
        let rate = Rate { every: Duration::from_hours(1), burst: NonZeroU32::MIN };
        let admission = Admission::new(Some(rate), None);
        let server = db.serve_changed(None, |api| api.with_admission(admission), Door::default()).await;
        let refused = server.order("k", 0).send(server.address).await;
        refused.expect_problem(400, "request-invalid");
        let first = server.order("k", 1200).send(server.address).await;
        assert_eq!(first.status, 201, "what was refused took nothing: {first:?}");

        let new = server.order("new", 1200).send(server.address).await;
        expect_limited(&new);
        assert_eq!(new.header("retry-after"), Some("3600"));
        assert_eq!(db.rows().await, (1, 1, 1), "what is refused is stored nowhere");

        let again = server.order("k", 1200).send(server.address).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{again:?}");
        server.order("k", 1300).send(server.address).await.expect_problem(422, "idempotency-key-reused");
        let read = server.get(first.header("location").unwrap()).send(server.address).await;
        assert_eq!(read.status, 200);

        let other = Server { token: db.token("other").await, ..server.clone() };
        assert_eq!(
            other.order("new", 1200).send(other.address).await.status,
            201,
            "others are not kept from it"
        );
        // Another process, whose bucket is full: the refused key is as unused as before.
        let elsewhere = Server { token: server.token.clone(), ..db.serve_guarded().await };
        let late = elsewhere.order("new", 1200).send(elsewhere.address).await;
        assert_eq!((late.status, late.header("idempotent-replayed")), (201, None));
    })
    .await;
}

#[tokio::test]
async fn a_client_whose_keys_are_in_progress_begins_no_payment_and_still_places_orders() {
    for over in Over::BOTH {
        with_database(async |db: Database| {
            let provider = Provider::start().await;
            let released = Arc::new(Semaphore::new(0));
            provider.then(Script::Hold(Arc::clone(&released)));
            let admission = Admission::new(None, NonZeroU32::new(1));
            let change = |api: semel_api::Api| api.with_admission(admission);
            let server = db.serve_changed(Some(&provider), change, Door::default()).await;
            let first = tokio::spawn({
                let server = server.clone();
                async move { over.payment(&server, "k", 1250).await }
            });
            until("the charge", async || (provider.charged() == 1).then_some(())).await;

            over.payment(&server, "new", 1250).await.expect_problem("rate-limited");
            assert_eq!(provider.charges(), 1);
            over.payment(&server, "k", 1250).await.expect_problem("request-in-progress");
            // An order is never in progress.
            over.order(&server, "o", 1).await.expect_made();
            let other = Server { token: db.token("other").await, ..server.clone() };
            over.payment(&other, "new", 1250).await.expect_made();

            released.add_permits(1);
            first.await.unwrap().expect_made();
            over.payment(&server, "new", 1250).await.expect_made();
        })
        .await;
    }
}

/// Begins a request whose body does not end, so that it keeps its place among those at work.
fn endless(server: &Server) -> Request<Body> {
    let never = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    Request::post("http://test/v1/orders")
        .header("authorization", format!("Bearer {}", server.token))
        .header("idempotency-key", "k")
        .header("content-type", "application/json")
        .body(Body::from_stream(never))
        .unwrap()
}

#[tokio::test]
async fn beyond_so_many_requests_at_work_one_is_told_to_come_back() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        // Once before, so that the credential is remembered and all are admitted at once.
        server.get("/v1/nothing").send(server.address).await.expect_problem(404, "not-found");
        let mut connections = Vec::new();
        let mut waiting = Vec::new();
        for _ in 0..8 {
            let stream = TcpStream::connect(server.address).await.unwrap();
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                    .await
                    .unwrap();
            connections.push(tokio::spawn(connection));
            waiting.extend((0..64).map(|_| tokio::spawn(sender.send_request(endless(&server)))));
        }
        let refused = until("the places to be taken", async || {
            let answer = server.get("/v1/nothing").send(server.address).await;
            (answer.status != 404).then_some(answer)
        })
        .await;
        refused.expect_problem(503, "temporarily-unavailable");
        assert_eq!(refused.header("retry-after"), Some("1"));

        // Each is told that its body is too slow, and gives its place back.
        for answer in join_all(waiting).await {
            let answer = answer.unwrap().unwrap();
            assert_eq!(answer.status(), 408);
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(String::from_utf8_lossy(&body).contains("request-timeout"));
        }
        server.get("/v1/nothing").send(server.address).await.expect_problem(404, "not-found");
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}
