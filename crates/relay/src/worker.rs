//! A worker: its connections, and one batch after the other.
//!
//! A batch's transaction holds the lanes by advisory locks, and neither a transaction id nor a snapshot while it
//! publishes, unless it has diverted events or marked what an earlier batch could not.
//!
//! While the broker is away or blocked, or the database does not take a relay's writes, no lane is held and nothing is
//! sent. A connection that learned of an alarm is kept until the broker says that it is over: a new one would not know.

use std::time::Instant;

use metrics::{counter, histogram};
use semel_broker::{Acceptance, Publisher, topology};
use semel_core::database::{self, CALL_LIMIT, within};
use semel_core::lifecycle::{Pass, Work};
use semel_core::outbox::{drain, held};
use sqlx::{Connection as _, PgConnection};

use crate::batch::Batch;
use crate::complaints::Complaints;
use crate::error::RelayError;
use crate::metrics as names;
use crate::options::{Config, TopologyMode};
use crate::prober::{Broker, Shared};

/// One worker with its own database connection, broker connection and channel.
#[derive(Debug)]
pub struct Worker {
    config: Config,
    shared: Shared,
    number: u16,
    database: Option<PgConnection>,
    /// One that broke because the broker is blocked is kept as well, to learn when that is over.
    publisher: Option<Publisher>,
    complaints: Complaints,
}

impl Worker {
    /// Makes the worker with this number; it connects when it first runs.
    #[must_use]
    pub fn new(config: Config, shared: Shared, number: u16) -> Self {
        Self { config, shared, number, database: None, publisher: None, complaints: Complaints::default() }
    }

    /// Closes its connections.
    pub async fn close(mut self) {
        self.shared.broker(self.number, Broker::Away);
        if let Some(publisher) = self.publisher.take() {
            publisher.close().await;
        }
        if let Some(database) = self.database.take() {
            let _ = database.close().await;
        }
    }

    async fn publisher(&mut self) -> Result<Publisher, RelayError> {
        if self.publisher.as_ref().is_some_and(Publisher::is_blocked) {
            self.shared.broker(self.number, Broker::Blocked);
            return Err(RelayError::Blocked);
        }
        let known = self.publisher.take().filter(Publisher::is_usable);
        if self.shared.is_blocked_beside(self.number) {
            // Another worker's connection knows. This one's would learn it by a wave that hangs with its lanes held.
            self.shared.broker(self.number, Broker::Away);
            self.publisher = known;
            return Err(RelayError::Blocked);
        }
        if let Some(publisher) = known {
            return Ok(publisher);
        }
        self.shared.broker(self.number, Broker::Away);
        let name = format!("semel-relay {}", self.number);
        let publisher =
            Publisher::for_events(&self.config.broker, &name).await.map_err(RelayError::Broker)?;
        match self.exchange(&publisher).await {
            Ok(()) => self.shared.broker(self.number, Broker::Up),
            Err(RelayError::Blocked) => {
                self.shared.broker(self.number, Broker::Blocked);
                self.publisher = Some(publisher);
                return Err(RelayError::Blocked);
            }
            Err(error) => {
                publisher.close().await;
                return Err(error);
            }
        }
        Ok(publisher)
    }

    /// Makes the exchange where that is to be done, and sees that it takes messages.
    async fn exchange(&self, publisher: &Publisher) -> Result<(), RelayError> {
        let name = &self.config.exchange;
        if self.config.topology == TopologyMode::Declare {
            topology::declare_exchange(publisher.connection(), name).await.map_err(RelayError::Broker)?;
        }
        match publisher.exchange_takes(name).await {
            Ok(Acceptance::Takes) => Ok(()),
            Ok(Acceptance::Missing) => Err(RelayError::NoExchange(name.clone())),
            Ok(Acceptance::Refused { reason }) => {
                Err(RelayError::NotAllowed { exchange: name.clone(), reason })
            }
            Err(semel_broker::Error::Blocked { .. }) => Err(RelayError::Blocked),
            Err(error) => Err(RelayError::Broker(error)),
        }
    }

    async fn database(&mut self) -> Result<PgConnection, RelayError> {
        if let Some(database) = self.database.take() {
            return Ok(database);
        }
        let mut database =
            database::connect_with(&self.config.database, "semel-relay worker", &drain::SETTINGS)
                .await
                .map_err(RelayError::database("connecting to the database"))?;
        let read_only = within(CALL_LIMIT, drain::is_read_only(&mut database))
            .await
            .map_err(RelayError::database("asking whether the database takes writes"))?;
        if read_only {
            return Err(RelayError::ReadOnly);
        }
        self.config.suits(&mut database).await?;
        // Found out later, it would be found out with events that are sent and cannot be marked.
        within(CALL_LIMIT, held::probe_writing(&mut database))
            .await
            .map_err(RelayError::database("making sure that the database takes a relay's writes"))?;
        Ok(database)
    }

    /// Counts what is marked, now that it is committed.
    fn tell_of(&self, latencies: &[f64]) {
        if latencies.is_empty() {
            return;
        }
        counter!(names::PUBLISHED).increment(latencies.len() as u64);
        let histogram = histogram!(names::LATENCY);
        for &latency in latencies {
            histogram.record(latency);
        }
        self.shared.progressed();
    }

    /// Runs one batch: the hot path, and when that is committed the chains of its lanes that are due.
    async fn pass(&mut self, waiting: &[i16], publisher: &mut Publisher) -> Result<Pass, RelayError> {
        let began = Instant::now();
        let (hot, due) = self.part(Part::Hot, waiting, began, publisher).await?;
        if due.is_empty() || began.elapsed() >= self.config.batch_time {
            return Ok(hot);
        }
        let (chains, _) = self.part(Part::Chains, &due, began, publisher).await?;
        Ok(if hot == Pass::Idle { chains } else { hot })
    }

    /// Runs a part of a batch in a transaction of its own; returns the lanes that have chains that are due, too.
    async fn part(
        &mut self,
        part: Part,
        lanes: &[i16],
        began: Instant,
        publisher: &mut Publisher,
    ) -> Result<(Pass, Vec<i16>), RelayError> {
        // Taken out, so that a connection that failed is dropped: that frees its lanes.
        let mut database = self.database().await?;
        let mut tx =
            within(CALL_LIMIT, database.begin()).await.map_err(RelayError::database("beginning a batch"))?;
        let mut batch =
            Batch { config: &self.config, shared: &self.shared, complaints: &mut self.complaints, began };
        let done = match part {
            Part::Hot => batch.run(&mut tx, lanes, publisher).await?,
            Part::Chains => batch.run_chains(&mut tx, lanes, publisher).await?,
        };
        within(CALL_LIMIT, tx.commit()).await.map_err(RelayError::database("committing a batch"))?;
        self.shared.unmarked().forget(&done.lanes);
        self.tell_of(&done.latencies);
        self.database = Some(database);
        match done.broken {
            Some(semel_broker::Error::Blocked { .. }) => return Err(RelayError::Blocked),
            Some(error) => return Err(RelayError::Broker(error)),
            None => {}
        }
        if done.pass != Pass::Idle {
            self.shared.progress().notify_one();
        }
        Ok((done.pass, done.due))
    }
}

/// The parts of a batch.
#[derive(Clone, Copy, Debug)]
enum Part {
    Hot,
    Chains,
}

impl Work for Worker {
    type Error = RelayError;

    async fn run_once(&mut self) -> Result<Pass, RelayError> {
        self.complaints.tell();
        // Both first: while one of them is away no lane is held.
        let mut publisher = self.publisher().await?;
        self.shared.broker(self.number, Broker::Up);
        let waiting = self.shared.waiting();
        let pass =
            if waiting.is_empty() { Ok(Pass::Idle) } else { self.pass(&waiting, &mut publisher).await };
        self.complaints.tell();
        if publisher.is_blocked() {
            self.shared.broker(self.number, Broker::Blocked);
            self.publisher = Some(publisher);
        } else if publisher.is_usable() {
            // Whatever became of the database, this connection is good.
            self.publisher = Some(publisher);
        } else {
            self.shared.broker(self.number, Broker::Away);
        }
        pass
    }
}
