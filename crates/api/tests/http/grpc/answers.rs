//! What each case answers, over both protocols, side by side: the status, its reason, and whether asking again may help.

use std::num::NonZeroU32;
use std::time::Duration;

use semel_api::Door;
use semel_core::idempotency::admission::{Admission, Rate};
use sqlx::postgres::PgPoolOptions;
use tonic::Code;
use tonic_types::ErrorDetails;

use super::call::{Call, Reply, order, order_of, payment, payment_of};
use crate::bed::{Database, Server, with_database};
use crate::client::Answer;
use crate::provider::{Provider, Script};

/// Checks that a call was refused as a request was: same kind, same words, same advice on asking again.
fn expect_same(reply: &Reply, code: Code, answer: &Answer, status: u16, suffix: &str) -> ErrorDetails {
    let problem = answer.json();
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(problem["type"], format!("https://semel.example/errors/{suffix}"));
    let details = reply.expect_refusal(code, &suffix.replace('-', "_").to_uppercase());
    assert_eq!(problem["detail"], reply.status.message());
    let delay = details.retry_info().map(|info| info.retry_delay.unwrap().as_secs().to_string());
    assert_eq!(delay.as_deref(), answer.header("retry-after"), "{suffix}");
    let told = &details.error_info().unwrap().metadata;
    assert_eq!(told.get("resource_id").map(String::as_str), problem["resource_id"].as_str(), "{suffix}");
    let fields = details.bad_request().map(|bad| {
        let fields = bad.field_violations.iter();
        fields.map(|bad| (bad.field.clone(), bad.description.clone())).collect::<Vec<_>>()
    });
    let errors = problem["errors"].as_array().map(|errors| {
        let text = |error: &serde_json::Value, name: &str| error[name].as_str().unwrap().to_owned();
        errors.iter().map(|error| (text(error, "field"), text(error, "reason"))).collect::<Vec<_>>()
    });
    assert_eq!(fields, errors, "{suffix}");
    let links = details.help().map(|help| format!("<{}>; rel=\"describedby\"", help.links[0].url));
    assert_eq!(links.as_deref(), answer.header("link"), "{suffix}");
    for name in ["idempotency-key-expires", "idempotent-replayed", "original-request-id"] {
        assert_eq!(reply.metadata(name), None);
    }
    details
}

#[tokio::test]
async fn a_key_that_cannot_be_used_is_an_invalid_argument() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let plain = Call::new(&server, "CreateOrder", &order_of(1));
        let http = server.order("k", 1).without("Idempotency-Key");
        expect_same(
            &plain.send(&server).await,
            Code::InvalidArgument,
            &http.send(server.address).await,
            400,
            "idempotency-key-missing",
        );
        let long = "k".repeat(256);
        let keys: [&[&[u8]]; 10] = [
            &[b""],
            &[b"\"\""],
            &[b"\"k"],
            &[long.as_bytes()],
            &[b"k\xc3\xa9"],
            &[b"k\xe9"],
            &[b"k k"],
            &[b"k;p=1"],
            &[b"k, k"],
            &[b"k", b"k"],
        ];
        for lines in keys {
            let (mut call, mut ask) = (plain.clone(), http.clone());
            for line in lines {
                (call, ask) = (call.with("idempotency-key", line), ask.header("Idempotency-Key", line));
            }
            let (reply, answer) = (call.send(&server).await, ask.send(server.address).await);
            expect_same(&reply, Code::InvalidArgument, &answer, 400, "idempotency-key-invalid");
        }
        assert_eq!(db.rows().await, (0, 0, 0));
        let longest = order(&server, &long[1..], 1).send(&server).await;
        assert_eq!(longest.status.code(), Code::Ok);
    })
    .await;
}

#[tokio::test]
async fn what_is_not_acceptable_is_an_invalid_argument_that_names_the_field() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        let with = |change: fn(&mut semel_proto::payments::v1::CreateOrderRequest)| {
            let mut request = order_of(1);
            change(&mut request);
            request
        };
        for (request, field) in [
            (with(|order| order.amount = 0), "amount"),
            (with(|order| order.amount = -5), "amount"),
            (with(|order| order.amount = 1_000_000_000_001), "amount"),
            (with(|order| order.reference.clear()), "reference"),
            (with(|order| order.reference = "r".repeat(256)), "reference"),
            (with(|order| order.reference = "a\0".to_owned()), "reference"),
            (with(|order| order.currency = "eur".to_owned()), "currency"),
            (with(|order| order.currency.clear()), "currency"),
        ] {
            let reply = Call::new(&server, "CreateOrder", &request).with("idempotency-key", "k");
            let body = serde_json::json!({
                "reference": request.reference, "amount": request.amount, "currency": request.currency,
            });
            let ask = server.post(body.to_string()).header("Idempotency-Key", "k");
            let (reply, answer) = (reply.send(&server).await, ask.send(server.address).await);
            let details = expect_same(&reply, Code::InvalidArgument, &answer, 400, "request-invalid");
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
        // Never a card number, and never shown.
        let card = payment_of(1, "4242 4242 4242 4242");
        let reply =
            Call::new(&server, "CreatePayment", &card).with("idempotency-key", "k").send(&server).await;
        let details = reply.expect_refusal(Code::InvalidArgument, "REQUEST_INVALID");
        assert_eq!(details.bad_request().unwrap().field_violations[0].field, "source");
        assert!(!format!("{reply:?}").contains("4242"), "{reply:?}");
        assert_eq!((db.rows().await, provider.charges()), ((0, 0, 0), 0));
    })
    .await;
}

#[tokio::test]
async fn who_is_not_known_is_unauthenticated_on_every_call() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let revoked = db.token("revoked").await;
        db.execute("UPDATE api_credentials SET revoked_at = now() WHERE client_id = 'revoked'").await;
        let token = &server.token;
        let wrong = format!("Bearer {}{}", &token[..token.len() - 64], "0".repeat(64));
        let lines: [&[String]; 6] = [
            &[],
            &["Basic czNjcmV0OnMzY3JldA==".to_owned()],
            &["Bearer ".to_owned()],
            &[wrong],
            &[format!("Bearer {revoked}")],
            &[format!("Bearer {token}"), format!("Bearer {token}")],
        ];
        for lines in lines {
            let (mut call, mut ask) = (
                order(&server, "k", 1).without("authorization"),
                server.order("k", 1).without("Authorization"),
            );
            for line in lines {
                (call, ask) = (call.with("authorization", line), ask.header("Authorization", line));
            }
            let (reply, answer) = (call.send(&server).await, ask.send(server.address).await);
            expect_same(&reply, Code::Unauthenticated, &answer, 401, "unauthenticated");
        }
        for path in
            ["/semel.payments.v1.Payments/GetOrder", "/semel.payments.v1.Payments/Nothing", "/v1/orders"]
        {
            let reply = Call::at(path, &()).send(&server).await;
            reply.expect_refusal(Code::Unauthenticated, "UNAUTHENTICATED");
        }
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_revoked_credential_is_not_served_the_stored_answer() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        assert_eq!(order(&server, "k", 1200).send(&server).await.status.code(), Code::Ok);
        db.execute("UPDATE api_credentials SET revoked_at = now()").await;
        // Another server, which has not met the credential before.
        let fresh = Server::start(db.pool.clone(), server.token.clone()).await;
        order(&fresh, "k", 1200).send(&fresh).await.expect_refusal(Code::Unauthenticated, "UNAUTHENTICATED");
    })
    .await;
}

#[tokio::test]
async fn a_resource_and_a_key_of_another_client_are_not_found() {
    use semel_proto::payments::v1;

    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        let order: v1::Order = order(&server, "k", 1200).send(&server).await.message();
        let payment: v1::Payment = payment(&server, "k", 1250).send(&server).await.message();
        let other = Server { token: db.token("other").await, ..server.clone() };
        for id in [order.id.as_str(), "", "1", &order.id.to_uppercase()] {
            let get = Call::new(&other, "GetOrder", &v1::GetOrderRequest { id: id.to_owned() });
            get.send(&other).await.expect_refusal(Code::NotFound, "NOT_FOUND");
        }
        let get = Call::new(&other, "GetPayment", &v1::GetPaymentRequest { id: payment.id.clone() });
        get.send(&other).await.expect_refusal(Code::NotFound, "NOT_FOUND");
        let list = Call::new(&other, "ListPayments", &v1::ListPaymentsRequest::default());
        assert!(list.send(&other).await.message::<v1::ListPaymentsResponse>().payments.is_empty());
        // The same key is another one.
        let foreign: v1::Order = super::call::order(&other, "k", 7).send(&other).await.message();
        assert_ne!(foreign.id, order.id);
        let listed = Call::new(&server, "ListPayments", &v1::ListPaymentsRequest::default());
        assert_eq!(listed.send(&server).await.message::<v1::ListPaymentsResponse>().payments, [payment]);
    })
    .await;
}

#[tokio::test]
async fn a_known_key_with_another_intent_is_a_failed_precondition() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        assert_eq!(order(&server, "k", 1200).send(&server).await.status.code(), Code::Ok);
        let reply = order(&server, "k", 1300).send(&server).await;
        let answer = server.order("k", 1300).send(server.address).await;
        expect_same(&reply, Code::FailedPrecondition, &answer, 422, "idempotency-key-reused");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_key_at_work_is_aborted_with_a_time_to_ask_again() {
    with_database(async |db: Database| {
        let (patient, guarded) = (db.serve().await, db.serve_guarded().await);
        let stopped = db.stop_writes().await;
        let first = tokio::spawn({
            let patient = patient.clone();
            async move { order(&patient, "k", 1200).send(&patient).await }
        });
        db.until_one_is_blocked().await;
        let reply = order(&guarded, "k", 1200).send(&guarded).await;
        let answer = guarded.order("k", 1200).send(guarded.address).await;
        let details = expect_same(&reply, Code::Aborted, &answer, 409, "request-in-progress");
        assert!(details.retry_info().is_some());
        stopped.rollback().await.unwrap();
        assert_eq!(first.await.unwrap().status.code(), Code::Ok);
        let again = order(&guarded, "k", 1200).send(&guarded).await;
        assert_eq!((again.status.code(), again.metadata("idempotent-replayed")), (Code::Ok, Some("true")));
    })
    .await;
}

#[tokio::test]
async fn what_is_beyond_a_clients_rate_is_exhausted_and_a_replay_is_not() {
    with_database(async |db: Database| {
        let rate = Rate { every: Duration::from_hours(1), burst: NonZeroU32::MIN };
        let admission = Admission::new(Some(rate), None);
        let server = db.serve_changed(None, |api| api.with_admission(admission), Door::default()).await;
        assert_eq!(order(&server, "k", 1200).send(&server).await.status.code(), Code::Ok);
        let reply = order(&server, "new", 1200).send(&server).await;
        let answer = server.order("new", 1200).send(server.address).await;
        let details = expect_same(&reply, Code::ResourceExhausted, &answer, 429, "rate-limited");
        assert!(details.retry_info().is_some());
        let again = order(&server, "k", 1200).send(&server).await;
        assert_eq!((again.status.code(), again.metadata("idempotent-replayed")), (Code::Ok, Some("true")));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn an_expired_key_is_a_failed_precondition_that_names_what_it_made() {
    use semel_proto::payments::v1;

    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let placed: v1::Order = order(&server, "k", 1200).send(&server).await.message();
        db.execute(
            "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '25 hours',
                                         expires_at = clock_timestamp() - INTERVAL '1 hour'",
        )
        .await;
        let reply = order(&server, "k", 1200).send(&server).await;
        let answer = server.order("k", 1200).send(server.address).await;
        let details = expect_same(&reply, Code::FailedPrecondition, &answer, 410, "idempotency-key-expired");
        assert_eq!(details.error_info().unwrap().metadata["resource_id"], placed.id);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn what_is_not_known_is_unavailable_and_names_the_resource() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        provider.then(Script::LoseAnswer);
        let lost = payment(&server, "k", 1250).send(&server).await;
        let details = lost.expect_refusal(Code::Unavailable, "OUTCOME_UNKNOWN");
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_secs(2)));
        let retry = payment(&server, "k", 1250).send(&server).await;
        let paid: semel_proto::payments::v1::Payment = retry.message();
        assert_eq!(paid.id, details.error_info().unwrap().metadata["resource_id"]);
        assert_eq!((provider.charges(), provider.charged()), (2, 1));

        provider.then(Script::Mismatch);
        let reply = payment(&server, "person", 1250).send(&server).await;
        let answer = server.payment("person", 1250).send(server.address).await;
        let details = expect_same(&reply, Code::Unavailable, &answer, 503, "needs-attention");
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_mins(1)));
    })
    .await;
}

#[tokio::test]
async fn a_database_that_is_away_or_was_never_there_is_unavailable() {
    let pool = PgPoolOptions::new()
        .acquire_timeout(Duration::from_millis(200))
        .connect_lazy("postgres://nobody@127.0.0.1:1/nothing")
        .unwrap();
    let token = format!("sml_{}_{}", "0".repeat(16), "0".repeat(64));
    for server in [Server::start(pool.clone(), token.clone()).await, Server::start_closed(pool, token).await]
    {
        let reply = order(&server, "k", 1200).send(&server).await;
        let answer = server.order("k", 1200).send(server.address).await;
        let details = expect_same(&reply, Code::Unavailable, &answer, 503, "temporarily-unavailable");
        assert!(details.retry_info().is_some());
    }
}

#[tokio::test]
async fn a_statement_that_is_refused_is_internal_and_is_not_stored() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        db.execute("ALTER TABLE outbox ADD CONSTRAINT outbox_refuses_all CHECK (FALSE)").await;
        let reply = order(&server, "k", 1200).send(&server).await;
        let answer = server.order("k", 1200).send(server.address).await;
        expect_same(&reply, Code::Internal, &answer, 500, "internal");
        db.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_refuses_all").await;
        let retry = order(&server, "k", 1200).send(&server).await;
        assert_eq!((retry.status.code(), retry.metadata("idempotent-replayed")), (Code::Ok, None));
    })
    .await;
}

#[tokio::test]
async fn a_rolled_back_payment_is_a_failed_precondition() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        provider.then(Script::Decline);
        server.payment("k", 1250).send(server.address).await;
        // As a fence at the provider would have left it.
        db.execute(
            "UPDATE idempotency_keys SET response_code = 424, response_body = convert_to(replace(
                 convert_from(response_body, 'UTF8'), 'payment-declined', 'payment-rolled-back'), 'UTF8')",
        )
        .await;
        let reply = payment(&server, "k", 1250).send(&server).await;
        let details = reply.expect_refusal(Code::FailedPrecondition, "PAYMENT_ROLLED_BACK");
        assert!(details.retry_info().is_none());
        assert_eq!(reply.metadata("idempotent-replayed"), Some("true"));
        assert_eq!(server.payment("k", 1250).send(server.address).await.status, 424);
    })
    .await;
}
