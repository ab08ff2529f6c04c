//! One subscription, from its opening to whatever ends it.
//!
//! Messages are handled in tasks of the process's [`Lifecycle`], which are awaited and never cut off half-way: a database
//! call that is dropped leaves its connection in an unknown state. Whatever ends the session, messages in work are finished
//! first, each call of theirs within its limit; then the channel is closed, which returns to the queue what was not
//! acknowledged, one delivery closer to its limit. So a session fetches nothing before the database has taken a write, and
//! the one after a failure fetches what comes again one by one, as does the first one of a process: a second failure is then the
//! cost of one message alone.
//!
//! With an aggregate's order it fetches as many as ever, for the broker puts a message that comes again behind others that do: a
//! second failure would change their order. There, what comes again is parked instead, and the database counts.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use semel_broker::{Connection, Delivery, Subscription, topology};
use semel_core::database::{Loan, within};
use semel_core::inbox::parked;
use semel_core::lifecycle::Lifecycle;
use semel_core::schema::{self, INBOX};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::aggregate::Ordering;
use crate::builder::{Readiness, TopologyMode};
use crate::consumer::Shared;
use crate::error::Error;
use crate::handler::Handler;
use crate::lanes::{Lane, Lanes};
use crate::message::{self, Signals};
use crate::transaction::probe;

/// How often an idle loop turns.
const TURN: Duration = Duration::from_secs(1);

/// How many messages the broker sends ahead.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ahead {
    /// As many as the settings say.
    Full,
    /// One, until one comes for the first time: an earlier process or subscription may have been ended by one that comes
    /// again, and that one is to use up its own deliveries and not its neighbours'.
    OneUntilFresh,
}

/// How a session ended that nothing has ended by force.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ended {
    /// By the soft stop.
    Stopped,
    /// For another that is sent as many messages ahead as the settings say.
    ForMoreAhead,
}

pub(crate) struct Session<H> {
    shared: Arc<Shared<H>>,
    subscription: Subscription,
    /// Messages that may be handled at the moment.
    places: Arc<Semaphore>,
    running: FuturesUnordered<JoinHandle<Result<(), Error>>>,
    signals: Arc<Signals>,
    ahead: Ahead,
    lanes: Arc<Lanes<Delivery>>,
}

impl<H: Handler> Session<H> {
    /// Sees that topology and tables are there and that the database takes writes, and subscribes.
    pub(crate) async fn open(shared: &Arc<Shared<H>>, ahead: Ahead) -> Result<Self, Error> {
        let settings = &shared.settings;
        // First of all, so that nothing is fetched that could only be given back, which counts towards its limit.
        schema::verify_in(&shared.pool, &[&INBOX]).await?;
        probe(&shared.pool, settings).await?;
        see_to_parked(shared).await?;
        shared.beat();
        if settings.topology_mode != TopologyMode::Off {
            let connection = Connection::open(&shared.broker, &settings.name).await?;
            match settings.topology_mode {
                TopologyMode::Declare => topology::declare(&connection, &settings.topology).await?,
                TopologyMode::Verify => topology::verify(&connection, &settings.topology).await?,
                TopologyMode::Off => {}
            }
            connection.close().await;
        }
        shared.beat();
        let queue = &settings.topology.queue;
        let prefetch = match ahead {
            Ahead::Full => settings.prefetch,
            Ahead::OneUntilFresh => 1,
        };
        let subscription = Subscription::open(&shared.broker, &settings.name, queue, prefetch).await?;
        let frame_max = subscription.frame_max();
        Ok(Self {
            shared: Arc::clone(shared),
            subscription,
            places: Arc::new(Semaphore::new(usize::from(settings.concurrency))),
            running: FuturesUnordered::new(),
            signals: Arc::new(Signals { frame_max, ..Signals::default() }),
            ahead,
            lanes: Arc::default(),
        })
    }

    /// Works until the soft stop, or until something ends the subscription.
    pub(crate) async fn work(mut self, life: &Lifecycle) -> Result<Ended, Error> {
        let ended = match self.shared.settings.ordering {
            Ordering::None => self.take(life).await.map(|()| Ended::Stopped),
            Ordering::Aggregate => self.take_in_order(life).await,
        };
        self.signals.ending.cancel();
        if !matches!(ended, Ok(Ended::ForMoreAhead)) {
            (self.shared.settings.on_readiness)(Readiness::NotReady("takes no more messages"));
        }
        let mut finished = Ok(());
        loop {
            self.shared.beat();
            tokio::select! {
                done = self.running.next() => match done {
                    Some(done) => finished = finished.and(outcome(done)),
                    None => break,
                },
                () = tokio::time::sleep(TURN) => {}
            }
        }
        self.subscription.close().await;
        ended.and_then(|ended| finished.map(|()| ended))
    }

    /// Takes messages for as long as the broker sends some: each waits in its aggregate's lane.
    ///
    /// The prefetch is never changed under way. That cancels a consumer, and the broker would hand the queue to another process
    /// while this one still holds messages. So the session ends, when what it holds is settled, for one with a larger prefetch.
    async fn take_in_order(&mut self, life: &Lifecycle) -> Result<Ended, Error> {
        let mut has_fresh = false;
        loop {
            self.shared.beat();
            tokio::select! {
                biased;
                () = life.stopping() => return Ok(Ended::Stopped),
                Some(done) = self.running.next() => outcome(done)?,
                () = self.signals.settled.notified(), if has_fresh && self.ahead == Ahead::OneUntilFresh => {
                    return Ok(Ended::ForMoreAhead);
                }
                delivery = self.subscription.next() => {
                    let delivery = delivery?;
                    has_fresh |= delivery.delivery_count.unwrap_or(0) == 0;
                    self.begin_in_order(life, delivery);
                }
                () = tokio::time::sleep(TURN) => {}
            }
        }
    }

    fn begin_in_order(&mut self, life: &Lifecycle, delivery: Delivery) {
        let (shared, places) = (Arc::clone(&self.shared), Arc::clone(&self.places));
        let signals = Arc::clone(&self.signals);
        let Some(aggregate) = message::aggregate(&self.shared, &delivery) else {
            self.running.push(life.spawn(message::settle_when_free(shared, delivery, places, signals)));
            return;
        };
        if self.lanes.join(&aggregate, delivery) == Lane::Idle {
            let lanes = Arc::clone(&self.lanes);
            self.running.push(life.spawn(message::settle_lane(shared, lanes, aggregate, places, signals)));
        }
    }

    async fn take(&mut self, life: &Lifecycle) -> Result<(), Error> {
        let mut place: Option<OwnedSemaphorePermit> = None;
        loop {
            self.shared.beat();
            let mut taken = Vec::new();
            tokio::select! {
                // In this order, so that nothing is taken after a stop.
                biased;
                () = life.stopping() => return Ok(()),
                Some(done) = self.running.next() => outcome(done)?,
                free = Arc::clone(&self.places).acquire_owned(), if place.is_none() => place = free.ok(),
                delivery = self.subscription.next(), if place.is_some() => {
                    let delivery = delivery?;
                    if self.ahead == Ahead::OneUntilFresh && delivery.delivery_count.unwrap_or(0) == 0 {
                        self.take_all_ahead().await?;
                    }
                    taken.push(delivery);
                    self.take_what_is_there(&mut taken)?;
                }
                () = tokio::time::sleep(TURN) => {}
            }
            if !taken.is_empty()
                && let Some(place) = place.take()
            {
                self.begin(life, taken, place);
            }
        }
    }

    async fn take_all_ahead(&mut self) -> Result<(), Error> {
        self.subscription.set_prefetch(self.shared.settings.prefetch).await?;
        self.ahead = Ahead::Full;
        Ok(())
    }

    /// Fills a batch with deliveries that have arrived; it waits for none.
    fn take_what_is_there(&mut self, taken: &mut Vec<Delivery>) -> Result<(), Error> {
        while taken.len() < usize::from(self.shared.settings.batch) {
            let Some(delivery) = self.subscription.next().now_or_never() else { break };
            taken.push(delivery?);
        }
        Ok(())
    }

    fn begin(&mut self, life: &Lifecycle, mut taken: Vec<Delivery>, place: OwnedSemaphorePermit) {
        let (shared, signals) = (Arc::clone(&self.shared), Arc::clone(&self.signals));
        self.running.push(match taken.pop() {
            Some(only) if taken.is_empty() => life.spawn(message::settle(shared, only, place, signals)),
            last => {
                taken.extend(last);
                life.spawn(message::settle_together(shared, taken, place, signals))
            }
        });
    }
}

/// Sees that nothing is parked in whose order nobody would try it again, and that there is room to park.
///
/// What fails while there is none is kept, and the broker ends a subscription that settles nothing for too long: all that was sent
/// ahead would be one delivery closer to its limit each time.
async fn see_to_parked<H>(shared: &Shared<H>) -> Result<(), Error> {
    let failed = |source| Error::Database { attempted: "look for parked events", source };
    let settings = &shared.settings;
    let (limit, full) = match settings.ordering {
        Ordering::None => (1, Error::StillParked),
        Ordering::Aggregate => (settings.parked_limit, Error::ParkedFull { limit: settings.parked_limit }),
    };
    let mut loan = Loan::take(&shared.pool).await.map_err(failed)?;
    let look = parked::is_full(&mut loan, &settings.name, i64::from(limit));
    let is_full = within(settings.call_limit(), look).await.map_err(failed)?;
    loan.give_back();
    if is_full { Err(full) } else { Ok(()) }
}

fn outcome(done: Result<Result<(), Error>, tokio::task::JoinError>) -> Result<(), Error> {
    done.map_err(Error::Task)?
}
