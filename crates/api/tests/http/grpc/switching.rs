//! A retry that comes over the other protocol.

use semel_proto::payments::v1;
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::call::{order, payment};
use crate::bed::{Database, with_database};
use crate::provider::{Provider, Script};

#[tokio::test]
async fn what_a_call_began_http_replays_as_if_it_had_begun_it() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let first = order(&server, "k", 1200).send(&server).await;
        let placed: v1::Order = first.message();
        let again = server.order("k", 1200).send(server.address).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")));
        assert_eq!(again.header("original-request-id"), first.metadata("request-id"));
        assert_eq!(again.header("idempotency-key-expires"), first.metadata("idempotency-key-expires"));
        assert_eq!(again.header("location"), Some(format!("/v1/orders/{}", placed.id).as_str()));

        // The same order in another database of the same name: what HTTP alone answers.
        with_database(async |other: Database| {
            let server = other.serve_guarded().await;
            let plain = server.order("k", 1200).send(server.address).await;
            assert_eq!((plain.status, &plain.body), (201, &again.body));
            let of_its_own = |answer: &crate::client::Answer| {
                let headers = answer.headers.iter().filter(|(name, _)| {
                    ![
                        "date",
                        "request-id",
                        "idempotency-key-expires",
                        "idempotent-replayed",
                        "original-request-id",
                    ]
                    .contains(&name.as_str())
                });
                headers.cloned().collect::<Vec<_>>()
            };
            assert_eq!(of_its_own(&plain), of_its_own(&again));
        })
        .await;
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn what_http_began_a_call_replays_and_both_refuse_another_intent() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let first = server.order("k", 1200).send(server.address).await;
        let again = order(&server, "k", 1200).send(&server).await;
        let placed: v1::Order = again.message();
        assert_eq!(
            first.json(),
            json!({
                "id": placed.id, "status": "placed", "reference": placed.reference, "amount": placed.amount,
                "currency": placed.currency,
            })
        );
        assert_eq!(again.metadata("idempotent-replayed"), Some("true"));
        assert_eq!(again.metadata("original-request-id"), first.header("request-id"));
        let other = order(&server, "k", 1300).send(&server).await;
        other.expect_refusal(Code::FailedPrecondition, "IDEMPOTENCY_KEY_REUSED");
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_decline_is_the_same_refusal_whichever_protocol_heard_it_first() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        provider.then(Script::Decline);
        let called = payment(&server, "called", 1250).send(&server).await;
        let details = called.expect_refusal(Code::FailedPrecondition, "PAYMENT_DECLINED");
        let replayed = server.payment("called", 1250).send(server.address).await;
        let problem = replayed.json();
        assert_eq!((replayed.status, replayed.header("idempotent-replayed")), (402, Some("true")));
        assert_eq!(problem["detail"], called.status.message());
        let told = &details.error_info().unwrap().metadata;
        assert_eq!(told["resource_id"], problem["payment"]["id"]);
        assert_eq!(told["payment_status"], "declined");
        assert_eq!(told["payment_decline_code"], problem["payment"]["decline_code"]);
        assert!(details.retry_info().is_none());

        provider.then(Script::Decline);
        let asked = server.payment("asked", 1250).send(server.address).await;
        assert_eq!(asked.status, 402);
        let twice = [
            payment(&server, "asked", 1250).send(&server).await,
            payment(&server, "asked", 1250).send(&server).await,
        ];
        for again in &twice {
            again.expect_refusal(Code::FailedPrecondition, "PAYMENT_DECLINED");
            assert_eq!(again.metadata("idempotent-replayed"), Some("true"));
            assert_eq!(again.metadata("original-request-id"), asked.header("request-id"));
            assert_eq!(again.metadata("idempotency-key-expires"), asked.header("idempotency-key-expires"));
        }
        // A map has no order on the wire.
        let told = twice.each_ref().map(|again| again.status.get_details_error_info().unwrap().metadata);
        assert_eq!(told[0], told[1]);
        assert_eq!(provider.charges(), 2);
    })
    .await;
}
