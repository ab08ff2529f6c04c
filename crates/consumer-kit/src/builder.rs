//! What a consumer is told before it runs.

use std::fmt;
use std::time::Duration;

use semel_broker::{BrokerUrl, Consumers, Topology};
use semel_core::lifecycle::Heartbeat;
use sqlx::PgPool;

use crate::aggregate::{Aggregate, Ordering, Unusable, VersionGuard};
use crate::consumer::Consumer;
use crate::handler::Handler;
use crate::metrics;
use crate::testing::Rehearsal;
use crate::transaction::PARKED_PATIENCE;

/// Whether a consumer can work; what a daemon's readiness is made of.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Readiness<'a> {
    /// It is subscribed, and its database takes writes.
    Ready,
    /// It is not; why.
    NotReady(&'a str),
}

/// What is done about exchange, queues and bindings before each subscription.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum TopologyMode {
    /// Make what is missing.
    #[default]
    Declare,
    /// Check that all is there with the right settings, and make nothing.
    Verify,
    /// Nothing.
    Off,
}

/// Settings of a consumer that cannot be used.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the consumer cannot be built: {0}")]
pub struct InvalidConsumer(String);

/// Builds a [`Consumer`]; each setting but the bindings has a default.
#[must_use]
pub struct ConsumerBuilder {
    pub(crate) settings: Settings,
    pub(crate) pool: PgPool,
    pub(crate) broker: BrokerUrl,
}

pub(crate) struct Settings {
    pub(crate) name: String,
    pub(crate) topology: Topology,
    pub(crate) topology_mode: TopologyMode,
    pub(crate) prefetch: u16,
    pub(crate) concurrency: u16,
    pub(crate) batch: u16,
    pub(crate) budget: Duration,
    pub(crate) answer_limit: Duration,
    pub(crate) attempts: u32,
    pub(crate) ordering: Ordering,
    pub(crate) version_guard: VersionGuard,
    pub(crate) parked_limit: u32,
    pub(crate) on_readiness: Box<dyn Fn(Readiness<'_>) + Send + Sync>,
    pub(crate) heartbeat: Heartbeat,
}

impl Settings {
    /// How long the database may take to answer one call. Its own limit for a statement is the budget.
    pub(crate) fn call_limit(&self) -> Duration {
        self.budget + self.answer_limit
    }

    /// What no transaction takes whose every call keeps its limit: begin, record, handle each, and two calls to end it; in an
    /// aggregate's order, to lock, to set limits, to look, to advance and two calls to unpark beside.
    pub(crate) fn attempt_limit(&self) -> Duration {
        let calls = 4 + u32::from(self.batch);
        match self.ordering {
            Ordering::None => self.call_limit() * calls,
            Ordering::Aggregate => self.call_limit() * (calls + 6) + PARKED_PATIENCE,
        }
    }

    /// The aggregate whose order the event is kept in, if it is in any.
    pub(crate) fn aggregate(
        &self,
        kind: Option<&str>,
        id: Option<&str>,
    ) -> Result<Option<Aggregate>, Unusable> {
        match self.ordering {
            Ordering::None => Ok(None),
            Ordering::Aggregate => Aggregate::of(kind, id),
        }
    }
}

/// The exchange that relays publish to unless told otherwise.
const EXCHANGE: &str = "semel.events";
/// Longest queue name, in bytes: `<queue>.retry.86400000ms` has to fit into AMQP's 255 too.
const MAX_QUEUE: usize = 235;
/// Of the 30 minutes after which RabbitMQ ends a subscription that acknowledges nothing.
const LONGEST_BATCH: Duration = Duration::from_mins(25);
/// After each failure a longer one; the last is repeated.
const RETRY_DELAYS: [Duration; 4] =
    [Duration::from_secs(5), Duration::from_mins(1), Duration::from_mins(10), Duration::from_hours(1)];
/// How many parked events are handled at once, beside those of the queue.
pub(crate) const PARKED_AT_ONCE: u32 = 4;
/// Each is a queue.
const MAX_RETRY_DELAYS: usize = 16;

impl ConsumerBuilder {
    pub(crate) fn new(name: String, pool: PgPool, broker: BrokerUrl, queue: String) -> Self {
        let retry_delays = RETRY_DELAYS.to_vec();
        let topology =
            Topology { delivery_limit: 10, retry_delays, ..Topology::new(EXCHANGE, queue, Vec::new()) };
        let settings = Settings {
            name,
            topology,
            topology_mode: TopologyMode::default(),
            prefetch: 32,
            concurrency: 8,
            batch: 1,
            budget: Duration::from_secs(10),
            answer_limit: Duration::from_secs(5),
            attempts: 8,
            ordering: Ordering::default(),
            version_guard: VersionGuard::default(),
            parked_limit: 10_000,
            on_readiness: Box::new(|_| {}),
            heartbeat: Heartbeat::default(),
        };
        Self { settings, pool, broker }
    }

    /// Adds a pattern of routing keys, `<aggregate_type>.<event_type>`, that the queue wants.
    pub fn bind(mut self, routing_key: impl Into<String>) -> Self {
        self.settings.topology.bindings.push(routing_key.into());
        self
    }

    /// Sets the topic exchange that events come from; `semel.events` by default.
    pub fn exchange(mut self, exchange: impl Into<String>) -> Self {
        self.settings.topology.exchange = exchange.into();
        self
    }

    /// Sets what is done about exchange, queues and bindings; they are declared by default.
    pub fn topology(mut self, mode: TopologyMode) -> Self {
        self.settings.topology_mode = mode;
        self
    }

    /// Sets how often the queue may get a message back before the broker gives up on it; 10 by default. That is for messages
    /// that end the process: those that a handler fails at are counted by [`attempts`](Self::attempts). It is a setting of
    /// the queue, which RabbitMQ cannot change in place.
    pub fn delivery_limit(mut self, limit: u32) -> Self {
        self.settings.topology.delivery_limit = limit;
        self
    }

    /// Sets how many messages the broker sends ahead; 32 by default.
    pub fn prefetch(mut self, messages: u16) -> Self {
        self.settings.prefetch = messages;
        self
    }

    /// Sets how many messages are handled at once, each with a database connection; 8 by default.
    pub fn concurrency(mut self, messages: u16) -> Self {
        self.settings.concurrency = messages;
        self
    }

    /// Sets how many messages are handled in one transaction at most, of those that have arrived when it begins; 1 by
    /// default. That saves commits where messages are many. When it fails, each message is handled by itself.
    pub fn batch(mut self, messages: u16) -> Self {
        self.settings.batch = messages;
        self
    }

    /// Sets how long a handler, and each of its statements, may take; 10 s by default.
    pub fn budget(mut self, budget: Duration) -> Self {
        self.settings.budget = budget;
        self
    }

    /// Sets how much longer than the budget an answer of the database may take before its connection is given up, and with
    /// it the subscription; 5 s by default. The server itself ends what takes longer than the budget, so that only a
    /// connection that is dead without knowing it comes to this.
    pub fn answer_limit(mut self, limit: Duration) -> Self {
        self.settings.answer_limit = limit;
        self
    }

    /// Sets how long a message waits after its first, second, … failure; the last is repeated. 5 s, 1 min, 10 min and 1 h by
    /// default. Each is a queue, `<queue>.retry.<delay>`, where the message waits without keeping others from being handled.
    pub fn retry_delays(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.settings.topology.retry_delays = delays.into_iter().collect();
        self
    }

    /// Sets after how many failed attempts a message is dead; 8 by default.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.settings.attempts = attempts;
        self
    }

    /// Sets in which order events take effect; in none by default. It is a setting of the queue, which RabbitMQ cannot change
    /// in place.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.settings.ordering = ordering;
        self.settings.topology.consumers = match ordering {
            Ordering::None => Consumers::Competing,
            Ordering::Aggregate => Consumers::SingleActive,
        };
        self
    }

    /// Sets whether, in the order of [`Ordering::Aggregate`], an event is refused that comes after a later version of its
    /// aggregate; it is by default.
    pub fn version_guard(mut self, guard: VersionGuard) -> Self {
        self.settings.version_guard = guard;
        self
    }

    /// Sets how many events may be parked in the order of [`Ordering::Aggregate`]; 10,000 by default. The next one that would
    /// have to be is kept, and the consumer is not ready, until there is room.
    pub fn parked_limit(mut self, events: u32) -> Self {
        self.settings.parked_limit = events;
        self
    }

    /// Sets what is told when the consumer becomes able or unable to work; it must not block.
    pub fn on_readiness(mut self, tell: impl Fn(Readiness<'_>) + Send + Sync + 'static) -> Self {
        self.settings.on_readiness = Box::new(tell);
        self
    }

    /// Sets what is told of each turn of the consumer's loop, so that liveness can tell one that stands still. It is told
    /// nothing while a transaction is stuck, as one is whose handler blocks its thread.
    pub fn heartbeat(mut self, heartbeat: Heartbeat) -> Self {
        self.settings.heartbeat = heartbeat;
        self
    }

    /// Checks the settings, and sets the consumer's counters to 0.
    ///
    /// # Errors
    ///
    /// The first setting that cannot be used.
    pub fn build<H: Handler>(self, handler: H) -> Result<Consumer<H>, InvalidConsumer> {
        self.check().map_err(InvalidConsumer)?;
        metrics::describe(&self.settings.name);
        Ok(Consumer::new(self, handler))
    }

    /// Checks the settings, and makes what hands events to the handler without a broker, to test it with.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn rehearse<H: Handler>(self, handler: H) -> Result<Rehearsal<H>, InvalidConsumer> {
        self.check().map_err(InvalidConsumer)?;
        Ok(Rehearsal::new(self, handler))
    }

    fn check(&self) -> Result<(), String> {
        let Settings {
            name,
            topology,
            prefetch,
            concurrency,
            batch,
            budget,
            answer_limit,
            attempts,
            ordering,
            parked_limit,
            ..
        } = &self.settings;
        if !(1..=127).contains(&name.len()) {
            return Err("its name is not 1 to 127 bytes long".to_owned());
        }
        if !(1..=MAX_QUEUE).contains(&topology.queue.len()) {
            return Err(format!("its queue's name is not 1 to {MAX_QUEUE} bytes long"));
        }
        if !(1..=255).contains(&topology.exchange.len()) {
            return Err("its exchange's name is not 1 to 255 bytes long".to_owned());
        }
        if topology.bindings.is_empty() {
            return Err("it is bound to no routing key".to_owned());
        }
        if topology.delivery_limit == 0 {
            return Err("a delivery limit of 0 allows no retry at all".to_owned());
        }
        let delays = &topology.retry_delays;
        if !(1..=MAX_RETRY_DELAYS).contains(&delays.len()) {
            return Err(format!("it has not 1 to {MAX_RETRY_DELAYS} retry delays"));
        }
        if delays.iter().any(|delay| !(Duration::from_millis(1)..=Duration::from_hours(24)).contains(delay)) {
            return Err("a retry delay is not 1 ms to 24 h".to_owned());
        }
        if !delays.is_sorted_by(|one, next| one < next) {
            return Err("its retry delays do not grow".to_owned());
        }
        if *attempts == 0 {
            return Err("0 attempts would handle nothing".to_owned());
        }
        if *concurrency == 0 || concurrency > prefetch {
            return Err(format!(
                "a concurrency of {concurrency} with a prefetch of {prefetch}: the prefetch has to be at least the \
                 concurrency, and that at least 1"
            ));
        }
        if *batch == 0 || batch > prefetch {
            return Err(format!(
                "a batch of {batch} with a prefetch of {prefetch}: the prefetch has to be at least the batch, and that at \
                 least 1"
            ));
        }
        if *ordering == Ordering::Aggregate && *batch > 1 {
            return Err(format!(
                "a batch of {batch} in an aggregate's order: one that fails would hold up the aggregates of all the others"
            ));
        }
        if *parked_limit == 0 {
            return Err("a parked limit of 0 allows no failure at all".to_owned());
        }
        let connections = self.pool.options().get_max_connections();
        if *ordering == Ordering::Aggregate && u32::from(*concurrency) + PARKED_AT_ONCE > connections {
            return Err(format!(
                "a concurrency of {concurrency} in an aggregate's order needs as many database connections and \
                 {PARKED_AT_ONCE} for what is parked, and the pool has {connections}"
            ));
        }
        if u32::from(*concurrency) > connections {
            return Err(format!(
                "a concurrency of {concurrency} needs as many database connections, and the pool has {connections}"
            ));
        }
        if !(Duration::from_millis(1)..=Duration::from_mins(5)).contains(budget) {
            return Err(format!("a time budget of {budget:?} is not 1 ms to 5 min"));
        }
        // A batch that fails at its end, and then each message by itself.
        if *budget * u32::from(*batch) * 2 > LONGEST_BATCH {
            return Err(format!(
                "a batch of {batch} with a time budget of {budget:?} may take more than {LONGEST_BATCH:?}"
            ));
        }
        if !(Duration::from_millis(1)..=Duration::from_mins(1)).contains(answer_limit) {
            return Err(format!("an answer limit of {answer_limit:?} is not 1 ms to 1 min"));
        }
        Ok(())
    }
}

impl fmt::Debug for ConsumerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerBuilder")
            .field("name", &self.settings.name)
            .field("topology", &self.settings.topology)
            .field("broker", &self.broker)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use sqlx::postgres::PgPoolOptions;

    use super::*;

    fn builder() -> ConsumerBuilder {
        let pool = PgPoolOptions::new().max_connections(8).connect_lazy("postgres://u@h/d").unwrap();
        let broker = "amqp://u:s3cret@h".parse().unwrap();
        ConsumerBuilder::new("stock".into(), pool, broker, "stock.orders".into()).bind("order.*")
    }

    #[tokio::test]
    async fn the_defaults_can_be_used() {
        builder().check().unwrap();
    }

    #[tokio::test]
    async fn names_the_setting_that_cannot_be_used() {
        let unbound = {
            let mut unbound = builder();
            unbound.settings.topology.bindings.clear();
            unbound
        };
        for (builder, reason) in [
            (unbound, "routing key"),
            (builder().prefetch(4), "prefetch"),
            (builder().concurrency(0), "concurrency"),
            (builder().concurrency(9), "the pool has 8"),
            (builder().budget(Duration::ZERO), "budget"),
            (builder().budget(Duration::from_secs(301)), "budget"),
            (builder().answer_limit(Duration::ZERO), "answer limit"),
            (builder().batch(0), "batch"),
            (builder().batch(33), "batch"),
            (builder().batch(32).budget(Duration::from_mins(1)), "may take more"),
            (builder().delivery_limit(0), "delivery limit"),
            (builder().attempts(0), "attempts"),
            (builder().retry_delays([]), "retry delays"),
            (builder().retry_delays([Duration::ZERO]), "retry delay"),
            (builder().retry_delays([Duration::from_secs(2), Duration::from_secs(2)]), "do not grow"),
            (builder().exchange(""), "exchange"),
            (builder().ordering(Ordering::Aggregate), "4 for what is parked, and the pool has 8"),
            (
                builder().ordering(Ordering::Aggregate).concurrency(4).batch(2),
                "a batch of 2 in an aggregate's order",
            ),
            (builder().parked_limit(0), "parked limit"),
        ] {
            let error = builder.check().unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[tokio::test]
    async fn shows_no_password() {
        assert!(!format!("{:?}", builder()).contains("s3cret"));
    }
}
