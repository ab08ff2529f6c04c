//! The SQL of the ledger's tables.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::booking::Booking;

/// Writes the transaction and its two entries.
pub(crate) async fn post(
    tx: &mut PgConnection,
    event_id: Uuid,
    booking: &Booking,
) -> Result<Uuid, sqlx::Error> {
    let (source_type, source_id) = booking.source;
    sqlx::query_scalar!(
        r#"-- ledger_post
        WITH booked AS (
            INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
            VALUES ($1, $2, $3, $4)
            RETURNING transaction_id
        ), entered AS (
            INSERT INTO ledger_entries (transaction_id, account, currency, amount)
            SELECT transaction_id, account, $5, amount
            FROM booked, (VALUES ($6, $8::BIGINT), ($7, -$8::BIGINT)) AS entries (account, amount)
        )
        SELECT transaction_id AS "transaction_id!" FROM booked"#,
        event_id,
        booking.client_id,
        source_type,
        source_id.to_string(),
        booking.currency,
        booking.debit,
        booking.credit,
        booking.amount
    )
    .fetch_one(tx)
    .await
}

/// What one account of a client holds in one currency: the sum of its entries.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Balance {
    /// Whose account it is.
    pub client_id: String,
    /// `cash`, `receivables` or `sales`.
    pub account: String,
    /// ISO 4217 code.
    pub currency: String,
    /// In minor units; debits are positive.
    pub balance: i64,
}

/// Which balances are asked for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Page {
    /// Of this client alone.
    pub client_id: Option<String>,
    /// Behind this client, account and currency.
    pub after: (String, String, String),
    /// At most so many.
    pub limit: i64,
}

/// Reads a page of balances, in the order of client, account and currency.
///
/// # Errors
///
/// When the database fails, or takes longer than it gives a statement.
pub async fn balances(connection: &mut PgConnection, page: &Page) -> Result<Vec<Balance>, sqlx::Error> {
    let (client_id, account, currency) = &page.after;
    sqlx::query_as!(
        Balance,
        r#"-- ledger_balances
        SELECT client_id, account, currency, sum(amount)::BIGINT AS "balance!"
        FROM ledger_transactions JOIN ledger_entries USING (transaction_id)
        WHERE client_id >= COALESCE($4::TEXT, $1) AND client_id <= COALESCE($4, client_id)
          AND (client_id, account, currency) > ($1, $2, $3)
        GROUP BY client_id, account, currency
        ORDER BY client_id, account, currency
        LIMIT $5"#,
        client_id,
        account,
        currency,
        page.client_id.as_deref(),
        page.limit
    )
    .fetch_all(connection)
    .await
}
