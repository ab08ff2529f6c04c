//! Booking what was ordered, paid and given back, and telling that it was posted.
//!
//! An order debits the client's receivables and credits sales; a payment debits cash and credits those receivables, and a
//! refund turns so much of its payment around.

use semel_consumer_kit::{Event, Handler, HandlerError};
use semel_core::derive::{self, Namespace};
use semel_core::outbox::{self, NewEvent};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::store;

/// The consumer's name in `processed_events`, and part of the ids of the events it makes.
pub const CONSUMER: &str = "ledger";
/// The event that tells of a placed order.
pub const ORDER_PLACED: &str = "OrderPlaced";
/// The event that tells of a payment that succeeded.
pub const PAYMENT_CREATED: &str = "PaymentCreated";
/// The event that tells of a refund that succeeded.
pub const PAYMENT_REFUNDED: &str = "PaymentRefunded";
/// The events that tell of payments and refunds that moved no money.
const NOTHING_TO_BOOK: [&str; 3] = ["PaymentDeclined", "PaymentCanceled", "PaymentRefundFailed"];
/// Routing keys of the events that the ledger takes: all outcomes of orders, payments and refunds, so that each has a queue,
/// though some leave nothing to book.
pub const ROUTING_KEYS: [&str; 6] = [
    "order.OrderPlaced",
    "payment.PaymentCreated",
    "payment.PaymentDeclined",
    "payment.PaymentCanceled",
    "payment.PaymentRefunded",
    "payment.PaymentRefundFailed",
];
/// Aggregate type of the events that the ledger makes.
pub const AGGREGATE_TYPE: &str = "ledger_transaction";
/// The event that tells of a booking.
pub const LEDGER_POSTED: &str = "LedgerPosted";

/// Largest amount of one event, in minor units, as for whoever places an order; so no balance comes near to what a column holds.
const MAX_AMOUNT: i64 = 1_000_000_000_000;

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

/// What a payment's event tells; fields that the ledger does not need are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct PaymentCreated {
    /// The payment.
    pub payment_id: Uuid,
    /// Who paid.
    pub client_id: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// What a refund's event tells; fields that the ledger does not need are ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct PaymentRefunded {
    /// The refund.
    pub refund_id: Uuid,
    /// Whose payment it was.
    pub client_id: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// An amount that goes from one of a client's accounts to another.
#[derive(Clone, Debug)]
pub(crate) struct Booking {
    /// Kind and id of what is booked.
    pub(crate) source: (&'static str, Uuid),
    pub(crate) client_id: String,
    pub(crate) debit: &'static str,
    pub(crate) credit: &'static str,
    pub(crate) amount: i64,
    pub(crate) currency: String,
}

impl From<OrderPlaced> for Booking {
    fn from(order: OrderPlaced) -> Self {
        Self {
            source: ("order", order.order_id),
            client_id: order.client_id,
            debit: "receivables",
            credit: "sales",
            amount: order.amount,
            currency: order.currency,
        }
    }
}

impl From<PaymentCreated> for Booking {
    fn from(payment: PaymentCreated) -> Self {
        Self {
            source: ("payment", payment.payment_id),
            client_id: payment.client_id,
            debit: "cash",
            credit: "receivables",
            amount: payment.amount,
            currency: payment.currency,
        }
    }
}

impl From<PaymentRefunded> for Booking {
    fn from(refund: PaymentRefunded) -> Self {
        Self {
            // A payment may have several: each is a booking of its own.
            source: ("refund", refund.refund_id),
            client_id: refund.client_id,
            debit: "receivables",
            credit: "cash",
            amount: refund.amount,
            currency: refund.currency,
        }
    }
}

impl Booking {
    /// Reads what an event of this type has to have booked; none where no money moved.
    fn of(event: &Event<Box<RawValue>>) -> Result<Option<Self>, HandlerError> {
        let booking: Self = match event.event_type.as_deref() {
            Some(ORDER_PLACED) => read::<OrderPlaced>(&event.payload)?.into(),
            Some(PAYMENT_CREATED) => read::<PaymentCreated>(&event.payload)?.into(),
            Some(PAYMENT_REFUNDED) => read::<PaymentRefunded>(&event.payload)?.into(),
            Some(settled) if NOTHING_TO_BOOK.contains(&settled) => return Ok(None),
            _ => return Err(HandlerError::permanent("an event of a type that is not booked")),
        };
        if !(1..=MAX_AMOUNT).contains(&booking.amount) {
            return Err(HandlerError::permanent("the amount is not 1 to 10^12"));
        }
        Ok(Some(booking))
    }
}

fn read<T: DeserializeOwned>(payload: &RawValue) -> Result<T, HandlerError> {
    // The decoder's words may quote the payload, which belongs into no log.
    serde_json::from_str(payload.get())
        .map_err(|_| HandlerError::permanent("the payload is not of the shape that its type has"))
}

/// Books orders, payments and refunds.
#[derive(Clone, Debug)]
pub struct Book {
    namespace: Namespace,
}

impl Book {
    /// Books what happens in this deployment.
    #[must_use]
    pub fn new(namespace: Namespace) -> Self {
        Self { namespace }
    }

    fn posted(&self, transaction_id: Uuid, booking: &Booking, event: &Event<Box<RawValue>>) -> NewEvent {
        let (source_type, source_id) = booking.source;
        let mut payload = Map::new();
        payload.insert("transaction_id".to_owned(), Value::String(transaction_id.to_string()));
        payload.insert("client_id".to_owned(), Value::String(booking.client_id.clone()));
        payload.insert("source_type".to_owned(), Value::String(source_type.to_owned()));
        payload.insert("source_id".to_owned(), Value::String(source_id.to_string()));
        payload.insert("amount".to_owned(), Value::from(booking.amount));
        payload.insert("currency".to_owned(), Value::String(booking.currency.clone()));
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

impl Handler for Book {
    type Payload = Box<RawValue>;

    async fn handle(&self, tx: &mut PgConnection, event: Event<Box<RawValue>>) -> Result<(), HandlerError> {
        let Some(booking) = Booking::of(&event)? else { return Ok(()) };
        let transaction_id = store::post(tx, event.id, &booking).await?;
        tracing::debug!(%transaction_id, "booked");
        outbox::append(tx, &[self.posted(transaction_id, &booking, &event)]).await?;
        Ok(())
    }
}
