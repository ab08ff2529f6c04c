//! Bookings against a real Postgres; each test has a database of its own.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail by panicking, too")]

use semel_consumer_kit::{Event, Handler as _, HandlerError};
use semel_core::database::{self, DatabaseUrl};
use semel_core::derive;
use semel_ledger::{BookOrder, CONSUMER, LEDGER_POSTED, OrderPlaced, SETS};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use uuid::Uuid;

struct Books {
    connection: PgConnection,
    admin: PgConnection,
    name: String,
}

impl Books {
    async fn new() -> Self {
        let admin_url = std::env::var("SEMEL_TEST_POSTGRES_URL").expect(
            "SEMEL_TEST_POSTGRES_URL is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ",
        );
        let name = format!("ledger_{}", Uuid::new_v4().simple());
        let mut admin = PgConnection::connect(&admin_url).await.unwrap();
        admin.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        let (server, _) = admin_url.rsplit_once('/').expect("the URL names a database");
        let url: DatabaseUrl = format!("{server}/{name}").parse().unwrap();
        semel_core::schema::migrate(&url, &SETS).await.unwrap();
        Self { connection: database::connect(&url, "ledger-test").await.unwrap(), admin, name }
    }

    /// Books an order in a transaction of its own.
    async fn book(&mut self, event: Event<OrderPlaced>) -> Result<(), HandlerError> {
        let mut tx = self.connection.begin().await?;
        BookOrder::new("test".parse().unwrap()).handle(&mut tx, event).await?;
        Ok(tx.commit().await?)
    }

    async fn close(mut self) {
        self.connection.close().await.unwrap();
        self.admin.execute(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.name))).await.unwrap();
    }
}

fn order() -> Event<OrderPlaced> {
    let payload = OrderPlaced {
        order_id: Uuid::new_v4(),
        client_id: "acme".to_owned(),
        amount: 500,
        currency: "EUR".to_owned(),
    };
    Event::new(Uuid::new_v4(), payload)
}

#[tokio::test]
async fn an_order_is_a_debit_and_a_credit_and_an_event() {
    let mut books = Books::new().await;
    let mut event = order();
    event.trace_context = Some("00-ab-cd-01".to_owned());
    books.book(event.clone()).await.unwrap();

    let booked: Vec<(Uuid, Uuid, String, String, String)> = sqlx::query_as(
        "SELECT transaction_id, event_id, client_id, source_type, source_id FROM ledger_transactions",
    )
    .fetch_all(&mut books.connection)
    .await
    .unwrap();
    let transaction = booked[0].0;
    let order_id = event.payload.order_id.to_string();
    assert_eq!(booked, [(transaction, event.id, "acme".into(), "order".into(), order_id.clone())]);

    let entries: Vec<(Uuid, String, String, i64)> = sqlx::query_as(
        "SELECT transaction_id, account, currency, amount FROM ledger_entries ORDER BY account",
    )
    .fetch_all(&mut books.connection)
    .await
    .unwrap();
    let entry = |account: &str, amount| (transaction, account.to_owned(), "EUR".to_owned(), amount);
    assert_eq!(entries, [entry("receivables", 500), entry("sales", -500)]);

    let told: Vec<(Uuid, String, String, String, serde_json::Value, serde_json::Value)> = sqlx::query_as(
        "SELECT event_id, aggregate_type, aggregate_id, event_type, payload, headers FROM outbox",
    )
    .fetch_all(&mut books.connection)
    .await
    .unwrap();
    let told_id = derive::from_event(&"test".parse().unwrap(), CONSUMER, event.id, LEDGER_POSTED);
    let payload = serde_json::json!({
        "event_id": told_id, "transaction_id": transaction, "client_id": "acme", "source_type": "order",
        "source_id": order_id, "amount": 500, "currency": "EUR",
    });
    let headers = serde_json::json!({ "traceparent": "00-ab-cd-01" });
    let posted = "LedgerPosted".to_owned();
    assert_eq!(
        told,
        [(told_id, "ledger_transaction".to_owned(), transaction.to_string(), posted, payload, headers)]
    );
    books.close().await;
}

#[tokio::test]
async fn an_order_that_cannot_be_booked_is_refused_for_good() {
    let mut books = Books::new().await;
    let changes: [fn(&mut OrderPlaced); 7] = [
        |order| order.amount = 0,
        |order| order.amount = i64::MIN,
        |order| order.currency = "eur".to_owned(),
        |order| order.currency = "EURO".to_owned(),
        |order| order.client_id = String::new(),
        |order| order.client_id = "x".repeat(64),
        |order| order.client_id = "a\0b".to_owned(),
    ];
    for change in changes {
        let mut event = order();
        change(&mut event.payload);
        let error = books.book(event.clone()).await.unwrap_err();
        assert!(matches!(error, HandlerError::Permanent(_)), "{error:?} for {:?}", event.payload);
    }
    for table in ["ledger_transactions", "ledger_entries", "outbox"] {
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut books.connection).await.unwrap();
        assert_eq!(rows, 0, "{table}");
    }
    books.close().await;
}
