//! What becomes of one message.

use std::sync::Arc;
use std::time::{Duration, Instant};

use semel_broker::{Delivery, Received, Settled};
use semel_core::disposition::chain;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::consumer::Shared;
use crate::dead_letter::Reason;
use crate::error::Error;
use crate::event::Event;
use crate::handler::{Handler, HandlerError};
use crate::metrics::{self, Outcome};
use crate::transaction::{Effect, Setback, take_effect};

/// What is to be done with a message.
#[derive(Debug)]
enum Verdict {
    /// Acknowledge it: its effect is committed, or was before.
    Settled(Outcome),
    /// Give it back to the queue, after a wait.
    Retry { error: String },
    /// Give it up.
    Dead { reason: Reason, error: String },
}

/// Handles a message and settles it. On an error nothing is settled, and the channel has to be closed.
///
/// `place` is given back as soon as the message no longer needs the database.
pub(crate) async fn settle<H: Handler>(
    shared: Arc<Shared<H>>,
    delivery: Delivery,
    place: OwnedSemaphorePermit,
    ending: CancellationToken,
) -> Result<(), Error> {
    let consumer = shared.settings.name.as_str();
    let verdict = judge(&shared, &delivery).await;
    drop(place);

    let event_id = delivery.envelope.as_ref().ok().map(|envelope| tracing::field::display(envelope.event_id));
    let (outcome, settled) = match verdict? {
        Verdict::Settled(outcome) => (outcome, delivery.ack().await),
        Verdict::Dead { reason, error } => {
            shared.dead_letters.publish(&delivery, reason, &error).await?;
            // The decoder's words may quote the payload; they are in the dead letter.
            let error = if reason == Reason::Invalid { "see its headers" } else { &error };
            tracing::warn!(consumer, event_id, reason = reason.label(), "dead letter: {error}");
            let outcome = if reason == Reason::Invalid { Outcome::Invalid } else { Outcome::Dead };
            (outcome, delivery.ack().await)
        }
        Verdict::Retry { error } => {
            let wait = retry_wait(delivery.delivery_count.unwrap_or(0), shared.settings.retry_wait);
            tracing::warn!(
                consumer,
                event_id,
                retry_in_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                "{error}"
            );
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = ending.cancelled() => {}
            }
            (Outcome::Retried, delivery.reject(true).await)
        }
    };
    metrics::count(consumer, outcome);
    if settled == Settled::Lost {
        tracing::debug!(consumer, outcome = outcome.label(), "settled too late: it will be delivered again");
    }
    Ok(())
}

async fn judge<H: Handler>(shared: &Shared<H>, delivery: &Delivery) -> Result<Verdict, Error> {
    let invalid = |error: String| Ok(Verdict::Dead { reason: Reason::Invalid, error });
    let received = match &delivery.envelope {
        Ok(received) => received,
        Err(error) => return invalid(error.to_string()),
    };
    let begun = Instant::now();
    let result = match attempt(shared, received, &delivery.body).await {
        Ok(result) => result,
        Err(error) => return invalid(format!("the payload is not of the expected shape: {error}")),
    };
    metrics::record_time(&shared.settings.name, begun.elapsed());
    let limit = i64::from(shared.settings.topology.delivery_limit);
    let is_last = delivery.delivery_count.unwrap_or(0) >= limit;
    verdict(result, is_last)
}

/// Takes effect, and tries again at once where the first setback says nothing of the next attempt.
async fn attempt<H: Handler>(
    shared: &Shared<H>,
    received: &Received,
    body: &[u8],
) -> Result<Result<Effect, Setback>, serde_json::Error> {
    let mut conflicts_left = 1;
    let mut connections_left = shared.pool.options().get_max_connections();
    loop {
        match take_effect(shared, Event::decode(received, body)?).await {
            Err(Setback::Conflict(_)) if conflicts_left > 0 => conflicts_left -= 1,
            // All connections of the pool may have died while they lay idle.
            Err(Setback::DeadConnection(_)) if connections_left > 0 => connections_left -= 1,
            result => return Ok(result),
        }
    }
}

/// `is_last` says that the broker would give the message up if it came back once more.
fn verdict(result: Result<Effect, Setback>, is_last: bool) -> Result<Verdict, Error> {
    let error = match result {
        Ok(Effect::Taken) => return Ok(Verdict::Settled(Outcome::Effect)),
        Ok(Effect::Duplicate) => return Ok(Verdict::Settled(Outcome::Duplicate)),
        Err(Setback::DeadConnection(error) | Setback::Unsettled(error)) => return Err(error),
        Err(Setback::Handler(error @ HandlerError::Permanent(_))) => {
            return Ok(Verdict::Dead { reason: Reason::Permanent, error: chain(&error) });
        }
        Err(Setback::Handler(error) | Setback::Conflict(error) | Setback::Twin(error)) => chain(&error),
        Err(Setback::OverBudget) => "the handler exceeded its time budget".to_owned(),
        Err(Setback::Panicked) => "the handler panicked".to_owned(),
    };
    if is_last {
        Ok(Verdict::Dead { reason: Reason::Exhausted, error })
    } else {
        Ok(Verdict::Retry { error })
    }
}

/// Doubles with each earlier delivery, from `shortest` to `longest`; between half of that and the whole.
fn retry_wait(earlier_deliveries: i64, (shortest, longest): (Duration, Duration)) -> Duration {
    let doublings = u32::try_from(earlier_deliveries.clamp(0, 20)).unwrap_or(0);
    let step = shortest.saturating_mul(1 << doublings).min(longest);
    semel_core::backoff::Backoff::new(step, step).next_wait()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_are_bounded() {
        let bounds = (Duration::from_millis(200), Duration::from_secs(5));
        for (deliveries, step) in [(0, 200), (1, 400), (4, 3200), (5, 5000), (1_000_000, 5000), (-1, 200)] {
            let wait = retry_wait(deliveries, bounds);
            let step = Duration::from_millis(step);
            assert!(wait >= step / 2 && wait <= step, "{deliveries}: {wait:?}");
        }
    }

    #[test]
    fn a_passing_failure_is_retried_until_the_last_delivery() {
        let failed = || Err(Setback::Handler(HandlerError::transient("bank is closed")));
        assert!(
            matches!(verdict(failed(), false), Ok(Verdict::Retry { error }) if error.contains("bank is closed"))
        );
        assert!(matches!(verdict(failed(), true), Ok(Verdict::Dead { reason: Reason::Exhausted, .. })));
        for setback in [Setback::Panicked, Setback::OverBudget] {
            assert!(matches!(verdict(Err(setback), false), Ok(Verdict::Retry { .. })));
        }
    }

    #[test]
    fn a_refusal_is_dead_at_once() {
        let refused = Err(Setback::Handler(HandlerError::permanent("no such account")));
        let dead = verdict(refused, false);
        assert!(
            matches!(dead, Ok(Verdict::Dead { reason: Reason::Permanent, error }) if error.contains("no such account"))
        );
    }

    #[test]
    fn an_unknown_outcome_settles_nothing() {
        let error = Error::Database { attempted: "commit", source: sqlx::Error::PoolTimedOut };
        assert!(verdict(Err(Setback::Unsettled(error)), true).is_err());
    }
}
