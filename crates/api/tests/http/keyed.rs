//! Orders under keys: the first answer, and every later one.

use std::sync::Arc;
use std::time::Duration;

use semel_core::idempotency::store;
use tokio::sync::Barrier;

use crate::bed::{Database, Server, with_database};
use crate::client::Answer;

const IMF_FIXDATE: usize = "Sun, 06 Nov 1994 08:49:37 GMT".len();

fn expect_created(answer: &Answer) -> String {
    assert_eq!(answer.status, 201, "{answer:?}");
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("location"), Some(format!("/v1/orders/{id}").as_str()));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let expires = answer.header("idempotency-key-expires").unwrap();
    assert!(expires.len() == IMF_FIXDATE && expires.ends_with(" GMT"), "{expires}");
    assert_eq!(answer.header("retry-after"), None);
    id
}

/// Checks that `again` replays `first`, byte for byte and line for line.
fn expect_replay(first: &Answer, again: &Answer) {
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.stored_headers(), first.stored_headers());
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.header("original-request-id"), first.header("request-id"));
    assert_ne!(again.header("request-id"), first.header("request-id"));
}

#[tokio::test]
async fn a_repeat_is_replayed_byte_for_byte() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let first = server.order("k-1", 1200).send(server.address).await;
        expect_created(&first);
        assert_eq!(first.header("idempotent-replayed"), None);
        let again = [
            server.order("k-1", 1200),
            server.order("\"k-1\"", 1200),
            server.order(" k-1\t", 1200),
            // The same intent in other words.
            server
                .post(b"\n{ \"currency\" : \"EUR\", \"amount\":1200, \"reference\":\"\\u0041-1\"}  ")
                .header("idempotency-key", "k-1"),
            server.order("k-1", 1200).header("Transfer-Encoding", "chunked"),
            server
                .order("k-1", 1200)
                .without("Content-Type")
                .header("Content-Type", "Application/JSON; Charset=UTF-8"),
        ];
        for ask in again {
            expect_replay(&first, &ask.send(server.address).await);
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn an_order_can_be_read_where_its_answer_says() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let first = server.order("k-1", 1200).send(server.address).await;
        let read = server.get(first.header("location").unwrap()).send(server.address).await;
        assert_eq!((read.status, read.body), (200, first.body));
        assert_eq!(read.headers.iter().filter(|(name, _)| name.starts_with("idempot")).count(), 0);
    })
    .await;
}

#[tokio::test]
async fn keys_that_differ_in_case_are_two() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let small = expect_created(&server.order("k", 1200).send(server.address).await);
        let capital = expect_created(&server.order("K", 1200).send(server.address).await);
        assert_ne!(small, capital);
        assert_eq!(db.rows().await, (2, 2, 2));
    })
    .await;
}

#[tokio::test]
async fn another_intent_under_the_key_is_refused_and_changes_nothing() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let first = server.order("k", 1200).send(server.address).await;
        let other = server.order("k", 1300).send(server.address).await;
        other.expect_problem(422, "idempotency-key-reused");
        assert_eq!(other.header("retry-after"), None);
        assert!(other.header("link").unwrap().contains("idempotency-key-reused"));
        assert_eq!(db.rows().await, (1, 1, 1));
        expect_replay(&first, &server.order("k", 1200).send(server.address).await);
    })
    .await;
}

#[tokio::test]
async fn keys_and_orders_belong_to_the_client_and_not_to_its_credential() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let first = server.order("k", 1200).send(server.address).await;
        let own = expect_created(&first);

        let rotated = Server { token: db.token("acme").await, ..server.clone() };
        expect_replay(&first, &rotated.order("k", 1200).send(server.address).await);

        let other = Server { token: db.token("other").await, ..server.clone() };
        let foreign = expect_created(&other.order("k", 1300).send(server.address).await);
        assert_ne!(own, foreign);
        other.get(&format!("/v1/orders/{own}")).send(server.address).await.expect_problem(404, "not-found");
        server
            .get(&format!("/v1/orders/{foreign}"))
            .send(server.address)
            .await
            .expect_problem(404, "not-found");
    })
    .await;
}

#[tokio::test]
async fn a_revoked_credential_is_not_served_the_stored_answer() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        expect_created(&server.order("k", 1200).send(server.address).await);
        db.execute("UPDATE api_credentials SET revoked_at = now()").await;
        // Another server, which has not met the credential before.
        let fresh = Server::start(db.pool.clone(), server.token.clone()).await;
        fresh.order("k", 1200).send(fresh.address).await.expect_problem(401, "unauthenticated");
    })
    .await;
}

#[tokio::test]
async fn a_revocation_is_in_force_within_a_minute_where_the_credential_was_met() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        expect_created(&server.order("k", 1200).send(server.address).await);
        db.execute("UPDATE api_credentials SET revoked_at = clock_timestamp()").await;
        let refused = async {
            loop {
                let answer = server.order("k", 1200).send(server.address).await;
                if answer.status != 201 {
                    break answer;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let refused = tokio::time::timeout(Duration::from_mins(1), refused).await;
        refused.expect("it is still believed").expect_problem(401, "unauthenticated");
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_points_to_what_it_made() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let id = expect_created(&server.order("k", 1200).send(server.address).await);
        db.execute(
            "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '25 hours',
                                         expires_at = clock_timestamp() - INTERVAL '1 hour'",
        )
        .await;
        for keys in [1, 0] {
            let late = server.order("k", 1200).send(server.address).await;
            let problem = late.expect_problem(410, "idempotency-key-expired");
            assert_eq!(problem["resource_id"], id.as_str());
            assert_eq!(late.header("location"), Some(format!("/v1/orders/{id}").as_str()));
            assert_eq!(late.header("retry-after"), None);
            assert_eq!(db.rows().await, (1, 1, keys));
            store::reap_expired(&mut db.pool.acquire().await.unwrap(), 10).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn of_many_requests_at_once_one_takes_effect() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let barrier = Arc::new(Barrier::new(32));
        let requests: Vec<_> = (0..32)
            .map(|_| {
                let (server, barrier) = (server.clone(), Arc::clone(&barrier));
                tokio::spawn(async move {
                    barrier.wait().await;
                    server.order("k", 1200).send(server.address).await
                })
            })
            .collect();
        let mut answers = Vec::new();
        for request in requests {
            answers.push(request.await.unwrap());
        }
        let is_fresh =
            |answer: &&Answer| answer.status == 201 && answer.header("idempotent-replayed").is_none();
        let fresh: Vec<_> = answers.iter().filter(is_fresh).collect();
        let [fresh] = fresh.as_slice() else { panic!("{answers:?}") };
        for answer in answers.iter().filter(|answer| *answer != *fresh) {
            if answer.status == 201 {
                expect_replay(fresh, answer);
            } else {
                answer.expect_problem(409, "request-in-progress");
            }
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_trace_goes_on_in_the_event_and_a_malformed_one_does_not() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        server.order("traced", 1).header("traceparent", trace).send(server.address).await;
        server.order("untraced", 2).header("traceparent", "00-xyz").send(server.address).await;
        let traces: Vec<Option<String>> =
            sqlx::query_scalar("SELECT headers->>'traceparent' FROM outbox ORDER BY id")
                .fetch_all(&db.pool)
                .await
                .unwrap();
        assert_eq!(traces, [Some(trace.to_owned()), None]);
    })
    .await;
}
