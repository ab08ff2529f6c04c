//! Refunds as calls.

use semel_proto::payments::v1;
use tonic::Code;

use super::call::{Call, payment};
use crate::bed::{Database, Server, with_database};
use crate::payments::with_payments;
use crate::provider::{Provider, Script};

/// Makes a payment of 1250, and returns its id.
async fn paid(server: &Server) -> String {
    payment(server, "paid", 1250).send(server).await.message::<v1::Payment>().id
}

fn refund(server: &Server, payment_id: &str, key: &str, amount: i64) -> Call {
    let request = v1::CreateRefundRequest { payment_id: payment_id.to_owned(), amount };
    Call::new(server, "CreateRefund", &request).with("idempotency-key", key)
}

#[tokio::test]
async fn a_refund_is_made_once_whichever_protocol_asks_and_is_read_and_listed() {
    with_payments(async |_, server, provider| {
        let paid = paid(&server).await;
        let first = refund(&server, &paid, "called", 500).send(&server).await;
        let made: v1::Refund = first.message();
        assert_eq!(
            (made.status(), made.amount, &made.payment_id),
            (v1::refund::Status::Succeeded, 500, &paid)
        );
        let path = format!("/v1/payments/{paid}/refunds");
        let ask = |key: &str, amount: i64| {
            server.post_to(&path, format!(r#"{{"amount":{amount}}}"#)).header("Idempotency-Key", key)
        };
        let again = ask("called", 500).send(server.address).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")));
        assert_eq!(again.header("original-request-id"), first.metadata("request-id"));
        assert_eq!(again.json()["id"], made.id);

        let asked = ask("asked", 750).send(server.address).await;
        let replayed = refund(&server, &paid, "asked", 750).send(&server).await;
        let second: v1::Refund = replayed.message();
        assert_eq!((asked.status, &asked.json()["id"]), (201, &second.id.as_str().into()));
        assert_eq!(replayed.metadata("original-request-id"), asked.header("request-id"));
        assert_eq!((provider.refunds(), provider.refunded()), (2, 1250));

        let read = Call::new(&server, "GetRefund", &v1::GetRefundRequest { id: made.id.clone() });
        assert_eq!(read.send(&server).await.message::<v1::Refund>(), made);
        let list = async |limit: u32, cursor: &str| {
            let request =
                v1::ListRefundsRequest { payment_id: paid.clone(), limit, cursor: cursor.to_owned() };
            Call::new(&server, "ListRefunds", &request)
                .send(&server)
                .await
                .message::<v1::ListRefundsResponse>()
        };
        let page = list(1, "").await;
        assert_eq!(page.refunds, [second]);
        assert_eq!(list(1, &page.next_cursor).await.refunds, [made]);
    })
    .await;
}

#[tokio::test]
async fn what_is_final_of_a_refund_is_a_failed_precondition_with_the_refund() {
    with_payments(async |_, server, provider| {
        let paid = paid(&server).await;
        provider.then_refund(Script::Decline);
        for (key, amount, reason, stands) in [
            ("exceeds", 1251, "REFUND_EXCEEDS_PAYMENT", "refused"),
            ("fails", 500, "REFUND_FAILED", "failed"),
        ] {
            let first = refund(&server, &paid, key, amount).send(&server).await;
            let again = refund(&server, &paid, key, amount).send(&server).await;
            assert_eq!(again.metadata("original-request-id"), first.metadata("request-id"));
            for refused in [first, again] {
                let details = refused.expect_refusal(Code::FailedPrecondition, reason);
                let told = &details.error_info().unwrap().metadata;
                assert_eq!(told["refund_status"], stands);
                assert_eq!(told["refund_id"], told["resource_id"]);
                assert!(details.retry_info().is_none());
            }
        }
        assert_eq!(provider.refunds(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_refund_of_what_has_no_outcome_waits_and_of_what_is_not_there_is_not_found() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let server = db.serve_payments(&provider).await;
        provider.then(Script::LoseAnswer);
        let unknown = payment(&server, "lost", 1250).send(&server).await;
        let details = unknown.expect_refusal(Code::Unavailable, "OUTCOME_UNKNOWN");
        let waiting = &details.error_info().unwrap().metadata["resource_id"];
        let early = refund(&server, waiting, "r", 500).send(&server).await;
        let details = early.expect_refusal(Code::Aborted, "PAYMENT_IN_PROGRESS");
        assert!(details.retry_info().is_some());

        let other = Server { token: db.token("other").await, ..server.clone() };
        for (server, payment_id) in [
            (&other, waiting.as_str()),
            (&server, "00000000-0000-4000-8000-000000000000"),
            (&server, ""),
            (&server, &waiting.to_uppercase()),
        ] {
            let nobody = refund(server, payment_id, "r", 500).send(server).await;
            nobody.expect_refusal(Code::NotFound, "NOT_FOUND");
            if payment_id.is_empty() {
                // In a list that is as none.
                continue;
            }
            let request = v1::ListRefundsRequest { payment_id: payment_id.to_owned(), ..Default::default() };
            let list = Call::new(server, "ListRefunds", &request).send(server).await;
            list.expect_refusal(Code::NotFound, "NOT_FOUND");
        }
        assert_eq!(provider.refunds(), 0);
    })
    .await;
}
