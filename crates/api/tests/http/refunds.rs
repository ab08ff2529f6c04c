//! Refunds under keys, through a provider on a socket.

use serde_json::{Value, json};
use uuid::Uuid;

use crate::bed::{Database, Server, with_database};
use crate::client::{Answer, Ask};
use crate::over::Over;
use crate::payments::{expect_replay, with_payments};
use crate::provider::Script;

/// Makes a payment of 1250, and returns its path.
async fn paid(server: &Server, key: &str) -> String {
    let answer = server.payment(key, 1250).send(server.address).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.header("location").unwrap().to_owned()
}

fn refund(server: &Server, payment: &str, key: &str, amount: i64) -> Ask {
    server
        .post_to(&format!("{payment}/refunds"), format!(r#"{{"amount":{amount}}}"#))
        .header("Idempotency-Key", key)
}

async fn refunds(server: &Server, payment: &str, query: &str) -> Value {
    let answer = server.get(&format!("{payment}/refunds{query}")).send(server.address).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

async fn count(db: &Database) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM refunds").fetch_one(&db.pool).await.unwrap()
}

/// Checks a problem that is stored: final, not to be retried, with the refund as it can be read.
async fn expect_stored(server: &Server, answer: &Answer, status: u16, kind: &str, stands: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert!(answer.header("idempotency-key-expires").is_some(), "it is final");
    assert_eq!(answer.header("retry-after"), None);
    let problem = answer.json();
    assert_eq!(problem["type"], format!("https://semel.example/errors/{kind}"));
    assert_eq!(problem["refund"]["status"], stands);
    assert_eq!(problem["instance"].as_str(), answer.header("location"));
    let read = server.get(answer.header("location").unwrap()).send(server.address).await;
    assert_eq!((read.status, read.json()), (200, problem["refund"].clone()));
}

#[tokio::test]
async fn a_refund_is_made_once_replayed_read_and_listed() {
    with_payments(async |_, server, provider| {
        let payment = paid(&server, "p").await;
        let first = refund(&server, &payment, "r", 500).send(server.address).await;
        assert_eq!(first.status, 201, "{first:?}");
        let made = first.json();
        assert_eq!((&made["status"], &made["amount"]), (&"succeeded".into(), &500.into()));
        assert_eq!(format!("/v1/payments/{}", made["payment_id"].as_str().unwrap()), payment);
        let location = format!("/v1/refunds/{}", made["id"].as_str().unwrap());
        assert_eq!(first.header("location"), Some(location.as_str()));
        expect_replay(&first, &refund(&server, &payment, "r", 500).send(server.address).await);
        assert_eq!((provider.refunds(), provider.refunded()), (1, 500));
        let read = server.get(&location).send(server.address).await;
        assert_eq!((read.status, read.body), (200, first.body));

        let second = refund(&server, &payment, "s", 750).send(server.address).await.json();
        assert_eq!(refunds(&server, &payment, "").await, json!({ "refunds": [second, made] }));
        let page = refunds(&server, &payment, "?limit=1").await;
        assert_eq!(page["refunds"], json!([second]));
        let rest = format!("?limit=1&cursor={}", page["next_cursor"].as_str().unwrap());
        assert_eq!(refunds(&server, &payment, &rest).await, json!({ "refunds": [made] }));
    })
    .await;
}

#[tokio::test]
async fn what_is_not_left_is_refused_for_good_with_a_row_of_its_own() {
    with_payments(async |_, server, provider| {
        let payment = paid(&server, "p").await;
        let made = refund(&server, &payment, "r", 1000).send(server.address).await.json();
        let refused = refund(&server, &payment, "s", 251).send(server.address).await;
        expect_stored(&server, &refused, 409, "refund-exceeds-payment", "refused").await;
        expect_replay(&refused, &refund(&server, &payment, "s", 251).send(server.address).await);
        assert_eq!((provider.refunds(), provider.refunded()), (1, 1000));
        let listed = refunds(&server, &payment, "").await;
        assert_eq!(listed, json!({ "refunds": [refused.json()["refund"], made] }));
    })
    .await;
}

#[tokio::test]
async fn a_refund_that_fails_is_a_stored_problem_and_can_be_asked_for_anew() {
    with_payments(async |_, server, provider| {
        let payment = paid(&server, "p").await;
        provider.then_refund(Script::Decline);
        let failed = refund(&server, &payment, "r", 1250).send(server.address).await;
        expect_stored(&server, &failed, 402, "refund-failed", "failed").await;
        assert_eq!(failed.json()["refund"]["failure_code"], "account_closed");
        expect_replay(&failed, &refund(&server, &payment, "r", 1250).send(server.address).await);
        assert_eq!(refund(&server, &payment, "s", 1250).send(server.address).await.status, 201);
    })
    .await;
}

#[tokio::test]
async fn of_a_declined_payment_nothing_is_left() {
    with_payments(async |_, server, provider| {
        provider.then(Script::Decline);
        let declined = server.payment("p", 1250).send(server.address).await;
        let payment = declined.header("location").unwrap();
        let refused = refund(&server, payment, "r", 1).send(server.address).await;
        expect_stored(&server, &refused, 409, "refund-exceeds-payment", "refused").await;
        assert_eq!(provider.refunds(), 0);
    })
    .await;
}

#[tokio::test]
async fn a_payment_without_an_outcome_is_to_be_waited_for() {
    with_payments(async |db, server, provider| {
        provider.then(Script::LoseAnswer);
        let lost = server.payment("p", 1250).send(server.address).await;
        let payment = format!("/v1/payments/{}", lost.json()["resource_id"].as_str().unwrap());
        let early = refund(&server, &payment, "r", 500).send(server.address).await;
        early.expect_problem(409, "payment-in-progress");
        assert_eq!(early.header("retry-after"), Some("2"));
        assert_eq!((count(&db).await, provider.refunds()), (0, 0));
        assert_eq!(server.payment("p", 1250).send(server.address).await.status, 201);
        assert_eq!(refund(&server, &payment, "r", 500).send(server.address).await.status, 201);
    })
    .await;
}

#[tokio::test]
async fn a_refund_is_of_its_clients_own_payment_and_its_clients_alone() {
    with_payments(async |db, server, provider| {
        let payment = paid(&server, "p").await;
        let other = Server { token: db.token("other").await, ..server.clone() };
        let nobodys = format!("/v1/payments/{}", Uuid::new_v4());
        let doubtful = payment.to_uppercase().replace("/V1/PAYMENTS", "/v1/payments");
        for (server, payment) in [
            (&other, payment.as_str()),
            (&server, &nobodys),
            (&server, &doubtful),
            (&server, "/v1/payments/x"),
        ] {
            let answer = refund(server, payment, "r", 500).send(server.address).await;
            answer.expect_problem(404, "not-found");
            let list = server.get(&format!("{payment}/refunds")).send(server.address).await;
            list.expect_problem(404, "not-found");
        }
        assert_eq!((count(&db).await, provider.refunds()), (0, 0));
        let made = refund(&server, &payment, "r", 500).send(server.address).await;
        assert_eq!(made.status, 201, "what was not there has used no key up");
        other
            .get(made.header("location").unwrap())
            .send(server.address)
            .await
            .expect_problem(404, "not-found");
    })
    .await;
}

#[tokio::test]
async fn the_payment_is_part_of_the_intent() {
    with_payments(async |_, server, provider| {
        let (payment, another) = (paid(&server, "p").await, paid(&server, "q").await);
        assert_eq!(refund(&server, &payment, "r", 500).send(server.address).await.status, 201);
        for (payment, amount) in [(&another, 500), (&payment, 501)] {
            let answer = refund(&server, payment, "r", amount).send(server.address).await;
            answer.expect_problem(422, "idempotency-key-reused");
        }
        // Another operation is another scope.
        assert_eq!(refund(&server, &payment, "p", 500).send(server.address).await.status, 201);
        assert_eq!(provider.refunded(), 1000);
    })
    .await;
}

#[tokio::test]
async fn a_bad_refund_is_refused_by_name_and_leaves_nothing_behind() {
    with_payments(async |db, server, provider| {
        let payment = paid(&server, "p").await;
        let path = format!("{payment}/refunds");
        for (body, field) in [
            (r#"{"amount":0}"#, "amount"),
            (r#"{"amount":-5}"#, "amount"),
            (r#"{"amount":1.5}"#, "amount"),
            (r#"{"amount":1000000000001}"#, "amount"),
            (r#"{"amount":1,"amount":2}"#, "amount"),
            (r#"{"amount":1,"currency":"EUR"}"#, "currency"),
            ("{}", "amount"),
            ("[500]", ""),
        ] {
            let answer =
                server.post_to(&path, body).header("Idempotency-Key", "r").send(server.address).await;
            let problem = answer.expect_problem(400, "request-invalid");
            assert_eq!(problem["errors"][0]["field"], field, "{body}: {problem}");
        }
        let keyless = server.post_to(&path, r#"{"amount":1}"#).send(server.address).await;
        keyless.expect_problem(400, "idempotency-key-missing");
        assert_eq!((count(&db).await, provider.refunds()), (0, 0));
        assert_eq!(db.rows().await.2, 1, "the payment's key");
    })
    .await;
}

#[tokio::test]
async fn a_lost_answer_is_told_as_unknown_and_settled_by_the_retry_and_the_key_tells_of_it() {
    with_payments(async |_, server, provider| {
        let payment = paid(&server, "p").await;
        let state = async || {
            let ask = server.get("/v1/idempotency-keys/refunds.create").header("Idempotency-Key", "r");
            ask.send(server.address).await.json()
        };
        provider.then_refund(Script::LoseAnswer);
        let lost = refund(&server, &payment, "r", 500).send(server.address).await;
        let resource = lost.expect_problem(503, "outcome-unknown")["resource_id"].clone();
        let told = state().await;
        assert_eq!((&told["state"], &told["resource_id"]), (&"in_progress".into(), &resource));
        let path = format!("/v1/refunds/{}", resource.as_str().unwrap());
        assert_eq!(server.get(&path).send(server.address).await.json()["status"], "processing");

        let retry = refund(&server, &payment, "r", 500).send(server.address).await;
        assert_eq!((retry.status, &retry.json()["id"]), (201, &resource));
        assert_eq!((provider.refunds(), provider.refunded()), (2, 500));
        let told = state().await;
        assert_eq!((&told["state"], told["location"].as_str()), (&"completed".into(), Some(path.as_str())));
    })
    .await;
}

#[tokio::test]
async fn what_contradicts_the_providers_records_is_for_a_person() {
    with_payments(async |_, server, provider| {
        let payment = paid(&server, "p").await;
        provider.then_refund(Script::Mismatch);
        for _ in 0..2 {
            let answer = refund(&server, &payment, "r", 500).send(server.address).await;
            answer.expect_problem(503, "needs-attention");
            assert_eq!(answer.header("retry-after"), Some("60"));
        }
        assert_eq!((provider.refunds(), provider.refunded()), (1, 0));
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_points_to_its_refund_and_gives_nothing_back() {
    with_payments(async |db, server, provider| {
        let payment = paid(&server, "p").await;
        let made = refund(&server, &payment, "r", 500).send(server.address).await;
        db.execute("DELETE FROM idempotency_keys").await;
        let expired = refund(&server, &payment, "r", 500).send(server.address).await;
        expired.expect_problem(410, "idempotency-key-expired");
        assert_eq!(expired.header("location"), made.header("location"));
        assert_eq!(provider.refunded(), 500);
    })
    .await;
}

#[tokio::test]
async fn without_a_provider_there_are_no_refunds() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let payment = format!("/v1/payments/{}", Uuid::new_v4());
        refund(&server, &payment, "r", 500).send(server.address).await.expect_problem(404, "not-found");
        let key = server.get("/v1/idempotency-keys/refunds.create").header("Idempotency-Key", "r");
        key.send(server.address).await.expect_problem(404, "not-found");
    })
    .await;
}

#[tokio::test]
async fn all_refunds_of_a_client_are_listed_page_by_page_over_both_protocols() {
    with_payments(async |db, server, _| {
        let mut made = Vec::new();
        for (number, payment) in ["a", "b"].into_iter().enumerate() {
            let paid = server.payment(payment, 1250).send(server.address).await;
            let path = format!("{}/refunds", paid.header("location").unwrap());
            for amount in [100, 200] {
                let key = format!("{payment}{amount}");
                let ask = server.post_to(&path, format!(r#"{{"amount":{amount}}}"#));
                let refund = ask.header("Idempotency-Key", key).send(server.address).await;
                made.insert(0, refund.json()["id"].as_str().unwrap().to_owned());
            }
            assert_eq!(made.len(), 2 * (number + 1));
        }
        let other = Server { token: db.token("other").await, ..server.clone() };
        for over in Over::BOTH {
            let (first, next) = over.refunds(&server, 3, None).await.unwrap();
            let (last, end) = over.refunds(&server, 3, next.as_deref()).await.unwrap();
            assert_eq!(([first, last].concat(), end), (made.clone(), None), "{over:?}");
            assert_eq!(over.refunds(&other, 3, None).await, Ok((Vec::new(), None)));
            assert_eq!(over.refunds(&server, 101, None).await, Err("request-invalid".to_owned()));
            assert_eq!(over.refunds(&server, 3, Some("x")).await, Err("request-invalid".to_owned()));
        }
    })
    .await;
}
