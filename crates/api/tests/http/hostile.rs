//! What clients should not send: each with its answer, and nothing left behind.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::bed::{Server, with_database};
use crate::client::{Ask, exchange, read_answer};
use crate::provider::Provider;

const SECRET: &str = "s3cret-marker";

struct Case {
    what: &'static str,
    ask: Ask,
    status: u16,
    suffix: &'static str,
}

fn case(what: &'static str, ask: Ask, status: u16, suffix: &'static str) -> Case {
    Case { what, ask, status, suffix }
}

fn keys(server: &Server) -> Vec<Case> {
    let ask = |key: &[u8]| server.order("k", 1).without("Idempotency-Key").header("Idempotency-Key", key);
    let invalid = |what, ask| case(what, ask, 400, "idempotency-key-invalid");
    let missing = server.order("k", 1).without("Idempotency-Key");
    vec![
        case("no key", missing.clone(), 400, "idempotency-key-missing"),
        case(
            "a key by another name",
            missing.header("X-Idempotency-Key", "k"),
            400,
            "idempotency-key-missing",
        ),
        invalid("an empty key", ask(b"")),
        invalid("a blank key", ask(b" \t ")),
        invalid("an empty quoted key", ask(b"\"\"")),
        invalid("an unbalanced quote", ask(b"\"k")),
        invalid("a key of 300 bytes", ask("k".repeat(300).as_bytes())),
        invalid("a key of 256 bytes", ask("k".repeat(256).as_bytes())),
        invalid("a key in UTF-8", ask("ké".as_bytes())),
        invalid("a key in Latin-1", ask(b"k\xe9")),
        invalid("a key with a space", ask(b"k k")),
        invalid("a key with a backslash", ask(b"k\\k")),
        invalid("parameters", ask(b"k;p=1")),
        invalid("parameters after a quoted key", ask(b"\"k\"; p=1")),
        invalid("keys that a proxy has joined", ask(b"k, k")),
        invalid("a key twice", server.order("k", 1).header("Idempotency-Key", "k")),
        invalid("two keys", server.order("k", 1).header("idempotency-key", "other")),
    ]
}

fn bodies(server: &Server) -> Vec<Case> {
    let good = r#"{"reference":"A","amount":1,"currency":"EUR"}"#;
    let with = |body: &[u8]| server.post(body).header("Idempotency-Key", SECRET);
    let field = |name: &str, value: &str| {
        let mut fields = vec![("reference", r#""A""#), ("amount", "1"), ("currency", r#""EUR""#)];
        fields.retain(|(other, _)| *other != name);
        fields.push((name, value));
        let fields: Vec<_> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        with(format!("{{{}}}", fields.join(",")).as_bytes())
    };
    let invalid = |what, ask| case(what, ask, 400, "request-invalid");
    let deep = "[".repeat(20_000);
    vec![
        invalid("an empty body", with(b"")),
        invalid("no body", server.post("").header("Idempotency-Key", "k").header("Content-Length", "0")),
        invalid("no JSON", with(b"reference=A")),
        invalid("half a body", with(&good.as_bytes()[..20])),
        invalid("an array of the fields", with(br#"["A",1,"EUR"]"#)),
        invalid("null", with(b"null")),
        invalid("trailing garbage", with(format!("{good} {SECRET}").as_bytes())),
        invalid("two bodies", with(format!("{good}{good}").as_bytes())),
        invalid("a byte order mark", with(format!("\u{feff}{good}").as_bytes())),
        invalid("invalid UTF-8", with(b"{\"reference\":\"\xff\",\"amount\":1,\"currency\":\"EUR\"}")),
        invalid("half a surrogate pair", field("reference", r#""\ud800""#)),
        invalid("a doubled field", with(br#"{"reference":"A","amount":1,"amount":1,"currency":"EUR"}"#)),
        invalid("an unknown field", field("note", "1")),
        invalid("an unknown field that looks like data", field(SECRET, "1")),
        invalid("a missing field", with(br#"{"reference":"A","amount":1}"#)),
        invalid("a float", field("amount", "1.0")),
        invalid("an exponent", field("amount", "1e2")),
        invalid("a number as text", field("amount", r#""1""#)),
        invalid("null for a number", field("amount", "null")),
        invalid("a number of a thousand digits", field("amount", &"9".repeat(1000))),
        invalid("a number that is none", field("amount", "NaN")),
        invalid("a number beyond 64 bits", field("amount", "9223372036854775808")),
        invalid("deep nesting", field("reference", &deep)),
        invalid("deep nesting all over", with(deep.as_bytes())),
        invalid("nothing to pay", field("amount", "0")),
        invalid("a negative amount", field("amount", "-5")),
        invalid("more than there can be", field("amount", "1000000000001")),
        invalid("an empty reference", field("reference", r#""""#)),
        invalid("a reference with a zero byte", field("reference", r#""a\u0000""#)),
        invalid("a reference of 256 bytes", field("reference", &format!("\"{}\"", "r".repeat(256)))),
        invalid("a currency that there is not", field("currency", r#""ZZZ""#)),
        invalid("a currency that was withdrawn", field("currency", r#""DEM""#)),
        invalid("a currency in small letters", field("currency", r#""eur""#)),
        invalid("a currency that is none", field("currency", &format!("\"{SECRET}\""))),
        case("an announced body of 10 MB", with(&vec![b' '; 10_000_000]), 413, "content-too-large"),
        case(
            "a streamed body of 10 MB",
            with(&vec![b' '; 10_000_000]).header("Transfer-Encoding", "chunked"),
            413,
            "content-too-large",
        ),
        case("an announced body over the limit", with(&vec![b' '; 65_537]), 413, "content-too-large"),
        case(
            "a streamed body over the limit",
            with(&vec![b' '; 70_000]).header("Transfer-Encoding", "chunked"),
            413,
            "content-too-large",
        ),
    ]
}

fn media_types(server: &Server) -> Vec<Case> {
    let plain = server.order("k", 1).without("Content-Type");
    let refused = |what, ask| case(what, ask, 415, "unsupported-media-type");
    vec![
        refused("no media type", plain.clone()),
        refused("a form", plain.clone().header("Content-Type", "application/x-www-form-urlencoded")),
        refused(
            "another character set",
            plain.clone().header("Content-Type", "application/json; charset=utf-16"),
        ),
        refused("two media types", server.order("k", 1).header("Content-Type", "application/json")),
        refused("a compressed body", server.order("k", 1).header("Content-Encoding", "gzip")),
    ]
}

fn routes(server: &Server) -> Vec<Case> {
    let token = format!("Bearer {}", server.token);
    let ask = |method, path| Ask::new(method, path).header("Authorization", &token);
    let nowhere = |what, path| case(what, ask("GET", path), 404, "not-found");
    vec![
        nowhere("the root", "/"),
        nowhere("another version", "/v2/orders"),
        nowhere("a trailing slash", "/v1/orders/"),
        nowhere("an order that is none", "/v1/orders/00000000-0000-4000-8000-000000000000"),
        nowhere("an id that is none", "/v1/orders/1"),
        nowhere("an id in another spelling", "/v1/orders/0E635B41-D860-8196-9D76-2D6CFF60DA32"),
        nowhere("an id that is no text", "/v1/orders/%ff"),
        nowhere("a way out", "/v1/orders/../../etc/passwd"),
        case("a method of no route", ask("DELETE", "/v1/orders"), 405, "method-not-allowed"),
        case("an unknown parameter", ask("GET", "/v1/orders?page=2"), 400, "request-invalid"),
        case("a doubled parameter", ask("GET", "/v1/orders?limit=2&limit=3"), 400, "request-invalid"),
        case("a page of nothing", ask("GET", "/v1/orders?limit=0"), 400, "request-invalid"),
        case("a page too long", ask("GET", "/v1/orders?limit=101"), 400, "request-invalid"),
        case("a cursor of another kind", ask("GET", "/v1/orders?cursor=7"), 400, "request-invalid"),
        case("a cursor that is no text", ask("GET", "/v1/orders?cursor=%ff"), 400, "request-invalid"),
        case("a change", ask("PATCH", "/v1/orders/1"), 405, "method-not-allowed"),
    ]
}

fn credentials(server: &Server, revoked: &str) -> Vec<Case> {
    let with = |line: &str| server.order("k", 1).without("Authorization").header("Authorization", line);
    let refused = |what, ask| case(what, ask, 401, "unauthenticated");
    let token = &server.token;
    vec![
        refused("no credential", server.order("k", 1).without("Authorization")),
        refused("no credential, no route", Ask::new("GET", "/nowhere")),
        refused("another scheme", with("Basic czNjcmV0OnMzY3JldA==")),
        refused("a bare token", with(token)),
        refused("no token", with("Bearer ")),
        refused("a malformed token", with("Bearer sml_1_2")),
        refused("half a token", with(&format!("Bearer {}", &token[..40]))),
        refused("a wrong secret", with(&format!("Bearer {}{}", &token[..token.len() - 64], "0".repeat(64)))),
        refused("an unknown id", with(&format!("Bearer sml_{}_{}", "0".repeat(16), "0".repeat(64)))),
        refused("a revoked token", with(&format!("Bearer {revoked}"))),
        refused(
            "a credential twice",
            server.order("k", 1).header("Authorization", format!("Bearer {token}")),
        ),
    ]
}

#[tokio::test]
async fn each_is_refused_by_name_and_leaves_nothing_behind() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let revoked = db.token("revoked").await;
        db.execute("UPDATE api_credentials SET revoked_at = now() WHERE client_id = 'revoked'").await;
        let cases = [
            keys(&server),
            bodies(&server),
            media_types(&server),
            routes(&server),
            credentials(&server, &revoked),
        ];
        for Case { what, ask, status, suffix } in cases.into_iter().flatten() {
            println!("{what}");
            let answer = ask.send(server.address).await;
            let problem = answer.expect_problem(status, suffix);
            assert_eq!(answer.header("retry-after"), None, "asking again does not help");
            let links = suffix.starts_with("idempotency-key-");
            let link = format!("<https://semel.example/errors/{suffix}>; rel=\"describedby\"");
            assert_eq!(answer.header("link"), links.then_some(link.as_str()));
            assert_eq!(answer.header("www-authenticate").is_some(), status == 401);
            assert!(status != 405 || answer.header("allow").is_some());
            if suffix == "request-invalid" {
                assert!(
                    problem["errors"][0]["field"].is_string() && problem["errors"][0]["reason"].is_string()
                );
            }
            let text = format!("{answer:?}");
            assert!(!text.contains(SECRET) && !text.contains(&server.token[20..]), "{text}");
            assert_eq!(db.rows().await, (0, 0, 0), "{what}");
        }
    })
    .await;
}

/// What only a payment has.
fn sources(server: &Server) -> Vec<Case> {
    let named = |what, source: &str| {
        let body = format!(r#"{{"reference":"A","amount":1,"currency":"EUR","source":{source}}}"#);
        let ask = server.post_to("/v1/payments", body).header("Idempotency-Key", SECRET);
        case(what, ask, 400, "request-invalid")
    };
    vec![
        named("no source", "null"),
        named("an empty source", r#""""#),
        named("a source with a space", r#""tok visa""#),
        named("a source that is no ASCII", r#""tök""#),
        named("a source of 256 bytes", &format!("\"{}\"", "t".repeat(256))),
        named("a card's number", r#""4242424242424242""#),
        named("a card's number in groups", r#""4000-0566-5566-5556""#),
        named("a card's number as a number", "4242424242424242"),
        named("a card's number in a token", r#""tok_4242424242424242""#),
    ]
}

#[tokio::test]
async fn a_payment_with_a_source_that_is_none_is_refused_by_name_and_nobody_is_asked() {
    with_database(async |db| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        for Case { what, ask, status, suffix } in sources(&server) {
            println!("{what}");
            let answer = ask.send(server.address).await;
            let problem = answer.expect_problem(status, suffix);
            assert_eq!(problem["errors"][0]["field"], "source");
            let text = format!("{answer:?}");
            assert!(!text.contains(SECRET) && !text.contains("4242") && !text.contains("5556"), "{text}");
            assert_eq!(db.rows().await, (0, 0, 0), "{what}");
        }
        assert_eq!(provider.charges(), 0);
    })
    .await;
}

#[tokio::test]
async fn a_request_that_could_be_read_in_two_ways_is_refused() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let good = server.order("k", 1);
        for (what, ask) in [
            ("two lengths", good.clone().header("Content-Length", "47").header("Content-Length", "2")),
            ("no length", good.clone().header("Content-Length", "-1")),
            ("a length beyond reason", good.clone().header("Content-Length", "99999999999999999999")),
            ("another coding", good.clone().header("Transfer-Encoding", "gzip, identity")),
            ("a header folded", good.clone().header("X-Folded", "a\r\n b")),
            ("a header's name with a blank", good.clone().header("Idempotency-Key ", "k")),
            ("a zero byte", good.clone().header("X-Zero", "a\0b")),
        ] {
            let answer = exchange(server.address, &ask.bytes()).await;
            let status = answer.as_ref().map(|answer| answer.status);
            assert!(matches!(status, None | Some(400)), "{what}: {answer:?}");
            assert_eq!(db.rows().await, (0, 0, 0), "{what}");
        }
        // Its length and its coding: the coding counts (RFC 9112, section 6.3), and the connection is not used again.
        let both =
            good.without("Connection").header("Content-Length", "5").header("Transfer-Encoding", "chunked");
        let answer = exchange(server.address, &both.bytes()).await;
        assert!(answer.as_ref().is_none_or(|answer| matches!(answer.status, 201 | 400)), "{answer:?}");
    })
    .await;
}

#[tokio::test]
async fn a_body_that_ends_early_leaves_nothing() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let whole = server.order("k", 1200).bytes();
        let chunked = server.order("k", 1200).header("Transfer-Encoding", "chunked").bytes();
        for bytes in [&whole[..whole.len() - 5], &chunked[..chunked.len() - 8]] {
            let mut stream = TcpStream::connect(server.address).await.unwrap();
            stream.write_all(bytes).await.unwrap();
            stream.shutdown().await.unwrap();
            if let Some(answer) = read_answer(stream).await {
                answer.expect_problem(400, "request-invalid");
            }
            assert_eq!(db.rows().await, (0, 0, 0));
        }
        let streamed = server.order("k", 1200).header("Transfer-Encoding", "chunked");
        assert_eq!(streamed.send(server.address).await.status, 201, "without a length it is as good");
    })
    .await;
}

#[tokio::test]
async fn a_refused_field_is_named() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        for (body, field) in [
            (r#"{"reference":"A","amount":0,"currency":"EUR"}"#, "amount"),
            (r#"{"reference":"A","amount":1.5,"currency":"EUR"}"#, "amount"),
            (r#"{"reference":"A","amount":1}"#, "currency"),
            (r#"{"reference":"A","amount":1,"currency":"EUR","note":""}"#, "note"),
            ("[]", ""),
        ] {
            let answer = server.post(body).header("Idempotency-Key", "k").send(server.address).await;
            let problem = answer.expect_problem(400, "request-invalid");
            assert_eq!(problem["errors"][0]["field"], field, "{body}");
        }
        // None of them has used the key up.
        assert_eq!(server.order("k", 1200).send(server.address).await.status, 201);
    })
    .await;
}

#[tokio::test]
async fn the_methods_of_a_route_are_named() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let allowed = async |path: &str| {
            let ask = Ask::new("PUT", path).header("Authorization", format!("Bearer {}", server.token));
            ask.send(server.address).await.header("allow").unwrap().to_owned()
        };
        assert_eq!(allowed("/v1/orders").await, "POST,GET,HEAD");
        assert_eq!(allowed("/v1/orders/1").await, "GET,HEAD");
    })
    .await;
}
