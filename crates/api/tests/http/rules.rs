//! Rules of the contract that no other test here is about, each named after its number in `docs/conformance.md`; and failures
//! that others had.

use std::sync::Arc;

use semel_core::idempotency::store;
use tokio::sync::{Barrier, Semaphore};
use tokio::task::JoinSet;

use crate::bed::{Database, Server, until, with_database};
use crate::client::{Answer, Ask};
use crate::over::Over;
use crate::provider::{Provider, Script};

async fn with_payments(test: impl AsyncFnOnce(Database, Server, Provider)) {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        test(db, server, provider).await;
    })
    .await;
}

/// Runs a test over each protocol, each time from the beginning.
async fn over_both(test: impl AsyncFn(Over, Database, Server, Provider)) {
    for over in Over::BOTH {
        with_payments(async |db, server, provider| test(over, db, server, provider).await).await;
    }
}

async fn expect_order(server: &Server, ask: &Ask) -> Answer {
    let answer = ask.send(server.address).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer
}

const EXPIRE: &str = "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '25 hours',
                                                  expires_at = clock_timestamp() - INTERVAL '1 hour'";

#[tokio::test]
async fn rule_02_every_visible_character_and_255_of_them_are_a_key() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let visible: String =
            ('!'..='~').filter(|character| !matches!(character, '"' | '\\' | ',' | ';')).collect();
        let (longest, shortest) = ("k".repeat(255), "k");
        for key in [visible.as_str(), &longest, shortest] {
            expect_order(&server, &server.order(key, 1200)).await;
            let again = server.order(&format!("\"{key}\""), 1200).send(server.address).await;
            assert_eq!(again.header("idempotent-replayed"), Some("true"), "{key}");
        }
        assert_eq!(db.rows().await, (3, 3, 3));
    })
    .await;
}

#[tokio::test]
async fn rule_03_every_post_takes_a_key_and_nothing_else_does() {
    with_payments(async |db, server, provider| {
        let order = server.order("k", 1200);
        for post in [&order, &server.payment("k", 1200)] {
            let answer = post.clone().without("Idempotency-Key").send(server.address).await;
            answer.expect_problem(400, "idempotency-key-missing");
        }
        assert_eq!((db.rows().await, provider.charges()), ((0, 0, 0), 0));
        let made = expect_order(&server, &order).await;
        for path in ["/v1/orders", made.header("location").unwrap()] {
            let plain = server.get(path).send(server.address).await;
            let keyed = server.get(path).header("Idempotency-Key", "other").send(server.address).await;
            assert_eq!((keyed.status, &keyed.body), (200, &plain.body));
            assert_eq!(keyed.header("idempotency-key-expires"), None);
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn rule_04_one_key_for_two_operations_is_two_keys() {
    with_payments(async |_, server, _| {
        let order = expect_order(&server, &server.order("k", 1200)).await;
        let payment = expect_order(&server, &server.payment("k", 1200)).await;
        assert_eq!(payment.header("idempotent-replayed"), None);
        assert_ne!(payment.json()["id"], order.json()["id"]);
    })
    .await;
}

#[tokio::test]
async fn rule_05_what_a_request_does_not_take_is_refused_and_not_left_out_of_its_hash() {
    with_payments(async |db, server, provider| {
        let body = r#"{"reference":"A-1","amount":1200,"currency":"EUR"}"#;
        let with_query = |path: &str| server.post_to(path, body).header("Idempotency-Key", "k");
        for path in ["/v1/orders?dry_run=true", "/v1/orders?amount=1", "/v1/payments?capture=false"] {
            with_query(path).send(server.address).await.expect_problem(400, "request-invalid");
        }
        assert_eq!((db.rows().await, provider.charges()), ((0, 0, 0), 0));
        expect_order(&server, &with_query("/v1/orders")).await;
        with_query("/v1/orders?amount=1").send(server.address).await.expect_problem(400, "request-invalid");
    })
    .await;
}

#[tokio::test]
async fn rules_06_and_11_a_payment_at_work_refuses_another_intent_and_tells_the_same_one_when_to_ask() {
    over_both(async |over, _, server, provider| {
        let released = Arc::new(Semaphore::new(0));
        provider.then(Script::Hold(Arc::clone(&released)));
        let first = tokio::spawn({
            let server = server.clone();
            async move { over.payment(&server, "k", 1250).await }
        });
        until("the charge", async || (provider.charged() == 1).then_some(())).await;
        over.payment(&server, "k", 1251).await.expect_problem("idempotency-key-reused");
        let same = over.payment(&server, "k", 1250).await;
        same.expect_problem("request-in-progress");
        // What is left of the lease, in seconds: most of its thirty.
        assert!(same.retry_after.is_some_and(|wait| (10..=30).contains(&wait)), "{same:?}");
        released.add_permits(1);
        first.await.unwrap().expect_made();
        assert_eq!((provider.charges(), provider.charged()), (1, 1));
    })
    .await;
}

#[tokio::test]
async fn rule_07_what_a_newer_binary_stored_is_unavailable_and_not_a_mismatch() {
    over_both(async |over, db, server, _| {
        let made = over.order(&server, "k", 1200).await;
        // The same command under another version is the same intent, and another one is another.
        db.execute("UPDATE idempotency_keys SET hash_version = 99").await;
        let again = over.order(&server, "k", 1200).await;
        assert_eq!((again.is_replay, again.resource_id.as_deref()), (true, Some(made.expect_made())));
        over.order(&server, "k", 1201).await.expect_problem("idempotency-key-reused");
        db.execute("UPDATE idempotency_keys SET command = '{\"newer\": true}'").await;
        over.order(&server, "k", 1200).await.expect_problem("temporarily-unavailable");
    })
    .await;
}

#[tokio::test]
async fn rule_08_of_several_faults_the_first_in_order_is_told_and_nothing_is_stored() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let (large, bad) = (vec![b' '; 65_537], b"{}".as_slice());
        // Each request has the fault that it is told of, and all that are looked for later.
        let all = |ask: Ask| ask.header("Idempotency-Key", "a,b").body(&large);
        let nowhere = all(Ask::new("PATCH", "/v1/nothing"));
        let token = format!("Bearer {}", server.token);
        let with_token = |ask: Ask| ask.header("Authorization", &token);
        let post = || with_token(Ask::new("POST", "/v1/orders"));
        let json = |ask: Ask| ask.header("Content-Type", "application/json");
        let cases = [
            (nowhere.clone(), 401, "unauthenticated"),
            (with_token(nowhere), 404, "not-found"),
            (with_token(all(Ask::new("PATCH", "/v1/orders"))), 405, "method-not-allowed"),
            (all(post()), 415, "unsupported-media-type"),
            (json(all(post())), 413, "content-too-large"),
            (json(post()).header("Idempotency-Key", "a,b").body(bad), 400, "idempotency-key-invalid"),
            (json(post()).body(bad), 400, "idempotency-key-missing"),
            (json(post()).header("Idempotency-Key", "k").body(bad), 400, "request-invalid"),
        ];
        for (ask, status, suffix) in cases {
            ask.send(server.address).await.expect_problem(status, suffix);
            assert_eq!(db.rows().await, (0, 0, 0), "{suffix}");
        }
        // A known key is looked up before the command is validated, and an unknown one is not.
        expect_order(&server, &server.order("k", 1200)).await;
        server.order("k", -1).send(server.address).await.expect_problem(422, "idempotency-key-reused");
        server.order("new", -1).send(server.address).await.expect_problem(400, "request-invalid");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn rule_10_of_many_requests_at_once_over_both_protocols_one_takes_effect() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let barrier = Arc::new(Barrier::new(32));
        let mut asking = JoinSet::new();
        for number in 0..32 {
            let (server, barrier) = (server.clone(), Arc::clone(&barrier));
            asking.spawn(async move {
                barrier.wait().await;
                Over::BOTH[number % 2].order(&server, "k", 1200).await
            });
        }
        let told = asking.join_all().await;
        let made: Vec<_> = told.iter().filter(|told| told.problem.is_none() && !told.is_replay).collect();
        let [made] = made.as_slice() else { panic!("{told:?}") };
        for other in told.iter().filter(|told| *told != *made) {
            match other.problem {
                None => assert_eq!((&other.resource_id, &other.expires), (&made.resource_id, &made.expires)),
                Some(_) => other.expect_problem("request-in-progress"),
            }
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn rule_18_a_rollback_is_final_and_names_the_payment() {
    with_payments(async |_, server, provider| {
        provider.then(Script::Fence);
        let first = server.payment("k", 1250).send(server.address).await;
        assert_eq!((first.status, first.header("retry-after")), (424, None), "{first:?}");
        let problem = first.json();
        assert_eq!(problem["type"], "https://semel.example/errors/payment-rolled-back");
        assert_eq!(problem["payment"]["status"], "canceled");
        let again = server.payment("k", 1250).send(server.address).await;
        assert_eq!((again.status, &again.body), (424, &first.body));
        assert_eq!(again.stored_headers(), first.stored_headers());
        assert_eq!((provider.charges(), provider.charged()), (1, 0));
    })
    .await;
}

#[tokio::test]
async fn rule_19_whatever_is_stored_is_replayed_and_never_made_anew() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        expect_order(&server, &server.order("k", 1200)).await;
        // No operation answers so today. What one that does has stored is replayed by the same path.
        let stored: [(i16, &[u8]); 4] =
            [(201, b""), (204, b""), (200, b"{\"b\":1.0,  \"a\":\"\\u0041\", \"b\":2}"), (409, b"\xff\x00")];
        for (status, body) in stored {
            sqlx::query(
                r#"UPDATE idempotency_keys SET response_code = $1, response_body = $2, response_headers =
                   '[["link", "<a>, <b>; rel=\"x, y\""], ["etag", "W/\"1,2\""], ["link", "<c>"]]'"#,
            )
            .bind(status)
            .bind(body)
            .execute(&db.pool)
            .await
            .unwrap();
            let again = server.order("k", 1200).send(server.address).await;
            assert_eq!((i16::try_from(again.status), again.body.as_slice()), (Ok(status), body));
            assert_eq!(again.header("idempotent-replayed"), Some("true"));
            let lines = |sought: &str| -> Vec<_> {
                again
                    .headers
                    .iter()
                    .filter(|(name, _)| name == sought)
                    .map(|(_, value)| value.as_str())
                    .collect()
            };
            assert_eq!(lines("link"), ["<a>, <b>; rel=\"x, y\"", "<c>"]);
            assert_eq!(lines("etag"), ["W/\"1,2\""]);
            assert_eq!((lines("content-type").len(), lines("location").len()), (0, 0));
            assert_eq!(db.rows().await, (1, 1, 1));
        }
    })
    .await;
}

#[tokio::test]
async fn rule_19_nothing_but_the_listed_headers_is_stored() {
    with_payments(async |db, server, provider| {
        let cookie = |ask: Ask| ask.header("Cookie", "session=s3cret").header("X-Trace", "s3cret");
        expect_order(&server, &cookie(server.order("k", 1200))).await;
        for script in [None, Some(Script::Decline), Some(Script::Fence)] {
            let key = format!("{script:?}");
            if let Some(script) = script {
                provider.then(script);
            }
            cookie(server.payment(&key, 1250)).send(server.address).await;
        }
        let names: Vec<String> = sqlx::query_scalar(
            "SELECT DISTINCT line->>0 FROM idempotency_keys, jsonb_array_elements(response_headers) AS line ORDER BY 1",
        )
        .fetch_all(&db.pool)
        .await
        .unwrap();
        assert_eq!(names, ["content-type", "location"]);
        let texts: Vec<String> =
            sqlx::query_scalar("SELECT k::TEXT FROM idempotency_keys AS k").fetch_all(&db.pool).await.unwrap();
        assert_eq!(texts.len(), 4);
        assert!(!texts.concat().contains("s3cret"));
    })
    .await;
}

#[tokio::test]
async fn rule_21_a_key_expires_a_day_after_its_completion_and_not_after_its_claim() {
    over_both(async |over, db, server, provider| {
        provider.then(Script::LoseAnswer);
        over.payment(&server, "k", 1250).await.expect_problem("outcome-unknown");
        db.execute("UPDATE idempotency_keys SET created_at = created_at - INTERVAL '23 hours 59 minutes'")
            .await;
        let made = over.payment(&server, "k", 1250).await;
        made.expect_made();
        let (whole, fresh): (bool, bool) = sqlx::query_as(
            "SELECT expires_at - completed_at BETWEEN INTERVAL '24 hours' AND INTERVAL '24 hours 1 second',
                    completed_at > clock_timestamp() - INTERVAL '1 minute' FROM idempotency_keys",
        )
        .fetch_one(&db.pool)
        .await
        .unwrap();
        assert!(whole && fresh);
        let again = over.payment(&server, "k", 1250).await;
        assert!(made.expires.is_some() && again.expires == made.expires, "{again:?}");
        // The row is still there, and judged by its instant.
        db.execute(EXPIRE).await;
        let late = over.payment(&server, "k", 1250).await;
        late.expect_problem("idempotency-key-expired");
        assert_eq!((late.resource_id, provider.charges()), (made.resource_id, 2));
    })
    .await;
}

#[tokio::test]
async fn rule_22_a_refusal_that_is_final_is_not_executed_again_when_its_key_is_gone() {
    over_both(async |over, db, server, provider| {
        provider.then(Script::Decline);
        let declined = over.payment(&server, "k", 1250).await;
        declined.expect_problem("payment-declined");
        db.execute(EXPIRE).await;
        for keys in [1, 0] {
            assert_eq!(db.rows().await.2, keys);
            let late = over.payment(&server, "k", 1250).await;
            late.expect_problem("idempotency-key-expired");
            assert!(late.resource_id.is_some() && late.resource_id == declined.resource_id, "{late:?}");
            store::reap_expired(&mut db.pool.acquire().await.unwrap(), 10).await.unwrap();
        }
        assert_eq!(provider.charges(), 1);
    })
    .await;
}

#[tokio::test]
async fn failure_a_body_in_chunks_that_is_left_out_of_the_hash() {
    with_database(async |db| {
        let server = db.serve_guarded().await;
        let in_chunks = |amount| server.order("k", amount).header("Transfer-Encoding", "chunked");
        expect_order(&server, &in_chunks(1200)).await;
        in_chunks(1201).send(server.address).await.expect_problem(422, "idempotency-key-reused");
        let whole = server.order("k", 1200).send(server.address).await;
        assert_eq!(whole.header("idempotent-replayed"), Some("true"));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn failure_a_crash_that_answers_409_until_the_record_expires() {
    over_both(async |over, db, server, provider| {
        let released = Arc::new(Semaphore::new(0));
        provider.then(Script::Hold(Arc::clone(&released)));
        // Its owner waits for the provider as long as the test lasts, as one that is gone.
        let owner = tokio::spawn({
            let server = server.clone();
            async move { over.payment(&server, "k", 1250).await }
        });
        until("the charge", async || (provider.charged() == 1).then_some(())).await;
        over.payment(&server, "k", 1250).await.expect_problem("request-in-progress");
        db.execute("UPDATE idempotency_keys SET lease_until = clock_timestamp()").await;
        let heir = over.payment(&server, "k", 1250).await;
        released.add_permits(1);
        assert_eq!(owner.await.unwrap().resource_id.as_deref(), Some(heir.expect_made()));
        assert_eq!((provider.charges(), provider.charged()), (2, 1));
    })
    .await;
}

#[tokio::test]
async fn failure_a_lease_that_is_missing_and_is_taken_for_a_dead_one() {
    with_payments(async |db, server, provider| {
        provider.then(Script::LoseAnswer);
        server.payment("k", 1250).send(server.address).await.expect_problem(503, "outcome-unknown");
        let unleased = "UPDATE idempotency_keys SET lease_until = NULL WHERE status = 'in_progress'";
        let refused = sqlx::query(unleased).execute(&db.pool).await.unwrap_err();
        let constraint = refused.as_database_error().and_then(|error| error.constraint());
        assert_eq!(constraint, Some("idempotency_keys_in_progress_is_leased"));
    })
    .await;
}
