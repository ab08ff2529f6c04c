//! What becomes of one message, and of several that are handled together.

use std::sync::Arc;
use std::time::Instant;

use semel_broker::{Delivery, Received, Settled};
use semel_core::backoff::Backoff;
use semel_core::disposition::{Disposed as _, Disposition, chain};
use semel_core::trace::TraceContext;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::aggregate::{Aggregate, Ordering, Unusable};
use crate::builder::Readiness;
use crate::consumer::Shared;
use crate::copies::{Copied, Original, Reason, To, failures};
use crate::error::Error;
use crate::event::{self, Event};
use crate::handler::{Handler, HandlerError};
use crate::lanes::Lanes;
use crate::metrics::{self, Outcome};
use crate::parking::{Parking, Why, park};
use crate::told::told;
use crate::transaction::{Effect, Setback, Source, take_effect};

/// What is to be done with a message.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Acknowledge it: its effect is committed, or was before.
    Settled(Outcome),
    /// Have it delivered again after a while.
    Retry { error: String },
    /// Park it, to be tried again from the database, and its aggregate's events behind it.
    Park { error: String },
    /// Park it behind others of its aggregate.
    Wait,
    /// Park it, to be handled from the database, where the attempt is counted before the handler runs.
    Suspect,
    /// Give it up.
    Dead { reason: Reason, error: String },
    /// Keep it unsettled: it could not even be tried, and its next delivery might be one too many.
    Keep(Error),
}

/// What a session and its messages tell each other.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The session ends: what cannot be tried is not to be tried again.
    pub(crate) ending: CancellationToken,
    /// A message is settled, so that database and broker work.
    pub(crate) settled: Notify,
    /// What the headers of a message may take on the session's connection, in bytes.
    pub(crate) frame_max: usize,
}

/// Handles a message and settles it. On an error nothing is settled, and the channel has to be closed.
///
/// `place` is given back as soon as the message no longer needs the database.
pub(crate) async fn settle<H: Handler>(
    shared: Arc<Shared<H>>,
    delivery: Delivery,
    place: OwnedSemaphorePermit,
    signals: Arc<Signals>,
) -> Result<(), Error> {
    settle_alone(&shared, delivery, Some(place), &signals).await
}

/// Handles a message that no order is kept of, when there is a place for it.
pub(crate) async fn settle_when_free<H: Handler>(
    shared: Arc<Shared<H>>,
    delivery: Delivery,
    places: Arc<Semaphore>,
    signals: Arc<Signals>,
) -> Result<(), Error> {
    let Some(place) = place(places, &signals).await else { return Ok(()) };
    settle_alone(&shared, delivery, Some(place), &signals).await
}

/// Handles the messages of an aggregate one after another, each when there is a place for it, until there are no more, one
/// cannot be settled or the session ends.
pub(crate) async fn settle_lane<H: Handler>(
    shared: Arc<Shared<H>>,
    lanes: Arc<Lanes<Delivery>>,
    aggregate: Aggregate,
    places: Arc<Semaphore>,
    signals: Arc<Signals>,
) -> Result<(), Error> {
    while let Some(delivery) = lanes.next(&aggregate) {
        // What is left unsettled goes back to the queue, in its order, when the channel is closed.
        let Some(place) = place(Arc::clone(&places), &signals).await else { return Ok(()) };
        settle_alone(&shared, delivery, Some(place), &signals).await?;
    }
    Ok(())
}

/// Waits for a place; none once the session ends.
async fn place(places: Arc<Semaphore>, signals: &Signals) -> Option<OwnedSemaphorePermit> {
    tokio::select! {
        biased;
        () = signals.ending.cancelled() => None,
        place = places.acquire_owned() => place.ok(),
    }
}

async fn settle_alone<H: Handler>(
    shared: &Shared<H>,
    delivery: Delivery,
    place: Option<OwnedSemaphorePermit>,
    signals: &Signals,
) -> Result<(), Error> {
    let consumer = shared.settings.name.as_str();
    let verdict = loop {
        match judge_until_known(shared, &delivery, signals).await? {
            Verdict::Park { error } => {
                break until_parked(shared, &delivery, signals, Why::Failed(&error))
                    .await?
                    .unwrap_or(Verdict::Retry { error });
            }
            verdict @ (Verdict::Wait | Verdict::Suspect) => {
                let why = if matches!(verdict, Verdict::Wait) { Why::Behind } else { Why::Redelivered };
                if let Some(verdict) = until_parked(shared, &delivery, signals, why).await? {
                    break verdict;
                }
                // What it would have waited for is done.
            }
            verdict => break verdict,
        }
    };
    drop(place);

    let event_id = delivery.envelope.as_ref().ok().map(|envelope| tracing::field::display(envelope.event_id));
    let trace = delivery.envelope.as_ref().ok().and_then(event::trace);
    let trace_id = trace.map(TraceContext::trace_id);
    let (outcome, settled) = match verdict {
        Verdict::Settled(outcome) => (outcome, delivery.ack().await),
        Verdict::Dead { reason, error } => {
            let copied = until_copied(shared, signals, &delivery, To::Dead(reason), &error).await?;
            // The decoder's words may quote the payload; they are in the dead letter.
            let error = if reason == Reason::Invalid { "see its headers" } else { &error };
            tracing::warn!(consumer, event_id, trace_id, reason = reason.label(), "dead letter: {error}");
            let outcome = if reason == Reason::Invalid { Outcome::Invalid } else { Outcome::Dead };
            let settled = match copied {
                Copied::Safe => delivery.ack().await,
                Copied::TooLarge { reason } => {
                    tracing::warn!(consumer, event_id, "the dead letter tells no reason: {reason}");
                    // The queue's own dead-lettering moves the message as it is.
                    delivery.reject(false).await
                }
            };
            (outcome, settled)
        }
        Verdict::Retry { error } => {
            let delay = shared.copies.delay(failures(&delivery));
            tracing::warn!(
                consumer,
                event_id,
                trace_id,
                retry_in_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX),
                "{error}"
            );
            let copied = until_copied(shared, signals, &delivery, To::Retry(delay), &error).await?;
            let settled = match copied {
                Copied::Safe => delivery.ack().await,
                Copied::TooLarge { reason } => {
                    tracing::warn!(consumer, event_id, "retried at once, and not counted by us: {reason}");
                    // The queue's delivery limit counts it.
                    delivery.reject(true).await
                }
            };
            (Outcome::Retried, settled)
        }
        // Closing the channel gives it back.
        Verdict::Keep(error) => return Err(error),
        // Parked above.
        Verdict::Park { .. } | Verdict::Wait | Verdict::Suspect => return Ok(()),
    };
    told_settled(shared, outcome, settled);
    semel_core::failpoint!(crate::failpoints::AFTER_ACK);
    signals.settled.notify_one();
    Ok(())
}

/// Parks a message, and waits where it cannot be for now, or until the session ends. Returns what is to be done with it then;
/// nothing if it need not wait for another.
async fn until_parked<H: Handler>(
    shared: &Shared<H>,
    delivery: &Delivery,
    signals: &Signals,
    why: Why<'_>,
) -> Result<Option<Verdict>, Error> {
    let Some(aggregate) = aggregate(shared, delivery) else { return Ok(None) };
    let mut backoff = Backoff::for_service();
    let mut was_kept = false;
    loop {
        let obstacle = match park(shared, delivery, &aggregate, why, signals.frame_max).await? {
            Parking::NotNow(obstacle) => obstacle,
            parking => {
                if was_kept && !signals.ending.is_cancelled() {
                    (shared.settings.on_readiness)(Readiness::Ready);
                }
                let event_id =
                    delivery.envelope.as_ref().ok().map(|event| tracing::field::display(event.event_id));
                let consumer = shared.settings.name.as_str();
                let outcome = match (parking, why) {
                    (Parking::Unfit(reason), _) => {
                        let error = format!("it cannot be parked: {reason}");
                        return Ok(Some(Verdict::Dead { reason: Reason::Invalid, error }));
                    }
                    (Parking::Parked, Why::Failed(error)) => {
                        tracing::warn!(consumer, event_id, "parked: {error}");
                        Some(Outcome::Parked)
                    }
                    (Parking::Parked, Why::Behind) => {
                        tracing::info!(consumer, event_id, "parked behind another of its aggregate");
                        Some(Outcome::Parked)
                    }
                    (Parking::Parked, Why::Redelivered) => {
                        tracing::info!(consumer, event_id, "parked, since it was delivered before");
                        Some(Outcome::Parked)
                    }
                    (Parking::Processed, _) => Some(Outcome::Duplicate),
                    (Parking::Clear | Parking::NotNow(_), _) => None,
                };
                return Ok(outcome.map(Verdict::Settled));
            }
        };
        if signals.ending.is_cancelled() {
            return Err(obstacle);
        }
        was_kept = true;
        let wait = backoff.next_wait();
        shared.not_consuming(&chain(&obstacle), wait);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = signals.ending.cancelled() => return Err(obstacle),
        }
    }
}

/// The aggregate in whose order a message is handled, if it is in any.
pub(crate) fn aggregate<H>(shared: &Shared<H>, delivery: &Delivery) -> Option<Aggregate> {
    let received = delivery.envelope.as_ref().ok()?;
    aggregate_of(shared, received).ok()?
}

fn aggregate_of<H>(shared: &Shared<H>, received: &Received) -> Result<Option<Aggregate>, Unusable> {
    shared.settings.aggregate(received.aggregate_type.as_deref(), received.aggregate_id.as_deref())
}

/// Publishes a copy again for as long as the broker does not take it, or until the session ends. To give the message back
/// would cost it, and what was sent with it, a delivery each time. Only where the queue is missing the session has to end,
/// for the next one declares it.
async fn until_copied<H: Handler>(
    shared: &Shared<H>,
    signals: &Signals,
    delivery: &Delivery,
    to: To,
    error: &str,
) -> Result<Copied, Error> {
    let original = Original::from(delivery);
    let mut backoff = Backoff::for_service();
    let mut was_kept = false;
    loop {
        let error = match shared.copies.publish(&original, to, error).await {
            Ok(copied) => {
                if was_kept && !signals.ending.is_cancelled() {
                    (shared.settings.on_readiness)(Readiness::Ready);
                }
                return Ok(copied);
            }
            Err(error) => error,
        };
        let is_over = matches!(error, Error::Unroutable { .. }) || error.disposition() == Disposition::Fail;
        if is_over || signals.ending.is_cancelled() {
            return Err(error);
        }
        was_kept = true;
        let wait = backoff.next_wait();
        shared.not_consuming(&chain(&error), wait);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = signals.ending.cancelled() => return Err(error),
        }
    }
}

/// Handles several messages in one transaction. When that fails, each is handled by itself, in their order, so that one
/// that fails drags none of the others along. `place` is kept until all are settled.
pub(crate) async fn settle_together<H: Handler>(
    shared: Arc<Shared<H>>,
    deliveries: Vec<Delivery>,
    place: OwnedSemaphorePermit,
    signals: Arc<Signals>,
) -> Result<(), Error> {
    let begun = Instant::now();
    let decoded = |delivery: &Delivery| {
        let received = delivery.envelope.as_ref().ok()?;
        Event::decode(received, &delivery.body).ok()
    };
    let (mut events, mut together, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for delivery in deliveries {
        match decoded(&delivery) {
            // One that has come before may end the process, and then what shares its transaction comes again, too.
            Some(event) if delivery.delivery_count.unwrap_or(0) == 0 => {
                events.push(event);
                together.push(delivery);
            }
            _ => alone.push(delivery),
        }
    }
    let result =
        if events.is_empty() { Ok(Vec::new()) } else { take_effect(&shared, events, Source::Queue).await };
    let rest = match result {
        Ok(effects) => {
            signals.settled.notify_one();
            for (delivery, effect) in together.into_iter().zip(effects) {
                metrics::record_time(&shared.settings.name, begun.elapsed());
                let settled = delivery.ack().await;
                let outcome = if effect == Effect::Taken { Outcome::Effect } else { Outcome::Duplicate };
                told_settled(&shared, outcome, settled);
            }
            alone
        }
        Err(Setback::Unsettled(error)) => return Err(error),
        Err(_) => together.into_iter().chain(alone).collect(),
    };
    for delivery in rest {
        if signals.ending.is_cancelled() {
            // Closing the channel gives the rest back.
            break;
        }
        settle_alone(&shared, delivery, None, &signals).await?;
    }
    drop(place);
    Ok(())
}

fn told_settled<H>(shared: &Shared<H>, outcome: Outcome, settled: Settled) {
    let consumer = shared.settings.name.as_str();
    metrics::count(consumer, outcome);
    if settled == Settled::Lost {
        tracing::debug!(consumer, outcome = outcome.label(), "settled too late: it will be delivered again");
    }
}

/// Judges a message again for as long as it has to be kept, or until the session ends. To give it back would bring it, and
/// what was sent with it, one delivery closer to the limit.
///
/// When that takes longer than the broker waits for an acknowledgement (30 minutes, by default), it ends the subscription,
/// and the next one begins when the database takes writes.
async fn judge_until_known<H: Handler>(
    shared: &Shared<H>,
    delivery: &Delivery,
    signals: &Signals,
) -> Result<Verdict, Error> {
    let mut backoff = Backoff::for_service();
    let mut was_kept = false;
    loop {
        let verdict = judge(shared, delivery).await?;
        let is_ending = signals.ending.is_cancelled();
        let Verdict::Keep(error) = &verdict else {
            if was_kept && !is_ending {
                (shared.settings.on_readiness)(Readiness::Ready);
            }
            return Ok(verdict);
        };
        if is_ending {
            return Ok(verdict);
        }
        was_kept = true;
        let wait = backoff.next_wait();
        shared.not_consuming(&chain(error), wait);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = signals.ending.cancelled() => return Ok(verdict),
        }
    }
}

async fn judge<H: Handler>(shared: &Shared<H>, delivery: &Delivery) -> Result<Verdict, Error> {
    let invalid = |error: String| Ok(Verdict::Dead { reason: Reason::Invalid, error });
    let received = match &delivery.envelope {
        Ok(received) => received,
        Err(error) => return invalid(error.to_string()),
    };
    let ordering = match aggregate_of(shared, received) {
        // It may be one that ends the process. The broker would count it, and what was sent ahead with it.
        Ok(Some(_)) if delivery.delivery_count.unwrap_or(0) > 0 => return Ok(Verdict::Suspect),
        Ok(Some(_)) => Ordering::Aggregate,
        Ok(None) => Ordering::None,
        Err(unusable) => return invalid(unusable.to_string()),
    };
    let begun = Instant::now();
    let result = match attempt(shared, received, &delivery.body, Source::Queue).await {
        Ok(result) => result,
        Err(error) => return invalid(format!("the payload is not of the expected shape: {error}")),
    };
    metrics::record_time(&shared.settings.name, begun.elapsed());
    let is_last = failures(delivery).saturating_add(1) >= shared.settings.attempts;
    verdict(result, is_last, ordering)
}

/// Takes effect, and tries again at once where the first setback says nothing of the next attempt.
pub(crate) async fn attempt<H: Handler>(
    shared: &Shared<H>,
    received: &Received,
    body: &[u8],
    source: Source<'_>,
) -> Result<Result<Effect, Setback>, serde_json::Error> {
    let mut conflicts_left = 1;
    let mut connections_left = shared.pool.options().get_max_connections();
    loop {
        match take_effect(shared, vec![Event::decode(received, body)?], source).await {
            Err(Setback::Conflict(_)) if conflicts_left > 0 => conflicts_left -= 1,
            // All connections of the pool may have died while they lay idle.
            Err(Setback::DeadConnection(_)) if connections_left > 0 => connections_left -= 1,
            result => return Ok(result.map(|effects| effects[0])),
        }
    }
}

/// `is_last` says that a message that fails now has failed as often as it may, `ordering` whether its aggregate's order is
/// kept.
pub(crate) fn verdict(
    result: Result<Effect, Setback>,
    is_last: bool,
    ordering: Ordering,
) -> Result<Verdict, Error> {
    let error = match result {
        Ok(Effect::Taken) => return Ok(Verdict::Settled(Outcome::Effect)),
        Ok(Effect::Duplicate | Effect::Gone) => return Ok(Verdict::Settled(Outcome::Duplicate)),
        Ok(Effect::Behind | Effect::Busy) => return Ok(Verdict::Wait),
        Ok(Effect::Stale { last }) => {
            let error = format!("version {last} of its aggregate took effect before it");
            return Ok(Verdict::Dead { reason: Reason::Stale, error });
        }
        Err(Setback::DeadConnection(error) | Setback::Unsettled(error)) => return Err(error),
        Err(Setback::Refused(error)) => return Ok(Verdict::Keep(error)),
        // What waits for its aggregate's lock has not been tried.
        Err(Setback::Twin(error)) if is_last || ordering == Ordering::Aggregate => {
            return Ok(Verdict::Keep(error));
        }
        Err(Setback::Twin(error)) => chain(&error),
        Err(Setback::Handler(error @ HandlerError::Permanent(_))) => {
            return Ok(Verdict::Dead { reason: Reason::Permanent, error: told(&error) });
        }
        Err(Setback::Handler(error) | Setback::Conflict(error)) => told(&error),
        Err(Setback::OverBudget) => "the handler exceeded its time budget".to_owned(),
        Err(Setback::Panicked) => "the handler panicked".to_owned(),
    };
    Ok(match ordering {
        _ if is_last => Verdict::Dead { reason: Reason::Exhausted, error },
        Ordering::None => Verdict::Retry { error },
        Ordering::Aggregate => Verdict::Park { error },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passing_failure_is_retried_until_the_last_attempt() {
        let failed = || Err(Setback::Handler(HandlerError::transient("bank is closed")));
        assert!(
            matches!(verdict(failed(), false, Ordering::None), Ok(Verdict::Retry { error }) if error.contains("bank is closed"))
        );
        assert!(matches!(
            verdict(failed(), true, Ordering::None),
            Ok(Verdict::Dead { reason: Reason::Exhausted, .. })
        ));
        for setback in [Setback::Panicked, Setback::OverBudget] {
            assert!(matches!(verdict(Err(setback), false, Ordering::None), Ok(Verdict::Retry { .. })));
        }
    }

    #[test]
    fn a_refusal_is_dead_at_once() {
        let refused = Err(Setback::Handler(HandlerError::permanent("no such account")));
        let dead = verdict(refused, false, Ordering::None);
        assert!(
            matches!(dead, Ok(Verdict::Dead { reason: Reason::Permanent, error }) if error.contains("no such account"))
        );
    }

    #[test]
    fn an_unknown_outcome_settles_nothing() {
        let error = Error::Database { attempted: "commit", source: sqlx::Error::PoolTimedOut };
        assert!(verdict(Err(Setback::Unsettled(error)), true, Ordering::None).is_err());
    }

    #[test]
    fn a_database_that_cannot_work_kills_no_message() {
        let refused = Error::Refused { told: "SQLSTATE 25006".to_owned() };
        assert!(matches!(
            verdict(Err(Setback::Refused(refused)), true, Ordering::None),
            Ok(Verdict::Keep(_))
        ));
    }

    #[test]
    fn what_a_twin_holds_is_given_back_but_for_the_last_time() {
        let held = || {
            let source = sqlx::Error::PoolTimedOut;
            Err(Setback::Twin(Error::Database { attempted: "record an event as processed", source }))
        };
        assert!(matches!(verdict(held(), false, Ordering::None), Ok(Verdict::Retry { .. })));
        assert!(matches!(verdict(held(), true, Ordering::None), Ok(Verdict::Keep(_))));
    }

    #[test]
    fn in_an_aggregates_order_what_fails_is_parked_and_what_comes_too_late_is_dead() {
        let failed = || Err(Setback::Handler(HandlerError::transient("bank is closed")));
        assert!(matches!(verdict(failed(), false, Ordering::Aggregate), Ok(Verdict::Park { .. })));
        let last = verdict(failed(), true, Ordering::Aggregate);
        assert!(matches!(last, Ok(Verdict::Dead { reason: Reason::Exhausted, .. })));
        assert!(matches!(verdict(Ok(Effect::Behind), false, Ordering::Aggregate), Ok(Verdict::Wait)));
        let stale = verdict(Ok(Effect::Stale { last: 7 }), false, Ordering::Aggregate);
        assert!(
            matches!(stale, Ok(Verdict::Dead { reason: Reason::Stale, error }) if error.contains("version 7"))
        );
    }
}
