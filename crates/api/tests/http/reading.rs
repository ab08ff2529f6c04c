//! What every answer carries, and answers without a body.

use crate::bed::{Server, with_database};
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

#[tokio::test]
async fn a_client_reads_all_its_orders_page_by_page() {
    with_database(async |db| {
        let server = db.serve().await;
        let other = Server { token: db.token("other").await, ..server.clone() };
        other.order("k", 1).send(server.address).await;
        let mut placed = Vec::new();
        for number in 0..5 {
            placed.push(server.order(&format!("k-{number}"), 100 + number).send(server.address).await.json());
        }
        // Three of the same instant, across a page's end: the id tells them apart.
        sqlx::query(
            "UPDATE orders SET created_at = (SELECT max(created_at) FROM orders) WHERE amount IN (102, 103)",
        )
        .execute(&db.pool)
        .await
        .unwrap();
        let (mut pages, mut read, mut path) = (Vec::new(), Vec::new(), "/v1/orders?limit=2".to_owned());
        loop {
            let page = server.get(&path).send(server.address).await.json();
            let orders = page["orders"].as_array().unwrap().clone();
            pages.push(orders.len());
            read.extend(orders);
            // Placed meanwhile, it shifts nothing.
            server.order(&format!("late-{}", pages.len()), 1).send(server.address).await;
            let Some(next) = page["next_cursor"].as_str() else { break };
            path = format!("/v1/orders?limit=2&cursor={next}");
        }
        assert_eq!(pages, [2, 2, 1]);
        let mut amounts: Vec<_> = read.iter().map(|order| order["amount"].as_i64().unwrap()).collect();
        amounts[..3].sort_unstable();
        assert_eq!(amounts, [102, 103, 104, 101, 100]);
        assert!(placed.iter().all(|order| read.contains(order)), "each is there as it was answered");
    })
    .await;
}
