//! A database with an outbox, a relay, and a queue per consumer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_broker::inspect::{QueueKind, declare_plain_queue};
use semel_broker::{Connection as BrokerConnection, topology};
use semel_core::schema::{self, ENGINE};
use semel_tests::net::free_port;
use semel_tests::polyglot::Language;
use semel_tests::process::{Daemon, binary};
use semel_tests::services::{Database, Services, Vhost};
use semel_tests::wait::eventually;
use semel_tests::workspace::root;
use serde::Deserialize;
use serde_json::Value;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

const READY: Duration = Duration::from_secs(30);

/// An event: a value for each column that is set.
pub(crate) type Event = BTreeMap<String, String>;

/// What producers write.
#[derive(Debug, Deserialize)]
pub(crate) struct Cases {
    pub(crate) accepted: Vec<Event>,
    /// By the constraint that refuses it.
    pub(crate) refused: BTreeMap<String, Event>,
}

/// An event as the outbox holds it.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) event_id: String,
    pub(crate) id: i64,
    pub(crate) aggregate_id: String,
    pub(crate) payload: String,
    /// In seconds since 1970.
    pub(crate) created_at: i64,
}

pub(crate) struct Yard {
    pub(crate) database: Database,
    pub(crate) cases: Cases,
    vhost: Vhost,
    exchange: String,
    producer: &'static str,
    _relay: Daemon,
}

impl Yard {
    pub(crate) async fn new(producer: &'static str) -> Result<Self> {
        let services = Services::from_env()?;
        let database = services.create_database("polyglot").await?;
        schema::migrate(&database.url().parse()?, &[&ENGINE]).await?;
        let mut producer_connection = PgConnection::connect(&database.url()).await?;
        // The producer's own table.
        producer_connection.execute("CREATE TABLE shipments (shipment_id TEXT NOT NULL)").await?;
        let vhost = services.create_vhost("polyglot").await?;
        let exchange = vhost.scoped("semel.events");
        let broker = BrokerConnection::open(&vhost.url().parse()?, "polyglot").await?;
        topology::declare_exchange(&broker, &exchange).await?;
        for language in [Language::Python, Language::Node] {
            let queue = vhost.scoped(queue(language));
            let keys = ["shipment.ShipmentMoved"];
            declare_plain_queue(&broker, &queue, QueueKind::Quorum, &exchange, &keys).await?;
        }
        broker.close().await;
        let admin = free_port()?;
        let relay = Daemon::command(&format!("polyglot-relay-{producer}"), binary("semel-relay")?)
            .env("DATABASE_URL", database.url())
            .env("AMQP_URL", vhost.url())
            .env("SEMEL_EXCHANGE", &exchange)
            .env("SEMEL_SOURCE", "polyglot")
            .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
            .start()
            .await?;
        relay.wait_ready(admin, READY).await?;
        let text = std::fs::read_to_string(cases_file()?).context("reading the cases")?;
        let cases = serde_json::from_str(&text).context("reading the cases")?;
        Ok(Self { database, cases, vhost, exchange, producer, _relay: relay })
    }

    /// Runs a language's producer to its end; returns the constraints that it was refused by.
    pub(crate) async fn produce(&self, language: Language) -> Result<Vec<String>> {
        let name = format!("polyglot-produce-{}", self.producer);
        let script = language.install().await?.script(&name, "produce");
        let producer = script.arg(cases_file()?).env("DATABASE_URL", self.database.url()).start().await?;
        let status = producer.wait_exit(READY).await?;
        ensure!(status.success(), "the producer left with {status}: {}", producer.lines().join("\n"));
        Ok(producer.lines())
    }

    pub(crate) async fn holds_what_was_accepted_and_nothing_of_what_was_refused(
        &self,
        refusals: &[String],
    ) -> Result<()> {
        let mut refusals = refusals.to_vec();
        refusals.sort();
        let constraints: Vec<&String> = self.cases.refused.keys().collect();
        assert_eq!(refusals.iter().collect::<Vec<_>>(), constraints, "refused by another constraint");
        let accepted: Vec<&str> =
            self.cases.accepted.iter().map(|event| event["aggregate_id"].as_str()).collect();
        let rows = self.rows().await?;
        let events: Vec<&str> = rows.iter().map(|row| row.aggregate_id.as_str()).collect();
        assert_eq!(events, accepted, "events in the order of their ids");
        // The whole transaction was refused, not only the event.
        let shipments = "SELECT count(*) FROM shipments";
        let shipments: i64 =
            sqlx::query(shipments).fetch_one(&mut self.database.connect().await?).await?.try_get(0)?;
        assert_eq!(usize::try_from(shipments)?, accepted.len(), "shipments");
        Ok(())
    }

    pub(crate) async fn rows(&self) -> Result<Vec<Row>> {
        let query = "SELECT event_id::TEXT, id, aggregate_id, payload::TEXT, floor(extract(EPOCH FROM created_at))::BIGINT
            FROM outbox ORDER BY id";
        let rows = sqlx::query(query).fetch_all(&mut self.database.connect().await?).await?;
        let row = |row: &sqlx::postgres::PgRow| {
            Ok(Row {
                event_id: row.try_get(0)?,
                id: row.try_get(1)?,
                aggregate_id: row.try_get(2)?,
                payload: row.try_get(3)?,
                created_at: row.try_get(4)?,
            })
        };
        rows.iter().map(row).collect()
    }

    /// Starts a language's consumer and waits until it has printed as many messages as were accepted.
    pub(crate) async fn messages(&self, language: Language) -> Result<Vec<Value>> {
        let name = format!("polyglot-consume-{}-{}", self.producer, queue(language));
        let consumer = language
            .install()
            .await?
            .script(&name, "consume")
            .env("AMQP_URL", self.vhost.url())
            .env("QUEUE", self.vhost.scoped(queue(language)))
            .start()
            .await?;
        consumer.wait_for_line("readiness", READY, |line| line == "ready").await?;
        let expected = self.cases.accepted.len();
        let look = || async {
            let messages: Vec<Value> =
                consumer.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
            if messages.len() >= expected { Ok(messages) } else { Err(consumer.lines()) }
        };
        eventually(&format!("{expected} messages in {language:?} from {}", self.exchange), READY, look).await
    }
}

fn queue(language: Language) -> &'static str {
    match language {
        Language::Python => "python",
        Language::Node => "node",
    }
}

fn cases_file() -> Result<PathBuf> {
    Ok(root()?.join("tests/polyglot/cases.json"))
}
