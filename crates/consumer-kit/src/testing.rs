//! A handler under test: real transactions, no broker.
//!
//! ```no_run
//! # use semel_consumer_kit::{ConsumerBuilder, Event, Handler, testing::Delivered};
//! # async fn test(
//! #     builder: ConsumerBuilder,
//! #     handler: impl Handler<Payload = String>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! let rehearsal = builder.rehearse(handler)?;
//! let event = Event::new(uuid::Uuid::new_v4(), "ordered".to_owned());
//! // A crash before COMMIT, then the redelivery, then one more.
//! rehearsal.deliver_and_crash(event.clone()).await?;
//! assert_eq!(rehearsal.deliver(event.clone()).await?, Delivered::Effect);
//! assert_eq!(rehearsal.deliver(event).await?, Delivered::Duplicate);
//! # Ok(())
//! # }
//! ```
//!
//! Deliveries may be concurrent, and come in any order. Nothing is parked: with an aggregate's order, what a consumer would park
//! is told as retried. The database needs what a consumer's does.

use std::fmt;

use serde::Deserialize;
use sqlx::PgConnection;

use crate::aggregate::Ordering;
use crate::builder::ConsumerBuilder;
use crate::consumer::Shared;
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};
use crate::message::{Verdict, verdict};
use crate::metrics::Outcome;
use crate::transaction::{Source, take_effect};

/// What became of a delivery.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Delivered {
    /// It took effect.
    Effect,
    /// It had taken effect before.
    Duplicate,
    /// Nothing of it remains, and a consumer would have it delivered again later.
    Retried {
        /// What the log tells of it.
        error: String,
    },
    /// Nothing of it remains, and a consumer would give it up.
    Dead {
        /// What log and dead letter tell of it.
        error: String,
    },
}

/// Hands events to a handler as a consumer does, in transactions that record them as processed. Made by
/// [`ConsumerBuilder::rehearse`].
pub struct Rehearsal<H> {
    shared: Shared<Actor<H>>,
}

impl<H: Handler> Rehearsal<H> {
    pub(crate) fn new(builder: ConsumerBuilder, handler: H) -> Self {
        Self { shared: Shared::new(builder, Actor(handler)) }
    }

    /// Delivers an event.
    ///
    /// # Errors
    ///
    /// When the database cannot be used, or the outcome of a commit is unknown.
    pub async fn deliver(&self, event: Event<H::Payload>) -> Result<Delivered, Error> {
        self.play(event, End::Commit).await
    }

    /// Delivers an event, and takes back what the handler did, as a crash before COMMIT does. What the handler says is not
    /// told: a [`deliver`](Self::deliver) tells it.
    ///
    /// # Errors
    ///
    /// As [`deliver`](Self::deliver).
    pub async fn deliver_and_crash(&self, event: Event<H::Payload>) -> Result<(), Error> {
        self.play(event, End::Crash).await.map(drop)
    }

    async fn play(&self, event: Event<H::Payload>, end: End) -> Result<Delivered, Error> {
        let settings = &self.shared.settings;
        let aggregate = settings.aggregate(event.aggregate_type.as_deref(), event.aggregate_id.as_deref());
        let ordering = match aggregate {
            Ok(Some(_)) => Ordering::Aggregate,
            Ok(None) => Ordering::None,
            Err(unusable) => return Ok(Delivered::Dead { error: unusable.to_string() }),
        };
        let event = event.map(|payload| (end, payload));
        let result = take_effect(&self.shared, vec![event], Source::Queue).await.map(|effects| effects[0]);
        match verdict(result, false, ordering)? {
            Verdict::Settled(Outcome::Effect) => Ok(Delivered::Effect),
            Verdict::Settled(_) => Ok(Delivered::Duplicate),
            Verdict::Retry { error } | Verdict::Park { error } => Ok(Delivered::Retried { error }),
            Verdict::Wait | Verdict::Suspect => {
                Ok(Delivered::Retried { error: "an earlier event is parked".to_owned() })
            }
            Verdict::Dead { error, .. } => Ok(Delivered::Dead { error }),
            Verdict::Keep(error) => Err(error),
        }
    }
}

impl<H> fmt::Debug for Rehearsal<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal").field("consumer", &self.shared.settings.name).finish_non_exhaustive()
    }
}

/// How a transaction ends whose handler has succeeded.
#[derive(Clone, Copy, Deserialize)]
enum End {
    Commit,
    Crash,
}

/// The handler, and what comes after it.
struct Actor<H>(H);

impl<H: Handler> Handler for Actor<H> {
    type Payload = (End, H::Payload);

    async fn handle(&self, tx: &mut PgConnection, event: Event<Self::Payload>) -> Result<(), HandlerError> {
        let end = event.payload.0;
        self.0.handle(tx, event.map(|(_, payload)| payload)).await?;
        match end {
            End::Commit => Ok(()),
            End::Crash => Err(HandlerError::transient("a crash, as ordered")),
        }
    }
}
