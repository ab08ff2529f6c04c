//! A consumer, and the loop that keeps it subscribed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semel_broker::BrokerUrl;
use semel_core::backoff::Backoff;
use semel_core::disposition::{Disposed as _, Disposition, chain};
use semel_core::lifecycle::Lifecycle;
use sqlx::PgPool;

use crate::builder::{ConsumerBuilder, Readiness, Settings};
use crate::dead_letter::DeadLetters;
use crate::error::Error;
use crate::handler::Handler;
use crate::session::Session;

/// A subscription that has held for this long makes the next wait a short one again.
const HELD: Duration = Duration::from_secs(30);

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
    pub(crate) dead_letters: DeadLetters,
    pub(crate) handler: H,
}

impl<H: Handler> Consumer<H> {
    pub(crate) fn new(builder: ConsumerBuilder, handler: H) -> Self {
        let ConsumerBuilder { settings, pool, broker } = builder;
        let dead_letters = DeadLetters::new(&broker, &settings);
        Self { shared: Arc::new(Shared { settings, pool, broker, dead_letters, handler }) }
    }

    /// Consumes until the soft stop, then finishes what it has begun and returns the rest to the queue.
    ///
    /// Whatever passes by waiting (broker or database away, queue deleted, tables not made yet) is logged once each time
    /// and waited for with backoff.
    ///
    /// # Errors
    ///
    /// What does not pass by waiting: refused credentials, a queue with other settings, a schema of another version.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: messages that are being handled are finished by tasks of `life`, but may stay unacknowledged.
    pub async fn run(&self, life: &Lifecycle) -> Result<(), Error> {
        let settings = &self.shared.settings;
        let mut backoff = Backoff::for_service();
        while !life.is_stopping() {
            let begun = Instant::now();
            let Err(error) = self.subscribe_and_work(life).await else { break };
            if error.disposition() == Disposition::Fail {
                (settings.on_readiness)(Readiness::NotReady("failed"));
                self.shared.dead_letters.close().await;
                return Err(error);
            }
            if begun.elapsed() > HELD {
                backoff.reset();
            }
            let wait = backoff.next_wait();
            let reason = chain(&error);
            (settings.on_readiness)(Readiness::NotReady(&reason));
            tracing::warn!(
                consumer = settings.name,
                retry_in_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                "not consuming: {reason}"
            );
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = life.stopping() => {}
            }
        }
        (settings.on_readiness)(Readiness::NotReady("stopping"));
        self.shared.dead_letters.close().await;
        Ok(())
    }

    async fn subscribe_and_work(&self, life: &Lifecycle) -> Result<(), Error> {
        self.shared.settings.heartbeat.beat();
        let session = tokio::select! {
            session = Session::open(&self.shared) => session?,
            () = life.stopping() => return Ok(()),
        };
        tracing::info!(
            consumer = self.shared.settings.name,
            queue = self.shared.settings.topology.queue,
            "consumes"
        );
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
