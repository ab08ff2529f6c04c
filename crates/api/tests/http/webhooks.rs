//! Stripe's events over HTTP, against the real database.

mod contradictions;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use hmac::{Hmac, KeyInit as _, Mac as _};
use semel_api::{Door, Webhooks};
use serde_json::{Value, json};
use sha2::Sha256;
use sqlx::Executor as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::bed::{Database, Server, until, with_database};
use crate::client::{Answer, Ask, exchange, read_answer};
use crate::provider::{Provider, Script};

const PATH: &str = "/v1/webhooks/stripe";
const SECRET: &str = "whsec_0123456789abcdef";
const NEXT: &str = "whsec_fedcba9876543210";

async fn with_webhooks(secrets: &str, test: impl AsyncFnOnce(Database, Server, Provider)) {
    let secrets = secrets.parse().unwrap();
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let hooks = Webhooks { secrets, livemode: false };
        let server = db.serve_changed(Some(&provider), |api| api.with_webhooks(hooks), Door::default()).await;
        test(db, server, provider).await;
    })
    .await;
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn signature(secret: &str, at: u64, body: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(format!("{at}.{body}").as_bytes());
    let digits: Vec<_> = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t={at},v1={}", digits.concat())
}

fn ask(body: &str, signature: &str) -> Ask {
    Ask::new("POST", PATH)
        .header("Content-Type", "application/json; charset=utf-8")
        .header("Stripe-Signature", signature)
        .body(body)
}

/// Sends an event as Stripe does.
async fn send(server: &Server, event: &Value) -> Answer {
    let body = event.to_string();
    ask(&body, &signature(SECRET, now(), &body)).send(server.address).await
}

async fn told(server: &Server, event: &Value) {
    let answer = send(server, event).await;
    assert_eq!((answer.status, answer.body.len()), (200, 0), "{answer:?}");
}

/// An event of an intent that stands so.
fn intent(id: &str, kind: &str, key: &str, status: &str) -> Value {
    json!({
        "id": id, "object": "event", "api_version": "2025-01-01", "type": kind, "livemode": false, "created": now(),
        "data": { "object": {
            "id": format!("ch_{key}"), "object": "payment_intent", "status": status, "amount": 1250, "amount_received": 1250,
            "currency": "eur", "livemode": false, "metadata": { "semel_key": key },
        } },
    })
}

fn succeeded(id: &str, key: &str) -> Value {
    intent(id, "payment_intent.succeeded", key, "succeeded")
}

fn refund(id: &str, kind: &str, key: &str, charge: &str, status: &str) -> Value {
    json!({
        "id": id, "object": "event", "type": kind, "livemode": false, "created": now(),
        "data": { "object": {
            "id": format!("re_{key}"), "object": "refund", "status": status, "amount": 500, "currency": "eur",
            "payment_intent": charge, "metadata": { "semel_key": key },
        } },
    })
}

impl Database {
    async fn text(&self, sql: &'static str) -> String {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    async fn provider_key(&self) -> String {
        self.text("SELECT provider_key FROM payments").await
    }

    async fn refund_key(&self, name: &str) -> String {
        let sql = "SELECT provider_key FROM refunds WHERE idempotency_key = $1";
        sqlx::query_scalar(sql).bind(name).fetch_one(&self.pool).await.unwrap()
    }

    /// Status of the payment, and how many events and entries of evidence by webhook there are.
    async fn stands(&self) -> (String, i64, i64) {
        sqlx::query_as(
            "SELECT (SELECT status FROM payments), (SELECT count(*) FROM outbox),
                    (SELECT count(*) FROM provider_answers WHERE call = 'webhook')",
        )
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }
}

fn standing(status: &str, events: i64, heard: i64) -> (String, i64, i64) {
    (status.to_owned(), events, heard)
}

/// Makes a payment whose answer is lost, so that it is in processing; returns the provider's key.
async fn lost(db: &Database, server: &Server, provider: &Provider) -> String {
    provider.then(Script::LoseAnswer);
    server.payment("k", 1250).send(server.address).await.expect_problem(503, "outcome-unknown");
    assert_eq!(db.stands().await, standing("processing", 0, 0));
    db.provider_key().await
}

#[tokio::test]
async fn a_success_settles_at_once_and_the_client_sees_it() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        told(&server, &succeeded("evt_1", &key)).await;
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, Some("true")));
        assert_eq!((provider.charges(), provider.charged()), (1, 1), "nobody asked the provider");
        // Later, again, and of what is settled.
        for id in ["evt_1", "evt_2", "evt_2"] {
            told(&server, &succeeded(id, &key)).await;
        }
        assert_eq!(db.stands().await, standing("succeeded", 1, 2), "each event is evidence once");
    })
    .await;
}

#[tokio::test]
async fn sixty_four_copies_at_once_settle_once() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let event = succeeded("evt_1", &key);
        let mut taken = 0;
        for answer in join_all((0..64).map(|_| send(&server, &event))).await {
            match answer.status {
                200 => taken += 1,
                // Beyond its places, and to be sent again.
                _ => drop(answer.expect_problem(503, "temporarily-unavailable")),
            }
        }
        assert!(taken > 0);
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
        assert_eq!(provider.charges(), 1);
    })
    .await;
}

#[tokio::test]
async fn events_out_of_order_do_no_harm() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        told(&server, &succeeded("evt_3", &key)).await;
        for (id, kind, status) in [
            ("evt_1", "payment_intent.created", "requires_confirmation"),
            ("evt_2", "payment_intent.processing", "processing"),
            ("evt_4", "payment_intent.payment_failed", "requires_payment_method"),
        ] {
            told(&server, &intent(id, kind, &key, status)).await;
            assert_eq!(db.stands().await, standing("succeeded", 1, 1), "{kind}");
        }
    })
    .await;
}

#[tokio::test]
async fn what_is_not_definitive_settles_nothing() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        for (id, kind, status) in [
            ("evt_1", "payment_intent.created", "requires_confirmation"),
            ("evt_2", "payment_intent.payment_failed", "requires_payment_method"),
            ("evt_3", "payment_intent.requires_action", "requires_action"),
            // What the charge is called is not known, so it may be another one that is canceled.
            ("evt_4", "payment_intent.canceled", "canceled"),
        ] {
            told(&server, &intent(id, kind, &key, status)).await;
        }
        // About the right key, and not about what was asked for.
        for (name, value) in [("amount", json!(1251)), ("currency", json!("usd")), ("livemode", json!(true))]
        {
            let mut event = succeeded("evt_5", &key);
            event["data"]["object"][name] = value;
            told(&server, &event).await;
        }
        assert_eq!(db.stands().await, standing("processing", 0, 0));
    })
    .await;
}

#[tokio::test]
async fn what_is_canceled_is_rolled_back_where_it_is_the_charge_that_was_made() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let canceled = intent("evt_1", "payment_intent.canceled", &key, "canceled");
        db.execute("UPDATE idempotency_keys SET provider_reference = 'ch_another'").await;
        told(&server, &canceled).await;
        assert_eq!(db.stands().await, standing("processing", 0, 0));
        db.execute("UPDATE idempotency_keys SET provider_reference = 'ch_' || provider_key").await;
        told(&server, &canceled).await;
        assert_eq!(db.stands().await, standing("canceled", 1, 1));
        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (424, Some("true")), "{retry:?}");
    })
    .await;
}

#[tokio::test]
async fn an_event_that_comes_before_the_answer_leaves_the_settling_to_the_client() {
    with_webhooks(SECRET, async |db, server, provider| {
        let released = Arc::new(Semaphore::new(0));
        provider.then(Script::Hold(Arc::clone(&released)));
        let (asking, address) = (server.payment("k", 1250), server.address);
        let client = tokio::spawn(async move { asking.send(address).await });
        until("the charge", async || (provider.charged() == 1).then_some(())).await;
        let key = db.provider_key().await;
        let event = succeeded("evt_1", &key);
        for answer in join_all((0..8).map(|_| send(&server, &event))).await {
            assert_eq!(answer.status, 200, "{answer:?}");
        }
        assert_eq!(db.stands().await, standing("processing", 0, 1), "the client's request holds the lease");
        released.add_permits(1);
        let answer = client.await.unwrap();
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None));
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
    })
    .await;
}

#[tokio::test]
async fn an_event_and_the_clients_retry_at_once_settle_once() {
    with_webhooks(SECRET, async |db, server, provider| {
        for n in 0..8 {
            provider.then(Script::LoseAnswer);
            let name = format!("k-{n}");
            server.payment(&name, 1250).send(server.address).await.expect_problem(503, "outcome-unknown");
            let key: String = sqlx::query_scalar("SELECT provider_key FROM payments WHERE idempotency_key = $1")
                .bind(&name)
                .fetch_one(&db.pool)
                .await
                .unwrap();
            let event = succeeded(&format!("evt_{n}"), &key);
            let retry = server.payment(&name, 1250);
            let (heard, answer) = tokio::join!(send(&server, &event), retry.send(server.address));
            assert_eq!(heard.status, 200, "{heard:?}");
            assert!([201, 409].contains(&answer.status), "{answer:?}");
            let last = server.payment(&name, 1250).send(server.address).await;
            assert_eq!(last.status, 201, "{last:?}");
        }
        let (settled, events): (i64, i64) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM payments WHERE status = 'succeeded'), (SELECT count(*) FROM outbox)",
        )
        .fetch_one(&db.pool)
        .await
        .unwrap();
        assert_eq!((settled, events, provider.charged()), (8, 8, 8));
    })
    .await;
}

#[tokio::test]
async fn refunds_are_settled_by_their_events_too() {
    with_webhooks(SECRET, async |db, server, provider| {
        let payment = server.payment("k", 1250).send(server.address).await;
        let path = format!("{}/refunds", payment.header("location").unwrap());
        let charge = format!("ch_{}", db.provider_key().await);
        for (name, kind, status, settled) in [
            ("r-1", "refund.updated", "succeeded", "succeeded"),
            // What it is called is not known, so it may be another one that failed.
            ("r-2", "refund.failed", "failed", "processing"),
            ("r-2", "charge.refund.updated", "canceled", "processing"),
        ] {
            provider.then_refund(Script::LoseAnswer);
            let asking = server.post_to(&path, r#"{"amount":500}"#).header("Idempotency-Key", name);
            asking.send(server.address).await.expect_problem(503, "outcome-unknown");
            let key = db.refund_key(name).await;
            told(&server, &refund(&format!("{name}-0"), "refund.created", &key, &charge, "pending")).await;
            // Of another charge.
            told(&server, &refund(&format!("{name}-1"), kind, &key, "ch_another", status)).await;
            let stands = || async {
                let sql = "SELECT status FROM refunds WHERE idempotency_key = $1";
                sqlx::query_scalar::<_, String>(sql).bind(name).fetch_one(&db.pool).await.unwrap()
            };
            assert_eq!(stands().await, "processing");
            for _ in 0..2 {
                told(&server, &refund(&format!("{name}-2"), kind, &key, &charge, status)).await;
                assert_eq!(stands().await, settled, "{name} {status}");
            }
        }
        let taken: i64 =
            sqlx::query_scalar("SELECT refund_reserved FROM payments").fetch_one(&db.pool).await.unwrap();
        assert_eq!(taken, 1000, "one was made, and of the other that is not known");
        assert_eq!(db.stands().await, standing("succeeded", 2, 1));
    })
    .await;
}

#[tokio::test]
async fn what_is_forged_is_refused_and_leaves_nothing() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let body = succeeded("evt_1", &key).to_string();
        let good = signature(SECRET, now(), &body);
        let other = succeeded("evt_1", "another").to_string();
        for (what, body, signature) in [
            ("another secret", &body, signature(NEXT, now(), &body)),
            ("another body", &body, signature(SECRET, now(), &other)),
            ("too late", &body, signature(SECRET, now() - 330, &body)),
            ("too early", &body, signature(SECRET, now() + 330, &body)),
            ("a moved timestamp", &body, good.replacen("t=1", "t=2", 1)),
            ("no timestamp", &body, good.split_once(',').unwrap().1.to_owned()),
            ("no signature", &body, good.split_once(',').unwrap().0.to_owned()),
            ("another scheme", &body, good.replace("v1=", "v0=")),
            ("truncated", &body[..body.len() - 1].to_owned(), good.clone()),
            ("nothing", &String::new(), good.clone()),
        ] {
            let answer = ask(body, &signature).send(server.address).await;
            assert_eq!(answer.status, 400, "{what}: {answer:?}");
            answer.expect_problem(400, "signature-invalid");
        }
        let unsigned = ask(&body, &good).without("Stripe-Signature");
        unsigned.send(server.address).await.expect_problem(400, "signature-invalid");
        let twice = ask(&body, &good).header("Stripe-Signature", &good);
        twice.send(server.address).await.expect_problem(400, "signature-invalid");
        // A client's credential is none here.
        let authorised = server.post_to(PATH, &body);
        authorised.send(server.address).await.expect_problem(400, "signature-invalid");
        assert_eq!(db.stands().await, standing("processing", 0, 0));
        // The same, believed.
        assert_eq!(ask(&body, &good).send(server.address).await.status, 200);
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
    })
    .await;
}

#[tokio::test]
async fn both_secrets_are_taken_while_one_replaces_the_other() {
    with_webhooks(&format!("{SECRET}\n{NEXT}"), async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let body = succeeded("evt_1", &key).to_string();
        for secret in [SECRET, NEXT] {
            let answer = ask(&body, &signature(secret, now(), &body)).send(server.address).await;
            assert_eq!(answer.status, 200, "{answer:?}");
        }
        // As Stripe signs while both are valid.
        let (old, new) = (signature("whsec_gone", now(), &body), signature(NEXT, now(), &body));
        let both = format!("{old},{}", new.split_once(',').unwrap().1);
        assert_eq!(ask(&body, &both).send(server.address).await.status, 200);
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
    })
    .await;
}

#[tokio::test]
async fn what_is_of_the_other_mode_or_no_event_is_refused() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let mut live = succeeded("evt_1", &key);
        live["livemode"] = true.into();
        let problem = send(&server, &live).await.expect_problem(400, "request-invalid");
        assert_eq!(problem["errors"][0]["field"], "livemode");
        for event in [json!({}), json!([]), json!({ "id": "evt_1" })] {
            send(&server, &event).await.expect_problem(400, "request-invalid");
        }
        assert_eq!(db.stands().await, standing("processing", 0, 0));
    })
    .await;
}

#[tokio::test]
async fn what_is_unknown_is_taken_and_changes_nothing() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let mut without_key = succeeded("evt_1", "x");
        without_key["data"]["object"]["metadata"] = json!({ "theirs": "x" });
        let of_another_kind = json!({
            "id": "evt_3", "type": "customer.created", "livemode": false, "created": 1, "data": { "object": { "id": 7 } },
        });
        // The same again would be as unreadable: refused, it would have the endpoint disabled in the end.
        let mut unreadable = succeeded("evt_4", &key);
        unreadable["data"]["object"]["amount"] = "much".into();
        for event in [without_key, succeeded("evt_2", "nobodys"), of_another_kind, unreadable] {
            told(&server, &event).await;
        }
        assert_eq!(db.stands().await, standing("processing", 0, 0));
    })
    .await;
}

#[tokio::test]
async fn what_happened_in_a_connected_account_is_nobodys_here() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        for livemode in [false, true] {
            let mut event = succeeded("evt_1", &key);
            event["account"] = "acct_1".into();
            event["livemode"] = livemode.into();
            told(&server, &event).await;
        }
        assert_eq!(db.stands().await, standing("processing", 0, 0));
    })
    .await;
}

/// A request whose body does not come.
fn stalled(at: u64) -> Vec<u8> {
    let ask = Ask::new("POST", PATH).header("Stripe-Signature", signature(SECRET, at, "anything"));
    ask.header("Content-Length", "100").bytes()
}

#[tokio::test]
async fn bodies_that_do_not_come_stop_no_order_and_end_soon() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let event = succeeded("evt_1", &key);
        let began = Instant::now();
        let mut senders = Vec::new();
        for _ in 0..20 {
            let mut sender = TcpStream::connect(server.address).await.unwrap();
            sender.write_all(&stalled(now())).await.unwrap();
            senders.push(sender);
        }
        let other = succeeded("evt_0", "nobodys");
        let refused = until("all places of webhooks to be taken", async || {
            Some(send(&server, &other).await).filter(|answer| answer.status != 200)
        })
        .await;
        refused.expect_problem(503, "temporarily-unavailable");
        assert!(refused.header("retry-after").is_some());
        let order = server.order("o", 1250).send(server.address).await;
        assert_eq!(order.status, 201, "{order:?}");
        let mut late = 0;
        for sender in senders {
            let answer = read_answer(sender).await.unwrap();
            match answer.status {
                408 => late += 1,
                _ => drop(answer.expect_problem(503, "temporarily-unavailable")),
            }
        }
        assert_eq!(late, 16);
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
        told(&server, &event).await;
        assert_eq!(db.stands().await.0, "succeeded");
    })
    .await;
}

#[tokio::test]
async fn a_signature_out_of_time_is_refused_before_its_body_comes() {
    with_webhooks(SECRET, async |_, server, _| {
        let answer = exchange(server.address, &stalled(now() - 330)).await.unwrap();
        answer.expect_problem(400, "signature-invalid");
    })
    .await;
}

#[tokio::test]
async fn what_is_written_down_and_fails_to_settle_does_not_keep_the_client_away() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        db.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$",
        )
        .await;
        db.execute("CREATE TRIGGER refuse BEFORE UPDATE ON payments EXECUTE FUNCTION refuse()").await;
        told(&server, &succeeded("evt_1", &key)).await;
        db.execute("DROP TRIGGER refuse ON payments").await;
        assert_eq!(db.stands().await, standing("processing", 0, 1));
        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, provider.charges()), (201, 1), "by the evidence, and at once: {retry:?}");
    })
    .await;
}

#[tokio::test]
async fn a_large_event_is_taken_and_a_larger_one_is_not() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let mut event = succeeded("evt_1", &key);
        event["more"] = "x".repeat(300_000).into();
        let problem = send(&server, &event).await.expect_problem(413, "content-too-large");
        assert_eq!(problem["max_bytes"], 256 * 1024);
        event["more"] = "x".repeat(200_000).into();
        told(&server, &event).await;
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
    })
    .await;
}

#[tokio::test]
async fn an_event_that_cannot_be_written_down_is_to_be_sent_again() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let event = succeeded("evt_1", &key);
        let mut tx = db.pool.begin().await.unwrap();
        tx.execute("LOCK TABLE provider_answers IN SHARE MODE").await.unwrap();
        let refused = send(&server, &event).await;
        refused.expect_problem(503, "temporarily-unavailable");
        assert!(refused.header("retry-after").is_some());
        tx.rollback().await.unwrap();
        told(&server, &event).await;
        assert_eq!(db.stands().await, standing("succeeded", 1, 1));
    })
    .await;
}

#[tokio::test]
async fn what_is_written_down_and_cannot_be_settled_is_settled_by_the_retry() {
    with_webhooks(SECRET, async |db, server, provider| {
        let key = lost(&db, &server, &provider).await;
        let mut tx = db.pool.begin().await.unwrap();
        tx.execute("SELECT FROM idempotency_keys FOR UPDATE").await.unwrap();
        told(&server, &succeeded("evt_1", &key)).await;
        assert_eq!(db.stands().await, standing("processing", 0, 1));
        tx.rollback().await.unwrap();
        let retry = server.payment("k", 1250).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, None));
        assert_eq!((provider.charges(), provider.charged()), (1, 1), "by the evidence");
    })
    .await;
}

#[tokio::test]
async fn what_waits_for_a_person_is_left_to_one_who_sees_the_event() {
    with_webhooks(SECRET, async |db, server, provider| {
        provider.then(Script::Mismatch);
        server.payment("k", 1250).send(server.address).await.expect_problem(503, "needs-attention");
        told(&server, &succeeded("evt_1", &db.provider_key().await)).await;
        assert_eq!(db.stands().await, standing("processing", 0, 1));
    })
    .await;
}

#[tokio::test]
async fn without_a_secret_there_is_no_such_route() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        let body = succeeded("evt_1", "x").to_string();
        let sent = ask(&body, &signature(SECRET, now(), &body)).send(server.address).await;
        // Without a credential, as any other path.
        sent.expect_problem(401, "unauthenticated");
        server.post_to(PATH, &body).send(server.address).await.expect_problem(404, "not-found");
    })
    .await;
}

#[tokio::test]
async fn the_route_takes_nothing_but_a_post() {
    with_webhooks(SECRET, async |_, server, _| {
        for method in ["GET", "PUT", "DELETE"] {
            Ask::new(method, PATH).send(server.address).await.expect_problem(405, "method-not-allowed");
        }
    })
    .await;
}
