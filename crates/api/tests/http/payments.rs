//! Payments under keys, through a provider on a socket.

use std::sync::Arc;

use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::bed::{Database, Server, until, with_database};
use crate::client::Answer;
use crate::provider::{Provider, Script};

pub(crate) async fn with_payments(test: impl AsyncFnOnce(Database, Server, Provider)) {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        test(db, server, provider).await;
    })
    .await;
}

/// Checks that `again` replays `first`, byte for byte and line for line.
pub(crate) fn expect_replay(first: &Answer, again: &Answer) {
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.stored_headers(), first.stored_headers());
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.header("original-request-id"), first.header("request-id"));
}

async fn payments(db: &Database) -> Vec<String> {
    sqlx::query_scalar("SELECT status FROM payments").fetch_all(&db.pool).await.unwrap()
}

#[tokio::test]
async fn a_payment_is_made_once_replayed_and_read() {
    with_payments(async |_, server, provider| {
        let first = server.payment("k", 1250).send(server.address).await;
        assert_eq!(first.status, 201, "{first:?}");
        let payment = first.json();
        assert_eq!((&payment["status"], &payment["amount"]), (&"succeeded".into(), &1250.into()));
        let location = format!("/v1/payments/{}", payment["id"].as_str().unwrap());
        assert_eq!(first.header("location"), Some(location.as_str()));
        expect_replay(&first, &server.payment("k", 1250).send(server.address).await);
        assert_eq!((provider.charges(), provider.charged()), (1, 1));
        let read = server.get(&location).send(server.address).await;
        assert_eq!((read.status, read.body), (200, first.body));
        let other = server.payment("k", 1251).send(server.address).await;
        other.expect_problem(422, "idempotency-key-reused");
    })
    .await;
}

#[tokio::test]
async fn a_payment_is_its_clients_alone() {
    with_payments(async |db, server, _| {
        let first = server.payment("k", 1250).send(server.address).await;
        let other = Server { token: db.token("other").await, ..server.clone() };
        let path = first.header("location").unwrap();
        other.get(path).send(server.address).await.expect_problem(404, "not-found");
        for path in
            ["/v1/payments/", "/v1/payments/x", &path.to_uppercase().replace("/V1/PAYMENTS", "/v1/payments")]
        {
            server.get(path).send(server.address).await.expect_problem(404, "not-found");
        }
        let listing = async |server: &Server| server.get("/v1/payments").send(server.address).await.json();
        assert_eq!(listing(&server).await, serde_json::json!({ "payments": [first.json()] }));
        assert_eq!(listing(&other).await, serde_json::json!({ "payments": [] }));
    })
    .await;
}

#[tokio::test]
async fn a_decline_is_a_stored_problem_that_names_the_payment() {
    with_payments(async |_, server, provider| {
        provider.then(Script::Decline);
        let first = server.payment("k", 1250).send(server.address).await;
        assert_eq!(first.status, 402, "{first:?}");
        assert_eq!(first.header("content-type"), Some("application/problem+json"));
        assert!(first.header("idempotency-key-expires").is_some(), "it is final");
        assert_eq!(first.header("retry-after"), None);
        let problem = first.json();
        assert_eq!(problem["type"], "https://semel.example/errors/payment-declined");
        assert_eq!(problem["payment"]["decline_code"], "card_declined");
        assert_eq!(problem["instance"].as_str(), first.header("location"));
        expect_replay(&first, &server.payment("k", 1250).send(server.address).await);
        assert_eq!(provider.charges(), 1);
        let read = server.get(first.header("location").unwrap()).send(server.address).await;
        assert_eq!((read.status, read.json()), (200, problem["payment"].clone()));
    })
    .await;
}

#[tokio::test]
async fn a_lost_answer_is_told_as_unknown_and_settled_by_the_retry() {
    with_payments(async |db, server, provider| {
        provider.then(Script::LoseAnswer);
        let lost = server.payment("k", 1250).send(server.address).await;
        let problem = lost.expect_problem(503, "outcome-unknown");
        assert_eq!(lost.header("retry-after"), Some("2"));
        let path = format!("/v1/payments/{}", problem["resource_id"].as_str().unwrap());
        assert_eq!(server.get(&path).send(server.address).await.json()["status"], "processing");

        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, &retry.json()["id"]), (201, &problem["resource_id"]));
        assert_eq!((provider.charges(), provider.charged()), (2, 1));
        assert_eq!(payments(&db).await, ["succeeded"]);
    })
    .await;
}

#[tokio::test]
async fn what_waits_for_a_person_is_asked_about_again_much_later() {
    with_payments(async |_, server, provider| {
        provider.then(Script::Mismatch);
        for _ in 0..2 {
            let answer = server.payment("k", 1250).send(server.address).await;
            let problem = answer.expect_problem(503, "needs-attention");
            assert_eq!(answer.header("retry-after"), Some("60"));
            assert!(problem["resource_id"].is_string(), "{problem}");
        }
        assert_eq!(provider.charges(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_client_that_goes_away_ends_neither_the_charge_nor_its_settlement() {
    with_payments(async |db, server, provider| {
        let released = Arc::new(Semaphore::new(0));
        provider.then(Script::Hold(Arc::clone(&released)));
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&server.payment("k", 1250).bytes()).await.unwrap();
        until("the charge", async || (provider.charged() == 1).then_some(())).await;
        drop(stream);
        let meanwhile = server.payment("k", 1250).send(server.address).await;
        meanwhile.expect_problem(409, "request-in-progress");
        assert!(meanwhile.header("retry-after").is_some());
        released.add_permits(1);
        until("the settlement", async || (payments(&db).await == ["succeeded"]).then_some(())).await;
        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, Some("true")));
        assert_eq!((provider.charges(), provider.charged()), (1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_card_number_is_refused_and_stands_nowhere() {
    with_payments(async |db, server, provider| {
        let body = r#"{"reference":"A-1","amount":1,"currency":"EUR","source":"4242424242424242"}"#;
        let answer =
            server.post_to("/v1/payments", body).header("Idempotency-Key", "k").send(server.address).await;
        let problem = answer.expect_problem(400, "request-invalid");
        assert_eq!(problem["errors"][0]["field"], "source");
        assert!(!problem.to_string().contains("4242"), "{problem}");
        assert_eq!((db.rows().await, provider.charges()), ((0, 0, 0), 0));
    })
    .await;
}

#[tokio::test]
async fn a_secret_stands_in_no_answer() {
    with_payments(async |_, server, provider| {
        for script in [None, Some(Script::Decline), Some(Script::LoseAnswer), Some(Script::Mismatch)] {
            let key = format!("{script:?}").replace(['(', ')'], "-");
            if let Some(script) = script {
                provider.then(script);
            }
            let answer = server.payment(&key, 1250).send(server.address).await;
            assert!(!String::from_utf8_lossy(&answer.body).contains("tok_visa"), "{answer:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn without_a_provider_there_are_no_payments() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        for ask in [
            server.payment("k", 1250),
            server.get("/v1/payments"),
            server.get("/v1/payments/00000000-0000-4000-8000-000000000000"),
        ] {
            ask.send(server.address).await.expect_problem(404, "not-found");
        }
        let order: Value = server.order("k", 1250).send(server.address).await.json();
        assert_eq!(order["status"], "placed");
    })
    .await;
}

#[tokio::test]
async fn while_the_provider_is_away_nothing_is_begun_after_a_few_calls() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let away = db.serve_payments(&provider.nowhere()).await;
        // The breaker opens after five calls without an answer.
        for number in 0..5 {
            let answer = away.payment(&format!("k{number}"), 1).send(away.address).await;
            answer.expect_problem(503, "outcome-unknown");
        }
        let answer = away.payment("k5", 1).send(away.address).await;
        answer.expect_problem(503, "temporarily-unavailable");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(db.rows().await.2, 5);
    })
    .await;
}
