use serde_json::{Value, json};

use super::*;

type Change = fn(&mut Value);

const ASKED: Asked<'_> =
    Asked { reference: Some("pi_1"), key: "k", amount: 1250, currency: "EUR", livemode: false };
const REFUND: AskedRefund<'_> = AskedRefund { intent: "pi_1", key: "r", amount: 400, currency: "EUR" };

fn reply(status: u16, body: &Value) -> Reply {
    Reply { status, body: body.to_string().into(), ..Reply::default() }
}

fn error(status: u16, kind: &str, code: &str) -> Reply {
    let mut error = json!({
        "type": kind, "message": "words", "doc_url": "https://stripe.com/docs/error-codes",
        "request_log_url": "https://dashboard.stripe.com/test/logs/req_1"
    });
    if !code.is_empty() {
        error["code"] = code.into();
    }
    reply(status, &json!({"error": error}))
}

fn intent(status: &str) -> Value {
    json!({
        "id": "pi_1", "object": "payment_intent", "amount": 1250, "amount_capturable": 0, "currency": "eur",
        "client_secret": "pi_1_secret_x", "livemode": false, "metadata": {"semel_key": "k", "semel_payment": "p"},
        "payment_method_types": ["card"], "status": status, "latest_charge": null, "last_payment_error": null,
        "canceled_at": null, "cancellation_reason": null
    })
}

fn declined_intent(status: &str) -> Value {
    let mut intent = intent(status);
    intent["last_payment_error"] = json!({
        "type": "card_error", "code": "card_declined", "decline_code": "insufficient_funds", "message": "no",
        "charge": "ch_1", "payment_method": {"id": "pm_1"}
    });
    intent
}

fn read_intent(value: &Value) -> PaymentIntent {
    serde_json::from_value(value.clone()).unwrap()
}

fn refund(status: &str) -> Value {
    json!({
        "id": "re_1", "object": "refund", "amount": 400, "charge": "ch_1", "currency": "eur", "status": status,
        "payment_intent": "pi_1", "metadata": {"semel_key": "r"}
    })
}

/// A refusal that names the parameter that it is about.
fn about(param: &str, code: &str) -> Reply {
    let mut error = json!({"type": "invalid_request_error", "message": "words", "param": param});
    if !code.is_empty() {
        error["code"] = code.into();
    }
    reply(400, &json!({"error": error}))
}

/// The shapes that Stripe documents, each with its class.
fn documented() -> Vec<(&'static str, Reply, Class)> {
    let sticky =
        |replayed, should_retry| Reply { is_replayed: replayed, should_retry, ..error(500, "api_error", "") };
    let text = |status, body: &'static str| Reply { status, body: body.into(), ..Reply::default() };
    let invalid = "invalid_request_error";
    vec![
        ("a parameter is missing", error(400, invalid, "parameter_missing"), Class::Faulty),
        ("a parameter is unknown", error(400, invalid, "parameter_unknown"), Class::Faulty),
        ("the amount is too small", error(400, invalid, "amount_too_small"), Class::Refused),
        ("no such payment method", error(400, invalid, "resource_missing"), Class::Refused),
        ("no code", error(400, invalid, ""), Class::Faulty),
        ("a code that is new", error(400, invalid, "account_is_blue"), Class::Faulty),
        ("a currency without a code", about("currency", ""), Class::Refused),
        ("a card, with a code that is new", about("payment_method", "card_is_blue"), Class::Refused),
        ("how we say an amount", about("amount", "parameter_invalid_integer"), Class::Faulty),
        ("of our own words", about("capture_method", ""), Class::Faulty),
        ("already refunded", error(400, invalid, "charge_already_refunded"), Class::Faulty),
        ("wrong state", error(400, invalid, "payment_intent_unexpected_state"), Class::Unexpected),
        ("other parameters under the key", error(400, "idempotency_error", ""), Class::Mismatch),
        ("other endpoint under the key", error(409, "idempotency_error", ""), Class::Mismatch),
        ("no key", error(401, invalid, ""), Class::NotExecuted),
        ("an expired key", error(401, invalid, "api_key_expired"), Class::NotExecuted),
        ("the other mode", error(400, invalid, "livemode_mismatch"), Class::NotExecuted),
        ("not permitted", error(403, invalid, "more_permissions_required"), Class::NotExecuted),
        ("declined", error(402, "card_error", "card_declined"), Class::Declined),
        ("expired card", error(402, "card_error", "expired_card"), Class::Declined),
        ("declined, of another type", error(402, invalid, "card_declined"), Class::Declined),
        ("a wrong number", error(400, "card_error", "incorrect_number"), Class::Declined),
        ("no such object", error(404, invalid, "resource_missing"), Class::Missing),
        ("the key is in use", error(409, invalid, "idempotency_key_in_use"), Class::InProgress),
        ("likewise", error(409, "idempotency_error", "idempotency_key_in_use"), Class::InProgress),
        ("a conflict", error(409, "api_error", ""), Class::NotExecuted),
        ("too many requests", error(429, invalid, "rate_limit"), Class::NotExecuted),
        ("the object is locked", error(429, invalid, "lock_timeout"), Class::NotExecuted),
        ("likewise, as a conflict", error(409, invalid, "lock_timeout"), Class::NotExecuted),
        ("a failure beyond Stripe", error(424, "api_error", ""), Class::Unknown),
        ("a failure", error(500, "api_error", ""), Class::Unknown),
        ("a failure that may pass", sticky(false, Some(true)), Class::Unknown),
        ("a failure that is replayed", sticky(true, None), Class::Sticky),
        ("a failure that stays", sticky(false, Some(false)), Class::Sticky),
        ("a bad gateway", text(502, "<html>"), Class::Unknown),
        ("unavailable", text(503, ""), Class::Unknown),
        ("a gateway's time is up", text(504, ""), Class::Unknown),
        ("somebody else's 400", text(400, "<html>"), Class::Unknown),
        ("somebody else's 404", text(404, "not here"), Class::Unknown),
        ("somebody else's limit", text(429, ""), Class::NotExecuted),
        ("a redirect", text(302, ""), Class::Unknown),
        ("nonsense", text(200, "{"), Class::Unknown),
        ("another object", reply(200, &json!({"object": "balance"})), Class::Unknown),
    ]
}

#[test]
fn each_documented_error_has_its_class() {
    for (what, reply, class) in documented() {
        let refusal = read::<PaymentIntent>(&reply).unwrap_err();
        assert_eq!(refusal.class, class, "{what}: {refusal:?}");
    }
}

fn label(prepared: &Prepared) -> &'static str {
    match prepared {
        Prepared::Reference(_) => "reference",
        Prepared::Never { .. } => "never",
        Prepared::Answered(answer) => answer.label(),
    }
}

/// What each class comes to when it answers a creation, a confirmation and a refund.
#[test]
fn each_class_has_its_consequence() {
    for (what, reply, class) in documented() {
        let (create, confirm, refund) = match class {
            Class::InProgress => ("in_progress", "in_progress", "in_progress"),
            Class::NotExecuted => ("not_executed", "not_executed", "not_executed"),
            Class::Unknown | Class::Missing => ("unknown", "unknown", "unknown"),
            Class::Sticky => ("never", "ask", "unknown"),
            Class::Unexpected => ("unknown", "ask", "unknown"),
            Class::Mismatch => ("mismatch", "mismatch", "mismatch"),
            Class::Declined => ("declined", "failed", "unknown"),
            Class::Refused => ("declined", "ask", "mismatch"),
            Class::Faulty => ("not_executed", "ask", "mismatch"),
        };
        assert_eq!(label(&prepared(&reply, &ASKED)), create, "{what}");
        let confirmed = match confirmed(&reply, &ASKED) {
            Confirmed::Answered(answer) => answer.label(),
            Confirmed::Failed { .. } => "failed",
            Confirmed::Ask(_) => "ask",
        };
        assert_eq!(confirmed, confirm, "{what}");
        let refused = refund_refused(read::<PaymentIntent>(&reply).unwrap_err());
        assert_eq!(refused.label(), refund, "{what}");
    }
}

#[test]
fn no_refusal_is_a_success_a_fence_or_a_refund_that_failed() {
    for (what, reply, _) in documented() {
        let created = label(&prepared(&reply, &ASKED));
        assert!(!["reference", "succeeded", "fenced"].contains(&created), "{what}: {created}");
        if let Confirmed::Answered(answer) = confirmed(&reply, &ASKED) {
            let is_final =
                matches!(answer, Answer::Succeeded { .. } | Answer::Declined { .. } | Answer::Fenced);
            assert!(!is_final, "{what}: {answer:?}");
        }
        let refused = refund_refused(refusal(&reply));
        let is_final = matches!(refused, Answer::Succeeded { .. } | Answer::Declined { .. } | Answer::Fenced);
        assert!(!is_final, "{what}: {refused:?}");
    }
}

#[test]
fn a_refund_for_which_there_is_no_money_is_made_later() {
    for code in NO_MONEY {
        let refused = refund_refused(refusal(&error(400, "invalid_request_error", code)));
        assert!(matches!(refused, Answer::NotExecuted { .. }), "{refused:?}");
    }
}

#[test]
fn each_status_of_an_intent_has_its_answer() {
    let declined =
        Answer::Declined { reference: Some("pi_1".to_owned()), code: "insufficient_funds".to_owned() };
    let cases = [
        (intent("succeeded"), Answer::Succeeded { reference: "pi_1".to_owned() }),
        (intent("processing"), Answer::InProgress),
        (intent("canceled"), Answer::Fenced),
        (declined_intent("canceled"), declined),
    ];
    for (value, answer) in cases {
        assert_eq!(charged(&read_intent(&value), &ASKED), answer, "{value}");
    }
    for open in
        ["requires_payment_method", "requires_confirmation", "requires_action", "requires_capture", "other"]
    {
        let answer = charged(&read_intent(&intent(open)), &ASKED);
        assert!(matches!(answer, Answer::Unknown { .. }), "{open}: {answer:?}");
    }
}

#[test]
fn what_fails_without_a_charge_is_declined_once_it_is_canceled() {
    let failed = |code: &str| Confirmed::Failed { code: code.to_owned() };
    let cases = [
        (intent("requires_action"), failed("authentication_required")),
        (declined_intent("requires_payment_method"), failed("insufficient_funds")),
        (intent("requires_payment_method"), failed("card_declined")),
    ];
    for (value, expected) in cases {
        assert_eq!(confirmed(&reply(200, &value), &ASKED), expected, "{value}");
        // However the confirmation itself was answered.
        let sticky = Reply { is_replayed: true, ..error(500, "api_error", "") };
        assert_eq!(attempted(&read_intent(&value), &ASKED, Some(&refusal(&sticky))), expected, "{value}");
    }
}

#[test]
fn an_intent_that_nobody_confirmed_has_failed_only_if_that_was_refused() {
    let open = read_intent(&intent("requires_confirmation"));
    let of = |reply: Reply| attempted(&open, &ASKED, Some(&refusal(&reply)));
    let refused = of(error(400, "invalid_request_error", "payment_method_unexpected_state"));
    assert_eq!(refused, Confirmed::Failed { code: "payment_method_unexpected_state".to_owned() });
    let faulty = of(error(400, "invalid_request_error", "parameter_unknown"));
    assert!(matches!(faulty, Confirmed::Answered(Answer::Unknown { .. })), "{faulty:?}");
    let sticky = of(Reply { is_replayed: true, ..error(500, "api_error", "") });
    assert!(matches!(sticky, Confirmed::Answered(Answer::Unknown { .. })), "{sticky:?}");
}

#[test]
fn believes_only_an_intent_that_is_the_one_asked_about() {
    let changes: [Change; 8] = [
        |i| i["id"] = "pi_2".into(),
        |i| i["metadata"] = json!({"semel_key": "other"}),
        |i| i["metadata"] = json!({}),
        |i| i["amount"] = 1251.into(),
        |i| i["amount_received"] = 1249.into(),
        |i| i["currency"] = "usd".into(),
        |i| i["livemode"] = true.into(),
        |i| i["status"] = "succeded".into(),
    ];
    for change in changes {
        let mut other = intent("succeeded");
        change(&mut other);
        let answer = charged(&read_intent(&other), &ASKED);
        assert!(matches!(answer, Answer::Unknown { .. }), "{other}: {answer:?}");
    }
    for change in &changes[..4] {
        let mut other = intent("canceled");
        change(&mut other);
        let answer = charged(&read_intent(&other), &ASKED);
        assert!(matches!(answer, Answer::Unknown { .. }), "{other}: {answer:?}");
    }
}

#[test]
fn an_intent_that_was_created_gives_its_name_whatever_became_of_it() {
    let new = Asked { reference: None, ..ASKED };
    for status in ["requires_confirmation", "succeeded", "canceled"] {
        let created = prepared(&reply(200, &intent(status)), &new);
        assert_eq!(created, Prepared::Reference("pi_1".to_owned()));
    }
    let other = Asked { key: "other", ..new };
    assert_eq!(label(&prepared(&reply(200, &intent("requires_confirmation")), &other)), "unknown");
}

#[test]
fn each_status_of_a_refund_has_its_answer() {
    let of = |value: &Value| refunded(&serde_json::from_value(value.clone()).unwrap(), &REFUND);
    assert_eq!(of(&refund("succeeded")), Answer::Succeeded { reference: "re_1".to_owned() });
    assert_eq!(of(&refund("pending")), Answer::InProgress);
    assert_eq!(of(&refund("requires_action")), Answer::InProgress);
    let failed = |code: &str| Answer::Declined { reference: Some("re_1".to_owned()), code: code.to_owned() };
    assert_eq!(of(&refund("canceled")), failed("canceled"));
    let mut lost = refund("failed");
    assert_eq!(of(&lost), failed("failed"));
    lost["failure_reason"] = "lost_or_stolen_card".into();
    assert_eq!(of(&lost), failed("lost_or_stolen_card"));

    let changes: [Change; 6] = [
        |r| r["status"] = "new".into(),
        |r| r["status"] = Value::Null,
        |r| r["payment_intent"] = "pi_2".into(),
        |r| r["metadata"]["semel_key"] = "other".into(),
        |r| r["amount"] = 401.into(),
        |r| r["currency"] = "usd".into(),
    ];
    for change in changes {
        let mut other = refund("succeeded");
        change(&mut other);
        assert!(matches!(of(&other), Answer::Unknown { .. }), "{other}: {:?}", of(&other));
    }
}

#[test]
fn cuts_and_cleans_the_code_of_a_decline() {
    let long = format!("no-money-{}", "é".repeat(60));
    let created = prepared(&error(402, "card_error", &long), &ASKED);
    let Prepared::Answered(Answer::Declined { code, reference: None }) = created else {
        panic!("{created:?}")
    };
    assert!(code.starts_with("no-money-") && code.len() <= 63, "{code}");
}
