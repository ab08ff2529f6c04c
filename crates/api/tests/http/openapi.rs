//! The API's description of itself, as it is served.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::bed::{Database, Server, with_database};
use crate::client::Ask;
use crate::provider::Provider;

async fn document(server: &Server) -> Value {
    let answer = Ask::new("GET", "/openapi.json").send(server.address).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert!(answer.header("request-id").is_some());
    answer.json()
}

#[tokio::test]
async fn the_document_takes_no_credential_and_no_database() {
    with_database(async |db: Database| {
        let server = Server::start_closed(db.pool.clone(), db.token("acme").await).await;
        let document = document(&server).await;
        assert_eq!(document["openapi"], "3.1.0");
        assert_eq!(document["paths"]["/v1/payments"], Value::Null, "there is no provider");
        assert!(document["paths"]["/v1/orders"]["post"].is_object());
    })
    .await;
}

#[tokio::test]
async fn every_route_has_the_methods_of_the_document_and_no_others() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        let document = document(&server).await;
        for (path, item) in document["paths"].as_object().unwrap() {
            let mut described: BTreeSet<_> =
                item.as_object().unwrap().keys().map(|method| method.to_ascii_uppercase()).collect();
            if described.contains("GET") {
                described.insert("HEAD".to_owned());
            }
            let path = path.replace("{id}", "00000000-0000-4000-8000-000000000000");
            let path = path.replace("{operation}", "orders.create");
            let ask = Ask::new("TRACE", &path).header("Authorization", format!("Bearer {}", server.token));
            let answer = ask.send(server.address).await;
            answer.expect_problem(405, "method-not-allowed");
            let allowed: BTreeSet<_> =
                answer.header("allow").unwrap().split(',').map(str::to_owned).collect();
            assert_eq!(allowed, described, "{path}");
        }
    })
    .await;
}
