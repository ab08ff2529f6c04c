//! Refunds: money of a payment given back by the provider that took it.
//!
//! Promise: at most one refund per key, whatever dies when; and the refunds of a payment never add up to more than it, however
//! many are asked for at a time.
//!
//! How: as with [`payments`](crate::payments), claim, refund and the provider's request are committed before the first byte
//! goes out ([`create`]), in the statement that takes the amount from what is left of the payment. It is given back only when
//! it is certain that the money was not. Whoever holds the fence drives the refund on ([`recovery`]), and a definitive answer
//! is written down in the statement that settles ([`settle`]).
//!
//! There is no fence at the provider for a refund, so none is ever rolled back: silence leaves it open, and its amount taken.
//! In a crash, the rows say where to go on: the same request under the same key for as long as the provider recognises it,
//! then a look-up, then a person.

pub(crate) mod audit;
pub mod create;
pub(crate) mod hearing;
pub mod operator;
pub mod recovery;
pub mod settle;

use semel_core::database;
use semel_core::idempotency::{ClientId, Command, InvalidCommand};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::orders::MAX_AMOUNT;
use crate::page::{Cursor, Page};

/// The event, of the payment, that tells of a refund that succeeded.
pub const PAYMENT_REFUNDED: &str = "PaymentRefunded";
/// The event, of the payment, that tells of a refund that the provider failed to make.
pub const PAYMENT_REFUND_FAILED: &str = "PaymentRefundFailed";

/// The intent to give money of a payment back.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CreateRefund {
    /// The payment.
    pub payment_id: Uuid,
    /// In minor units of the payment's currency, positive.
    pub amount: i64,
}

impl Command for CreateRefund {
    const OPERATION: &'static str = "refunds.create";

    fn validate(&self) -> Result<(), InvalidCommand> {
        if (1..=MAX_AMOUNT).contains(&self.amount) {
            return Ok(());
        }
        let reason = "must be a whole number of minor units, from 1 to 1,000,000,000,000".to_owned();
        Err(InvalidCommand { field: "amount", reason })
    }
}

/// A refund as its client sees it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Refund {
    /// Its id.
    pub id: Uuid,
    /// The payment whose money it gives back.
    pub payment_id: Uuid,
    /// `processing`, `succeeded`, `failed`, or `refused` when it was larger than what was left.
    pub status: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// Why it failed; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_code: Option<String>,
}

/// Returns where a refund is.
#[must_use]
pub fn location(refund_id: Uuid) -> String {
    format!("/v1/refunds/{refund_id}")
}

/// Returns one of the client's refunds.
///
/// # Errors
///
/// When the database fails.
pub async fn find(pool: &PgPool, client: &ClientId, refund_id: Uuid) -> Result<Option<Refund>, sqlx::Error> {
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Refund,
            "-- refunds_find
            SELECT refund_id AS id, payment_id, status, amount, currency, failure_code FROM refunds
            WHERE client_id = $1 AND refund_id = $2",
            client.as_str(),
            refund_id
        )
        .fetch_optional(connection)
        .await
    })
    .await
}

/// Returns a page of the refunds of one of the client's payments, the newest first, and where the next page begins.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    pool: &PgPool,
    client: &ClientId,
    payment_id: Uuid,
    page: Page,
) -> Result<(Vec<Refund>, Option<Cursor>), sqlx::Error> {
    let before = page.place();
    let rows = database::call(pool, async |connection| {
        sqlx::query_as!(
            Row,
            "-- refunds_list
            SELECT refund_id, payment_id, status, amount, currency, failure_code, created_at FROM refunds
            WHERE client_id = $1 AND payment_id = $2 AND (created_at, refund_id) < ($3, $4)
            ORDER BY created_at DESC, refund_id DESC LIMIT $5",
            client.as_str(),
            payment_id,
            before.created_at,
            before.id,
            page.rows()
        )
        .fetch_all(connection)
        .await
    });
    Ok(page.cut(rows.await?.into_iter().map(Row::entry)))
}

/// Returns a page of the client's refunds, of whichever payment, the newest first, and where the next page begins.
///
/// # Errors
///
/// When the database fails.
pub async fn list_all(
    pool: &PgPool,
    client: &ClientId,
    page: Page,
) -> Result<(Vec<Refund>, Option<Cursor>), sqlx::Error> {
    let before = page.place();
    let rows = database::call(pool, async |connection| {
        sqlx::query_as!(
            Row,
            "-- refunds_list_all
            SELECT refund_id, payment_id, status, amount, currency, failure_code, created_at FROM refunds
            WHERE client_id = $1 AND (created_at, refund_id) < ($2, $3)
            ORDER BY created_at DESC, refund_id DESC LIMIT $4",
            client.as_str(),
            before.created_at,
            before.id,
            page.rows()
        )
        .fetch_all(connection)
        .await
    });
    Ok(page.cut(rows.await?.into_iter().map(Row::entry)))
}

/// An entry of a list.
struct Row {
    refund_id: Uuid,
    payment_id: Uuid,
    status: String,
    amount: i64,
    currency: String,
    failure_code: Option<String>,
    created_at: OffsetDateTime,
}

impl Row {
    fn entry(self) -> (Cursor, Refund) {
        let Self { refund_id, payment_id, status, amount, currency, failure_code, created_at } = self;
        let refund = Refund { id: refund_id, payment_id, status, amount, currency, failure_code };
        (Cursor { created_at, id: refund_id }, refund)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_amount_that_is_not_acceptable_is_named() {
        let refund = |amount| CreateRefund { payment_id: Uuid::from_u128(7), amount };
        refund(1).validate().unwrap();
        refund(MAX_AMOUNT).validate().unwrap();
        for amount in [0, -1, i64::MIN, MAX_AMOUNT + 1, i64::MAX] {
            assert_eq!(refund(amount).validate().unwrap_err().field, "amount", "{amount}");
        }
    }
}
