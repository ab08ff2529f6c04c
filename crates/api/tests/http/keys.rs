//! How a key stands, told to its owner.

use serde_json::Value;

use crate::bed::{Database, Server, with_database};
use crate::client::Ask;
use crate::over::Over;
use crate::provider::{Provider, Script};

fn ask(server: &Server, operation: &str) -> Ask {
    server.get(&format!("/v1/idempotency-keys/{operation}"))
}

async fn state(server: &Server, operation: &str, key: &str) -> Value {
    let answer = ask(server, operation).header("Idempotency-Key", key).send(server.address).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn a_client_that_lost_its_request_learns_what_became_of_it() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let made = server.order("k", 1200).send(server.address).await;
        let told = state(&server, "orders.create", "k").await;
        assert_eq!((&told["state"], &told["status"]), (&"completed".into(), &201.into()));
        assert_eq!((&told["resource_id"], &told["operation"]), (&made.json()["id"], &"orders.create".into()));
        assert_eq!(told["location"].as_str(), made.header("location"));
        assert_eq!(told["request_id"].as_str(), made.header("request-id"));
        assert!(told["expires_at"].is_string(), "{told}");
        // The draft's spelling of the same key.
        assert_eq!(state(&server, "orders.create", "\"k\"").await, told);

        sqlx::query("UPDATE idempotency_keys SET completed_at = now() - INTERVAL '2 s', expires_at = now() - INTERVAL '1 s'")
            .execute(&db.pool)
            .await
            .unwrap();
        let expired = state(&server, "orders.create", "k").await;
        assert_eq!((&expired["state"], &expired["status"]), (&"expired".into(), &Value::Null));
        sqlx::query("DELETE FROM idempotency_keys").execute(&db.pool).await.unwrap();
        let outlived = state(&server, "orders.create", "k").await;
        assert_eq!((&outlived["state"], &outlived["location"]), (&"expired".into(), &told["location"]));
    })
    .await;
}

#[tokio::test]
async fn a_payment_under_way_and_one_for_a_person_are_told_apart() {
    for over in Over::BOTH {
        with_database(async |db: Database| {
            let provider = Provider::start().await;
            let server = db.serve_payments(&provider).await;
            provider.then(Script::LoseAnswer);
            let lost = over.payment(&server, "k", 1250).await;
            lost.expect_problem("outcome-unknown");
            let told = over.state(&server, "payments.create", "k").await;
            assert_eq!(told, Ok(("in_progress".to_owned(), lost.resource_id.unwrap())));
            db.execute("UPDATE idempotency_keys SET needs_person_at = now(), needs_person_reason = 'test'")
                .await;
            assert_eq!(over.state(&server, "payments.create", "k").await.unwrap().0, "needs_attention");
            over.payment(&server, "k", 1250).await.expect_problem("needs-attention");
        })
        .await;
    }
}

#[tokio::test]
async fn nobody_learns_of_anothers_key_and_no_key_is_made() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        server.order("k", 1200).send(server.address).await;
        let other = Server { token: db.token("other").await, ..server.clone() };
        let with_key = |server: &Server, operation: &str, key: &str| {
            ask(server, operation).header("Idempotency-Key", key)
        };
        for unknown in [
            with_key(&other, "orders.create", "k"),
            with_key(&server, "orders.create", "never"),
            // Without a provider there are no payments.
            with_key(&server, "payments.create", "k"),
            with_key(&server, "nothing", "k"),
        ] {
            unknown.send(server.address).await.expect_problem(404, "not-found");
        }
        let missing = ask(&server, "orders.create").send(server.address).await;
        missing.expect_problem(400, "idempotency-key-missing");
        let doubled = with_key(&server, "orders.create", "k").header("Idempotency-Key", "k");
        doubled.send(server.address).await.expect_problem(400, "idempotency-key-invalid");
        let unauthenticated =
            Ask::new("GET", "/v1/idempotency-keys/orders.create").header("Idempotency-Key", "k");
        unauthenticated.send(server.address).await.expect_problem(401, "unauthenticated");
        let posted = Ask::new("POST", "/v1/idempotency-keys/orders.create")
            .header("Authorization", format!("Bearer {}", server.token));
        posted.send(server.address).await.expect_problem(405, "method-not-allowed");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}
