//! One subscription, from its opening to whatever ends it.
//!
//! Messages are handled in tasks of the process's [`Lifecycle`], which are awaited and never cut off half-way: a database
//! call that is dropped leaves its connection in an unknown state. Whatever ends the session, messages in work are finished
//! first, then the channel is closed, which returns to the queue what was not acknowledged.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use semel_broker::{Connection, Delivery, Subscription, topology};
use semel_core::lifecycle::Lifecycle;
use semel_core::schema::{self, INBOX};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::builder::TopologyMode;
use crate::consumer::Shared;
use crate::error::Error;
use crate::handler::Handler;
use crate::message;

/// How often an idle loop turns.
const TURN: Duration = Duration::from_secs(5);

pub(crate) struct Session<H> {
    shared: Arc<Shared<H>>,
    subscription: Subscription,
    /// Messages that may be handled at the moment.
    places: Arc<Semaphore>,
    running: FuturesUnordered<JoinHandle<Result<(), Error>>>,
    /// Ends the waits of messages that are about to be given back.
    ending: CancellationToken,
}

impl<H: Handler> Session<H> {
    /// Sees that topology and tables are there, and subscribes.
    pub(crate) async fn open(shared: &Arc<Shared<H>>) -> Result<Self, Error> {
        let settings = &shared.settings;
        // First of all, so that nothing is fetched that could only be given back, which counts towards its limit.
        schema::verify(&shared.pool, &[&INBOX]).await?;
        if settings.topology_mode != TopologyMode::Off {
            let connection = Connection::open(&shared.broker, &settings.name).await?;
            match settings.topology_mode {
                TopologyMode::Declare => topology::declare(&connection, &settings.topology).await?,
                TopologyMode::Verify => topology::verify(&connection, &settings.topology).await?,
                TopologyMode::Off => {}
            }
            connection.close().await;
        }
        let queue = &settings.topology.queue;
        let subscription =
            Subscription::open(&shared.broker, &settings.name, queue, settings.prefetch).await?;
        Ok(Self {
            shared: Arc::clone(shared),
            subscription,
            places: Arc::new(Semaphore::new(usize::from(settings.concurrency))),
            running: FuturesUnordered::new(),
            ending: CancellationToken::new(),
        })
    }

    /// Works until the soft stop, or until something ends the subscription.
    pub(crate) async fn work(mut self, life: &Lifecycle) -> Result<(), Error> {
        let ended = self.take(life).await;
        self.ending.cancel();
        let mut finished = Ok(());
        while let Some(done) = self.running.next().await {
            self.shared.settings.heartbeat.beat();
            finished = finished.and(outcome(done));
        }
        self.subscription.close().await;
        ended.and(finished)
    }

    async fn take(&mut self, life: &Lifecycle) -> Result<(), Error> {
        let mut place: Option<OwnedSemaphorePermit> = None;
        loop {
            self.shared.settings.heartbeat.beat();
            let mut taken: Option<Delivery> = None;
            tokio::select! {
                // In this order, so that nothing is taken after a stop.
                biased;
                () = life.stopping() => return Ok(()),
                Some(done) = self.running.next() => outcome(done)?,
                free = Arc::clone(&self.places).acquire_owned(), if place.is_none() => place = free.ok(),
                delivery = self.subscription.next(), if place.is_some() => taken = Some(delivery?),
                () = tokio::time::sleep(TURN) => {}
            }
            if let Some(delivery) = taken
                && let Some(place) = place.take()
            {
                let shared = Arc::clone(&self.shared);
                let ending = self.ending.clone();
                self.running.push(life.spawn(message::settle(shared, delivery, place, ending)));
            }
        }
    }
}

fn outcome(done: Result<Result<(), Error>, tokio::task::JoinError>) -> Result<(), Error> {
    done.map_err(Error::Task)?
}
