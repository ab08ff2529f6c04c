//! The transaction of one event: its row in `processed_events` first, then the handler, then COMMIT.
//!
//! It is ended explicitly on every path, and every call has a limit. A connection on which a handler was dropped or
//! panicked, or a call got no answer, is closed, because nobody knows what state it is in.

use std::io;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, Failure, failure, sqlstate, within};
use semel_core::inbox::{self, Recorded};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Postgres, Transaction};
use uuid::Uuid;

use crate::builder::Settings;
use crate::consumer::Shared;
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};
use crate::lease::Lease;
use crate::told::told;

/// What an event has done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Effect {
    /// It took effect now; committed.
    Taken,
    /// It had taken effect before.
    Duplicate,
}

/// Why an event has not taken effect. In all but the last case it certainly has not.
#[derive(Debug)]
pub(crate) enum Setback {
    /// The handler failed.
    Handler(HandlerError),
    /// Another transaction was in the way; worth an immediate repeat.
    Conflict(HandlerError),
    /// The handler did not end in time.
    OverBudget,
    /// The handler panicked.
    Panicked,
    /// A concurrent twin held the event for too long.
    Twin(HandlerError),
    /// The database answers, and cannot work. That says nothing of the event.
    Refused(Error),
    /// The connection turned out to be dead before the handler ran; another one may not be.
    DeadConnection(Error),
    /// The database is away, or the outcome of the commit is unknown: nothing may be settled.
    Unsettled(Error),
}

/// Takes effect of an event, once.
///
/// # Cancel safety
///
/// Not cancel safe: runs in a task that nobody cuts off.
pub(crate) async fn take_effect<H: Handler>(
    shared: &Shared<H>,
    event: Event<H::Payload>,
) -> Result<Effect, Setback> {
    let mut lease = Lease::take(&shared.pool).await.map_err(unsettled("get a database connection"))?;
    let attempt = shared.attempts.begin();
    let result = transact(shared, &mut lease, event).await;
    drop(attempt);
    if ended_by_an_answer(&result) {
        lease.give_back(shared.settings.call_limit());
    }
    result
}

/// A connection whose transaction ended like this is as good as before. One on which the database refused to work is not:
/// it may lead to a server that was demoted, or be set read-only for as long as it lives.
fn ended_by_an_answer(result: &Result<Effect, Setback>) -> bool {
    matches!(result, Ok(_) | Err(Setback::Handler(_) | Setback::Conflict(_) | Setback::Twin(_)))
}

async fn transact<H: Handler>(
    shared: &Shared<H>,
    connection: &mut PgConnection,
    event: Event<H::Payload>,
) -> Result<Effect, Setback> {
    let (budget, limit) = (shared.settings.budget, shared.settings.call_limit());
    let begin = connection.begin_with(AssertSqlSafe(begin_statement(budget)));
    let mut tx = within(limit, begin).await.map_err(lost("begin a transaction"))?;

    match within(limit, inbox::record_once(&mut tx, &shared.settings.name, event.id)).await {
        Ok(Recorded::First) => {}
        Ok(Recorded::Duplicate) => {
            // Another connection will say the same.
            within(limit, tx.rollback()).await.map_err(lost("roll back a transaction"))?;
            return Ok(Effect::Duplicate);
        }
        Err(error) => {
            let setback = not_recorded(error);
            if ended_by_an_answer(&Err(setback)) {}
            return Err(setback);
        }
    }

    let handling = tokio::time::timeout(budget, shared.handler.handle(&mut tx, event));
    let setback = match AssertUnwindSafe(handling).catch_unwind().await {
        Ok(Ok(Ok(()))) => return commit(tx, limit).await,
        Ok(Ok(Err(error))) => {
            roll_back(tx, limit).await?;
            return Err(failed(error));
        }
        Ok(Err(_)) => Setback::OverBudget,
        Err(_) => Setback::Panicked,
    };
    abandon(&mut tx, limit).await.map_err(unsettled("roll back a transaction"))?;
    Err(setback)
}
