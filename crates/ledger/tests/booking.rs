//! Bookings against a real Postgres; each test has a database of its own.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail by panicking, too")]

use semel_consumer_kit::{Event, Handler as _, HandlerError};
use semel_core::database::{self, DatabaseUrl};
use semel_core::derive;
use semel_ledger::{
    Book, CONSUMER, LEDGER_POSTED, ORDER_PLACED, PAYMENT_CREATED, PAYMENT_REFUNDED, Page, SETS, balances,
};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
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

    /// Books an event in a transaction of its own.
    async fn book(&mut self, event: Event<Box<RawValue>>) -> Result<(), HandlerError> {
        let mut tx = self.connection.begin().await?;
        Book::new("test".parse().unwrap()).handle(&mut tx, event).await?;
        Ok(tx.commit().await?)
    }

    /// Transaction, event, client, type and id of the source of what is booked.
    async fn transactions(&mut self) -> Vec<(Uuid, Uuid, String, String, String)> {
        sqlx::query_as(
            "SELECT transaction_id, event_id, client_id, source_type, source_id FROM ledger_transactions",
        )
        .fetch_all(&mut self.connection)
        .await
        .unwrap()
    }

    /// Account, currency and amount of all entries.
    async fn entries(&mut self) -> Vec<(String, String, i64)> {
        sqlx::query_as("SELECT account, currency, amount FROM ledger_entries ORDER BY account, amount")
            .fetch_all(&mut self.connection)
            .await
            .unwrap()
    }

    /// Checks that nothing is booked and nothing told.
    async fn expect_empty(&mut self) {
        for table in ["ledger_transactions", "ledger_entries", "outbox"] {
            let count = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
            let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut self.connection).await.unwrap();
            assert_eq!(rows, 0, "{table}");
        }
    }

    async fn close(mut self) {
        self.connection.close().await.unwrap();
        self.admin.execute(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.name))).await.unwrap();
    }
}

fn event(event_type: &str, payload: &Value) -> Event<Box<RawValue>> {
    let mut event = Event::new(Uuid::new_v4(), to_raw_value(payload).unwrap());
    event.event_type = Some(event_type.to_owned());
    event
}

fn order(order_id: Uuid) -> Value {
    json!({
        "order_id": order_id, "client_id": "acme", "reference": "A-1", "amount": 500, "currency": "EUR",
        "event_id": Uuid::new_v4(),
    })
}

fn payment(payment_id: Uuid) -> Value {
    json!({
        "payment_id": payment_id, "client_id": "acme", "reference": "A-1", "amount": 500, "currency": "EUR",
        "event_id": Uuid::new_v4(),
    })
}

fn refund(refund_id: Uuid) -> Value {
    json!({
        "refund_id": refund_id, "payment_id": Uuid::new_v4(), "client_id": "acme", "amount": 500, "currency": "EUR",
        "event_id": Uuid::new_v4(),
    })
}

/// Books an event, and checks the booking, its two entries and the event that tells of it.
async fn expect_booked(event_type: &str, payload: &Value, source: (&str, Uuid), debit: &str, credit: &str) {
    let mut books = Books::new().await;
    let mut event = event(event_type, payload);
    event.trace_context = Some("00-ab-cd-01".to_owned());
    books.book(event.clone()).await.unwrap();

    let booked = books.transactions().await;
    let transaction = booked[0].0;
    let (source_type, source_id) = (source.0.to_owned(), source.1.to_string());
    assert_eq!(booked, [(transaction, event.id, "acme".into(), source_type.clone(), source_id.clone())]);
    let entry = |account: &str, amount| (account.to_owned(), "EUR".to_owned(), amount);
    let mut expected = [entry(debit, 500), entry(credit, -500)];
    expected.sort();
    assert_eq!(books.entries().await, expected);

    let told: Vec<(Uuid, String, String, String, Value, Value)> = sqlx::query_as(
        "SELECT event_id, aggregate_type, aggregate_id, event_type, payload, headers FROM outbox",
    )
    .fetch_all(&mut books.connection)
    .await
    .unwrap();
    let told_id = derive::from_event(&"test".parse().unwrap(), CONSUMER, event.id, LEDGER_POSTED);
    let payload = json!({
        "event_id": told_id, "transaction_id": transaction, "client_id": "acme", "source_type": source_type,
        "source_id": source_id, "amount": 500, "currency": "EUR",
    });
    let headers = json!({ "traceparent": "00-ab-cd-01" });
    let posted = "LedgerPosted".to_owned();
    assert_eq!(
        told,
        [(told_id, "ledger_transaction".to_owned(), transaction.to_string(), posted, payload, headers)]
    );
    books.close().await;
}

#[tokio::test]
async fn an_order_is_a_debit_and_a_credit_and_an_event() {
    let id = Uuid::new_v4();
    expect_booked(ORDER_PLACED, &order(id), ("order", id), "receivables", "sales").await;
}

#[tokio::test]
async fn a_payment_turns_receivables_into_cash() {
    let id = Uuid::new_v4();
    expect_booked(PAYMENT_CREATED, &payment(id), ("payment", id), "cash", "receivables").await;
}

#[tokio::test]
async fn a_refund_turns_its_part_of_the_payment_around() {
    let id = Uuid::new_v4();
    expect_booked(PAYMENT_REFUNDED, &refund(id), ("refund", id), "receivables", "cash").await;
}

#[tokio::test]
async fn each_refund_of_a_payment_is_a_booking_of_its_own_and_all_of_it_sums_to_nothing() {
    let mut books = Books::new().await;
    let paid = payment(Uuid::new_v4());
    books.book(event(PAYMENT_CREATED, &paid)).await.unwrap();
    for amount in [200, 300] {
        let mut part = refund(Uuid::new_v4());
        (part["payment_id"], part["amount"]) = (paid["payment_id"].clone(), json!(amount));
        books.book(event(PAYMENT_REFUNDED, &part)).await.unwrap();
    }
    let entry = |account: &str, amount| (account.to_owned(), "EUR".to_owned(), amount);
    let mut expected = [("cash", -300), ("cash", -200), ("cash", 500)].map(|(a, n)| entry(a, n)).to_vec();
    expected.extend(
        [("receivables", -500), ("receivables", 200), ("receivables", 300)].map(|(a, n)| entry(a, n)),
    );
    assert_eq!(books.entries().await, expected);
    assert_eq!(books.transactions().await.len(), 3);
    books.close().await;
}

#[tokio::test]
async fn what_cannot_be_booked_is_refused_for_good() {
    let mut books = Books::new().await;
    let changes = [
        ("amount", json!(0)),
        ("amount", json!(i64::MIN)),
        ("amount", json!(1_000_000_000_001_i64)),
        ("amount", json!(1.5)),
        ("currency", json!("eur")),
        ("currency", json!("EURO")),
        ("client_id", json!("")),
        ("client_id", json!("x".repeat(64))),
        ("client_id", json!("a\0b")),
        ("client_id", Value::Null),
    ];
    for (event_type, payload) in [
        (ORDER_PLACED, order(Uuid::nil())),
        (PAYMENT_CREATED, payment(Uuid::nil())),
        (PAYMENT_REFUNDED, refund(Uuid::nil())),
    ] {
        for (field, value) in &changes {
            let mut payload = payload.clone();
            payload[field] = value.clone();
            let error = books.book(event(event_type, &payload)).await.unwrap_err();
            assert!(matches!(error, HandlerError::Permanent(_)), "{error:?} for {payload}");
        }
    }
    books.expect_empty().await;
    books.close().await;
}

#[tokio::test]
async fn what_moved_no_money_leaves_nothing_to_book() {
    let mut books = Books::new().await;
    for event_type in ["PaymentDeclined", "PaymentCanceled"] {
        books.book(event(event_type, &payment(Uuid::new_v4()))).await.unwrap();
    }
    books.book(event("PaymentRefundFailed", &refund(Uuid::new_v4()))).await.unwrap();
    books.expect_empty().await;
    books.close().await;
}

#[tokio::test]
async fn the_type_decides_what_an_event_tells() {
    let mut books = Books::new().await;
    let both = json!({
        "order_id": Uuid::from_u128(1), "payment_id": Uuid::from_u128(2), "client_id": "acme", "amount": 1,
        "currency": "EUR",
    });
    let mut untyped = event(ORDER_PLACED, &both);
    untyped.event_type = None;
    let others = ["PaymentRefused", "orderplaced", ""].map(|name| event(name, &both));
    for event in others.into_iter().chain([untyped, event(ORDER_PLACED, &payment(Uuid::nil()))]) {
        let error = books.book(event.clone()).await.unwrap_err();
        assert!(matches!(error, HandlerError::Permanent(_)), "{error:?} for {event:?}");
    }
    books.expect_empty().await;
    books.book(event(PAYMENT_CREATED, &both)).await.unwrap();
    let booked = books.transactions().await;
    assert_eq!(
        (booked[0].3.as_str(), booked[0].4.as_str()),
        ("payment", Uuid::from_u128(2).to_string().as_str())
    );
    books.close().await;
}

#[tokio::test]
async fn a_refusal_shows_nothing_of_the_payload() {
    let mut books = Books::new().await;
    let mut payload = order(Uuid::nil());
    payload["amount"] = json!("4242");
    let error = books.book(event(ORDER_PLACED, &payload)).await.unwrap_err();
    assert!(!format!("{error:?}").contains("4242"), "{error:?}");
    books.close().await;
}

#[tokio::test]
async fn the_database_refuses_what_does_not_balance_at_commit() {
    let mut books = Books::new().await;
    let refused = [
        // One-sided, short of a unit, balanced over currencies but in none of them.
        "('cash', 'EUR', 500)",
        "('cash', 'EUR', 500), ('receivables', 'EUR', -499)",
        "('cash', 'EUR', 500), ('receivables', 'USD', -500)",
    ];
    for entries in refused {
        let mut tx = books.connection.begin().await.unwrap();
        enter(&mut tx, entries).await;
        let error = tx.commit().await.unwrap_err();
        let refusal = error.as_database_error().unwrap();
        assert_eq!(
            (refusal.code().as_deref(), refusal.constraint()),
            (Some("23514"), Some("ledger_entries_balance")),
            "{entries}: {error}"
        );
    }
    books.expect_empty().await;

    let mut tx = books.connection.begin().await.unwrap();
    enter(
        &mut tx,
        "('cash', 'EUR', 500), ('receivables', 'EUR', -500), ('cash', 'USD', 1), ('sales', 'USD', -1)",
    )
    .await;
    tx.commit().await.unwrap();
    // Nor can a booking be made unbalanced afterwards.
    for change in [
        "UPDATE ledger_entries SET amount = 7 WHERE account = 'sales'",
        "DELETE FROM ledger_entries WHERE account = 'sales'",
        "UPDATE ledger_entries SET currency = 'GBP' WHERE account = 'sales'",
        // The half of one booking becomes a part of another, and is made good there.
        "WITH other AS (
             INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
             VALUES (gen_random_uuid(), 'acme', 'order', '2') RETURNING transaction_id
         ), balanced AS (
             INSERT INTO ledger_entries SELECT transaction_id, 'cash', 'USD', 1 FROM other
         )
         UPDATE ledger_entries SET transaction_id = (SELECT transaction_id FROM other) WHERE account = 'sales'",
    ] {
        let error = books.connection.execute(change).await.unwrap_err();
        assert_eq!(
            error.as_database_error().and_then(|error| error.constraint()),
            Some("ledger_entries_balance"),
            "{change}: {error}"
        );
    }
    books.close().await;
}

#[tokio::test]
async fn the_database_refuses_a_booking_without_entries_and_to_be_truncated() {
    let mut books = Books::new().await;
    let mut tx = books.connection.begin().await.unwrap();
    enter(&mut tx, "('cash', 'EUR', 500), ('receivables', 'EUR', -500)").await;
    tx.commit().await.unwrap();
    for (change, code) in [
        (
            "INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
             VALUES (gen_random_uuid(), 'acme', 'order', '2')",
            "23514",
        ),
        ("DELETE FROM ledger_entries", "23514"),
        ("TRUNCATE ledger_entries", "55000"),
        ("TRUNCATE ledger_transactions, ledger_entries", "55000"),
    ] {
        let error = books.connection.execute(change).await.unwrap_err();
        let refusal = error.as_database_error().unwrap();
        assert_eq!(refusal.code().as_deref(), Some(code), "{change}: {error}");
    }
    books.close().await;
}

#[tokio::test]
async fn balances_are_sums_of_entries_and_come_page_by_page() {
    let mut books = Books::new().await;
    let client = |id: u128, client: &str, currency: &str| {
        let mut payload = order(Uuid::from_u128(id));
        (payload["client_id"], payload["currency"]) = (json!(client), json!(currency));
        event(ORDER_PLACED, &payload)
    };
    let events =
        [client(1, "b,c", "USD"), client(2, "b,c", "EUR"), client(3, "a", "EUR"), client(4, "a", "EUR")];
    let amount = order(Uuid::nil())["amount"].as_i64().unwrap();
    for event in events {
        books.book(event).await.unwrap();
    }
    let mut page = Page { limit: 4, ..Page::default() };
    let mut all = Vec::new();
    loop {
        let found = balances(&mut books.connection, &page).await.unwrap();
        let Some(last) = found.last() else { break };
        page.after = (last.client_id.clone(), last.account.clone(), last.currency.clone());
        all.extend(found);
    }
    let told: Vec<_> = all
        .iter()
        .map(|of| (of.client_id.as_str(), of.account.as_str(), of.currency.as_str(), of.balance))
        .collect();
    let expected = [
        ("a", "receivables", "EUR", 2 * amount),
        ("a", "sales", "EUR", -2 * amount),
        ("b,c", "receivables", "EUR", amount),
        ("b,c", "receivables", "USD", amount),
        ("b,c", "sales", "EUR", -amount),
        ("b,c", "sales", "USD", -amount),
    ];
    assert_eq!(told, expected);
    let of_one = Page { client_id: Some("a".to_owned()), limit: 100, ..Page::default() };
    assert_eq!(balances(&mut books.connection, &of_one).await.unwrap(), all[..2]);
    books.close().await;
}

/// Writes a transaction with these entries, as whoever writes past the ledger would.
async fn enter(tx: &mut PgConnection, entries: &str) {
    tx.execute(AssertSqlSafe(format!(
        "WITH booked AS (
             INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
             VALUES (gen_random_uuid(), 'acme', 'order', '1') RETURNING transaction_id
         )
         INSERT INTO ledger_entries (transaction_id, account, currency, amount)
         SELECT transaction_id, account, currency, amount
         FROM booked, (VALUES {entries}) AS entries (account, currency, amount)"
    )))
    .await
    .unwrap();
}
