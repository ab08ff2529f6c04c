//! Consumers without the kit: those of `docs/outbox.md`, as they stand there, but for the names of exchange and queue.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_broker::inspect::message_count;
use semel_broker::{Connection as BrokerConnection, Envelope, Outcome, Outgoing, Publisher, topology};
use semel_core::schema::{self, INBOX};
use semel_tests::net::unique_name;
use semel_tests::polyglot::{Installed, Language};
use semel_tests::process::Daemon;
use semel_tests::services::{Database, Services, Vhost};
use semel_tests::wait::eventually;
use semel_tests::workspace::root;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use uuid::Uuid;

const SOON: Duration = Duration::from_mins(1);
const EVENTS: usize = 300;

/// A consumer's database and its queue.
struct Shop {
    database: Database,
    vhost: Vhost,
    exchange: String,
    queue: String,
    broker: BrokerConnection,
    installed: Installed,
    script: String,
}

impl Shop {
    async fn open(language: Language, fence: &str) -> Result<Self> {
        let services = Services::from_env()?;
        let database = services.create_database("polyglot").await?;
        schema::migrate(&database.url().parse()?, &[&INBOX]).await?;
        // Nothing is unique: what takes effect twice has to show.
        let mut own = PgConnection::connect(&database.url()).await?;
        own.execute("CREATE TABLE stops (shipment_id TEXT, stop INT)").await?;
        let vhost = services.create_vhost("polyglot").await?;
        let (exchange, queue) = (vhost.scoped("semel.events"), vhost.scoped("stock.shipments"));
        let broker = BrokerConnection::open(&vhost.url().parse()?, "polyglot").await?;
        topology::declare_exchange(&broker, &exchange).await?;
        let (installed, script) = (language.install().await?, unique_name("consumer"));
        let text = documented(fence)?.replace("semel.events", &exchange).replace("stock.shipments", &queue);
        installed.write_script(&script, &text)?;
        Ok(Self { database, vhost, exchange, queue, broker, installed, script })
    }

    async fn consumer(&self, name: &str) -> Result<Daemon> {
        let script = self.installed.script(&format!("{name}-{}", self.script), &self.script);
        script.env("DATABASE_URL", self.database.url()).env("AMQP_URL", self.vhost.url()).start().await
    }

    async fn queue_is_there(&self) -> Result<()> {
        let look =
            || async { message_count(&self.broker, &self.queue).await.map_err(|error| error.to_string()) };
        eventually("the consumer to make its queue", SOON, look).await.map(drop)
    }

    /// Publishes each of these twice, one behind the other, and a message that is no event.
    async fn publish_twice(&self, events: &[Uuid]) -> Result<()> {
        let mut publisher = Publisher::open(&self.vhost.url().parse()?, "polyglot").await?;
        let message = |event_id: Uuid, body: String| {
            let envelope = Envelope {
                event_id,
                event_type: "ShipmentMoved".to_owned(),
                aggregate_type: "shipment".to_owned(),
                aggregate_id: event_id.to_string(),
                aggregate_version: None,
                outbox_id: 1,
                created_at_unix_micros: 1_790_000_000_000_000,
                source: "polyglot".to_owned(),
                headers: BTreeMap::new(),
            };
            Outgoing::event(self.exchange.as_str(), "shipment.ShipmentMoved", envelope, body.into_bytes())
        };
        let mut wave = vec![message(Uuid::new_v4(), "no event".to_owned())];
        for id in events {
            let moved = || message(*id, format!(r#"{{"shipment_id":"{id}","stop":1}}"#));
            wave.extend([moved(), moved()]);
        }
        let outcomes = publisher.publish_wave(wave).await.outcomes;
        ensure!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
        publisher.close().await;
        Ok(())
    }

    /// Rows of `stops`, shipments among them, and rows of `processed_events`.
    async fn counts(&self) -> Result<[i64; 3]> {
        let counts = "SELECT count(*), count(DISTINCT shipment_id), (SELECT count(*) FROM processed_events)
            FROM stops";
        let row = sqlx::query(counts).fetch_one(&mut self.database.connect().await?).await?;
        Ok([row.try_get(0)?, row.try_get(1)?, row.try_get(2)?])
    }

    async fn has_effects(&self, at_least: i64) -> Result<()> {
        let look = || async {
            let [_, shipments, _] = self.counts().await.map_err(|error| error.to_string())?;
            if shipments >= at_least { Ok(()) } else { Err(format!("{shipments} shipments")) }
        };
        eventually("effects", SOON, look).await
    }
}

/// The block of `docs/outbox.md` in this language that consumes.
fn documented(fence: &str) -> Result<String> {
    let text = std::fs::read_to_string(root()?.join("docs/outbox.md")).context("reading docs/outbox.md")?;
    let opening = format!("```{fence}\n");
    let blocks = text.split(&opening).skip(1).filter_map(|rest| rest.split("\n```").next());
    let block = blocks.filter(|block| block.contains("INSERT INTO processed_events")).last();
    block.map(str::to_owned).with_context(|| format!("docs/outbox.md shows no consumer in {fence}"))
}

/// Two of them at once, each message twice, and one of them killed half-way: its messages are delivered once more.
async fn is_exact_under_redelivery(language: Language, fence: &str) -> Result<()> {
    let shop = Shop::open(language, fence).await?;
    let doomed = shop.consumer("doomed").await?;
    shop.queue_is_there().await?;
    let heir = shop.consumer("heir").await?;
    let events: Vec<Uuid> = (0..EVENTS).map(|_| Uuid::new_v4()).collect();
    shop.publish_twice(&events).await?;
    let count = i64::try_from(EVENTS)?;
    shop.has_effects(count / 4).await?;
    doomed.kill().await?;
    shop.has_effects(count).await?;
    let settled = || async {
        let left = message_count(&shop.broker, &shop.queue).await.map_err(|error| error.to_string())?;
        let dead = message_count(&shop.broker, &topology::dead_queue(&shop.queue)).await;
        let dead = dead.map_err(|error| error.to_string())?;
        if (left, dead) == (0, 1) { Ok(()) } else { Err(format!("{left} left, {dead} dead")) }
    };
    eventually("the queue to be empty, and what is no event to be dead", SOON, settled).await?;
    ensure!(heir.is_running(), "the other consumer has left: {}", heir.lines().join("\n"));
    assert_eq!(shop.counts().await?, [count; 3], "effects, shipments, processed events");
    Ok(())
}

#[tokio::test]
async fn the_documented_consumer_in_python_is_exact_under_redelivery() -> Result<()> {
    is_exact_under_redelivery(Language::Python, "python").await
}

#[tokio::test]
async fn the_documented_consumer_in_node_is_exact_under_redelivery() -> Result<()> {
    is_exact_under_redelivery(Language::Node, "js").await
}
