//! Dead letters, for people: what is in `<queue>.dead`, and what is decided about it.
//!
//! It promises:
//!
//! * **Looking changes nothing.** Letters are held unacknowledged, all that are there, and given back together by closing the
//!   channel; so no letter is lost, and their order stays. Only how often they were delivered is counted on, towards a limit
//!   that nobody reaches. A command that is broken off, or one that does not hold all of them, may move those it held behind
//!   others.
//! * **No letter lost by a replay.** Its copy goes to the consumer's *own* queue, mandatory and confirmed, before the letter is
//!   acknowledged. A crash in between leaves both: the event is replayed twice, and the second is a duplicate.
//! * **No effect twice.** A replayed letter is deduplicated like any message. One that is older than what the consumer
//!   remembers would not be, and is refused unless that is forced.
//! * **No decision without a trace.** The entry in `operator_actions` is committed before the broker is told anything. One that
//!   was broken off may name letters that are still there.
//!
//! A replayed message begins anew: it tells neither of attempts nor of errors, and the broker's `x-death` is left out.
//!
//! Letters that another command holds at the time are not seen. What a command holds is bounded: it looks at 16,384 letters, or
//! 64 MiB, and says when more may be behind those.
//!
//! The order relies on quorum queues of RabbitMQ, 3.10 as 4.x: what one consumer holds is returned, sorted as it was taken, when
//! its channel is gone, and is delivered before what never was delivered. `basic.get` would not do: each such message is held by
//! a consumer of its own, and those are returned one after another in no order. RabbitMQ 4 gives a queue a delivery limit of 20
//! unless it has one of its own, which `<queue>.dead` has.

mod desk;
mod letter;
mod walk;

use std::fmt;
use std::time::Duration;

use semel_broker::{BrokerUrl, topology};
use semel_core::database;
use semel_core::inbox;
use semel_core::schema::{self, ENGINE, INBOX, SchemaError};
use sqlx::PgPool;
use time::OffsetDateTime;

pub use desk::{Decided, Decision, Fate, Verdict};
pub use letter::{Filter, Letter, Which};
use walk::{MOST_HELD, Walk};

/// How long after it was put back a letter may still be delivered; what the reaper adds to the retention of events, too.
const LONGEST_REDELIVERY: Duration = Duration::from_hours(168);

/// How long a consumer remembers what it took effect of, unless told otherwise; the reaper's default.
const RETENTION: Duration = Duration::from_hours(720);

/// The dead letters of one consumer's queue.
pub struct DeadLetters {
    consumer: String,
    pool: PgPool,
    broker: BrokerUrl,
    queue: String,
    retention: Duration,
}

/// What stood in the way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeadError {
    /// The broker cannot be used, or there is no such queue.
    #[error(transparent)]
    Broker(#[from] semel_broker::Error),
    /// The database cannot be used.
    #[error("cannot {attempted}")]
    Database {
        /// What was attempted, as a verb phrase.
        attempted: &'static str,
        /// Why it failed.
        source: sqlx::Error,
    },
    /// The database has no tables that a decision can be written down in.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// No letter is meant.
    #[error("there is no dead letter {letter} in queue `{queue}`")]
    NoLetter {
        /// What was asked for.
        letter: String,
        /// Where it was looked for.
        queue: String,
    },
    /// The connection was lost before a letter was gone.
    #[error("whether dead letter {0} is gone is not known: the connection was lost")]
    NotDiscarded(String),
    /// A letter could not be put back; it and what was to follow are where they were.
    #[error("dead letter {letter} was not put back into queue `{queue}`: {outcome}")]
    NotPutBack {
        /// Which.
        letter: String,
        /// Where it should have gone.
        queue: String,
        /// What became of its copy.
        outcome: String,
    },
}

/// What a look has found.
#[derive(Debug)]
pub struct Seen {
    /// The letters, oldest first.
    pub letters: Vec<Letter>,
    /// Why there may be more.
    pub bound: Option<Bound>,
}

/// What ended a command before the end of the queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bound {
    /// As many as were asked for.
    Limit,
    /// As much as one command holds.
    Held,
    /// Another command holds letters of this queue.
    Others,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Limit => "there may be more: raise --limit",
            Self::Held => {
                "there may be more behind those that were looked at: decide about some of them first"
            }
            Self::Others => "another command holds letters of this queue, and those were not seen",
        })
    }
}

impl DeadLetters {
    /// The dead letters of the consumer of that name, as given to [`Consumer::builder`](crate::Consumer::builder).
    pub fn new(
        consumer: impl Into<String>,
        pool: PgPool,
        broker: BrokerUrl,
        queue: impl Into<String>,
    ) -> Self {
        Self { consumer: consumer.into(), pool, broker, queue: queue.into(), retention: RETENTION }
    }

    /// Sets how long the consumer's rows in `processed_events` are kept; 30 days by default.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// The consumer's own queue, where letters are put back to.
    #[must_use]
    pub fn queue(&self) -> &str {
        &self.queue
    }

    fn dead_queue(&self) -> String {
        topology::dead_queue(&self.queue)
    }

    fn name(&self) -> String {
        format!("{} dead letters", self.consumer)
    }

    /// Looks at letters, the oldest first, `limit` at most; each stays where it is.
    ///
    /// # Errors
    ///
    /// When broker or database cannot be used.
    pub async fn list(&self, filter: &Filter, limit: usize) -> Result<Seen, DeadError> {
        let now = self.now().await?;
        let mut walk = Walk::open(self, MOST_HELD).await?;
        let (mut letters, mut bound) = (Vec::new(), None);
        let walked = loop {
            match walk.next().await {
                Ok(Some((letter, _))) if !filter.takes(&letter, now) => {}
                Ok(Some((letter, _))) if letters.len() < limit => letters.push(letter),
                Ok(Some(_)) => bound = Some(Bound::Limit),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let bound = bound.or(walk.bound());
        walk.close().await;
        walked.map(|()| Seen { letters, bound })
    }

    /// Looks for one letter; `None` if it is not there. The second value is its payload.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub async fn show(&self, which: &Which) -> Result<Option<(Letter, Vec<u8>)>, DeadError> {
        let mut walk = Walk::open(self, MOST_HELD).await?;
        let mut found = None;
        let walked = loop {
            match walk.next().await {
                Ok(Some((letter, delivery))) if found.is_none() && which.is(&letter) => {
                    found = Some((letter, delivery.body));
                }
                Ok(Some(_)) => {}
                Ok(None) => break Ok(found),
                Err(error) => break Err(error),
            }
        };
        walk.close().await;
        walked
    }

    /// When the consumer took effect of an event, as far as it remembers.
    ///
    /// # Errors
    ///
    /// When the database cannot be used.
    pub async fn took_effect_at(&self, letter: &Letter) -> Result<Option<OffsetDateTime>, DeadError> {
        let Some(event_id) = letter.event_id else { return Ok(None) };
        schema::verify_in(&self.pool, &[&INBOX]).await?;
        let found = database::call(&self.pool, async |connection| {
            inbox::find(connection, &self.consumer, event_id).await
        });
        found.await.map_err(failed_to("look for the event's effect"))
    }

    /// The clock that processed events are measured by.
    async fn now(&self) -> Result<OffsetDateTime, DeadError> {
        let asked = "-- dead_letters_now\n SELECT clock_timestamp()";
        let now = database::call(&self.pool, async |connection| {
            sqlx::query_scalar(asked).fetch_one(connection).await
        });
        now.await.map_err(failed_to("ask the database for the time"))
    }

    async fn sees_that_decisions_can_be_written_down(&self) -> Result<(), DeadError> {
        Ok(schema::verify_in(&self.pool, &[&ENGINE]).await?)
    }
}

fn failed_to(attempted: &'static str) -> impl Fn(sqlx::Error) -> DeadError {
    move |source| DeadError::Database { attempted, source }
}

impl DeadError {
    /// Whether there is no queue of dead letters: the consumer has never run.
    #[must_use]
    pub fn is_no_queue(&self) -> bool {
        matches!(self, Self::Broker(error) if error.reply_code() == Some(404))
    }
}

impl fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetters")
            .field("consumer", &self.consumer)
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}
