//! The bed that tests stand on.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::FutureExt;
use semel_broker::inspect::{self, QueueKind};
use semel_broker::{BrokerUrl, Connection, Delivery, Envelope, Outgoing, Publisher, Subscription, topology};
use uuid::Uuid;

/// How long anything may take that should be quick.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) fn raw_url() -> String {
    std::env::var("AMQP_URL").unwrap_or_else(|_| {
        panic!("set AMQP_URL, or run `cargo xtask test`, which starts a private RabbitMQ")
    })
}

pub(crate) fn url() -> BrokerUrl {
    raw_url().parse().expect("AMQP_URL")
}

/// A topic exchange, a connection, and the names of what to remove.
pub(crate) struct Bed {
    pub(crate) connection: Connection,
    pub(crate) exchange: String,
    queues: Mutex<Vec<String>>,
    exchanges: Mutex<Vec<String>>,
}

impl Bed {
    /// Runs a test and removes what it made, whether it fails or not.
    pub(crate) async fn run(test: impl AsyncFnOnce(&Bed)) {
        let connection = Connection::open(&url(), "broker tests").await.expect("RabbitMQ at AMQP_URL");
        let exchange = unique("exchange");
        topology::declare_exchange(&connection, &exchange).await.unwrap();
        let bed = Bed { connection, exchange, queues: Mutex::default(), exchanges: Mutex::default() };

        let result = AssertUnwindSafe(within("the test", Duration::from_mins(2), Box::pin(test(&bed))))
            .catch_unwind()
            .await;

        let queues = std::mem::take(&mut *bed.queues.lock().unwrap());
        for queue in queues {
            inspect::delete_queue(&bed.connection, &queue).await.unwrap();
        }
        let mut exchanges = std::mem::take(&mut *bed.exchanges.lock().unwrap());
        exchanges.push(bed.exchange.clone());
        for exchange in exchanges {
            inspect::delete_exchange(&bed.connection, &exchange).await.unwrap();
        }
        bed.connection.close().await;
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    }

    /// A name for a queue that is deleted in the end.
    pub(crate) fn queue_name(&self) -> String {
        let name = unique("queue");
        self.remove_queue(&name);
        name
    }

    pub(crate) fn remove_queue(&self, name: &str) {
        self.queues.lock().unwrap().push(name.to_owned());
    }

    /// A name for an exchange that is deleted in the end.
    pub(crate) fn exchange_name(&self) -> String {
        let name = unique("exchange");
        self.exchanges.lock().unwrap().push(name.clone());
        name
    }

    /// A queue that gets everything published with key `in`.
    pub(crate) async fn queue(&self, kind: QueueKind) -> String {
        let name = self.queue_name();
        inspect::declare_plain_queue(&self.connection, &name, kind, &self.exchange, &["in"]).await.unwrap();
        name
    }

    pub(crate) async fn publisher(&self) -> Publisher {
        Publisher::open(&url(), "broker tests: publisher").await.unwrap()
    }

    pub(crate) async fn subscription(&self, queue: &str, prefetch: u16) -> Subscription {
        Subscription::open(&url(), "broker tests: consumer", queue, prefetch).await.unwrap()
    }

    /// Publishes bodies with key `in`, all of which must be confirmed.
    pub(crate) async fn fill(&self, bodies: &[&str]) {
        let mut publisher = self.publisher().await;
        let wave = bodies.iter().map(|body| self.outgoing("in", body)).collect();
        let wave = publisher.publish_wave(wave).await;
        assert!(
            wave.outcomes.iter().all(|outcome| *outcome == semel_broker::Outcome::Confirmed),
            "{:?}",
            wave.outcomes
        );
        publisher.close().await;
    }

    pub(crate) fn outgoing(&self, key: &str, body: &str) -> Outgoing {
        Outgoing::event(self.exchange.clone(), key, envelope(), body.into())
    }

    pub(crate) async fn count(&self, queue: &str) -> u32 {
        inspect::message_count(&self.connection, queue).await.unwrap()
    }

    /// Asks the broker until the queue holds so many ready messages.
    pub(crate) async fn wait_for_count(&self, queue: &str, count: u32) {
        within(&format!("{count} messages in {queue}"), SOON, async {
            while self.count(queue).await != count {}
        })
        .await;
    }
}

pub(crate) fn unique(what: &str) -> String {
    format!("test.{what}.{}", Uuid::new_v4().simple())
}

pub(crate) fn envelope() -> Envelope {
    Envelope {
        event_id: Uuid::new_v4(),
        event_type: "thing.happened".into(),
        aggregate_type: "thing".into(),
        aggregate_id: "1".into(),
        aggregate_version: Some(1),
        outbox_id: 1,
        created_at_unix_micros: 1_700_000_000_000_001,
        source: "broker-tests".into(),
        headers: BTreeMap::from([(
            "traceparent".into(),
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into(),
        )]),
    }
}

/// Fails with what was waited for.
pub(crate) async fn within<T>(what: &str, limit: Duration, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, future)
        .await
        .unwrap_or_else(|_| panic!("waited {limit:?} in vain for {what}"))
}

/// The next delivery, which must come soon.
pub(crate) async fn next(subscription: &mut Subscription) -> Delivery {
    within("a delivery", SOON, subscription.next()).await.unwrap()
}

pub(crate) fn text(delivery: &Delivery) -> &str {
    std::str::from_utf8(&delivery.body).unwrap()
}
