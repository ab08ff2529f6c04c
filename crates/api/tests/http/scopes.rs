//! What a credential may be used for, over both protocols.

use tonic::Code;

use crate::bed::{Database, Server, with_database};
use crate::client::Ask;
use crate::grpc::call::order;
use crate::over::Over;
use crate::payments::with_payments;
use crate::provider::Provider;

const SCOPES: [&str; 4] = ["orders:read", "orders:write", "payments:read", "payments:write"];

async fn only(db: &Database, server: &Server, scopes: &[&str]) -> Server {
    Server { token: db.token_for("acme", scopes).await, ..server.clone() }
}

#[tokio::test]
async fn each_scope_allows_its_own_and_nothing_else_and_retries_are_asked_too() {
    for over in Over::BOTH {
        with_database(async |db: Database| {
            let provider = Provider::start().await;
            let server = db.serve_payments(&provider).await;
            over.order(&server, "k", 1200).await.expect_made();
            over.payment(&server, "k", 1250).await.expect_made();
            for scope in SCOPES {
                let server = only(&db, &server, &[scope]).await;
                let expect = |needed: &str, problem: Option<String>| {
                    let expected = (needed != scope).then(|| "forbidden".to_owned());
                    assert_eq!(problem, expected, "{over:?}: {needed} with {scope}");
                };
                // What is known would be replayed.
                let told = over.order(&server, "k", 1200).await;
                assert!(
                    told.is_replay == (scope == "orders:write") && told.retry_after.is_none(),
                    "{told:?}"
                );
                expect("orders:write", told.problem);
                expect("orders:write", over.order(&server, scope, 1200).await.problem);
                expect("payments:write", over.payment(&server, "k", 1250).await.problem);
                expect("payments:write", over.payment(&server, scope, 1250).await.problem);
                expect("orders:read", over.list(&server, "orders").await);
                expect("payments:read", over.list(&server, "payments").await);
                expect("payments:read", over.refunds(&server, 10, None).await.err());
                expect("orders:read", over.state(&server, "orders.create", "k").await.err());
                expect("payments:read", over.state(&server, "payments.create", "k").await.err());
            }
            // One more order and payment, by the two that may.
            assert_eq!((db.rows().await, provider.charges()), ((2, 4, 4), 2));
            let both = only(&db, &server, &["orders:read", "orders:write"]).await;
            over.order(&both, "both", 1).await.expect_made();
            assert_eq!(over.list(&both, "orders").await, None);
        })
        .await;
    }
}

#[tokio::test]
async fn what_is_forbidden_names_the_scope_before_anything_else_is_looked_at() {
    with_payments(async |db, server, provider| {
        let reader = only(&db, &server, &["orders:read"]).await;
        // No media type, no key, no body: that comes later.
        let bare = Ask::new("POST", "/v1/orders").header("Authorization", format!("Bearer {}", reader.token));
        let answer = bare.send(reader.address).await;
        let problem = answer.expect_problem(403, "forbidden");
        assert_eq!(problem["scope"], "orders:write");
        let challenge = answer.header("www-authenticate").unwrap();
        assert!(challenge.contains("error=\"insufficient_scope\", scope=\"orders:write\""), "{challenge}");
        let reply = order(&reader, "k", 1).without("idempotency-key").body(b"x").send(&reader).await;
        let details = reply.expect_refusal(Code::PermissionDenied, "FORBIDDEN");
        assert_eq!(details.error_info().unwrap().metadata["scope"], "orders:write");
        assert!(details.retry_info().is_none() && answer.header("retry-after").is_none());
        assert_eq!(reply.status.message(), problem["detail"].as_str().unwrap());

        // A refund is a matter of payments; and where there is nothing, nothing is forbidden.
        let path = "/v1/payments/00000000-0000-4000-8000-000000000000/refunds";
        reader.post_to(path, r#"{"amount":1}"#).send(reader.address).await.expect_problem(403, "forbidden");
        reader.get("/v1/nothing").send(reader.address).await.expect_problem(404, "not-found");
        let method =
            Ask::new("PUT", "/v1/payments").header("Authorization", format!("Bearer {}", reader.token));
        method.send(reader.address).await.expect_problem(405, "method-not-allowed");
        assert_eq!((db.rows().await, provider.charges()), ((0, 0, 0), 0));
    })
    .await;
}
