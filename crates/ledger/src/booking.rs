//! Booking a placed order: debit receivables, credit sales, and tell that it was posted.

use semel_consumer_kit::{Event, Handler, HandlerError};
use semel_core::derive::{self, Namespace};
use semel_core::outbox::{self, NewEvent};
use serde::Deserialize;
use serde_json::{Map, Value};
use sqlx::PgConnection;
use uuid::Uuid;

/// The consumer's name in `processed_events`, and part of the ids of the events it makes.
pub const CONSUMER: &str = "ledger";
/// Routing key of the event that is booked.
pub const ORDER_PLACED: &str = "order.OrderPlaced";
/// Aggregate type of the events that the ledger makes.
pub const AGGREGATE_TYPE: &str = "ledger_transaction";
/// The event that tells of a booking.
pub const LEDGER_POSTED: &str = "LedgerPosted";

/// Aggregate type of the orders that are booked, as the ledger keeps it.
const SOURCE_TYPE: &str = "order";

/// What an order's event tells; fields that the ledger does not need are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct OrderPlaced {
    /// The order.
    pub order_id: Uuid,
    /// Whose it is.
    pub client_id: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// Books placed orders.
#[derive(Clone, Debug)]
pub struct BookOrder {
    namespace: Namespace,
}

impl BookOrder {
    /// Books the orders of this deployment.
    #[must_use]
    pub fn new(namespace: Namespace) -> Self {
        Self { namespace }
    }

    fn posted(&self, transaction_id: Uuid, event: &Event<OrderPlaced>) -> NewEvent {
        let order = &event.payload;
        let mut payload = Map::new();
        payload.insert("transaction_id".to_owned(), Value::String(transaction_id.to_string()));
        payload.insert("client_id".to_owned(), Value::String(order.client_id.clone()));
        payload.insert("source_type".to_owned(), Value::String(SOURCE_TYPE.to_owned()));
        payload.insert("source_id".to_owned(), Value::String(order.order_id.to_string()));
        payload.insert("amount".to_owned(), Value::from(order.amount));
        payload.insert("currency".to_owned(), Value::String(order.currency.clone()));
        NewEvent {
            event_id: derive::from_event(&self.namespace, CONSUMER, event.id, LEDGER_POSTED),
            aggregate_type: AGGREGATE_TYPE,
            aggregate_id: transaction_id.to_string(),
            aggregate_version: Some(1),
            event_type: LEDGER_POSTED,
            payload,
            trace_context: event.trace_context.clone(),
        }
    }
}

impl Handler for BookOrder {
    type Payload = OrderPlaced;

    async fn handle(&self, tx: &mut PgConnection, event: Event<OrderPlaced>) -> Result<(), HandlerError> {
        if event.payload.amount <= 0 {
            return Err(HandlerError::permanent("the order's amount is not positive"));
        }
        let transaction_id = post(tx, event.id, &event.payload).await?;
        outbox::append(tx, &[self.posted(transaction_id, &event)]).await?;
        Ok(())
    }
}

/// Writes the transaction and its two entries.
async fn post(tx: &mut PgConnection, event_id: Uuid, order: &OrderPlaced) -> Result<Uuid, sqlx::Error> {
    sqlx::query_scalar!(
        r#"-- ledger_post
        WITH booked AS (
            INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
            VALUES ($1, $2, $3, $4)
            RETURNING transaction_id
        ), entered AS (
            INSERT INTO ledger_entries (transaction_id, account, currency, amount)
            SELECT transaction_id, account, $5, amount
            FROM booked, (VALUES ('receivables', $6::BIGINT), ('sales', -$6::BIGINT)) AS entries (account, amount)
        )
        SELECT transaction_id AS "transaction_id!" FROM booked"#,
        event_id,
        order.client_id,
        SOURCE_TYPE,
        order.order_id.to_string(),
        order.currency,
        order.amount
    )
    .fetch_one(tx)
    .await
}
