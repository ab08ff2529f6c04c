//! What a call may not be, and what ends the waiting for it.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use hyper::client::conn::http2::handshake;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use semel_proto::payments::v1;
use sqlx::Executor as _;
use tokio::net::TcpStream;
use tonic::Code;

use super::call::{Call, framed, order, order_of, payment};
use crate::bed::{Database, until, with_database};
use crate::provider::{Provider, Script};

/// 64 KiB.
const LARGEST: usize = 65_536;

#[tokio::test]
async fn a_message_that_is_too_large_is_refused_and_the_largest_is_not() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let mut request = order_of(1);
        request.reference = "r".repeat(LARGEST);
        let large = Call::new(&server, "CreateOrder", &request).with("idempotency-key", "k");
        let details = large.send(&server).await.expect_refusal(Code::ResourceExhausted, "CONTENT_TOO_LARGE");
        assert_eq!(details.error_info().unwrap().metadata["max_bytes"], LARGEST.to_string());
        assert!(details.retry_info().is_none());
        // Announced and never sent.
        let announced = large.clone().body([&[0], &u32::MAX.to_be_bytes()[..]].concat());
        announced.send(&server).await.expect_refusal(Code::ResourceExhausted, "CONTENT_TOO_LARGE");

        // Its own three bytes go, and its length takes two more.
        let spare = LARGEST - order_of(1).encoded_len() + 3 - 2;
        request.reference = "r".repeat(spare);
        assert_eq!(request.encoded_len(), LARGEST, "as large as may be");
        let largest = Call::new(&server, "CreateOrder", &request).with("idempotency-key", "k");
        largest.send(&server).await.expect_refusal(Code::InvalidArgument, "REQUEST_INVALID");
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn what_is_no_message_is_refused_by_name_and_leaves_nothing_behind() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let good = framed(&order_of(1).encode_to_vec());
        let with = |body: &[u8]| order(&server, "k", 1).body(body);
        // Field 1 is a text, and this is none.
        let no_text = framed(b"\x0a\x02\xff\xfe\x10\x01\x1a\x03EUR");
        let other_type = framed(b"\x08\x01");
        for (what, call) in [
            ("nothing", with(b"")),
            ("half a prefix", with(&good[..3])),
            ("half a message", with(&good[..good.len() - 1])),
            ("two messages", with(&[&good[..], &good[..]].concat())),
            ("a flag that is none", with(&[&[2], &good[1..]].concat())),
            ("garbage", with(&framed(b"\xff\xff\xff\xff\xff"))),
            ("text that is none", with(&no_text)),
            ("a field of another type", with(&other_type)),
        ] {
            println!("{what}");
            let details = call.send(&server).await.expect_refusal(Code::InvalidArgument, "REQUEST_INVALID");
            assert_eq!(details.bad_request().unwrap().field_violations.len(), 1);
        }
        for (what, call) in [
            ("a compressed message", with(&[&[1], &good[1..]].concat()).with("grpc-encoding", "gzip")),
            (
                "another encoding",
                order(&server, "k", 1).without("content-type").with("content-type", "application/grpc+json"),
            ),
        ] {
            println!("{what}");
            call.send(&server).await.expect_refusal(Code::Unimplemented, "UNSUPPORTED_MEDIA_TYPE");
        }
        assert_eq!(db.rows().await, (0, 0, 0));
        // What is not known is dropped, as the encoding has it: the same command, the same hash.
        let known = order(&server, "k", 1).send(&server).await;
        let more = framed(&[order_of(1).encode_to_vec(), b"\xfa\x06\x04more".to_vec()].concat());
        let again = with(&more).send(&server).await;
        assert_eq!(again.message::<v1::Order>(), known.message());
        assert_eq!(again.metadata("idempotent-replayed"), Some("true"));
    })
    .await;
}

#[tokio::test]
async fn a_message_that_does_not_arrive_is_told_so() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let call = order(&server, "k", 1);
        let half = Bytes::copy_from_slice(&framed(&order_of(1).encode_to_vec())[..4]);
        let stalled = Body::from_stream(stream::iter([Ok::<_, Infallible>(half)]).chain(stream::pending()));
        let slow = call.send_with(&server, stalled).await;
        let details = slow.expect_refusal(Code::DeadlineExceeded, "REQUEST_TIMEOUT");
        assert!(details.retry_info().is_some());
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_deadline_ends_the_waiting_and_the_retry_replays() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        let late = order(&server, "k", 1200).with("grpc-timeout", "300m").send(&server).await;
        let details = late.expect_refusal(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
        assert!(details.retry_info().is_some());
        db.until_one_is_blocked().await;
        stopped.rollback().await.unwrap();
        until("the order whose caller waits no more", async || (db.rows().await == (1, 1, 1)).then_some(()))
            .await;
        let retry = order(&server, "k", 1200).with("grpc-timeout", "20S").send(&server).await;
        assert_eq!((retry.status.code(), retry.metadata("idempotent-replayed")), (Code::Ok, Some("true")));
        let no_time = order(&server, "k", 1200).with("grpc-timeout", "soon").send(&server).await;
        no_time.expect_refusal(Code::InvalidArgument, "REQUEST_INVALID");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_deadline_ends_the_waiting_for_the_credential_too() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let mut stopped = db.pool.begin().await.unwrap();
        stopped.execute("LOCK TABLE api_credentials").await.unwrap();
        let late = order(&server, "k", 1200).with("grpc-timeout", "300m").send(&server).await;
        late.expect_refusal(Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
        stopped.rollback().await.unwrap();
        let retry = order(&server, "k", 1200).send(&server).await;
        assert_eq!((retry.status.code(), retry.metadata("idempotent-replayed")), (Code::Ok, None));
    })
    .await;
}

#[tokio::test]
async fn a_reset_stream_ends_neither_the_charge_nor_its_settlement() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        let released = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
        provider.then(Script::Hold(std::sync::Arc::clone(&released)));
        let stream = TcpStream::connect(server.address).await.unwrap();
        let (mut sender, connection) =
            handshake::<_, _, Body>(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let waiting = tokio::spawn(sender.send_request(payment(&server, "k", 1250).request()));
        until("the charge", async || (provider.charged() == 1).then_some(())).await;
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        let meanwhile = payment(&server, "k", 1250).send(&server).await;
        meanwhile.expect_refusal(Code::Aborted, "REQUEST_IN_PROGRESS");
        released.add_permits(1);
        let retry = until("the settlement", async || {
            let retry = payment(&server, "k", 1250).send(&server).await;
            (retry.status.code() == Code::Ok).then_some(retry)
        })
        .await;
        assert_eq!(retry.metadata("idempotent-replayed"), Some("true"));
        assert_eq!(retry.message::<v1::Payment>().status(), v1::payment::Status::Succeeded);
        assert_eq!((provider.charges(), provider.charged()), (1, 1));
        connection.abort();
    })
    .await;
}

#[tokio::test]
async fn a_trace_goes_on_in_the_event() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let placed = order(&server, "k", 1).with("traceparent", trace).send(&server).await;
        assert_eq!(placed.status.code(), Code::Ok);
        let told: Option<String> = sqlx::query_scalar("SELECT headers->>'traceparent' FROM outbox")
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert_eq!(told.as_deref(), Some(trace));
    })
    .await;
}
