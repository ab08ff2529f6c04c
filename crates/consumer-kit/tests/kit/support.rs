//! A database, a queue and a running consumer per test.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::time::{Duration, Instant};

use semel_broker::topology::retry_queue;
use semel_broker::{BrokerUrl, Connection, Delivery, Envelope, Outcome, Outgoing, Publisher, inspect};
use semel_consumer_kit::{Consumer, ConsumerBuilder, Error, Readiness};
use semel_core::database::{self, DatabaseUrl};
use semel_core::lifecycle::Lifecycle;
use semel_core::schema::{self, ENGINE, INBOX};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::counters;
use crate::line::Line;
use crate::script::{Act, Order, Script};

/// How long a condition may take to come true; a passing test never waits for it.
const DEADLINE: Duration = Duration::from_secs(20);

/// A wait that no test sees the end of.
pub(crate) const HOUR: Duration = Duration::from_hours(1);
/// Of consumers in tests.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(20)];

pub(crate) const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

pub(crate) struct World {
    pub(crate) pool: PgPool,
    pub(crate) name: String,
    pub(crate) broker: BrokerUrl,
    pub(crate) connection: Connection,
    pub(crate) script: Script,
    pub(crate) database: DatabaseUrl,
    admin: PgPool,
}

/// An event of an aggregate.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) aggregate: String,
    pub(crate) version: Option<i64>,
    pub(crate) id: Uuid,
    pub(crate) act: Act,
}

/// Events of one aggregate with the versions 1, 2, 3, …
pub(crate) fn steps(aggregate: &str, acts: &[Act]) -> Vec<Step> {
    let steps = acts.iter().zip(1..).map(|(act, version)| Step {
        aggregate: aggregate.to_owned(),
        version: Some(version),
        id: Uuid::new_v4(),
        act: *act,
    });
    steps.collect()
}

pub(crate) fn ids<'a>(steps: impl IntoIterator<Item = &'a Step>) -> Vec<Uuid> {
    steps.into_iter().map(|step| step.id).collect()
}

/// Whether the consumer's tables are made before the test.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Tables {
    Made,
    Missing,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Tables::Made).await
    }

    pub(crate) async fn with(tables: Tables) -> Self {
        counters::install();
        let admin_url = service("SEMEL_TEST_POSTGRES_URL");
        let name = format!("kit_{}", Uuid::new_v4().simple());
        let admin = PgPool::connect_lazy(&admin_url).unwrap();
        admin.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.unwrap();
        let (server, _) = admin_url.rsplit_once('/').expect("the URL names a database");
        let database: DatabaseUrl = format!("{server}/{name}").parse().unwrap();
        if tables == Tables::Made {
            make_tables(&database).await;
        }
        let broker: BrokerUrl = service("AMQP_URL").parse().unwrap();
        Self {
            pool: database::pool(&database, "kit-test", 13),
            connection: Connection::open(&broker, "kit-test").await.unwrap(),
            script: Script::default(),
            name,
            broker,
            database,
            admin,
        }
    }

    /// Exchange and queue are named like the database.
    pub(crate) fn builder(&self) -> ConsumerBuilder {
        self.builder_on(self.pool.clone())
    }

    /// A consumer that reaches the database in its own way.
    pub(crate) fn builder_on(&self, pool: PgPool) -> ConsumerBuilder {
        self.builder_with(pool, self.broker.clone())
    }

    fn builder_with(&self, pool: PgPool, broker: BrokerUrl) -> ConsumerBuilder {
        let queue = self.name.as_str();
        Consumer::builder(queue, pool, broker, queue)
            .exchange(queue)
            .bind("order.OrderPlaced")
            .retry_delays(RETRY_DELAYS)
    }

    /// A consumer that reaches the broker by that line.
    pub(crate) fn builder_by(&self, line: &Line) -> ConsumerBuilder {
        self.builder_with(self.pool.clone(), line.broker())
    }

    pub(crate) async fn start(&self) -> Running {
        let running = self.start_with(self.builder());
        running.ready().await;
        running
    }

    pub(crate) fn start_with(&self, builder: ConsumerBuilder) -> Running {
        let (tell, readiness) = watch::channel(Seen::default());
        let builder = builder.on_readiness(move |readiness| {
            tell.send_modify(|seen| {
                seen.ready = readiness == Readiness::Ready;
                seen.losses += u32::from(!seen.ready);
            });
        });
        let consumer = builder.build(self.script.clone()).unwrap();
        let life = Lifecycle::new();
        let task = {
            let life = life.clone();
            tokio::spawn(async move { consumer.run(&life).await })
        };
        Running { life, task, readiness }
    }

    pub(crate) async fn publish(&self, act: Act) -> Uuid {
        self.publish_all(&[act]).await[0]
    }

    pub(crate) async fn publish_all(&self, acts: &[Act]) -> Vec<Uuid> {
        let events: Vec<_> = acts.iter().map(|act| (Uuid::new_v4(), *act)).collect();
        self.publish_events(&events).await;
        events.into_iter().map(|(id, _)| id).collect()
    }

    pub(crate) async fn publish_events(&self, events: &[(Uuid, Act)]) {
        let bodies = events.iter().map(|(id, act)| (*id, serde_json::to_vec(&Order { act: *act }).unwrap()));
        self.publish_bodies(bodies.collect()).await;
    }

    pub(crate) async fn publish_bodies(&self, bodies: Vec<(Uuid, Vec<u8>)>) {
        let events = bodies.into_iter().map(|(id, body)| {
            let aggregate = Step { aggregate: id.to_string(), version: Some(1), id, act: Act::Succeed };
            self.outgoing(&aggregate, body)
        });
        self.publish_outgoing(events.collect()).await;
    }

    /// Publishes events of aggregates, in this order.
    pub(crate) async fn publish_steps(&self, steps: &[Step]) {
        let events = steps
            .iter()
            .map(|step| self.outgoing(step, serde_json::to_vec(&Order { act: step.act }).unwrap()));
        self.publish_outgoing(events.collect()).await;
    }

    fn outgoing(&self, step: &Step, body: Vec<u8>) -> Outgoing {
        let envelope = Envelope {
            event_id: step.id,
            event_type: "OrderPlaced".to_owned(),
            aggregate_type: "order".to_owned(),
            aggregate_id: step.aggregate.clone(),
            aggregate_version: step.version,
            outbox_id: 1,
            created_at_unix_micros: 1_700_000_000_000_000,
            source: "kit-test".to_owned(),
            headers: BTreeMap::from([("traceparent".to_owned(), TRACE.to_owned())]),
        };
        Outgoing::event(self.name.as_str(), "order.OrderPlaced", envelope, body)
    }

    async fn publish_outgoing(&self, events: Vec<Outgoing>) {
        let mut publisher = Publisher::open(&self.broker, "kit-test").await.unwrap();
        let outcomes = publisher.publish_wave(events).await.outcomes;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
        publisher.close().await;
    }

    /// The events that took effect, in the order in which they did, as often as they did.
    pub(crate) async fn effects_in_order(&self) -> Vec<Uuid> {
        let effects = sqlx::query_scalar("SELECT event_id FROM effects ORDER BY place");
        effects.fetch_all(&self.pool).await.unwrap()
    }

    /// Waits until that many events are parked.
    pub(crate) async fn parked(&self, expected: i64) {
        eventually("the parked events", || async {
            let seen = self.count("parked_events").await;
            if seen == expected { Ok(()) } else { Err(format!("{seen} instead of {expected}")) }
        })
        .await;
    }

    /// Waits until the broker has handed out all that was in the queue.
    pub(crate) async fn drained(&self) {
        eventually("the queue to be empty", || async {
            match self.queued().await {
                0 => Ok(()),
                left => Err(left),
            }
        })
        .await;
    }

    /// Waits until a transaction waits for an aggregate's lock.
    pub(crate) async fn waits_for_lock(&self) {
        let waiting = "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
                       WHERE datname = $1 AND locktype = 'advisory' AND NOT granted";
        eventually("somebody to wait for the lock", || async {
            let waiting: i64 =
                sqlx::query_scalar(waiting).bind(&self.name).fetch_one(&self.admin).await.unwrap();
            if waiting > 0 { Ok(()) } else { Err(waiting) }
        })
        .await;
    }

    /// Waits until that many effects are there.
    pub(crate) async fn took_effect(&self, expected: usize) {
        eventually("the effects", || async {
            let seen = self.count("effects").await;
            if usize::try_from(seen).unwrap() >= expected {
                Ok(())
            } else {
                Err(format!("{seen} of {expected}"))
            }
        })
        .await;
    }

    /// How often the event took effect.
    pub(crate) async fn effects(&self, event: Uuid) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM effects WHERE event_id = $1");
        count.bind(event).fetch_one(&self.pool).await.unwrap()
    }

    pub(crate) async fn count(&self, what: &'static str) -> i64 {
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {what}"));
        sqlx::query_scalar(count).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits for the messages that became of by now: effect, duplicate, retried, dead, invalid.
    pub(crate) async fn counted(&self, expected: [u64; 5]) {
        eventually("the counters", || async {
            let seen = counters::of(&self.name);
            if seen == expected { Ok(()) } else { Err(format!("{seen:?} instead of {expected:?}")) }
        })
        .await;
    }

    /// Ends every database connection of the test, as a restart of the server does.
    pub(crate) async fn end_database_connections(&self) {
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
        eventually("the connections to be gone", || async {
            let ended = sqlx::query(end).bind(&self.name).execute(&self.admin).await.unwrap();
            if ended.rows_affected() == 0 { Ok(()) } else { Err(ended) }
        })
        .await;
    }

    /// Lets new connections only read, or lets them write again, and ends those that are there.
    pub(crate) async fn set_read_only(&self, read_only: bool) {
        let (name, value) = (&self.name, if read_only { "on" } else { "off" });
        let set = format!("ALTER DATABASE {name} SET default_transaction_read_only = {value}");
        self.admin.execute(AssertSqlSafe(set)).await.unwrap();
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
        sqlx::query(end).bind(name).execute(&self.admin).await.unwrap();
    }

    pub(crate) async fn dead_letter_count(&self) -> u32 {
        inspect::message_count(&self.connection, &format!("{}.dead", self.name)).await.unwrap()
    }

    pub(crate) async fn queued(&self) -> u32 {
        inspect::message_count(&self.connection, &self.name).await.unwrap()
    }

    /// How many messages wait for their retry after this delay.
    pub(crate) async fn waiting(&self, delay: Duration) -> u32 {
        inspect::message_count(&self.connection, &retry_queue(&self.name, delay)).await.unwrap()
    }

    /// Waits for that many dead letters, and takes them out of their queue.
    pub(crate) async fn dead_letters(&self, expected: usize) -> Vec<Delivery> {
        let queue = format!("{}.dead", self.name);
        eventually("the dead letters", || async {
            match inspect::message_count(&self.connection, &queue).await {
                Ok(count) if count as usize == expected => Ok(()),
                seen => Err(format!("{seen:?} instead of {expected}")),
            }
        })
        .await;
        inspect::take(&self.connection, &queue, expected).await.unwrap()
    }

    pub(crate) async fn close(self) {
        inspect::delete_queue(&self.connection, &self.name).await.unwrap();
        inspect::delete_queue(&self.connection, &format!("{}.dead", self.name)).await.unwrap();
        for delay in RETRY_DELAYS.into_iter().chain([HOUR]) {
            inspect::delete_queue(&self.connection, &retry_queue(&self.name, delay)).await.unwrap();
        }
        inspect::delete_exchange(&self.connection, &self.name).await.unwrap();
        self.connection.close().await;
        self.pool.close().await;
        self.admin.execute(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.name))).await.unwrap();
    }
}

pub(crate) async fn make_tables(database: &DatabaseUrl) {
    // Nothing is unique here: what takes effect twice has to show.
    let mut connection = database::connect(database, "kit-test").await.unwrap();
    connection.execute("CREATE TABLE effects (event_id UUID NOT NULL, place BIGSERIAL)").await.unwrap();
    schema::migrate(database, &[&ENGINE, &INBOX]).await.unwrap();
}

pub(crate) fn service(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: run `cargo xtask test`, which starts a private Postgres and RabbitMQ")
    })
}

/// A consumer at work.
pub(crate) struct Running {
    pub(crate) life: Lifecycle,
    task: JoinHandle<Result<(), Error>>,
    readiness: watch::Receiver<Seen>,
}

/// What a consumer has told of its readiness.
#[derive(Clone, Copy, Default)]
struct Seen {
    ready: bool,
    losses: u32,
}

impl Running {
    pub(crate) async fn ready(&self) {
        self.readiness("the consumer to be ready", |seen| seen.ready).await;
    }

    /// Waits until the consumer has been unable to work that often.
    pub(crate) async fn lost(&self, times: u32) {
        self.readiness("the consumer to be not ready", |seen| seen.losses >= times).await;
    }

    pub(crate) async fn not_ready(&self) {
        self.readiness("the consumer to be not ready", |seen| !seen.ready).await;
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.readiness.borrow().ready
    }

    /// How often it has been unable to work.
    pub(crate) fn losses(&self) -> u32 {
        self.readiness.borrow().losses
    }

    async fn readiness(&self, what: &str, holds: impl FnMut(&Seen) -> bool) {
        let mut readiness = self.readiness.clone();
        within(what, readiness.wait_for(holds)).await.unwrap();
    }

    /// Stops it and waits for its end.
    pub(crate) async fn stop(self) {
        self.life.stop();
        self.ended().await.unwrap();
    }

    /// Only makes its topology.
    pub(crate) async fn stop_when_ready(self) {
        self.ready().await;
        self.stop().await;
    }

    pub(crate) async fn ended(self) -> Result<(), Error> {
        within("the consumer to end", self.task).await.unwrap()
    }
}

pub(crate) async fn within<F: Future>(what: &str, future: F) -> F::Output {
    let ended = tokio::time::timeout(DEADLINE, future).await;
    ended.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {what}"))
}

/// Looks at a condition until it holds; the panic tells what was seen last.
pub(crate) async fn eventually<T, E: Debug, F>(what: &str, look: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, E>>,
{
    eventually_within(DEADLINE, what, look).await
}

/// Does so for at most so long.
pub(crate) async fn eventually_within<T, E: Debug, F>(
    deadline: Duration,
    what: &str,
    mut look: impl FnMut() -> F,
) -> T
where
    F: Future<Output = Result<T, E>>,
{
    let until = Instant::now() + deadline;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if Instant::now() > until => {
                panic!("waited {deadline:?} for {what}; seen last: {seen:?}")
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}
