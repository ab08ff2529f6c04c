//! What Stripe's replies mean. Pure functions: a reply in, an [`Answer`] out.
//!
//! Promise: *succeeded* is only what is about the key, amount, currency, mode and intent that were asked about, and what
//! is not certain to have executed nothing is unknown.
//!
//! The rules, by <https://docs.stripe.com/api/errors>, <https://docs.stripe.com/error-handling> and
//! <https://docs.stripe.com/api/idempotent_requests>. Types are told by status and code, since not everything that speaks
//! this protocol gives a decline the type `card_error`.

use bytes::Bytes;
use serde::Deserialize;

use super::objects::{
    Error, ErrorBody, IntentStatus, Name, PaymentIntent, Refund, RefundStatus, Related, Words,
};
use crate::provider::{Answer, Prepared, declined};

/// What came back for a request.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// Whether it was replayed from under the idempotency key (`Idempotent-Replayed: true`).
    pub is_replayed: bool,
    /// What Stripe said about another try (`Stripe-Should-Retry`), if it did.
    pub should_retry: Option<bool>,
    /// The body, whole.
    pub body: Bytes,
}

/// What a refusal means for the request that was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// Another request under the same key is at work.
    InProgress,
    /// It has executed nothing; the same again later may.
    NotExecuted,
    /// Whether it was executed is not known.
    Unknown,
    /// Likewise, and the same again will be answered the same for as long as the key is remembered.
    Sticky,
    /// The key was used for another request.
    Mismatch,
    /// The card was declined.
    Declined,
    /// What is to be paid, or the card, is not acceptable; it has executed nothing.
    Refused,
    /// The request is not acceptable whatever is to be paid by it, which is a fault of ours; it has executed nothing.
    Faulty,
    /// The object stands where this cannot be done with it: it has to be looked at.
    Unexpected,
    /// There is no such object, for this API key.
    Missing,
}

/// A reply that is no object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Refusal {
    /// What it means.
    pub class: Class,
    /// Stripe's code for it, or what stands for one.
    pub code: String,
    /// For people: status, code and words.
    pub reason: String,
}

/// What a charge has to agree with, to be the one that was asked about.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The intent's id, where it is known.
    pub reference: Option<&'a str>,
    /// The key that it was asked for under.
    pub key: &'a str,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code, in capital letters.
    pub currency: &'a str,
    /// Whether it is about real money.
    pub livemode: bool,
}

/// What a refund has to agree with, to be the one that was asked about.
#[derive(Clone, Copy, Debug)]
pub struct AskedRefund<'a> {
    /// The id of the intent whose money it gives back.
    pub intent: &'a str,
    /// The key that it was asked for under.
    pub key: &'a str,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code, in capital letters.
    pub currency: &'a str,
}

/// What a confirmation came to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Confirmed {
    /// This.
    Answered(Answer),
    /// No money has moved by it, and none will once the intent is canceled.
    Failed {
        /// Why.
        code: String,
    },
    /// What stands is to be read from the intent itself.
    Ask(Refusal),
}

/// Codes of a refusal that is about our account or key, and not about the payment.
const OURS: [&str; 8] = [
    "account_invalid",
    "api_key_expired",
    "livemode_mismatch",
    "not_allowed_on_standard_account",
    "platform_api_key_expired",
    "secret_key_required",
    "testmode_charges_only",
    "tls_version_unsupported",
];

/// Codes of a refusal that is about what is to be paid, or about the card. Of whatever else is refused nobody knows that it is
/// not our own fault, which no client is to be told as a decline.
const ABOUT_PAYMENT: [&str; 32] = [
    "amount_too_large",
    "amount_too_small",
    "authentication_required",
    "card_decline_rate_limit_exceeded",
    "card_declined",
    "charge_exceeds_source_limit",
    "charge_exceeds_transaction_limit",
    "expired_card",
    "incorrect_address",
    "incorrect_cvc",
    "incorrect_number",
    "incorrect_zip",
    "insufficient_funds",
    "invalid_card_type",
    "invalid_charge_amount",
    "invalid_cvc",
    "invalid_expiry_month",
    "invalid_expiry_year",
    "invalid_number",
    "payment_intent_authentication_failure",
    "payment_intent_incompatible_payment_method",
    "payment_intent_payment_attempt_failed",
    "payment_method_currency_mismatch",
    "payment_method_customer_decline",
    "payment_method_not_available",
    "payment_method_provider_decline",
    "payment_method_unexpected_state",
    "payment_method_unsupported_type",
    "postal_code_invalid",
    "processing_error",
    "resource_missing",
    "test_mode_live_card",
];

/// Parameters of an intent that are the client's words.
const CLIENTS: [&str; 3] = ["amount", "currency", "payment_method"];

/// Codes of a refund that may be made later: the account has no money at the moment.
const NO_MONEY: [&str; 2] = ["balance_insufficient", "insufficient_funds"];

/// Reads a reply as an object.
///
/// # Errors
///
/// When it is a refusal, or not to be read.
pub fn read<T: for<'de> Deserialize<'de>>(reply: &Reply) -> Result<T, Refusal> {
    if !(200..300).contains(&reply.status) {
        return Err(refusal(reply));
    }
    serde_json::from_slice(&reply.body).map_err(|error| Refusal {
        class: Class::Unknown,
        code: "unreadable".to_owned(),
        reason: format!("{}: the body cannot be read: {error}", reply.status),
    })
}

/// Reads a reply that is no success.
#[must_use]
pub fn refusal(reply: &Reply) -> Refusal {
    let error = serde_json::from_slice(&reply.body).ok().map(|body: ErrorBody| body.error);
    let class = class(reply, error.as_ref());
    let error = error.unwrap_or_default();
    let code = error.why().unwrap_or("unspecified").to_owned();
    let words = error.message.as_ref().map_or("", Words::as_str);
    Refusal { class, reason: format!("{} {code}: {words}", reply.status), code }
}

fn class(reply: &Reply, error: Option<&Error>) -> Class {
    let code = error.and_then(|error| error.code.as_ref()).map_or("", Name::as_str);
    let kind = error.and_then(|error| error.kind.as_ref()).map_or("", Name::as_str);
    // By code first: the statuses and types of these have varied.
    match code {
        "idempotency_key_in_use" => return Class::InProgress,
        "lock_timeout" | "rate_limit" => return Class::NotExecuted,
        _ => {}
    }
    match (reply.status, kind) {
        (400..500, "idempotency_error") => Class::Mismatch,
        (401 | 403 | 409 | 429, _) => Class::NotExecuted,
        (400..500, _) if OURS.contains(&code) => Class::NotExecuted,
        (402, _) | (400..500, "card_error") => Class::Declined,
        (400, _) if code == "payment_intent_unexpected_state" => Class::Unexpected,
        // Not without Stripe's own words: something on the way may have answered.
        (404, _) if error.is_some() => Class::Missing,
        (400, _) if error.is_some_and(is_about_payment) => Class::Refused,
        (400, _) if error.is_some() => Class::Faulty,
        (500.., _) if reply.is_replayed || reply.should_retry == Some(false) => Class::Sticky,
        _ => Class::Unknown,
    }
}

/// Also without a code, or with one that is new: as long as it is about what the client chose, and not about how we say it.
fn is_about_payment(error: &Error) -> bool {
    let [code, param] =
        [&error.code, &error.param].map(|name| name.as_ref().map(Name::as_str).unwrap_or_default());
    ABOUT_PAYMENT.contains(&code) || (CLIENTS.contains(&param) && !code.starts_with("parameter"))
}

impl Refusal {
    /// Returns the answer that a refusal is by itself, whatever was asked for.
    #[must_use]
    pub fn answer(self) -> Answer {
        let reason = self.reason;
        match self.class {
            Class::InProgress => Answer::InProgress,
            Class::NotExecuted => Answer::NotExecuted { reason },
            Class::Mismatch => Answer::Mismatch { reason },
            Class::Unknown
            | Class::Sticky
            | Class::Declined
            | Class::Refused
            | Class::Faulty
            | Class::Unexpected
            | Class::Missing => Answer::Unknown { reason },
        }
    }
}

/// Reads the reply to the creation of an intent.
///
/// One that is not acceptable for what is to be paid is a decline: nothing was made of it, and without an intent nothing is ever
/// charged. With a fault of ours it waits until that is mended.
#[must_use]
pub fn prepared(reply: &Reply, asked: &Asked<'_>) -> Prepared {
    match read::<PaymentIntent>(reply) {
        // Whatever became of it since: it is the one.
        Ok(intent) => match contradiction(&intent, asked) {
            None => Prepared::Reference(intent.id.as_str().to_owned()),
            Some(reason) => Prepared::Answered(unknown(reason)),
        },
        Err(Refusal { class: Class::Declined | Class::Refused, code, .. }) => {
            Prepared::Answered(declined("", &code))
        }
        Err(Refusal { class: Class::Faulty, reason, .. }) => {
            Prepared::Answered(Answer::NotExecuted { reason })
        }
        // It has no id that anybody could be told.
        Err(Refusal { class: Class::Sticky, reason, .. }) => Prepared::Never { reason },
        Err(refusal) => Prepared::Answered(refusal.answer()),
    }
}

/// Reads the reply to a confirmation.
#[must_use]
pub fn confirmed(reply: &Reply, asked: &Asked<'_>) -> Confirmed {
    match read::<PaymentIntent>(reply) {
        Ok(intent) => attempted(&intent, asked, None),
        Err(Refusal { class: Class::Declined, code, .. }) => Confirmed::Failed { code },
        Err(refusal) => match refusal.class {
            Class::Refused | Class::Faulty | Class::Unexpected | Class::Sticky => Confirmed::Ask(refusal),
            _ => Confirmed::Answered(refusal.answer()),
        },
    }
}

/// Reads what an intent tells about the confirmation that was sent, and refused like that if it was.
#[must_use]
pub fn attempted(intent: &PaymentIntent, asked: &Asked<'_>, refusal: Option<&Refusal>) -> Confirmed {
    if let Some(reason) = contradiction(intent, asked) {
        return Confirmed::Answered(unknown(reason));
    }
    let why = intent.last_payment_error.as_ref().and_then(Error::why);
    match intent.status {
        IntentStatus::RequiresAction => Confirmed::Failed { code: "authentication_required".to_owned() },
        IntentStatus::RequiresPaymentMethod => {
            Confirmed::Failed { code: why.unwrap_or("card_declined").to_owned() }
        }
        IntentStatus::RequiresConfirmation => match refusal {
            Some(Refusal { class: Class::Refused, code, .. }) => Confirmed::Failed { code: code.clone() },
            _ => Confirmed::Answered(charged(intent, asked)),
        },
        _ => Confirmed::Answered(charged(intent, asked)),
    }
}

/// Reads what an intent tells about a charge.
#[must_use]
pub fn charged(intent: &PaymentIntent, asked: &Asked<'_>) -> Answer {
    if let Some(reason) = contradiction(intent, asked) {
        return unknown(reason);
    }
    match intent.status {
        IntentStatus::Succeeded if intent.amount_received.is_some_and(|amount| amount != intent.amount) => {
            unknown("another amount was received than was asked for")
        }
        IntentStatus::Succeeded => Answer::Succeeded { reference: intent.id.as_str().to_owned() },
        IntentStatus::Processing => Answer::InProgress,
        // After an attempt that failed: what was canceled is what nobody pays any more.
        IntentStatus::Canceled => match intent.last_payment_error.as_ref().and_then(Error::why) {
            Some(code) => declined(intent.id.as_str(), code),
            None => Answer::Fenced,
        },
        IntentStatus::RequiresPaymentMethod
        | IntentStatus::RequiresConfirmation
        | IntentStatus::RequiresAction => unknown("not charged so far, and not canceled"),
        IntentStatus::RequiresCapture => unknown("authorised, and not captured: this was not asked for"),
        IntentStatus::Other => unknown("the intent's status is not known to this version"),
    }
}

/// Says how an intent is not the one that was asked about.
fn contradiction(intent: &PaymentIntent, asked: &Asked<'_>) -> Option<&'static str> {
    let key = intent.metadata.key.as_ref().map(Name::as_str);
    if asked.reference.is_some_and(|reference| reference != intent.id.as_str()) || key != Some(asked.key) {
        Some("the answer is about another charge")
    } else if intent.livemode != asked.livemode {
        Some("the answer is of the other mode, live or test")
    } else if intent.amount != asked.amount || !is_same_currency(&intent.currency, asked.currency) {
        Some("the answer is about another amount")
    } else {
        None
    }
}

/// Reads what a refund tells.
#[must_use]
pub fn refunded(refund: &Refund, asked: &AskedRefund<'_>) -> Answer {
    let intent = refund.payment_intent.as_ref().map(|intent| match intent {
        Related::Id(id) => id.as_str(),
        Related::Object(intent) => intent.id.as_str(),
    });
    let key = refund.metadata.key.as_ref().map(Name::as_str);
    if intent != Some(asked.intent) || key != Some(asked.key) {
        return unknown("the answer is about another refund");
    }
    if refund.amount != asked.amount || !is_same_currency(&refund.currency, asked.currency) {
        return unknown("the answer is about another amount");
    }
    let reference = refund.id.as_str();
    match refund.status {
        Some(RefundStatus::Succeeded) => Answer::Succeeded { reference: reference.to_owned() },
        Some(RefundStatus::Pending | RefundStatus::RequiresAction) => Answer::InProgress,
        Some(RefundStatus::Failed) => {
            declined(reference, refund.failure_reason.as_ref().map_or("failed", Name::as_str))
        }
        Some(RefundStatus::Canceled) => declined(reference, "canceled"),
        Some(RefundStatus::Other) | None => unknown("the refund's status is not known to this version"),
    }
}

/// Reads a refusal to refund. None of them is final: the amount stays taken until a refund itself tells that it failed.
#[must_use]
pub fn refund_refused(refusal: Refusal) -> Answer {
    match refusal.class {
        Class::Refused | Class::Faulty if NO_MONEY.contains(&refusal.code.as_str()) => {
            Answer::NotExecuted { reason: refusal.reason }
        }
        // What we have on record says that the money is there to be given back, so somebody else has been at it.
        Class::Refused | Class::Faulty => Answer::Mismatch { reason: refusal.reason },
        _ => refusal.answer(),
    }
}

fn is_same_currency(theirs: &Name, ours: &str) -> bool {
    theirs.as_str().eq_ignore_ascii_case(ours)
}

fn unknown(reason: &str) -> Answer {
    Answer::Unknown { reason: reason.to_owned() }
}

#[cfg(test)]
mod tests;
