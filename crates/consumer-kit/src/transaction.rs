//! The transaction of one event or of several: their rows in `processed_events` first, then the handler for each, then
//! COMMIT. Of an event in its aggregate's order the aggregate's lock comes before, and its last version after.
//!
//! It is ended explicitly on every path, and every call has a limit. A connection on which a handler was dropped or
//! panicked, or a call got no answer, is closed, because nobody knows what state it is in.

use std::collections::BTreeSet;
use std::io;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use semel_core::database::{self, Failure, Loan, failure, sqlstate, within};
use semel_core::inbox;
use semel_core::inbox::order::{self, Place, Standing};
use semel_core::inbox::parked::{self, NewParked, Parked, Reason};
use semel_core::trace::TraceContext;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Postgres, Transaction};
use tracing::{Instrument as _, Span};
use uuid::Uuid;

use crate::aggregate::{Aggregate, Ordering, VersionGuard};
use crate::builder::Settings;
use crate::consumer::Shared;
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};
use crate::told::told;

/// What an event has done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Effect {
    /// It took effect now; committed.
    Taken,
    /// It had taken effect before, or is parked.
    Duplicate,
    /// Nothing: a later event of its aggregate took effect before it.
    Stale {
        /// The version after that one.
        last: i64,
    },
    /// Nothing: an earlier event of its aggregate is parked.
    Behind,
    /// Nothing, for one that is parked: somebody else is at work on its aggregate.
    Busy,
    /// Nothing, for one that was parked: somebody else has claimed or removed it.
    Gone,
}

/// Where an event comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// From the queue.
    Queue,
    /// From where it was parked.
    Parked(&'a Parked),
}

/// Why events have not taken effect. In all but the last case they certainly have not.
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
    /// A concurrent twin held the event for too long. It may be one whose consumer is gone, and the server does not know yet.
    Twin(Error),
    /// The database answers, and cannot work. That says nothing of the event.
    Refused(Error),
    /// The connection turned out to be dead before the handler ran; another one may not be.
    DeadConnection(Error),
    /// The database is away, or the outcome of the commit is unknown: nothing may be settled.
    Unsettled(Error),
}

/// Takes effect of events, once of each and of all or none; tells of each what it has done, in their order.
///
/// # Cancel safety
///
/// Not cancel safe: runs in a task that nobody cuts off.
pub(crate) async fn take_effect<H: Handler>(
    shared: &Shared<H>,
    events: Vec<Event<H::Payload>>,
    source: Source<'_>,
) -> Result<Vec<Effect>, Setback> {
    let mut loan = Loan::take(&shared.pool).await.map_err(unsettled("get a database connection"))?;
    let attempt = shared.attempts.begin();
    let result = transact(shared, &mut loan, events, source).await;
    drop(attempt);
    if ended_by_an_answer(&result) {
        loan.give_back();
    }
    result
}

/// A connection whose transaction ended like this is as good as before. One on which the database refused to work is not:
/// it may lead to a server that was demoted, or be set read-only for as long as it lives.
fn ended_by_an_answer(result: &Result<Vec<Effect>, Setback>) -> bool {
    matches!(result, Ok(_) | Err(Setback::Handler(_) | Setback::Conflict(_) | Setback::Twin(_)))
}

async fn transact<H: Handler>(
    shared: &Shared<H>,
    connection: &mut PgConnection,
    events: Vec<Event<H::Payload>>,
    source: Source<'_>,
) -> Result<Vec<Effect>, Setback> {
    let (budget, limit) = (shared.settings.budget, shared.settings.call_limit());
    let begin = match source {
        Source::Queue => begin_statement(budget),
        // Its statement may take longer than the wait for the lock, so that it is told which of the two was too long.
        Source::Parked(_) => begin_within(PARKED_PATIENCE * 2, PARKED_PATIENCE),
    };
    let begin = connection.begin_with(AssertSqlSafe(begin));
    let mut tx = within(limit, begin).await.map_err(lost("begin a transaction"))?;

    let in_order = InOrder::of(&shared.settings, &events);
    if let Some(in_order) = &in_order {
        match in_order.obstacle(&mut tx, &shared.settings, source).await {
            Ok(None) => {}
            Ok(Some(effect)) => {
                within(limit, tx.rollback()).await.map_err(lost("roll back a transaction"))?;
                return Ok(vec![effect]);
            }
            Err(error) => return Err(not_begun(error, tx, limit).await),
        }
    }

    // Twins may be among them.
    let ids: Vec<Uuid> = events.iter().map(|event| event.id).collect::<BTreeSet<_>>().into_iter().collect();
    let mut without_effect =
        match within(limit, inbox::record_all(&mut tx, &shared.settings.name, &ids)).await {
            Ok(recorded) => recorded.into_iter().collect::<BTreeSet<_>>(),
            Err(error) => return Err(not_begun(error, tx, limit).await),
        };
    if without_effect.is_empty() {
        // Another connection will say the same.
        within(limit, tx.rollback()).await.map_err(lost("roll back a transaction"))?;
        return Ok(vec![Effect::Duplicate; events.len()]);
    }

    let mut effects = Vec::with_capacity(events.len());
    for event in events {
        if !without_effect.remove(&event.id) {
            effects.push(Effect::Duplicate);
            continue;
        }
        let span = span(&shared.settings.name, &event);
        let handling = tokio::time::timeout(budget, shared.handler.handle(&mut tx, event)).instrument(span);
        let setback = match AssertUnwindSafe(handling).catch_unwind().await {
            Ok(Ok(Ok(()))) => {
                effects.push(Effect::Taken);
                continue;
            }
            Ok(Ok(Err(error))) => {
                roll_back(tx, limit).await?;
                return Err(failed(error));
            }
            Ok(Err(_)) => Setback::OverBudget,
            Err(_) => Setback::Panicked,
        };
        abandon(&mut tx, limit).await.map_err(unsettled("roll back a transaction"))?;
        return Err(setback);
    }
    commit(tx, in_order, source, &shared.settings).await?;
    Ok(effects)
}

/// What the handler's lines in the log stand in, by which they are found from the request that the event goes back to.
fn span<T>(consumer: &str, event: &Event<T>) -> Span {
    let trace: Option<TraceContext> = event.trace_context.as_deref().and_then(|trace| trace.parse().ok());
    tracing::info_span!(
        "handle",
        consumer,
        event_id = %event.id,
        trace_id = trace.map(TraceContext::trace_id),
        span_id = trace.map(TraceContext::span_id),
    )
}

/// Ends a transaction in which no handler ran, after a statement of ours has failed.
async fn not_begun(error: sqlx::Error, tx: Transaction<'_, Postgres>, limit: Duration) -> Setback {
    let setback = not_recorded(error);
    if matches!(setback, Setback::Conflict(_) | Setback::Twin(_))
        && let Err(setback) = roll_back(tx, limit).await
    {
        return setback;
    }
    setback
}

/// An event that takes effect in its aggregate's order.
struct InOrder {
    aggregate: Aggregate,
    event_id: Uuid,
    version: Option<i64>,
}

impl InOrder {
    /// A transaction of several keeps no order.
    fn of<T>(settings: &Settings, events: &[Event<T>]) -> Option<Self> {
        let [event] = events else { return None };
        let aggregate =
            settings.aggregate(event.aggregate_type.as_deref(), event.aggregate_id.as_deref()).ok()??;
        Some(Self { aggregate, event_id: event.id, version: event.aggregate_version })
    }

    /// Locks the aggregate until the transaction's end, and tells what is in the way of the event. An earlier owner of the
    /// queue may still be at work on it: then this waits.
    async fn obstacle(
        &self,
        tx: &mut PgConnection,
        settings: &Settings,
        source: Source<'_>,
    ) -> Result<Option<Effect>, sqlx::Error> {
        let (place, limit) = (self.aggregate.place(&settings.name), settings.call_limit());
        match source {
            Source::Queue => within(limit, order::lock(tx, place)).await?,
            Source::Parked(parked) => {
                // Whoever waits has its turn; one that only looked would hardly ever find a busy aggregate free.
                match within(limit + PARKED_PATIENCE, order::lock(tx, place)).await {
                    Err(error) if failure(&error) == Failure::LockTimeout => return Ok(Some(Effect::Busy)),
                    locked => locked?,
                }
                within(limit, tx.execute(AssertSqlSafe(limits(settings.budget, settings.budget)))).await?;
                if !within(limit, parked::is_held(tx, parked.parked_id, parked.attempts)).await? {
                    return Ok(Some(Effect::Gone));
                }
            }
        }
        let standing = within(limit, order::look(tx, place, self.event_id)).await?;
        let is_from_queue = matches!(source, Source::Queue);
        Ok(match standing {
            Standing { is_processed: true, .. } => Some(Effect::Duplicate),
            Standing { is_parked: true, .. } if is_from_queue => Some(Effect::Duplicate),
            Standing { last_version: Some(last), .. }
                if settings.version_guard == VersionGuard::On
                    && self.version.is_some_and(|version| version < last) =>
            {
                Some(Effect::Stale { last })
            }
            Standing { has_parked: true, .. } if is_from_queue => Some(Effect::Behind),
            Standing { .. } => None,
        })
    }

    /// Writes what is to be known of the event's aggregate from now on.
    async fn conclude(
        &self,
        tx: &mut PgConnection,
        settings: &Settings,
        source: Source<'_>,
    ) -> Result<(), sqlx::Error> {
        let (place, limit) = (self.aggregate.place(&settings.name), settings.call_limit());
        if let Some(version) = self.version {
            within(limit, order::advance(tx, place, version)).await?;
        }
        if let Source::Parked(parked) = source {
            within(limit * 2, parked::remove(tx, place, parked.parked_id)).await?;
        }
        Ok(())
    }
}

async fn commit(
    mut tx: Transaction<'_, Postgres>,
    in_order: Option<InOrder>,
    source: Source<'_>,
    settings: &Settings,
) -> Result<(), Setback> {
    let limit = settings.call_limit();
    let checked = match &in_order {
        Some(in_order) => in_order.conclude(&mut tx, settings, source).await,
        None => Ok(()),
    };
    let checked = match checked {
        Ok(()) => within(limit, check(&mut tx)).await,
        failed => failed,
    };
    if let Err(error) = checked {
        if is_silent(&error) {
            return Err(unsettled("check a transaction")(error));
        }
        roll_back(tx, limit).await?;
        return Err(failed(error.into()));
    }
    semel_core::failpoint!(crate::failpoints::BEFORE_COMMIT);
    within(limit, tx.commit()).await.map_err(|error| match failure(&error) {
        Failure::Unknown => unsettled("commit a transaction: its outcome is unknown")(error),
        Failure::Conflict | Failure::LockTimeout | Failure::Refused => failed(error.into()),
    })?;
    semel_core::failpoint!(crate::failpoints::AFTER_COMMIT);
    Ok(())
}

/// Fails where COMMIT would, but for a lost connection. Deferred constraints are checked while it is still known that
/// nothing is committed. And in a transaction whose handler swallowed a failed statement, COMMIT would roll back and
/// report success; this statement fails.
async fn check(tx: &mut PgConnection) -> Result<(), sqlx::Error> {
    tx.execute("SET CONSTRAINTS ALL IMMEDIATE").await.map(drop)
}

/// Ends a transaction whose handler has ended by itself.
async fn roll_back(tx: Transaction<'_, Postgres>, limit: Duration) -> Result<(), Setback> {
    match within(limit, tx.rollback()).await {
        Err(error) if failure(&error) == Failure::Unknown => Err(unsettled("roll back a transaction")(error)),
        // An answer to a statement that the handler gave up waiting for; the ROLLBACK is queued behind it.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Ends a transaction whose handler was dropped. Not through `Transaction`, because the handler may have left a savepoint.
async fn abandon(tx: &mut PgConnection, limit: Duration) -> Result<(), sqlx::Error> {
    match within(limit, database::roll_back(tx)).await {
        // An answer to the statement that ran when the handler was dropped; the next one is to the ROLLBACK.
        Err(error) if failure(&error) != Failure::Unknown => within(limit, database::roll_back(tx)).await,
        ended => ended,
    }
}

/// Sees that the database takes the row of an event, by writing one and taking it back.
///
/// Looking at the tables is not enough: a database that is read-only or full shows them, and every message that is fetched
/// in vain is one delivery closer to its limit.
pub(crate) async fn probe(pool: &PgPool, settings: &Settings) -> Result<(), Error> {
    let budget = settings.budget.min(PROBE_BUDGET);
    let limit = budget + settings.answer_limit;
    let failed = |attempted| move |source| Error::Database { attempted, source };
    let mut loan = Loan::take(pool).await.map_err(failed("get a database connection"))?;
    let begin = loan.begin_with(AssertSqlSafe(begin_statement(budget)));
    let mut tx = within(limit, begin).await.map_err(failed("begin a transaction"))?;
    let record = inbox::record_once(&mut tx, &settings.name, Uuid::new_v4());
    within(limit, record).await.map_err(failed("write to the database"))?;
    if settings.ordering == Ordering::Aggregate {
        within(limit, probe_order(&mut tx, settings)).await.map_err(failed("write to the database"))?;
    }
    within(limit, tx.rollback()).await.map_err(failed("roll back a transaction"))?;
    loan.give_back();
    Ok(())
}

/// What is written of an event in its aggregate's order; without its lock, for nobody knows of this one.
async fn probe_order(tx: &mut PgConnection, settings: &Settings) -> Result<(), sqlx::Error> {
    let id = Uuid::new_v4();
    let name = id.to_string();
    let place = Place { consumer: &settings.name, kind: "semel-probe", id: &name };
    order::advance(tx, place, 1).await?;
    let event = NewParked {
        event_id: id,
        version: None,
        event_type: None,
        exchange: "",
        routing_key: "",
        properties: "{}",
        payload: &[],
        reason: Reason::Behind,
    };
    parked::park(tx, place, &event).await
}

/// A single row of a random event waits for nobody, but for a table that is being changed.
const PROBE_BUDGET: Duration = Duration::from_secs(5);

/// How long a parked event waits for its aggregate's lock, before others that are due have their turn.
pub(crate) const PARKED_PATIENCE: Duration = Duration::from_millis(750);

/// The server ends a statement, or a wait for a twin's lock, that outlasts the budget, so that dropping a handler never
/// leaves one running. One round trip.
pub(crate) fn begin_statement(budget: Duration) -> String {
    begin_within(budget, budget)
}

fn begin_within(statement: Duration, lock: Duration) -> String {
    format!("BEGIN ISOLATION LEVEL READ COMMITTED; {}", limits(statement, lock))
}

fn limits(statement: Duration, lock: Duration) -> String {
    let (statement, lock) = (statement.as_millis(), lock.as_millis());
    format!("SET LOCAL statement_timeout = {statement}; SET LOCAL lock_timeout = {lock}")
}

/// Of a transaction that is rolled back.
fn failed(error: HandlerError) -> Setback {
    if error.is_refusal_to_work() {
        Setback::Refused(Error::Refused { told: told(&error) })
    } else if error.is_conflict() {
        Setback::Conflict(error)
    } else {
        Setback::Handler(error)
    }
}

/// The statement is ours, so its failure is never the event's fault.
fn not_recorded(source: sqlx::Error) -> Setback {
    let attempted = "record an event as processed";
    match failure(&source) {
        Failure::Conflict => Setback::Conflict(HandlerError::transient(source)),
        Failure::LockTimeout => Setback::Twin(Error::Database { attempted, source }),
        Failure::Refused if sqlstate(&source).as_deref() == Some(QUERY_CANCELED) => {
            Setback::Twin(Error::Database { attempted, source })
        }
        Failure::Refused => Setback::Refused(Error::Database { attempted, source }),
        Failure::Unknown => lost(attempted)(source),
    }
}

/// What `statement_timeout` gives.
const QUERY_CANCELED: &str = "57014";

/// A connection that fell silent has cost as much time as there is: the others of the pool are not tried.
fn lost(attempted: &'static str) -> impl Fn(sqlx::Error) -> Setback {
    move |source| {
        let is_silent = is_silent(&source);
        let error = Error::Database { attempted, source };
        if is_silent { Setback::Unsettled(error) } else { Setback::DeadConnection(error) }
    }
}

fn is_silent(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut)
}

fn unsettled(attempted: &'static str) -> impl Fn(sqlx::Error) -> Setback {
    move |source| Setback::Unsettled(Error::Database { attempted, source })
}
