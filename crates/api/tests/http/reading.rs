//! What every answer carries, and answers without a body.

use crate::bed::with_database;
use crate::client::Ask;

#[tokio::test]
async fn every_answer_names_its_request_with_an_id_of_ours() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let mut ids = std::collections::HashSet::new();
        let theirs = "00000000-0000-4000-8000-000000000000";
        for ask in
            [server.order("k", 1), server.order("k", 1), server.get("/v1/nothing"), Ask::new("GET", "/")]
        {
            let answer = ask.header("Request-Id", theirs).send(server.address).await;
            let id = answer.header("request-id").unwrap().to_owned();
            assert!(id != theirs && id.parse::<uuid::Uuid>().is_ok(), "{id}");
            assert!(ids.insert(id), "an id of its own");
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_names_one_host() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        for ask in [server.order("k", 1).without("Host"), server.order("k", 1).header("Host", "other")] {
            ask.send(server.address).await.expect_problem(400, "request-invalid");
        }
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_head_request_is_answered_without_a_body() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let made = server.order("k", 1).send(server.address).await;
        let head =
            |path: &str| Ask::new("HEAD", path).header("Authorization", format!("Bearer {}", server.token));
        let answer = head(made.header("location").unwrap()).send(server.address).await;
        assert_eq!((answer.status, answer.body.len()), (200, 0));
        assert_eq!(answer.header("content-length"), Some(made.body.len().to_string().as_str()));
        let answer = head("/v1/nothing").send(server.address).await;
        assert_eq!((answer.status, answer.body.len()), (404, 0));
    })
    .await;
}
