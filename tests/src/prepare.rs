//! A database with every table that there is, which the compiler checks queries against.

use anyhow::Result;
use semel_core::schema::{self, ENGINE, INBOX};
use semel_ledger::LEDGER;
use semel_payments::schema::PAYMENTS;
use sqlx::Executor as _;

use crate::services::Services;

/// Makes it anew, and returns its URL.
///
/// # Errors
///
/// The server or a migration fails.
pub async fn database(services: &Services) -> Result<String> {
    let database = services.postgres.lasting_database("semel_prepare").await?;
    // A migration that is being written changes under the same number, so nothing of the last time may stay.
    let mut connection = database.connect().await?;
    connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION CURRENT_USER").await?;
    schema::migrate(&database.admin_url().parse()?, &[&ENGINE, &INBOX, &PAYMENTS, &LEDGER]).await?;
    Ok(database.admin_url())
}
