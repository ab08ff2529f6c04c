//! Whether the independent places agree: what the client was told, the orders, the outboxes, what the broker routed, the
//! ledger.
//!
//! Each is read on its own; none is derived from another. A difference names the id that differs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::client::{Acknowledged, ToldPayment, ToldRefund};
use crate::provider::BookLine;
use crate::tap::Tapped;

mod refunds;

pub use refunds::{RefundRow, read_refunds};

/// What the independent places say.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Sources {
    /// Orders that the client was told of.
    pub acknowledged: Vec<Acknowledged>,
    /// Payments that the client was finally told of.
    #[serde(default)]
    pub told: Vec<ToldPayment>,
    /// Refunds that the client was finally told of.
    #[serde(default)]
    pub told_refunds: Vec<ToldRefund>,
    /// Orders in the database.
    pub orders: Vec<OrderRow>,
    /// Payments in the database.
    #[serde(default)]
    pub payments: Vec<PaymentRow>,
    /// Refunds in the database.
    #[serde(default)]
    pub refunds: Vec<RefundRow>,
    /// The provider's own book.
    #[serde(default)]
    pub provider: Vec<BookLine>,
    /// Events in the outboxes.
    pub outbox: Vec<OutboxRow>,
    /// Messages that the broker routed, in order of arrival.
    pub tap: Vec<Tapped>,
    /// Bookings of the ledger.
    pub ledger: Vec<Booking>,
}

/// An order in the database.
#[derive(Clone, Debug, Deserialize, Serialize, sqlx::FromRow)]
pub struct OrderRow {
    /// Its id.
    pub order_id: Uuid,
    /// The key it was placed under.
    pub key: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// A payment in the database.
#[derive(Clone, Debug, Deserialize, Serialize, sqlx::FromRow)]
pub struct PaymentRow {
    /// Its id.
    pub payment_id: Uuid,
    /// The key it was asked for under.
    pub key: String,
    /// `processing`, `succeeded`, `declined` or `canceled`.
    pub status: String,
    /// The key towards the provider.
    pub provider_key: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// In minor units; what refunds have taken of it.
    #[serde(default)]
    pub refund_reserved: i64,
}

/// An event in an outbox.
#[derive(Clone, Debug, Deserialize, Serialize, sqlx::FromRow)]
pub struct OutboxRow {
    /// The event.
    pub event_id: Uuid,
    /// Its place in its outbox.
    pub id: i64,
    /// What kind of thing changed.
    pub aggregate_type: String,
    /// Which one.
    pub aggregate_id: String,
    /// Whether it is marked as published.
    pub published: bool,
}

/// A booking of the ledger.
#[derive(Clone, Debug, Deserialize, Serialize, sqlx::FromRow)]
pub struct Booking {
    /// The event that was booked.
    pub event_id: Uuid,
    /// What kind of thing it tells of: `order`, `payment` or `refund`.
    pub source_type: String,
    /// Which one.
    pub source_id: String,
    /// On cash, in minor units; debits are positive.
    pub cash: i64,
    /// On receivables.
    pub receivables: i64,
    /// On sales.
    pub sales: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// Two places that disagree about an id.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Difference {
    /// What they disagree about.
    pub id: String,
    /// How.
    pub statement: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.id, self.statement)
    }
}

/// Compares the places, and returns what they disagree about; nothing when they agree.
#[must_use]
pub fn reconcile(sources: &Sources) -> Vec<Difference> {
    let mut differences = BTreeSet::new();
    let mut differ = |id: &dyn fmt::Display, statement: String| {
        differences.insert(Difference { id: id.to_string(), statement });
    };
    orders_and_acknowledgements(sources, &mut differ);
    orders_and_events(sources, &mut differ);
    outbox_and_tap(sources, &mut differ);
    payments_and_client(sources, &mut differ);
    payments_and_provider(sources, &mut differ);
    payments_and_events(sources, &mut differ);
    refunds::refunds_and_client(sources, &mut differ);
    refunds::refunds_and_provider(sources, &mut differ);
    refunds::refunds_and_payments(sources, &mut differ);
    ledger(sources, &mut differ);
    differences.into_iter().collect()
}

type Differ<'a> = &'a mut dyn FnMut(&dyn fmt::Display, String);

fn orders_and_acknowledgements(sources: &Sources, differ: Differ<'_>) {
    let acknowledged: HashMap<Uuid, &Acknowledged> =
        sources.acknowledged.iter().map(|order| (order.order_id, order)).collect();
    let rows = by(&sources.orders, |row| row.order_id);
    for (id, order) in &acknowledged {
        let rows = rows.get(id).map_or(&[][..], Vec::as_slice);
        let [row] = rows else {
            differ(id, format!("acknowledged, and has {} rows in orders", rows.len()));
            continue;
        };
        if (row.amount, &row.currency, &row.key) != (order.amount, &order.currency, &order.key) {
            let told = format!("{} {} under key {}", order.amount, order.currency, order.key);
            differ(
                id,
                format!(
                    "acknowledged as {told}, stored as {} {} under key {}",
                    row.amount, row.currency, row.key
                ),
            );
        }
    }
    for row in &sources.orders {
        if !acknowledged.contains_key(&row.order_id) {
            differ(&row.order_id, "stored in orders, and never acknowledged".to_owned());
        }
    }
    for (key, orders) in by(&sources.orders, |row| row.key.clone()) {
        if orders.len() > 1 {
            differ(&orders[0].order_id, format!("{} orders under the one key {key}", orders.len()));
        }
    }
}

fn orders_and_events(sources: &Sources, differ: Differ<'_>) {
    let orders: BTreeSet<String> = sources.orders.iter().map(|row| row.order_id.to_string()).collect();
    let told =
        by(sources.outbox.iter().filter(|row| row.aggregate_type == "order"), |row| row.aggregate_id.clone());
    for order in &orders {
        let events = told.get(order).map_or(0, Vec::len);
        if events != 1 {
            differ(order, format!("stored in orders, and has {events} events in the outbox"));
        }
    }
    for order in told.keys() {
        if !orders.contains(order) {
            differ(order, "told of in the outbox, and not stored in orders".to_owned());
        }
    }
}

fn outbox_and_tap(sources: &Sources, differ: Differ<'_>) {
    let outbox: HashMap<Uuid, &OutboxRow> = sources.outbox.iter().map(|row| (row.event_id, row)).collect();
    let routed: BTreeSet<Uuid> = sources.tap.iter().map(|message| message.event_id).collect();
    for row in &sources.outbox {
        if !row.published {
            differ(&row.event_id, format!("not published: event {} of {}", row.id, row.aggregate_id));
        }
        if !routed.contains(&row.event_id) {
            differ(
                &row.event_id,
                format!("in the outbox, and never routed: event {} of {}", row.id, row.aggregate_id),
            );
        }
    }
    let mut seen = BTreeSet::new();
    let mut last: BTreeMap<(&str, &str), i64> = BTreeMap::new();
    for message in &sources.tap {
        match outbox.get(&message.event_id) {
            None => differ(&message.event_id, "routed, and not in the outbox".to_owned()),
            Some(row) if (row.id, &row.aggregate_id) != (message.outbox_id, &message.aggregate_id) => {
                differ(&message.event_id, "routed as another aggregate's, or at another place".to_owned());
            }
            Some(_) => {}
        }
        // Repeats are allowed; first deliveries are in order.
        if seen.insert(message.event_id) {
            let last = last.entry((&message.aggregate_type, &message.aggregate_id)).or_default();
            if message.outbox_id < *last {
                differ(
                    &message.event_id,
                    format!(
                        "overtaken: event {} of {} came after {last}",
                        message.outbox_id, message.aggregate_id
                    ),
                );
            }
            *last = (*last).max(message.outbox_id);
        }
    }
}

fn payments_and_client(sources: &Sources, differ: Differ<'_>) {
    let rows = by(&sources.payments, |row| row.payment_id);
    for told in &sources.told {
        let rows = rows.get(&told.payment_id).map_or(&[][..], Vec::as_slice);
        let [row] = rows else {
            differ(
                &told.payment_id,
                format!("the client was told of it, and it has {} rows in payments", rows.len()),
            );
            continue;
        };
        if (&row.status, row.amount, &row.currency, &row.key)
            != (&told.status, told.amount, &told.currency, &told.key)
        {
            differ(
                &told.payment_id,
                format!("told as {} {}, stored as {} {}", told.status, told.amount, row.status, row.amount),
            );
        }
    }
    let told: BTreeSet<Uuid> = sources.told.iter().map(|told| told.payment_id).collect();
    for row in &sources.payments {
        if !told.contains(&row.payment_id) {
            differ(&row.payment_id, "stored in payments, and the client was never told".to_owned());
        }
        if row.status == "processing" {
            differ(&row.payment_id, "still in processing".to_owned());
        }
    }
}

fn payments_and_provider(sources: &Sources, differ: Differ<'_>) {
    let charges = by(sources.provider.iter().filter(|line| line.kind == "charge"), |line| line.key.clone());
    let mut known = BTreeSet::new();
    for row in &sources.payments {
        known.insert(&row.provider_key);
        let charges = charges.get(&row.provider_key).map_or(&[][..], Vec::as_slice);
        let expected = usize::from(row.status == "succeeded");
        if charges.len() != expected {
            differ(
                &row.payment_id,
                format!("{} here, and charged {} times by the provider", row.status, charges.len()),
            );
        }
        for charge in charges {
            if (charge.amount, &charge.currency) != (row.amount, &row.currency) {
                differ(
                    &row.payment_id,
                    format!("{} here, and charged {} by the provider", row.amount, charge.amount),
                );
            }
        }
    }
    for key in charges.keys() {
        if !known.contains(key) {
            differ(key, "charged by the provider, and no payment knows of it".to_owned());
        }
    }
}

fn payments_and_events(sources: &Sources, differ: Differ<'_>) {
    let told = by(sources.outbox.iter().filter(|row| row.aggregate_type == "payment"), |row| {
        row.aggregate_id.clone()
    });
    let refunds = by(sources.refunds.iter().filter(|row| row.is_told()), |row| row.payment_id);
    for row in &sources.payments {
        let events = told.get(&row.payment_id.to_string()).map_or(0, Vec::len);
        let refunds = refunds.get(&row.payment_id).map_or(0, Vec::len);
        if events != usize::from(row.status != "processing") + refunds {
            differ(
                &row.payment_id,
                format!(
                    "{} in payments with {refunds} refunds, and has {events} events in the outbox",
                    row.status
                ),
            );
        }
    }
    let payments: BTreeSet<String> = sources.payments.iter().map(|row| row.payment_id.to_string()).collect();
    for payment in told.keys() {
        if !payments.contains(payment) {
            differ(payment, "told of in the outbox, and not stored in payments".to_owned());
        }
    }
}

/// What the ledger must have booked: cash, receivables and sales per order, succeeded payment and succeeded refund.
fn ledger(sources: &Sources, differ: Differ<'_>) {
    let booked = by(&sources.ledger, |booking| (booking.source_type.clone(), booking.source_id.clone()));
    let orders =
        sources.orders.iter().map(|row| ("order", row.order_id, &row.currency, [0, row.amount, -row.amount]));
    let payments = sources.payments.iter().filter(|row| row.status == "succeeded");
    let payments =
        payments.map(|row| ("payment", row.payment_id, &row.currency, [row.amount, -row.amount, 0]));
    let refunds = sources.refunds.iter().filter(|row| row.status == "succeeded");
    let refunds = refunds.map(|row| ("refund", row.refund_id, &row.currency, [-row.amount, row.amount, 0]));
    let mut expected = BTreeSet::new();
    for (kind, id, currency, amounts) in orders.chain(payments).chain(refunds) {
        let source = (kind.to_owned(), id.to_string());
        let bookings = booked.get(&source).map_or(&[][..], Vec::as_slice);
        expected.insert(source);
        let [booking] = bookings else {
            differ(&id, format!("{kind} to be booked once, and booked {} times", bookings.len()));
            continue;
        };
        if ([booking.cash, booking.receivables, booking.sales], &booking.currency) != (amounts, currency) {
            differ(
                &id,
                format!(
                    "{kind} to be booked as {amounts:?} {currency}, and booked as {:?} {}",
                    [booking.cash, booking.receivables, booking.sales],
                    booking.currency
                ),
            );
        }
    }
    for (kind, id) in booked.keys() {
        if !expected.contains(&(kind.clone(), id.clone())) {
            differ(id, format!("booked in the ledger as {kind}, and there is nothing to book"));
        }
    }
}

fn by<'a, T: 'a, K: Ord>(
    rows: impl IntoIterator<Item = &'a T>,
    key: impl Fn(&T) -> K,
) -> BTreeMap<K, Vec<&'a T>> {
    let mut groups: BTreeMap<K, Vec<&T>> = BTreeMap::new();
    for row in rows {
        groups.entry(key(row)).or_default().push(row);
    }
    groups
}

/// Reads the orders of a payments database.
///
/// # Errors
///
/// The database fails.
pub async fn read_orders(connection: &mut PgConnection) -> Result<Vec<OrderRow>> {
    let sql = "SELECT order_id, idempotency_key AS key, amount, currency FROM orders ORDER BY order_id";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}

/// Reads the payments of a payments database.
///
/// # Errors
///
/// The database fails.
pub async fn read_payments(connection: &mut PgConnection) -> Result<Vec<PaymentRow>> {
    let sql =
        "SELECT payment_id, idempotency_key AS key, status, provider_key, amount, currency, refund_reserved
               FROM payments ORDER BY payment_id";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}

/// Reads an outbox.
///
/// # Errors
///
/// The database fails.
pub async fn read_outbox(connection: &mut PgConnection) -> Result<Vec<OutboxRow>> {
    let sql = "SELECT event_id, id, aggregate_type, aggregate_id, published_at IS NOT NULL AS published
               FROM outbox ORDER BY id";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}

/// Reads the bookings of a ledger.
///
/// # Errors
///
/// The database fails.
pub async fn read_ledger(connection: &mut PgConnection) -> Result<Vec<Booking>> {
    let sql = "SELECT event_id, source_type, source_id, currency,
                      COALESCE(sum(amount) FILTER (WHERE account = 'cash'), 0)::BIGINT AS cash,
                      COALESCE(sum(amount) FILTER (WHERE account = 'receivables'), 0)::BIGINT AS receivables,
                      COALESCE(sum(amount) FILTER (WHERE account = 'sales'), 0)::BIGINT AS sales
               FROM ledger_transactions JOIN ledger_entries USING (transaction_id)
               GROUP BY transaction_id, event_id, source_type, source_id, currency ORDER BY source_id";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}
