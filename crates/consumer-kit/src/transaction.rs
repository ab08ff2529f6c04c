//! The transaction of one event: its row in `processed_events` first, then the handler, then COMMIT.
//!
//! It is ended explicitly on every path. A connection on which a handler was dropped or panicked is closed, because nobody
//! knows what it left there.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, Failure, failure, sqlstate};
use semel_core::inbox::{self, Recorded};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Postgres, Transaction};

use crate::consumer::Shared;
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};

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
    let budget = shared.settings.budget;
    let mut connection = shared.pool.acquire().await.map_err(unsettled("get a database connection"))?;
    let begin = AssertSqlSafe(begin_statement(budget));
    let mut tx = connection.begin_with(begin).await.map_err(|source| {
        Setback::DeadConnection(Error::Database { attempted: "begin a transaction", source })
    })?;

    match inbox::record_once(&mut tx, &shared.settings.name, event.id).await {
        Ok(Recorded::First) => {}
        Ok(Recorded::Duplicate) => {
            // A failure changes nothing: the effect is committed already.
            let _ = tx.rollback().await;
            return Ok(Effect::Duplicate);
        }
        Err(error) => {
            let setback = not_recorded(error);
            let _ = tx.rollback().await;
            return Err(setback);
        }
    }

    let handling = tokio::time::timeout(budget, shared.handler.handle(&mut tx, event));
    let setback = match AssertUnwindSafe(handling).catch_unwind().await {
        Ok(Ok(Ok(()))) => return commit(tx).await,
        Ok(Ok(Err(error))) => {
            roll_back(tx).await?;
            return Err(failed(error));
        }
        Ok(Err(_)) => Setback::OverBudget,
        Err(_) => Setback::Panicked,
    };
    let ended = abandon(&mut tx).await;
    drop(tx);
    connection.close_on_drop();
    ended.map_err(unsettled("roll back a transaction"))?;
    Err(setback)
}

async fn commit(mut tx: Transaction<'_, Postgres>) -> Result<Effect, Setback> {
    if let Err(error) = check(&mut tx).await {
        roll_back(tx).await?;
        return Err(failed(error.into()));
    }
    semel_core::failpoint!(crate::failpoints::BEFORE_COMMIT);
    tx.commit().await.map_err(|error| match failure(&error) {
        Failure::Unknown => unsettled("commit a transaction: its outcome is unknown")(error),
        Failure::Conflict | Failure::LockTimeout | Failure::Refused => failed(error.into()),
    })?;
    semel_core::failpoint!(crate::failpoints::AFTER_COMMIT);
    Ok(Effect::Taken)
}

/// Fails where COMMIT would, but for a lost connection. Deferred constraints are checked while it is still known that
/// nothing is committed. And in a transaction whose handler swallowed a failed statement, COMMIT would roll back and
/// report success; this statement fails.
async fn check(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    tx.execute("SET CONSTRAINTS ALL IMMEDIATE").await.map(drop)
}

/// Ends a transaction whose handler has ended by itself.
async fn roll_back(tx: Transaction<'_, Postgres>) -> Result<(), Setback> {
    match tx.rollback().await {
        Err(error) if failure(&error) == Failure::Unknown => Err(unsettled("roll back a transaction")(error)),
        // An answer to a statement that the handler gave up waiting for; the ROLLBACK is queued behind it.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Ends a transaction whose handler was dropped. Not through `Transaction`, because the handler may have left a savepoint.
async fn abandon(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    match database::roll_back(tx).await {
        // An answer to the statement that ran when the handler was dropped; the next one is to the ROLLBACK.
        Err(error) if failure(&error) != Failure::Unknown => database::roll_back(tx).await,
        ended => ended,
    }
}

/// The server ends a statement, or a wait for a twin's lock, that outlasts the budget, so that dropping a handler never
/// leaves one running. One round trip.
fn begin_statement(budget: Duration) -> String {
    let budget = budget.as_millis();
    format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {budget}; SET LOCAL lock_timeout = {budget}"
    )
}

fn failed(error: HandlerError) -> Setback {
    if error.is_conflict() { Setback::Conflict(error) } else { Setback::Handler(error) }
}

/// The statement is ours, so its failure is never the event's fault.
fn not_recorded(source: sqlx::Error) -> Setback {
    let attempted = "record an event as processed";
    match failure(&source) {
        Failure::Conflict => Setback::Conflict(HandlerError::transient(source)),
        Failure::LockTimeout => Setback::Twin(HandlerError::transient(source)),
        Failure::Refused if sqlstate(&source).as_deref() == Some(QUERY_CANCELED) => {
            Setback::Twin(HandlerError::transient(source))
        }
        Failure::Refused => Setback::Unsettled(Error::Database { attempted, source }),
        Failure::Unknown => Setback::DeadConnection(Error::Database { attempted, source }),
    }
}

/// What `statement_timeout` gives.
const QUERY_CANCELED: &str = "57014";

fn unsettled(attempted: &'static str) -> impl Fn(sqlx::Error) -> Setback {
    move |source| Setback::Unsettled(Error::Database { attempted, source })
}
