//! Publishing a batch in waves, and what its events' outcomes mean for them.
//!
//! An event is to blame when it came back, was not taken or cannot be sent; and when it was sent and then there was
//! silence, although others of its wave were confirmed, none of them with its routing key, and the broker still answers: then
//! it is its queue that is silent, and not a disk or a leader that pauses.
//! Anything else is the trouble of the connection or of the broker, or mere slowness, and costs no event an attempt.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use semel_broker::{Envelope, Error, Message, Outcome, Outgoing, Patience, Publisher};
use semel_core::failpoint;
use semel_core::outbox::drain::PendingEvent;
use semel_core::outbox::held::{Aggregate, Failure};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::complaints::Complaints;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::metrics as names;
use crate::options::Config;
use crate::prober::Shared;
use crate::turns::Turn;
use crate::waves::{Fate, Waves};

/// Most events of one wave: a channel is used fully by some hundred.
const WAVE: usize = 1000;

/// How long any wave of chains may take: they are what may lead to a queue that is silent. A longer one needs a turn.
const CHAINS_LIMIT: Duration = Duration::from_secs(3);

/// The part of the time for which chains have been set aside that a wave of them may take that has a turn. So those of a
/// broker that is slow get what it needs.
const CHAINS_SHARE: u32 = 8;

/// How long a wave may be silent once something of it was confirmed.
const SILENCE: Duration = Duration::from_secs(5);

/// The same for all while it is known that there is a silent queue.
const SHORT_SILENCE: Duration = Duration::from_secs(1);

/// Where the events of a wave come from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Source {
    /// The hot path.
    Hot,
    /// Chains, of which the one that was set aside first has been so for that long.
    Chains(Duration),
}

/// What came of publishing a batch.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Events that are safe with the broker.
    pub(crate) confirmed: Vec<Uuid>,
    /// Events that failed by their own fault.
    pub(crate) failures: Vec<Failure>,
    /// Chains of which something is safe.
    pub(crate) advanced: BTreeSet<Aggregate>,
    /// Chains that failed.
    pub(crate) failed: BTreeSet<Aggregate>,
    /// Chains whose event the broker did not answer, without that being the event's fault.
    pub(crate) unanswered: BTreeSet<Aggregate>,
    /// Why the publisher cannot be used any more.
    pub(crate) broken: Option<Error>,
}

/// An event on its way.
struct Awaited {
    event_id: Uuid,
    routing_key: String,
    lane: i16,
    chain: Option<Aggregate>,
}

/// The routing keys of which something was confirmed in a wave.
struct Heard(BTreeSet<String>);

impl Heard {
    fn of(awaited: &[Awaited], outcomes: &[Outcome]) -> Self {
        if !outcomes.contains(&Outcome::Unconfirmed) {
            return Self(BTreeSet::new());
        }
        let confirmed = awaited.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Confirmed);
        Self(confirmed.map(|(event, _)| event.routing_key.clone()).collect())
    }

    /// Whether something was, and nothing that goes to the queues of this key.
    fn but_not_of(&self, routing_key: &str) -> bool {
        !self.0.is_empty() && !self.0.contains(routing_key)
    }
}

/// Publishes events for one batch.
pub(crate) struct Sending<'a> {
    pub(crate) config: &'a Config,
    pub(crate) shared: &'a Shared,
    pub(crate) complaints: &'a mut Complaints,
    pub(crate) began: Instant,
    pub(crate) sent: Sent,
}

impl<'a> Sending<'a> {
    /// Publishes events in waves; after `limit` from the beginning of the batch no further wave begins.
    pub(crate) async fn publish(
        &mut self,
        publisher: &mut Publisher,
        events: Vec<PendingEvent>,
        source: Source,
        limit: Duration,
    ) {
        let mut waves = Waves::new(events);
        while self.began.elapsed() < limit && self.sent.broken.is_none() {
            let events = waves.next_wave(WAVE);
            if events.is_empty() {
                break;
            }
            let mut awaited = Vec::with_capacity(events.len());
            let mut wave = Vec::with_capacity(events.len());
            for event in events {
                let chain = matches!(source, Source::Chains(_)).then(|| Aggregate {
                    kind: event.aggregate_type.clone(),
                    id: event.aggregate_id.clone(),
                });
                let (event_id, lane) = (event.event_id, event.lane);
                let outgoing = self.outgoing(event);
                awaited.push(Awaited { event_id, routing_key: outgoing.routing_key.clone(), lane, chain });
                wave.push(outgoing);
            }
            let started = Instant::now();
            let (patience, turn) = self.patience(source);
            let judged = publisher.publish_wave_within(patience, wave).await;
            match turn {
                Some(turn) if judged.outcomes.contains(&Outcome::Confirmed) => turn.answered(),
                _ => {}
            }
            histogram!(names::CONFIRM).record(started.elapsed().as_secs_f64());
            let fates = self.judge(awaited, &judged.outcomes, judged.broken.as_ref());
            waves.settle(&fates);
            self.sent.broken = judged.broken;
            failpoint!(failpoints::AFTER_CONFIRM);
        }
    }

    fn patience(&self, source: Source) -> (Patience, Option<Turn<'a>>) {
        let whole = self.config.confirm_limit;
        // A third at most, so that a wave which ends at its limit can tell silence from slowness.
        match source {
            Source::Hot if self.shared.was_silent() => {
                (Patience { whole, silence: SHORT_SILENCE.min(whole / 3) }, None)
            }
            Source::Hot => (Patience { whole, silence: SILENCE.min(whole / 3) }, None),
            Source::Chains(oldest) => {
                let long = whole.min(oldest / CHAINS_SHARE);
                let turn = if long > CHAINS_LIMIT { self.shared.turns().take() } else { None };
                let whole = if turn.is_some() { long } else { whole.min(CHAINS_LIMIT) };
                (Patience { whole, silence: SILENCE.min(whole / 3) }, turn)
            }
        }
    }

    fn judge(&mut self, awaited: Vec<Awaited>, outcomes: &[Outcome], broken: Option<&Error>) -> Vec<Fate> {
        let heard = Heard::of(&awaited, outcomes);
        let is_late = matches!(broken, None | Some(Error::TimedOut { .. }));
        let mut fates = Vec::with_capacity(awaited.len());
        let mut safe = Vec::with_capacity(awaited.len());
        let mut counts = BTreeMap::<_, u64>::new();
        for (Awaited { event_id, routing_key, lane, chain }, outcome) in awaited.into_iter().zip(outcomes) {
            let label = names::label(outcome);
            *counts.entry(label).or_default() += 1;
            let error = match outcome {
                Outcome::Confirmed => {
                    safe.push((lane, event_id));
                    self.sent.advanced.extend(chain);
                    fates.push(Fate::Safe);
                    continue;
                }
                Outcome::Returned { reason } => format!("returned: {reason}"),
                Outcome::Nacked => "nacked: a queue did not take it, such as one that is full".to_owned(),
                Outcome::Refused { reason } => format!("refused: {reason}"),
                Outcome::Unconfirmed if heard.but_not_of(&routing_key) => {
                    self.shared.fell_silent();
                    "unknown: not confirmed in time, while others were".to_owned()
                }
                Outcome::Unconfirmed | Outcome::Unknown { .. } => {
                    // Nobody's fault but the connection's; said once, by the pass.
                    if is_late {
                        self.sent.unanswered.extend(chain);
                    }
                    fates.push(Fate::Stopped);
                    continue;
                }
            };
            let failure = Failure { event_id, error };
            self.complaints.failed(label, &failure);
            self.sent.failures.push(failure);
            self.sent.failed.extend(chain);
            fates.push(Fate::Stopped);
        }
        for (label, count) in counts {
            counter!(names::OUTCOMES, "outcome" => label).increment(count);
        }
        self.sent.confirmed.extend(safe.iter().map(|&(_, event_id)| event_id));
        self.shared.unmarked().remember(safe);
        fates
    }

    fn outgoing(&self, event: PendingEvent) -> Outgoing {
        // The table's names are bounded so that the usual key fits; one that does not is refused by the publisher.
        let routing_key = self.config.routing_key.of(&event.aggregate_type, &event.event_type);
        let envelope = Envelope {
            event_id: event.event_id,
            event_type: event.event_type,
            aggregate_type: event.aggregate_type,
            aggregate_id: event.aggregate_id,
            aggregate_version: event.aggregate_version,
            outbox_id: event.id,
            created_at_unix_micros: micros(event.created_at),
            source: self.config.source.clone(),
            headers: event.headers.0,
        };
        Outgoing {
            exchange: self.config.exchange.clone(),
            routing_key,
            message: Message::Event { envelope: Box::new(envelope), body: event.payload.into_bytes() },
        }
    }
}

fn micros(time: OffsetDateTime) -> i64 {
    i64::try_from(time.unix_timestamp_nanos() / 1000).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn awaited(routing_key: &str) -> Awaited {
        Awaited { event_id: Uuid::nil(), routing_key: routing_key.to_owned(), lane: 0, chain: None }
    }

    #[test]
    fn a_queue_is_silent_when_others_are_not() {
        let wave = ["order.Placed", "order.Placed", "payment.Made"].map(awaited);
        let blames = |outcomes: [Outcome; 3]| {
            let heard = Heard::of(&wave, &outcomes);
            ["order.Placed", "payment.Made"].map(|key| heard.but_not_of(key))
        };
        let (confirmed, silent) = (|| Outcome::Confirmed, || Outcome::Unconfirmed);
        assert_eq!(blames([silent(), silent(), confirmed()]), [true, false]);
        // It was heard of, so that it pauses and is not silent.
        assert_eq!(blames([confirmed(), silent(), silent()]), [false, true]);
        assert_eq!(blames([confirmed(), silent(), confirmed()]), [false, false]);
        assert_eq!(blames([silent(), silent(), silent()]), [false, false]);
    }
}
