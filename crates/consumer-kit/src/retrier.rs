//! Parked events, tried again when they are due.
//!
//! It promises that a parked event leaves its table only when it took effect, now or before, when its dead letter is confirmed,
//! or by a person's command; and that its followers are tried only then, in order. An attempt is counted before the handler runs,
//! so that one that ends the process counts, and one that its attempts have not helped becomes a dead letter. One whose last
//! attempt did not end is tried alone.
//!
//! Any process of the consumer may do it, beside the one that the broker hands the queue to: the aggregate's lock keeps them
//! apart. In a crash the event is due again when the claim's lease is over.

use std::sync::Arc;
use std::time::{Duration, Instant};

use semel_broker::MessageCopy;
use semel_core::database::{Loan, within};
use semel_core::disposition::{Disposed, Disposition, chain};
use semel_core::inbox::order;
use semel_core::inbox::parked::{self, Failure, Parked, Suspicion};
use semel_core::lifecycle::{Pace, Pass, Work};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use time::format_description::well_known::Rfc3339;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::aggregate::{Aggregate, Ordering};
use crate::builder::PARKED_AT_ONCE;
use crate::consumer::Shared;
use crate::copies::{Copied, Original, Reason, To, shortened, storable};
use crate::error::Error;
use crate::handler::Handler;
use crate::message::{Verdict, attempt, verdict};
use crate::metrics::{self, Outcome};
use crate::transaction::{Effect, PARKED_PATIENCE, Source, begin_statement};

/// How long until an attempt is made again that said nothing of its event.
const EXCUSED: Duration = Duration::from_secs(1);

/// What two dead letters take at most, the second one as the message is, with a connection to open before.
const CONFIRM_LIMIT: Duration = Duration::from_mins(2);

/// How often what is parked is counted.
const COUNTED_EVERY: Duration = Duration::from_secs(10);

/// What stops parked events from being tried for now. The subscription finds out what is wrong for good.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) struct Hindered(#[from] Error);

impl Disposed for Hindered {
    fn disposition(&self) -> Disposition {
        Disposition::Retry
    }
}

pub(crate) struct Retrier<H> {
    shared: Arc<Shared<H>>,
    running: JoinSet<Result<(), Error>>,
    /// One is done with: the next of its aggregate is due.
    done: Arc<Notify>,
    /// When what is parked was counted last.
    counted: Option<Instant>,
}

impl<H: Handler> Retrier<H> {
    pub(crate) fn new(shared: Arc<Shared<H>>) -> Self {
        Self { shared, running: JoinSet::new(), done: Arc::default(), counted: None }
    }

    pub(crate) fn pace(&self) -> Pace {
        let (shortest, longest) = (Duration::from_millis(20), Duration::from_secs(1));
        Pace { shortest, longest, wake: Some(Arc::clone(&self.done)), heartbeat: None }
    }

    fn begin(&mut self, parked: Parked) {
        let (shared, done) = (Arc::clone(&self.shared), Arc::clone(&self.done));
        self.running.spawn(async move {
            let ended = retry(&shared, parked).await;
            done.notify_one();
            ended
        });
    }

    async fn all_ended(&mut self) -> Result<(), Error> {
        let mut all = Ok(());
        while let Some(done) = self.running.join_next().await {
            all = all.and(ended(Some(done)));
        }
        all
    }

    async fn count_what_is_parked(&mut self) -> Result<(), Error> {
        if self.counted.is_some_and(|counted| counted.elapsed() < COUNTED_EVERY) {
            return Ok(());
        }
        let failed = |source| Error::Database { attempted: "count parked events", source };
        let settings = &self.shared.settings;
        let mut loan = Loan::take(&self.shared.pool).await.map_err(failed)?;
        let count = parked::backlog(&mut loan, &settings.name);
        let backlog = within(settings.call_limit(), count).await.map_err(failed)?;
        loan.give_back();
        metrics::record_backlog(&settings.name, backlog);
        self.counted = Some(Instant::now());
        Ok(())
    }

    async fn has_suspect(&self) -> Result<bool, Error> {
        let failed = |source| Error::Database { attempted: "look for parked events", source };
        let settings = &self.shared.settings;
        let mut loan = Loan::take(&self.shared.pool).await.map_err(failed)?;
        let look = parked::has_suspect(&mut loan, &settings.name);
        let has_suspect = within(settings.call_limit(), look).await.map_err(failed)?;
        loan.give_back();
        Ok(has_suspect)
    }

    async fn claim(&self, suspicion: Suspicion, limit: u32) -> Result<Vec<Parked>, Error> {
        let failed = |source| Error::Database { attempted: "claim parked events", source };
        let settings = &self.shared.settings;
        let mut loan = Loan::take(&self.shared.pool).await.map_err(failed)?;
        // Longer than an attempt takes, unless its connection fell silent: then the next one finds the aggregate locked.
        let lease = settings.call_limit() * 2 + PARKED_PATIENCE;
        let claim = parked::claim(&mut loan, &settings.name, suspicion, lease, i64::from(limit));
        let due = within(settings.call_limit(), claim).await.map_err(failed)?;
        loan.give_back();
        Ok(due)
    }
}

impl<H: Handler> Work for Retrier<H> {
    type Error = Hindered;

    async fn run_once(&mut self) -> Result<Pass, Hindered> {
        self.count_what_is_parked().await?;
        let mut free = PARKED_AT_ONCE.saturating_sub(u32::try_from(self.running.len()).unwrap_or(u32::MAX));
        if free == 0 {
            ended(self.running.join_next().await)?;
            free = 1;
        }
        while let Some(done) = self.running.try_join_next() {
            ended(Some(done))?;
            free += 1;
        }
        if self.has_suspect().await? {
            // Alone, and counted only then: if it ends the process, the attempts of those beside it would count against them.
            self.all_ended().await?;
            for parked in self.claim(Suspicion::Suspect, 1).await? {
                self.begin(parked);
            }
            self.all_ended().await?;
            return Ok(Pass::Full);
        }
        let free = free.min(PARKED_AT_ONCE);
        let due = self.claim(Suspicion::None, free).await?;
        let found = u32::try_from(due.len()).unwrap_or(u32::MAX);
        for parked in due {
            self.begin(parked);
        }
        Ok(match found {
            0 => Pass::Idle,
            _ if found == free => Pass::Full,
            _ => Pass::Worked,
        })
    }

    async fn finish(&mut self) {
        if let Err(error) = self.all_ended().await {
            tracing::warn!(consumer = self.shared.settings.name, "{}", chain(&error));
        }
    }
}

fn ended(done: Option<Result<Result<(), Error>, tokio::task::JoinError>>) -> Result<(), Error> {
    done.unwrap_or(Ok(Ok(()))).map_err(Error::Task)?
}

/// Tries a parked event once more.
async fn retry<H: Handler>(shared: &Shared<H>, parked: Parked) -> Result<(), Error> {
    let settings = &shared.settings;
    let (consumer, event_id) = (settings.name.as_str(), parked.event_id);
    let copy = MessageCopy::from_stored(&parked.properties, parked.payload.clone())
        .map_err(|source| Error::Parked { event_id, source })?;
    let received = copy.received();
    let begun = u32::try_from(parked.attempts).unwrap_or(0);
    let original = Original {
        copy,
        failures: begun.saturating_sub(1),
        first_failed_at: parked.first_failed_at.and_then(|at| at.format(&Rfc3339).ok()),
        exchange: parked.exchange.clone(),
        routing_key: parked.routing_key.clone(),
    };
    let verdict = match &received {
        _ if begun > settings.attempts => Verdict::Dead {
            reason: Reason::Exhausted,
            error: "the process ended while it was handled".to_owned(),
        },
        None => Verdict::Dead { reason: Reason::Invalid, error: "it is no event".to_owned() },
        Some(received) => match attempt(shared, received, &parked.payload, Source::Parked(&parked)).await {
            Err(error) => Verdict::Dead {
                reason: Reason::Invalid,
                error: format!("the payload is not of the expected shape: {error}"),
            },
            Ok(Ok(Effect::Taken)) => {
                metrics::count(consumer, Outcome::Effect);
                tracing::info!(consumer, event_id = %event_id, attempts = begun, "a parked event took effect");
                return Ok(());
            }
            // Somebody else has it, or had it.
            Ok(Ok(Effect::Gone)) => return Ok(()),
            Ok(Ok(Effect::Busy)) => return excuse(shared, &parked).await,
            Ok(result) => match verdict(result, begun >= settings.attempts, Ordering::Aggregate) {
                Ok(verdict) => verdict,
                Err(error) => {
                    // It may have committed, and then there is nothing to note; else this attempt counts.
                    fail(shared, &parked, original.failures, &chain(&error)).await?;
                    return Err(error);
                }
            },
        },
    };
    match verdict {
        Verdict::Settled(outcome) => {
            unpark(shared, &parked).await?;
            metrics::count(consumer, outcome);
        }
        Verdict::Dead { reason, error } => bury(shared, &parked, &original, reason, &error).await?,
        Verdict::Park { error } | Verdict::Retry { error } => {
            fail(shared, &parked, original.failures, &error).await?;
            metrics::count(consumer, Outcome::Retried);
        }
        Verdict::Wait | Verdict::Suspect => return excuse(shared, &parked).await,
        Verdict::Keep(error) => {
            excuse(shared, &parked).await?;
            return Err(error);
        }
    }
    Ok(())
}

/// Makes a dead letter of a parked event, and then lets its followers go on. Only when the broker has it safe: else it stays.
async fn bury<H: Handler>(
    shared: &Shared<H>,
    parked: &Parked,
    original: &Original,
    reason: Reason,
    error: &str,
) -> Result<(), Error> {
    let consumer = shared.settings.name.as_str();
    // No transaction holds its aggregate's lock meanwhile: nobody else is to try it before the broker has answered.
    let hold = async |connection: &mut PgConnection| {
        parked::hold(connection, parked.parked_id, parked.attempts, CONFIRM_LIMIT).await
    };
    if !call(shared, hold).await? {
        return Ok(());
    }
    let copied = match shared.copies.publish(original, To::Dead(reason), error).await {
        Ok(Copied::TooLarge { .. }) => shared.copies.bury_as_it_is(original).await,
        copied => copied,
    };
    match copied {
        Ok(Copied::Safe) => {}
        Ok(Copied::TooLarge { reason }) => {
            // It stays, with what people need to know; its handler is not called again once its attempts are used up.
            let told = format!("there can be no dead letter of it: {reason}; it failed with: {error}");
            return fail(shared, parked, original.failures, &told).await;
        }
        Err(error) => {
            // An attempt that could not be brought to its end is none.
            excuse(shared, parked).await?;
            return Err(error);
        }
    }
    unpark(shared, parked).await?;
    // The decoder's words may quote the payload; they are in the dead letter.
    let error = if reason == Reason::Invalid { "see its headers" } else { error };
    tracing::warn!(consumer, event_id = %parked.event_id, reason = reason.label(), "dead letter: {error}");
    metrics::count(consumer, if reason == Reason::Invalid { Outcome::Invalid } else { Outcome::Dead });
    Ok(())
}

/// Notes that the attempt failed, and waits for the next one.
async fn fail<H>(shared: &Shared<H>, parked: &Parked, failures: u32, error: &str) -> Result<(), Error> {
    let delay = shared.copies.delay(failures);
    tracing::warn!(
        consumer = shared.settings.name,
        event_id = %parked.event_id,
        retry_in_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
        "a parked event failed: {error}"
    );
    let error = storable(error);
    let failure = Failure { error: shortened(&error), attempts: parked.attempts, retry_in: delay };
    call(shared, async |connection| parked::fail(connection, parked.parked_id, failure).await).await
}

async fn excuse<H>(shared: &Shared<H>, parked: &Parked) -> Result<(), Error> {
    call(shared, async |connection| {
        parked::excuse(connection, parked.parked_id, parked.attempts, EXCUSED).await
    })
    .await
}

async fn call<H, T>(
    shared: &Shared<H>,
    call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
) -> Result<T, Error> {
    let failed = |source| Error::Database { attempted: "note an attempt at a parked event", source };
    let mut loan = Loan::take(&shared.pool).await.map_err(failed)?;
    let answer = within(shared.settings.call_limit(), call(&mut loan)).await.map_err(failed)?;
    loan.give_back();
    Ok(answer)
}

/// Removes a parked event that is done with, and makes the next one of its aggregate due.
async fn unpark<H>(shared: &Shared<H>, parked: &Parked) -> Result<(), Error> {
    let failed = |source| Error::Database { attempted: "remove a parked event", source };
    let settings = &shared.settings;
    let Ok(Some(aggregate)) = Aggregate::of(Some(&parked.aggregate_type), Some(&parked.aggregate_id)) else {
        return Ok(());
    };
    let place = aggregate.place(&settings.name);
    let mut loan = Loan::take(&shared.pool).await.map_err(failed)?;
    let patience = settings.attempt_limit();
    let limit = patience + settings.answer_limit;
    let begin = loan.begin_with(AssertSqlSafe(begin_statement(patience)));
    let mut tx = within(limit, begin).await.map_err(failed)?;
    within(limit * 2, async {
        order::lock(&mut tx, place).await?;
        parked::remove(&mut tx, place, parked.parked_id).await
    })
    .await
    .map_err(failed)?;
    within(limit, tx.commit()).await.map_err(failed)?;
    loan.give_back();
    Ok(())
}
