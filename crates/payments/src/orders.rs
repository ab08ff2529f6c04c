//! Orders: a state change that lives wholly in our database.
//!
//! Placing an order writes the completed key, the order and its event in *one statement*: one round trip, and no moment
//! in which only part of it is there.

use semel_core::derive::{self, Namespace};
use semel_core::idempotency::engine::{Begun, Operation, Terms};
use semel_core::idempotency::store::{self, LookedUp, NewKey};
use semel_core::idempotency::{ClientId, Command, InvalidCommand, Scope, StoredResponse};
use semel_core::outbox::NewEvent;
use semel_core::{begin_key, database, look_up_key};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use crate::currency;
use crate::page::{Cursor, Page};

/// The aggregate type of an order's events.
pub const AGGREGATE_TYPE: &str = "order";
/// The event that tells of a placed order.
pub const ORDER_PLACED: &str = "OrderPlaced";

/// The intent to place an order.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CreateOrder {
    /// The client's own name for the order, 1 to 255 bytes.
    pub reference: String,
    /// In minor units of the currency, positive.
    pub amount: i64,
    /// ISO 4217 code, three capital letters.
    pub currency: String,
}

impl Command for CreateOrder {
    const OPERATION: &'static str = "orders.create";

    fn validate(&self) -> Result<(), InvalidCommand> {
        let invalid = |field, reason: &str| Err(InvalidCommand { field, reason: reason.to_owned() });
        if !(1..=255).contains(&self.reference.len()) || self.reference.chars().any(char::is_control) {
            return invalid("reference", "must be 1 to 255 bytes of text without control characters");
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
        Ok(())
    }
}

/// The largest amount, in minor units: sums of a billion of them still fit into 64 bits.
pub const MAX_AMOUNT: i64 = 1_000_000_000_000;

/// An order as its client sees it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Order {
    /// Its id.
    pub id: Uuid,
    /// `placed`.
    pub status: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// What [`ORDER_PLACED`] tells, beside `event_id`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct OrderPlaced {
    /// The order.
    pub order_id: Uuid,
    /// Whose it is.
    pub client_id: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// Placing orders.
#[derive(Clone, Debug)]
pub struct PlaceOrder {
    namespace: Namespace,
}

impl PlaceOrder {
    /// Places orders of this deployment.
    #[must_use]
    pub fn new(namespace: Namespace) -> Self {
        Self { namespace }
    }

    fn event(&self, key: &NewKey<'_>, command: &CreateOrder) -> NewEvent {
        let mut payload = Map::new();
        payload.insert("order_id".to_owned(), Value::String(key.resource_id.to_string()));
        payload.insert("client_id".to_owned(), Value::String(key.scope.client.to_string()));
        payload.insert("reference".to_owned(), Value::String(command.reference.clone()));
        payload.insert("amount".to_owned(), Value::from(command.amount));
        payload.insert("currency".to_owned(), Value::String(command.currency.clone()));
        NewEvent {
            event_id: derive::from_key(&self.namespace, key.scope, ORDER_PLACED),
            aggregate_type: AGGREGATE_TYPE,
            aggregate_id: key.resource_id.to_string(),
            aggregate_version: Some(1),
            event_type: ORDER_PLACED,
            payload,
            trace_context: key.request.trace_context.clone(),
        }
    }
}

impl Operation for PlaceOrder {
    type Command = CreateOrder;

    fn resource_id(&self, scope: &Scope) -> Uuid {
        derive::from_key(&self.namespace, scope, "order")
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        look_up_key!(
            "orders_look_up",
            "SELECT order_id FROM orders WHERE client_id = $1 AND operation = $2 AND idempotency_key = $3",
            connection,
            scope
        )
        .await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreateOrder,
        terms: &Terms<'_>,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let event = self.event(key, command);
        let response = response(key.resource_id, command);
        let begun = begin_key!(
            "orders_place",
            "SELECT order_id FROM orders WHERE client_id = $1 AND operation = $2 AND idempotency_key = $3",
            "key AS (
                -- First and gating: a concurrent duplicate waits here, and then writes nothing at all.
                INSERT INTO idempotency_keys (
                    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id, trace_context,
                    status, recovery_point, response_code, response_headers, response_body, completed_at, expires_at
                )
                SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, 'completed', 'completed', $10, $11, $12, instant, instant + $13
                FROM outcome, clock_timestamp() AS instant WHERE outcome.id IS NULL
                ON CONFLICT DO NOTHING
                RETURNING resource_id, client_id, operation, key, expires_at, fence
            ), placed AS (
                INSERT INTO orders (order_id, client_id, operation, idempotency_key, reference, amount, currency, status)
                SELECT resource_id, client_id, operation, key, $14, $15, $16, 'placed' FROM key
                RETURNING order_id, version
            ), told AS (
                -- Selects from the order, so that the event's id is drawn after the order's row is written.
                INSERT INTO outbox (
                    event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers
                )
                SELECT $17, $18, order_id::TEXT, version, $19, $20, $21 FROM placed
            )",
            "FALSE",
            connection,
            key.scope,
            &key.hash.bytes[..],
            key.hash.version,
            key.command,
            key.resource_id,
            key.request.id,
            key.request.trace_context,
            store::code(&response),
            Json(&response.headers) as _,
            response.body,
            store::interval(terms.retention),
            command.reference,
            command.amount,
            command.currency,
            event.event_id,
            event.aggregate_type,
            event.event_type,
            event.stored_payload(),
            event.stored_headers()
        )
        .await?;
        Ok(match begun.written_until {
            Some(expires_at) => Some(Begun::Completed { response, expires_at }),
            None => Begun::known(begun),
        })
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        &["orders_pkey", "orders_idempotency_key_once"]
    }
}

/// Returns the response that is stored and sent once the order is placed.
fn response(resource_id: Uuid, command: &CreateOrder) -> StoredResponse {
    let order = Order {
        id: resource_id,
        status: "placed".to_owned(),
        reference: command.reference.clone(),
        amount: command.amount,
        currency: command.currency.clone(),
    };
    StoredResponse {
        code: 201,
        headers: vec![
            ("content-type".to_owned(), "application/json".to_owned()),
            ("location".to_owned(), format!("/v1/orders/{resource_id}")),
        ],
        // A struct of strings and numbers cannot fail to be written.
        body: serde_json::to_vec(&order).unwrap_or_default(),
    }
}

/// Returns one of the client's orders.
///
/// # Errors
///
/// When the database fails.
pub async fn find(pool: &PgPool, client: &ClientId, order_id: Uuid) -> Result<Option<Order>, sqlx::Error> {
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Order,
            "-- orders_find
            SELECT order_id AS id, status, reference, amount, currency FROM orders
            WHERE client_id = $1 AND order_id = $2",
            client.as_str(),
            order_id
        )
        .fetch_optional(connection)
        .await
    })
    .await
}

/// Returns a page of the client's orders, the newest first, and where the next page begins.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    pool: &PgPool,
    client: &ClientId,
    page: Page,
) -> Result<(Vec<Order>, Option<Cursor>), sqlx::Error> {
    let before = page.place();
    let rows = database::call(pool, async |connection| {
        sqlx::query!(
            "-- orders_list
            SELECT order_id, status, reference, amount, currency, created_at FROM orders
            WHERE client_id = $1 AND (created_at, order_id) < ($2, $3)
            ORDER BY created_at DESC, order_id DESC LIMIT $4",
            client.as_str(),
            before.created_at,
            before.id,
            page.rows()
        )
        .fetch_all(connection)
        .await
    });
    let entries = rows.await?.into_iter().map(|row| {
        let order = Order {
            id: row.order_id,
            status: row.status,
            reference: row.reference,
            amount: row.amount,
            currency: row.currency,
        };
        (Cursor { created_at: row.created_at, id: row.order_id }, order)
    });
    Ok(page.cut(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(reference: &str, amount: i64, currency: &str) -> CreateOrder {
        CreateOrder { reference: reference.to_owned(), amount, currency: currency.to_owned() }
    }

    #[test]
    fn accepts_a_plain_order() {
        order("A-1", 1, "EUR").validate().unwrap();
        order(&"r".repeat(255), MAX_AMOUNT, "JPY").validate().unwrap();
    }

    #[test]
    fn names_the_field_that_is_not_acceptable() {
        for (command, field) in [
            (order("", 1, "EUR"), "reference"),
            (order(&"r".repeat(256), 1, "EUR"), "reference"),
            (order("a\nb", 1, "EUR"), "reference"),
            (order("A", 0, "EUR"), "amount"),
            (order("A", -5, "EUR"), "amount"),
            (order("A", MAX_AMOUNT + 1, "EUR"), "amount"),
            (order("A", 1, "eur"), "currency"),
            (order("A", 1, "EURO"), "currency"),
        ] {
            assert_eq!(command.validate().unwrap_err().field, field, "{command:?}");
        }
    }

    #[test]
    fn floats_and_unknown_fields_are_no_order() {
        for body in [
            r#"{"reference":"A","amount":1.0,"currency":"EUR"}"#,
            r#"{"reference":"A","amount":"1","currency":"EUR"}"#,
            r#"{"reference":"A","amount":1,"currency":"EUR","extra":1}"#,
            r#"{"reference":"A","amount":1,"amount":2,"currency":"EUR"}"#,
        ] {
            assert!(serde_json::from_str::<CreateOrder>(body).is_err(), "{body}");
        }
    }
}
