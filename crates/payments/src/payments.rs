//! Payments: money moved by a provider that is in no transaction of ours.
//!
//! Promise: at most one charge per key, whatever dies when; and every payment is settled, by the provider's word or by a
//! fence behind which no charge can succeed.
//!
//! How: claim, payment and the provider's request, byte for byte, are committed before the first byte goes out
//! ([`create`]); from then on "maybe charged" is assumed, and nothing releases the key but its completion. The execution is
//! driven on from its recovery point by whoever holds the fence ([`recovery`]): this request, a retry, the reaper. Every
//! definitive answer is written down as evidence, stale fence or not, in the statement that settles ([`settle`]).
//!
//! In a crash, the rows say where to go on: the same request again under the same key while it is young, then a look-up,
//! then a fence.

pub(crate) mod audit;
pub mod create;
pub(crate) mod hearing;
pub mod operator;
pub mod recovery;
pub mod retention;
pub mod settle;

use semel_core::database::{self, Failure};
use semel_core::idempotency::{ClientId, Command, InvalidCommand};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::currency;
use crate::orders::MAX_AMOUNT;
use crate::page::{Cursor, Page};

/// The aggregate type of a payment's events.
pub const AGGREGATE_TYPE: &str = "payment";
/// The event that tells of a payment that succeeded.
pub const PAYMENT_CREATED: &str = "PaymentCreated";
/// The event that tells of a payment that the provider declined.
pub const PAYMENT_DECLINED: &str = "PaymentDeclined";
/// The event that tells of a payment that was fenced and rolled back.
pub const PAYMENT_CANCELED: &str = "PaymentCanceled";

/// Where an execution of a payment stands.
pub(crate) mod recovery_point {
    /// The provider's request may have gone out.
    pub(crate) const SENT: &str = "sent";
    /// It is being fenced: nobody sends any more.
    pub(crate) const CANCELING: &str = "canceling";
}

/// The intent to make a payment.
#[derive(Clone, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CreatePayment {
    /// The client's own name for the payment, 1 to 255 bytes.
    pub reference: String,
    /// In minor units of the currency, positive.
    pub amount: i64,
    /// ISO 4217 code, three capital letters.
    pub currency: String,
    /// The provider's token of the card or account to charge, 1 to 255 visible ASCII characters; a secret.
    pub source: String,
}

/// Shows everything but the source.
impl std::fmt::Debug for CreatePayment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatePayment")
            .field("reference", &self.reference)
            .field("amount", &self.amount)
            .field("currency", &self.currency)
            .finish_non_exhaustive()
    }
}

impl Command for CreatePayment {
    const OPERATION: &'static str = "payments.create";

    fn validate(&self) -> Result<(), InvalidCommand> {
        let invalid = |field, reason: &str| Err(InvalidCommand { field, reason: reason.to_owned() });
        if !(1..=255).contains(&self.reference.len()) || self.reference.chars().any(char::is_control) {
            return invalid("reference", "must be 1 to 255 bytes of text without control characters");
        }
        if looks_like_a_card(&self.reference) {
            return invalid("reference", "looks like a card number, which never belongs here");
        }
        if !(1..=MAX_AMOUNT).contains(&self.amount) {
            return invalid("amount", "must be a whole number of minor units, from 1 to 1,000,000,000,000");
        }
        if !currency::is_known(&self.currency) {
            return invalid(
                "currency",
                "must be a current code of ISO 4217 in capital letters, such as \"EUR\"",
            );
        }
        if !(1..=255).contains(&self.source.len()) || !self.source.bytes().all(|b| b.is_ascii_graphic()) {
            return invalid("source", "must be a token of 1 to 255 visible ASCII characters");
        }
        if looks_like_a_card(&self.source) {
            return invalid("source", "looks like a card number; only a token of the provider belongs here");
        }
        Ok(())
    }
}

/// Says whether a text holds 13 to 19 digits, spaced or not, that pass the Luhn check of card numbers (ISO/IEC 7812).
fn looks_like_a_card(text: &str) -> bool {
    let runs = text.split(|c: char| !c.is_ascii_digit() && c != ' ' && c != '-');
    runs.map(|run| run.bytes().filter(u8::is_ascii_digit).map(|b| u32::from(b - b'0')).collect::<Vec<_>>())
        .any(|digits| (13..=19).contains(&digits.len()) && passes_luhn(&digits))
}

fn passes_luhn(digits: &[u32]) -> bool {
    let sum: u32 = digits
        .iter()
        .rev()
        .enumerate()
        .map(|(place, &digit)| match (place % 2, digit * 2) {
            (0, _) => digit,
            (_, doubled) if doubled > 9 => doubled - 9,
            (_, doubled) => doubled,
        })
        .sum();
    sum.is_multiple_of(10)
}

/// A payment as its client sees it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Payment {
    /// Its id.
    pub id: Uuid,
    /// `processing`, `succeeded`, `declined` or `canceled`.
    pub status: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// Why it was declined; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decline_code: Option<String>,
}

/// Returns one of the client's payments.
///
/// # Errors
///
/// When the database fails.
pub async fn find(
    pool: &PgPool,
    client: &ClientId,
    payment_id: Uuid,
) -> Result<Option<Payment>, sqlx::Error> {
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Payment,
            "-- payments_find
        SELECT payment_id AS id, status, reference, amount, currency, decline_code
        FROM payments WHERE client_id = $1 AND payment_id = $2",
            client.as_str(),
            payment_id
        )
        .fetch_optional(connection)
        .await
    })
    .await
}

/// What there is of a payment to be refunded.
pub(crate) struct Refundable {
    pub(crate) status: String,
    /// In minor units; what refunds have not taken yet.
    pub(crate) left: i64,
    pub(crate) currency: String,
    /// The key that its charge was made under.
    pub(crate) provider_key: String,
    /// The provider's own name for the charge; there is one for each success.
    pub(crate) provider_reference: Option<String>,
}

/// Returns what there is of one of the client's payments to be refunded.
pub(crate) async fn refundable(
    connection: &mut PgConnection,
    client: &ClientId,
    payment_id: Uuid,
) -> Result<Option<Refundable>, sqlx::Error> {
    sqlx::query_as!(
        Refundable,
        r#"-- payments_to_refund
        SELECT status, amount - refund_reserved AS "left!", currency, provider_key, provider_reference
        FROM payments WHERE client_id = $1 AND payment_id = $2"#,
        client.as_str(),
        payment_id
    )
    .fetch_optional(connection)
    .await
}

/// Says whether somebody holds a payment's row at this moment, so that nothing can be taken of it.
pub(crate) async fn is_locked(connection: &mut PgConnection, payment_id: Uuid) -> Result<bool, sqlx::Error> {
    let locked = sqlx::query_scalar!(
        "-- payments_is_locked
        SELECT payment_id FROM payments WHERE payment_id = $1 FOR NO KEY UPDATE NOWAIT",
        payment_id
    )
    .fetch_optional(connection)
    .await;
    match locked {
        Err(error) if database::failure(&error) == Failure::LockTimeout => Ok(true),
        locked => locked.map(|_| false),
    }
}

/// Returns a page of the client's payments, the newest first, and where the next page begins.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    pool: &PgPool,
    client: &ClientId,
    page: Page,
) -> Result<(Vec<Payment>, Option<Cursor>), sqlx::Error> {
    let before = page.place();
    let rows = database::call(pool, async |connection| {
        sqlx::query!(
            "-- payments_list
            SELECT payment_id, status, reference, amount, currency, decline_code, created_at FROM payments
            WHERE client_id = $1 AND (created_at, payment_id) < ($2, $3)
            ORDER BY created_at DESC, payment_id DESC LIMIT $4",
            client.as_str(),
            before.created_at,
            before.id,
            page.rows()
        )
        .fetch_all(connection)
        .await
    });
    let entries = rows.await?.into_iter().map(|row| {
        let payment = Payment {
            id: row.payment_id,
            status: row.status,
            reference: row.reference,
            amount: row.amount,
            currency: row.currency,
            decline_code: row.decline_code,
        };
        (Cursor { created_at: row.created_at, id: row.payment_id }, payment)
    });
    Ok(page.cut(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payment() -> CreatePayment {
        CreatePayment {
            reference: "A-1".to_owned(),
            amount: 1250,
            currency: "EUR".to_owned(),
            source: "tok_visa".to_owned(),
        }
    }

    #[test]
    fn names_the_field_that_is_not_acceptable() {
        type Change = fn(&mut CreatePayment);
        payment().validate().unwrap();
        let changes: [(Change, &str); 9] = [
            (|p| p.reference = String::new(), "reference"),
            (|p| p.reference = "order 4242 4242 4242 4242".to_owned(), "reference"),
            (|p| p.amount = 0, "amount"),
            (|p| p.amount = MAX_AMOUNT + 1, "amount"),
            (|p| p.currency = "euro".to_owned(), "currency"),
            (|p| p.source = String::new(), "source"),
            (|p| p.source = "tok visa".to_owned(), "source"),
            (|p| p.source = "4242424242424242".to_owned(), "source"),
            (|p| p.source = "4000-0566-5566-5556".to_owned(), "source"),
        ];
        for (change, field) in changes {
            let mut command = payment();
            change(&mut command);
            let invalid = command.validate().unwrap_err();
            assert_eq!(invalid.field, field, "{command:?}");
            assert!(!invalid.to_string().contains("4242"), "{invalid}");
        }
    }

    #[test]
    fn takes_no_number_for_a_card_that_is_none() {
        for text in
            ["4242424242424241", "12345", "ord-20261201-000123", "424242424242424242424242", "tok_1N4242"]
        {
            assert!(!looks_like_a_card(text), "{text}");
        }
    }

    #[test]
    fn debug_output_does_not_show_the_source() {
        assert!(!format!("{:?}", payment()).contains("tok_visa"));
    }
}
