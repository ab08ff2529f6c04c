//! A consumer, and the loop that keeps it subscribed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semel_broker::BrokerUrl;
use semel_core::backoff::Backoff;
use semel_core::database;
use semel_core::disposition::{Disposed as _, Disposition, chain};
use semel_core::lifecycle::{Lifecycle, drive};
use sqlx::PgPool;

use crate::aggregate::Ordering;
use crate::attempts::Attempts;
use crate::builder::{ConsumerBuilder, Readiness, Settings};
use crate::copies::Copies;
use crate::error::Error;
use crate::handler::Handler;
use crate::retrier::Retrier;
use crate::session::{Ahead, Ended, Session};

/// A subscription that has held for this long makes the next wait a short one again.
const HELD: Duration = Duration::from_secs(30);

/// Subscriptions in a row that end before that, with an aggregate's order, before a message is suspected that the client library
/// cannot read: it ends each connection that it is sent on.
const CUT_SHORT: u32 = 3;

/// Takes the events of one queue and hands them to a [`Handler`], once each.
///
/// Any number of processes may run the same consumer.
pub struct Consumer<H> {
    shared: Arc<Shared<H>>,
}

/// What the tasks of a consumer share.
pub(crate) struct Shared<H> {
    pub(crate) settings: Settings,
    pub(crate) pool: PgPool,
    pub(crate) broker: BrokerUrl,
    pub(crate) copies: Copies,
    pub(crate) attempts: Attempts,
    pub(crate) handler: H,
}

impl<H> Shared<H> {
    pub(crate) fn new(builder: ConsumerBuilder, handler: H) -> Self {
        let ConsumerBuilder { settings, pool, broker } = builder;
        let copies = Copies::new(&broker, &settings);
        Self { settings, pool, broker, copies, attempts: Attempts::default(), handler }
    }

    /// Notes a turn of the loop, unless a message is stuck: then the consumer is not to look alive.
    pub(crate) fn beat(&self) {
        if self.attempts.oldest() <= self.settings.attempt_limit() {
            self.settings.heartbeat.beat();
        }
    }

    pub(crate) fn not_consuming(&self, reason: &str, retry_in: Duration) {
        (self.settings.on_readiness)(Readiness::NotReady(reason));
        tracing::warn!(
            consumer = self.settings.name,
            retry_in_ms = u64::try_from(retry_in.as_millis()).unwrap_or(u64::MAX),
            "not consuming: {reason}"
        );
    }
}

impl<H: Handler> Consumer<H> {
    pub(crate) fn new(builder: ConsumerBuilder, handler: H) -> Self {
        Self { shared: Arc::new(Shared::new(builder, handler)) }
    }

    /// Consumes until the soft stop, then finishes what it has begun and returns the rest to the queue; at the hard stop it
    /// returns at once.
    ///
    /// Whatever passes by waiting (broker or database away, database read-only or full, queue deleted, tables not made yet)
    /// is logged once each time and waited for with backoff.
    ///
    /// # Errors
    ///
    /// What does not pass by waiting: refused credentials, a queue with other settings, a schema of another version.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: messages that are being handled are finished by tasks of `life`, but may stay unacknowledged.
    pub async fn run(&self, life: &Lifecycle) -> Result<(), Error> {
        let ended = tokio::select! {
            biased;
            // Boxed, for it is large, and callers hold it by value.
            ended = Box::pin(self.consume(life)) => ended,
            // Its subscription is dropped, which cuts the connection, and the broker has the messages again.
            () = life.hard_stop() => Ok(()),
        };
        let reason = if ended.is_ok() { "stopping" } else { "failed" };
        (self.shared.settings.on_readiness)(Readiness::NotReady(reason));
        ended
    }

    async fn consume(&self, life: &Lifecycle) -> Result<(), Error> {
        let ended = match self.shared.settings.ordering {
            Ordering::None => self.keep_subscribed(life).await,
            Ordering::Aggregate => self.keep_subscribed_and_retry(life).await,
        };
        self.shared.copies.close().await;
        ended
    }

    /// Beside the subscription, parked events are tried again, also while the broker is away or another process has the queue.
    async fn keep_subscribed_and_retry(&self, life: &Lifecycle) -> Result<(), Error> {
        let retrying = Lifecycle::new();
        let retry = async {
            let mut retrier = Retrier::new(Arc::clone(&self.shared));
            let pace = retrier.pace();
            drive("parked events", &mut retrier, &pace, &retrying).await
        };
        let subscribe = async {
            let ended = self.keep_subscribed(life).await;
            retrying.stop();
            ended
        };
        let stop = async {
            tokio::select! {
                () = life.stopping() => retrying.stop(),
                () = retrying.stopping() => {}
            }
        };
        let (ended, _, ()) = tokio::join!(subscribe, retry, stop);
        ended
    }

    async fn keep_subscribed(&self, life: &Lifecycle) -> Result<(), Error> {
        let mut backoff = Backoff::for_service();
        let in_order = self.shared.settings.ordering == Ordering::Aggregate;
        let mut ahead = if in_order { Ahead::Full } else { Ahead::OneUntilFresh };
        let mut cut_short = 0;
        let mut ended = Ok(());
        while !life.is_stopping() {
            let begun = Instant::now();
            let mut was_subscribed = false;
            let error = match self.subscribe_and_work(life, ahead, &mut was_subscribed).await {
                Ok(Ended::Stopped) => break,
                Ok(Ended::ForMoreAhead) => {
                    ahead = Ahead::Full;
                    continue;
                }
                Err(error) => error,
            };
            if error.disposition() == Disposition::Fail {
                ended = Err(error);
                break;
            }
            if matches!(error, Error::Broker(_)) {
                cut_short += u32::from(was_subscribed);
            } else {
                database::cut_idle(&self.shared.pool);
            }
            if begun.elapsed() > HELD {
                backoff.reset();
                cut_short = 0;
            }
            ahead = if in_order && cut_short < CUT_SHORT { Ahead::Full } else { Ahead::OneUntilFresh };
            let wait = backoff.next_wait();
            self.shared.not_consuming(&chain(&error), wait);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = life.stopping() => {}
            }
        }
        ended
    }

    async fn subscribe_and_work(
        &self,
        life: &Lifecycle,
        ahead: Ahead,
        was_subscribed: &mut bool,
    ) -> Result<Ended, Error> {
        self.shared.beat();
        let session = tokio::select! {
            session = Session::open(&self.shared, ahead) => session?,
            () = life.stopping() => return Ok(Ended::Stopped),
        };
        tracing::info!(
            consumer = self.shared.settings.name,
            queue = self.shared.settings.topology.queue,
            "consumes"
        );
        *was_subscribed = true;
        (self.shared.settings.on_readiness)(Readiness::Ready);
        session.work(life).await
    }
}

impl Consumer<()> {
    /// Starts to build the consumer of that name, which is the scope of its deduplication: the same queue consumed under
    /// another name takes every effect again.
    pub fn builder(
        name: impl Into<String>,
        pool: PgPool,
        broker: BrokerUrl,
        queue: impl Into<String>,
    ) -> ConsumerBuilder {
        ConsumerBuilder::new(name.into(), pool, broker, queue.into())
    }
}

impl<H> fmt::Debug for Consumer<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("name", &self.shared.settings.name)
            .field("queue", &self.shared.settings.topology.queue)
            .finish_non_exhaustive()
    }
}
