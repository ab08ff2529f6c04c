use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::provider::breaker;

/// One that answers every request like this.
async fn answering(status: &str, body: &serde_json::Value) -> StripeProvider {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let body = body.to_string();
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        }
    });
    StripeProvider::new(base.parse().unwrap(), &"sk_test_0123456789abcdef".parse().unwrap()).unwrap()
}

#[tokio::test]
async fn a_list_that_is_refused_keeps_nobody_from_charging() {
    let busy = serde_json::json!({ "error": { "type": "invalid_request_error", "code": "rate_limit" } });
    let provider = answering("429 Too Many Requests", &busy).await;
    for _ in 0..=breaker::TOLERATED {
        for list in [List::Charges, List::Refunds] {
            let listed = provider.list(list, UNIX_EPOCH, None).await;
            assert!(matches!(listed, Listed::Failed { .. }), "{listed:?}");
        }
    }
    assert!(provider.is_open() && !provider.lists.admits(), "only lists are not asked for");
}

#[tokio::test]
async fn a_refund_that_failed_does_not_hide_another_of_the_key() {
    let refund = |id: &str, status: &str| {
        serde_json::json!({
            "id": id, "status": status, "amount": 500, "currency": "eur", "payment_intent": "pi_1",
            "failure_reason": "lost_or_stolen_card", "metadata": { "semel_key": "r" },
        })
    };
    let made = Answer::Succeeded { reference: "re_1".to_owned() };
    let failed = declined("re_2", "lost_or_stolen_card");
    for (refunds, answer) in [
        (vec![refund("re_2", "failed"), refund("re_1", "succeeded")], made),
        (vec![refund("re_2", "failed"), refund("re_1", "pending")], Answer::InProgress),
        (vec![refund("re_2", "failed")], failed),
        (vec![], Answer::NotFound),
    ] {
        let provider = answering("200 OK", &serde_json::json!({ "data": refunds, "has_more": false })).await;
        let charged = Charged { key: "p".to_owned(), reference: "pi_1".to_owned() };
        let stored = StoredRefund {
            key: "r".to_owned(),
            request: provider.encode_refund(&charged, 500),
            amount: 500,
            currency: "EUR".to_owned(),
        };
        assert_eq!(provider.get_refund(&stored).await, answer);
    }
}
