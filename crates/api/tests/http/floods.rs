//! Floods over HTTP/2, frame by frame: the connection that sends one is ended, and nobody else notices.

use std::time::Duration;

use axum::body::Body;
use http::Request;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use semel_api::Door;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bed::{DEADLINE, Database, Server, with_database};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// GET, http, /, in the static table of HPACK.
const HEAD: &[u8] = &[0x82, 0x86, 0x84];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The ids of streams that a client opens.
fn streams(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|number| 2 * number + 1)
}

/// Sends frames until the server has had enough; returns the kinds of the frames that it answered with.
async fn flood(server: &Server, frames: &[u8]) -> Vec<u8> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let frames = [PREFACE, &frame(SETTINGS, 0, 0, &[]), frames].concat();
    let writing = tokio::spawn(async move {
        // The server may have closed before it has read everything.
        let _ = writer.write_all(&frames).await;
        writer
    });
    let mut received = Vec::new();
    let reading = async { while reader.read_buf(&mut received).await.is_ok_and(|read| read > 0) {} };
    assert!(tokio::time::timeout(DEADLINE, reading).await.is_ok(), "the server neither ends nor closes");
    writing.abort();
    let mut kinds = Vec::new();
    let mut rest = received.as_slice();
    while rest.len() >= 9 {
        kinds.push(rest[3]);
        let length = usize::from(rest[0]) << 16 | usize::from(rest[1]) << 8 | usize::from(rest[2]);
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    kinds
}

/// Floods a server while others ask it, and checks that those are answered.
async fn flood_beside_others(server: &Server, frames: &[u8]) -> Vec<u8> {
    let flooding = flood(server, frames);
    tokio::pin!(flooding);
    loop {
        let ask = server.get("/v1/nothing");
        let asking = ask.send(server.address);
        tokio::select! {
            kinds = &mut flooding => {
                server.get("/v1/nothing").send(server.address).await.expect_problem(404, "not-found");
                return kinds;
            }
            answer = asking => { answer.expect_problem(404, "not-found"); }
        }
    }
}

#[tokio::test]
async fn a_flood_of_streams_that_are_reset_ends_its_connection_alone() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let pair = |stream| {
            let head = frame(HEADERS, END_STREAM | END_HEADERS, stream, HEAD);
            [head, frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
        };
        let frames: Vec<u8> = streams(20_000).flat_map(pair).collect();
        let kinds = flood_beside_others(&server, &frames).await;
        assert!(kinds.contains(&GOAWAY), "{kinds:?}");
        let answered = kinds.iter().map(|kind| usize::from(*kind == HEADERS)).sum::<usize>();
        assert!(answered < 1000, "{answered} of the streams were answered");
    })
    .await;
}

#[tokio::test]
async fn a_head_that_goes_on_and_on_ends_its_connection_alone() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        // A literal header, never indexed: x: and a hundred bytes.
        let line = [&[0x10, 1, b'x', 100][..], &[b'y'; 100]].concat();
        let piece = line.repeat(100);
        let mut frames = frame(HEADERS, END_STREAM, 1, HEAD);
        for _ in 0..1000 {
            frames.extend(frame(CONTINUATION, 0, 1, &piece));
        }
        frames.extend(frame(CONTINUATION, END_HEADERS, 1, &line));
        let kinds = flood_beside_others(&server, &frames).await;
        assert!(kinds.contains(&GOAWAY), "{kinds:?}");
        assert!(!kinds.contains(&HEADERS), "it is not answered as a request: {kinds:?}");
    })
    .await;
}

#[tokio::test]
async fn a_flood_of_settings_and_pings_keeps_no_connection() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let pair = [frame(SETTINGS, 0, 0, &[]), frame(PING, 0, 0, &[7; 8])].concat();
        // It is no request, so the connection ends as one that sends none.
        let kinds = flood_beside_others(&server, &pair.repeat(20_000)).await;
        assert!(kinds.contains(&GOAWAY), "{kinds:?}");
    })
    .await;
}

#[tokio::test]
async fn more_streams_than_there_may_be_are_refused_and_the_others_answered() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let open = |stream| frame(HEADERS, END_HEADERS, stream, HEAD);
        let frames: Vec<u8> = streams(2_000).flat_map(open).collect();
        let kinds = flood_beside_others(&server, &frames).await;
        assert!(kinds.contains(&RST_STREAM) || kinds.contains(&GOAWAY), "{kinds:?}");
    })
    .await;
}

#[tokio::test]
async fn a_connection_without_a_request_at_work_ends_whatever_its_protocol() {
    with_database(async |db: Database| {
        let door = Door::default().with_idle(Duration::from_millis(300));
        let server = db.serve_changed(None, |api| api, door).await;
        let stream = TcpStream::connect(server.address).await.unwrap();
        // Its pings keep it alive for the network, and not for us.
        let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(hyper_util::rt::TokioTimer::new())
            .keep_alive_interval(Duration::from_millis(50))
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(stream))
            .await
            .unwrap();
        let connection = tokio::spawn(connection);
        let request = Request::get("http://test/v1/nothing").body(Body::empty()).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), 401);
        let ended = tokio::time::timeout(DEADLINE, connection).await;
        assert!(ended.is_ok_and(|ended| ended.is_ok()), "the server keeps it");

        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&server.get("/v1/nothing").without("Connection").bytes()).await.unwrap();
        let mut received = Vec::new();
        let closed = async { while stream.read_buf(&mut received).await.is_ok_and(|read| read > 0) {} };
        assert!(tokio::time::timeout(DEADLINE, closed).await.is_ok(), "the server keeps it");
        assert!(received.starts_with(b"HTTP/1.1 404"));
    })
    .await;
}
