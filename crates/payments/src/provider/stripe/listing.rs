//! Pages of Stripe's lists, newest first, as the audit reads them. A page's name is the id that it begins after.

use super::objects::{IntentStatus, List, Metadata, Name, PaymentIntent, Refund, RefundStatus};
use crate::provider::{Listed, ListedMove};

/// Keeps what was charged.
pub(super) fn charges(page: List<PaymentIntent>) -> Listed {
    let next = page.data.last().filter(|_| page.has_more).map(|last| last.id.as_str().to_owned());
    let succeeded = page.data.into_iter().filter(|intent| intent.status == IntentStatus::Succeeded);
    let moves = succeeded.map(|intent| moved(&intent.metadata, &intent.id, intent.amount, &intent.currency));
    Listed::Page { moves: moves.collect(), next }
}

/// Keeps what was given back.
pub(super) fn refunds(page: List<Refund>) -> Listed {
    let next = page.data.last().filter(|_| page.has_more).map(|last| last.id.as_str().to_owned());
    let succeeded = page.data.into_iter().filter(|refund| refund.status == Some(RefundStatus::Succeeded));
    let moves = succeeded.map(|refund| moved(&refund.metadata, &refund.id, refund.amount, &refund.currency));
    Listed::Page { moves: moves.collect(), next }
}

fn moved(metadata: &Metadata, id: &Name, amount: i64, currency: &Name) -> ListedMove {
    ListedMove {
        // One without is not ours; nothing is known of it, as an audit is to find.
        key: metadata.key.as_ref().map(|key| key.as_str().to_owned()).unwrap_or_default(),
        reference: id.as_str().to_owned(),
        amount,
        currency: currency.as_str().to_ascii_uppercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(listed: Listed) -> (Vec<(String, String, String)>, Option<String>) {
        let Listed::Page { moves, next } = listed else { panic!("{listed:?}") };
        (moves.into_iter().map(|moved| (moved.key, moved.reference, moved.currency)).collect(), next)
    }

    fn moved(key: &str, reference: &str) -> (String, String, String) {
        (key.to_owned(), reference.to_owned(), "EUR".to_owned())
    }

    #[test]
    fn what_moved_money_is_listed_whoever_asked_for_it() {
        let intent = |id: &str, status: &str, metadata: serde_json::Value| json!({ "id": id, "status": status, "amount": 5, "currency": "eur", "livemode": false, "metadata": metadata });
        let page = json!({ "has_more": true, "data": [
            intent("pi_3", "succeeded", json!({ "semel_key": "k" })),
            intent("pi_2", "succeeded", json!({})),
            intent("pi_1", "canceled", json!({ "semel_key": "l" })),
        ] });
        let (moves, next) = read(charges(serde_json::from_value(page).unwrap()));
        assert_eq!(moves, [moved("k", "pi_3"), moved("", "pi_2")]);
        assert_eq!(next.as_deref(), Some("pi_1"), "the page ends there, whatever became of it");
    }

    #[test]
    fn refunds_are_listed_likewise() {
        let refund = |id: &str, status: &str, metadata: serde_json::Value| json!({ "id": id, "status": status, "amount": 5, "currency": "eur", "payment_intent": null, "metadata": metadata });
        let page = json!({ "data": [
            refund("re_3", "pending", json!({ "semel_key": "k" })),
            refund("re_2", "succeeded", json!(null)),
            refund("re_1", "succeeded", json!({ "semel_key": "l" })),
        ] });
        let (moves, next) = read(refunds(serde_json::from_value(page).unwrap()));
        assert_eq!(moves, [moved("", "re_2"), moved("l", "re_1")]);
        assert_eq!(next, None);
    }
}
