//! What Stripe's API sends, as far as anything here depends on it.
//!
//! Fields that are not named are passed over, so that another version of the API can add some. Nothing that is kept is without
//! a bound: a name that is too long to be one makes the object unreadable, words are cut.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::provider::clean;

/// The entry of an object's metadata that holds the key which it was asked for under.
pub const KEY: &str = "semel_key";
/// Most bytes of a name; the database takes no longer ones.
const NAME: usize = 255;
/// Most bytes kept of words that are for people.
const WORDS: usize = 200;

/// A name or code that Stripe gave: at most 255 bytes without control characters.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Name(String);

impl Name {
    /// Returns it as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_name = (1..=NAME).contains(&text.len()) && !text.chars().any(char::is_control);
        if is_name { Ok(Self(text)) } else { Err(de::Error::custom("not a name of 1 to 255 bytes")) }
    }
}

/// Words for people: cut, and without control characters.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Words(String);

impl Words {
    /// Returns them as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(clean(&String::deserialize(deserializer)?, WORDS)))
    }
}

/// Our entry of an object's metadata; others may have put theirs beside it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
pub struct Metadata {
    /// The key that the charge or refund was asked for under; absent from what is not ours.
    #[serde(rename = "semel_key")]
    pub key: Option<Name>,
}

/// Reads nothing at all as the default, be it left out or null.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Another object, by its id or in full.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(untagged)]
pub enum Related<T> {
    /// Its id.
    Id(Name),
    /// The object, where the request asked for it.
    Object(Box<T>),
}

/// A `PaymentIntent`: what may become a charge.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct PaymentIntent {
    /// `pi_…`.
    pub id: Name,
    /// Where it stands.
    pub status: IntentStatus,
    /// In Stripe's smallest unit of the currency.
    pub amount: i64,
    /// How much has been received.
    pub amount_received: Option<i64>,
    /// ISO 4217 code, in small letters.
    pub currency: Name,
    /// Whether it is about real money.
    pub livemode: bool,
    /// What we attached to it.
    #[serde(default, deserialize_with = "or_default")]
    pub metadata: Metadata,
    /// Why the last attempt to confirm it failed.
    pub last_payment_error: Option<Error>,
    /// The charge of the last attempt.
    pub latest_charge: Option<Related<Charge>>,
}

/// Where a `PaymentIntent` stands.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum IntentStatus {
    /// It has no means of payment, or that was declined.
    RequiresPaymentMethod,
    /// Nobody has confirmed it yet.
    RequiresConfirmation,
    /// The payer has to do something.
    RequiresAction,
    /// Under way.
    Processing,
    /// Authorised, and not captured.
    RequiresCapture,
    /// Canceled, for ever.
    Canceled,
    /// The money has moved.
    Succeeded,
    /// One that this version does not know.
    #[serde(other)]
    Other,
}

/// A charge: one attempt of a `PaymentIntent`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct Charge {
    /// `ch_…`.
    pub id: Name,
    /// In Stripe's smallest unit of the currency.
    pub amount: i64,
    /// How much of it was given back.
    #[serde(default)]
    pub amount_refunded: i64,
    /// ISO 4217 code, in small letters.
    pub currency: Name,
    /// Whether it is about real money.
    pub livemode: bool,
    /// The `PaymentIntent` that it is of.
    pub payment_intent: Option<Related<PaymentIntent>>,
}

/// A refund.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct Refund {
    /// `re_…`.
    pub id: Name,
    /// Where it stands; absent only from very old ones.
    pub status: Option<RefundStatus>,
    /// In Stripe's smallest unit of the currency.
    pub amount: i64,
    /// ISO 4217 code, in small letters.
    pub currency: Name,
    /// The `PaymentIntent` whose money it gives back.
    pub payment_intent: Option<Related<PaymentIntent>>,
    /// What we attached to it.
    #[serde(default, deserialize_with = "or_default")]
    pub metadata: Metadata,
    /// Why it failed.
    pub failure_reason: Option<Name>,
}

/// Where a refund stands.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum RefundStatus {
    /// Under way.
    Pending,
    /// The payer has to do something.
    RequiresAction,
    /// The money has been given back.
    Succeeded,
    /// It has not, and will not.
    Failed,
    /// Called off before it took place.
    Canceled,
    /// One that this version does not know.
    #[serde(other)]
    Other,
}

/// A page of a list.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct List<T> {
    /// What is on it.
    pub data: Vec<T>,
    /// Whether there is another page, which begins after the last one here.
    #[serde(default)]
    pub has_more: bool,
}

/// Something that happened, as a webhook tells it. Its object is read by whoever knows the type.
#[derive(Debug, Deserialize)]
pub struct Event {
    /// `evt_…`.
    pub id: Name,
    /// Such as `payment_intent.succeeded`.
    #[serde(rename = "type")]
    pub kind: Name,
    /// The connected account whose it is; none when it is ours.
    pub account: Option<Name>,
    /// Whether it is about real money.
    pub livemode: bool,
    /// When it happened, in seconds since 1970.
    pub created: i64,
    /// What it happened to.
    pub data: EventData,
}

/// What an event happened to.
#[derive(Debug, Deserialize)]
pub struct EventData {
    /// The object as it was then, unread.
    pub object: Box<RawValue>,
}

/// The body of a refusal.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
pub struct ErrorBody {
    /// What was wrong.
    pub error: Error,
}

/// What was wrong with a request, or with the last attempt to confirm an intent.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
pub struct Error {
    /// `api_error`, `card_error`, `idempotency_error` or `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: Option<Name>,
    /// Such as `card_declined`.
    pub code: Option<Name>,
    /// The issuer's reason, such as `insufficient_funds`.
    pub decline_code: Option<Name>,
    /// The parameter that it is about.
    pub param: Option<Name>,
    /// For people.
    #[serde(default)]
    pub message: Option<Words>,
}

impl Error {
    /// Returns why a card was declined: the issuer's reason, or else Stripe's.
    #[must_use]
    pub fn why(&self) -> Option<&str> {
        self.decline_code.as_ref().or(self.code.as_ref()).map(Name::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn passes_over_what_it_does_not_know() {
        let intent: PaymentIntent = serde_json::from_value(json!({
            "id": "pi_1", "object": "payment_intent", "amount": 5, "currency": "eur", "livemode": false,
            "status": "requires_something_new", "metadata": {"theirs": "x", "semel_key": "k"},
            "latest_charge": "ch_1", "last_payment_error": null, "new": {"deep": [1]}
        }))
        .unwrap();
        assert_eq!(intent.status, IntentStatus::Other);
        assert_eq!(intent.metadata.key.unwrap().as_str(), "k");
        assert_eq!(intent.latest_charge, Some(Related::Id(Name("ch_1".to_owned()))));
    }

    #[test]
    fn reads_a_charge_that_is_given_in_full() {
        let charge = json!({"id": "ch_1", "amount": 5, "amount_refunded": 2, "currency": "eur", "livemode": false,
                            "payment_intent": "pi_1"});
        let intent: PaymentIntent = serde_json::from_value(json!({
            "id": "pi_1", "amount": 5, "currency": "eur", "livemode": false, "status": "succeeded",
            "latest_charge": charge
        }))
        .unwrap();
        let Some(Related::Object(charge)) = intent.latest_charge else { panic!("{intent:?}") };
        assert_eq!(charge.amount_refunded, 2);
    }

    #[test]
    fn refuses_names_that_are_none_and_cuts_words() {
        let read = |code: &str| serde_json::from_value::<Error>(json!({"code": code}));
        assert!(read("card_declined").is_ok());
        for code in ["", "a\0b", &"x".repeat(256)] {
            assert!(read(code).is_err());
        }
        let long: Error = serde_json::from_value(json!({"message": "é\n".repeat(1_000)})).unwrap();
        assert_eq!(long.message.unwrap().as_str(), "é".repeat(100));
    }

    #[test]
    fn leaves_the_object_of_an_event_unread() {
        let body = r#"{"id": "evt_1", "type": "payment_intent.succeeded", "livemode": false, "created": 1,
                       "data": {"object": {"id": "pi_1"}}, "request": null}"#;
        let event: Event = serde_json::from_str(body).unwrap();
        assert_eq!(event.data.object.get(), r#"{"id": "pi_1"}"#);
    }
}
