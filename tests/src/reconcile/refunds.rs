//! Refunds: what the client was told, the rows, the provider's book, and what is taken of each payment.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Differ, Sources, by};

/// A refund in the database.
#[derive(Clone, Debug, Deserialize, Serialize, sqlx::FromRow)]
pub struct RefundRow {
    /// Its id.
    pub refund_id: Uuid,
    /// The payment whose money it gives back.
    pub payment_id: Uuid,
    /// The key it was asked for under.
    pub key: String,
    /// `processing`, `succeeded`, `failed` or `refused`.
    pub status: String,
    /// The key towards the provider; none where it was not asked.
    pub provider_key: Option<String>,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

impl RefundRow {
    /// Whether its outcome is told by an event of its payment.
    pub(super) fn is_told(&self) -> bool {
        matches!(self.status.as_str(), "succeeded" | "failed")
    }

    /// Whether it takes of its payment.
    fn is_taken(&self) -> bool {
        matches!(self.status.as_str(), "succeeded" | "processing")
    }
}

pub(super) fn refunds_and_client(sources: &Sources, differ: Differ<'_>) {
    let rows = by(&sources.refunds, |row| row.refund_id);
    for told in &sources.told_refunds {
        let rows = rows.get(&told.refund_id).map_or(&[][..], Vec::as_slice);
        let [row] = rows else {
            let rows = rows.len();
            differ(&told.refund_id, format!("the client was told of it, and it has {rows} rows in refunds"));
            continue;
        };
        if (&row.status, row.payment_id, row.amount, &row.currency, &row.key)
            != (&told.status, told.payment_id, told.amount, &told.currency, &told.key)
        {
            differ(
                &told.refund_id,
                format!("told as {} {}, stored as {} {}", told.status, told.amount, row.status, row.amount),
            );
        }
    }
    let told: BTreeSet<Uuid> = sources.told_refunds.iter().map(|told| told.refund_id).collect();
    for row in &sources.refunds {
        if !told.contains(&row.refund_id) {
            differ(&row.refund_id, "stored in refunds, and the client was never told".to_owned());
        }
        if row.status == "processing" {
            differ(&row.refund_id, "still in processing".to_owned());
        }
    }
}

pub(super) fn refunds_and_provider(sources: &Sources, differ: Differ<'_>) {
    let made = by(sources.provider.iter().filter(|line| line.kind == "refund"), |line| line.key.clone());
    let charge_keys: BTreeMap<Uuid, &String> =
        sources.payments.iter().map(|row| (row.payment_id, &row.provider_key)).collect();
    let mut known = BTreeSet::new();
    for row in &sources.refunds {
        let Some(key) = &row.provider_key else { continue };
        known.insert(key);
        let lines = made.get(key).map_or(&[][..], Vec::as_slice);
        let expected = usize::from(row.status == "succeeded");
        if lines.len() != expected {
            let made = lines.len();
            differ(&row.refund_id, format!("{} here, and made {made} times by the provider", row.status));
        }
        for line in lines {
            if (line.amount, &line.currency) != (row.amount, &row.currency)
                || charge_keys.get(&row.payment_id) != Some(&&line.charge_key)
            {
                differ(
                    &row.refund_id,
                    format!(
                        "{} here, and the provider gave {} of {} back",
                        row.amount, line.amount, line.charge_key
                    ),
                );
            }
        }
    }
    for key in made.keys() {
        if !known.contains(key) {
            differ(key, "given back by the provider, and no refund knows of it".to_owned());
        }
    }
}

pub(super) fn refunds_and_payments(sources: &Sources, differ: Differ<'_>) {
    let rows = by(&sources.refunds, |row| row.payment_id);
    for payment in &sources.payments {
        let refunds = rows.get(&payment.payment_id).map_or(&[][..], Vec::as_slice);
        let taken: i64 = refunds.iter().filter(|row| row.is_taken()).map(|row| row.amount).sum();
        if taken != payment.refund_reserved || taken > payment.amount {
            differ(
                &payment.payment_id,
                format!(
                    "{taken} of {} refunded, and {} taken for it",
                    payment.amount, payment.refund_reserved
                ),
            );
        }
    }
}

/// Reads the refunds of a payments database.
///
/// # Errors
///
/// The database fails.
pub async fn read_refunds(connection: &mut PgConnection) -> Result<Vec<RefundRow>> {
    let sql = "SELECT refund_id, payment_id, idempotency_key AS key, status, provider_key, amount, currency
               FROM refunds ORDER BY refund_id";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}
