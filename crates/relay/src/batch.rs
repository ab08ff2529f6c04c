//! A batch: what a worker does inside the transaction that holds its lanes.
//!
//! It marks what was confirmed earlier and not marked, reads the hot path, diverts what belongs behind a chain, publishes,
//! marks, and sets aside what failed. Chains that are due follow in a transaction of their own, which holds their lanes alone:
//! one that leads to a silent queue delays no mark of the hot path, and none of the other lanes. Bounded in events, bytes and
//! time: chains have a quarter as many events and bytes, and the last fifth of the time.

use std::time::{Duration, Instant};

use metrics::histogram;
use semel_broker::Publisher;
use semel_core::database::{CALL_LIMIT, within};
use semel_core::failpoint;
use semel_core::lifecycle::Pass;
use semel_core::outbox::drain::{self, PendingEvent};
use semel_core::outbox::held::{self, Aggregate};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::complaints::Complaints;
use crate::error::RelayError;
#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::metrics as names;
use crate::options::Config;
use crate::prober::Shared;
use crate::sending::{Sending, Sent, Source};

/// One batch of one worker.
pub(crate) struct Batch<'a> {
    pub(crate) config: &'a Config,
    pub(crate) shared: &'a Shared,
    pub(crate) complaints: &'a mut Complaints,
    /// When the batch began, its hot path included.
    pub(crate) began: Instant,
}

/// What a transaction of a batch came to; it is not committed yet.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) pass: Pass,
    /// The lanes, which the transaction holds.
    pub(crate) lanes: Vec<i16>,
    /// Those of them that have chains that are due and were not tried.
    pub(crate) due: Vec<i16>,
    /// How long each event that is marked took from its creation, in seconds.
    pub(crate) latencies: Vec<f64>,
    /// Why the publisher cannot be used any more.
    pub(crate) broken: Option<semel_broker::Error>,
}

impl Done {
    fn nothing() -> Self {
        Self { pass: Pass::Idle, lanes: Vec::new(), due: Vec::new(), latencies: Vec::new(), broken: None }
    }
}

/// What the hot path holds.
struct Hot {
    events: Vec<PendingEvent>,
    /// Lanes with chains that are due.
    due: Vec<i16>,
    /// Events that were set aside behind a chain.
    diverted: usize,
    /// Whether a lane may hold more.
    is_full: bool,
}

impl Batch<'_> {
    /// Takes lanes, publishes what their hot path holds, marks what is safe and sets aside what failed.
    pub(crate) async fn run(
        &mut self,
        tx: &mut PgConnection,
        waiting: &[i16],
        publisher: &mut Publisher,
    ) -> Result<Done, RelayError> {
        let started = Instant::now();
        let share = waiting.len().div_ceil(usize::from(self.config.workers));
        let lanes = take(tx, waiting, share).await?;
        if lanes.is_empty() {
            return Ok(Done::nothing());
        }
        let _held = self.shared.hold(lanes.len());
        // Before anything of these lanes is read, or it would be sent again.
        let mut latencies = mark(tx, &self.shared.unmarked().of(&lanes)).await?;
        let Hot { events, due, diverted, is_full } = self.read(tx, &lanes).await?;
        histogram!(names::CLAIM).record(started.elapsed().as_secs_f64());
        failpoint!(failpoints::AFTER_TAKE);
        let all = self.config.batch_time;
        let limit = if due.is_empty() { all } else { all * 4 / 5 };
        let sent = self.publish(publisher, events, Source::Hot, limit).await;
        latencies.extend(self.write(tx, &sent, Vec::new()).await?);
        let has_moved = !sent.confirmed.is_empty() || !sent.failures.is_empty() || diverted > 0;
        let pass = match (has_moved, is_full) {
            (true, true) => Pass::Full,
            (true, false) => Pass::Worked,
            (false, _) => Pass::Idle,
        };
        Ok(Done { pass, lanes, due, latencies, broken: sent.broken })
    }

    /// Takes those of the lanes that are still free, and tries their chains that are due.
    pub(crate) async fn run_chains(
        &mut self,
        tx: &mut PgConnection,
        lanes: &[i16],
        publisher: &mut Publisher,
    ) -> Result<Done, RelayError> {
        let lanes = take(tx, lanes, lanes.len()).await?;
        if lanes.is_empty() {
            return Ok(Done::nothing());
        }
        let _held = self.shared.hold(lanes.len());
        let mut latencies = mark(tx, &self.shared.unmarked().of(&lanes)).await?;
        let (most, bytes) = self.per_lane(&lanes);
        let chains = within(CALL_LIMIT, held::due(tx, &lanes, (most / 4).max(1), (bytes / 4).max(1)))
            .await
            .map_err(RelayError::database("reading chains that are due"))?;
        let source = Source::Chains(chains.oldest);
        let sent = self.publish(publisher, chains.events, source, self.config.batch_time).await;
        latencies.extend(self.write(tx, &sent, chains.idle).await?);
        let has_moved = !sent.confirmed.is_empty() || !sent.failures.is_empty();
        let pass = if has_moved { Pass::Worked } else { Pass::Idle };
        Ok(Done { pass, lanes, due: Vec::new(), latencies, broken: sent.broken })
    }

    /// Most events and bytes of each of so many lanes.
    fn per_lane(&self, lanes: &[i16]) -> (i64, i64) {
        let count = i64::try_from(lanes.len()).unwrap_or(i64::MAX);
        ((i64::from(self.config.batch) / count).max(1), (i64::from(self.config.batch_bytes) / count).max(1))
    }

    async fn read(&self, tx: &mut PgConnection, lanes: &[i16]) -> Result<Hot, RelayError> {
        let (per_lane, bytes) = self.per_lane(lanes);
        let with_chains = within(CALL_LIMIT, held::lanes_with_chains(tx, lanes))
            .await
            .map_err(RelayError::database("looking for chains"))?;
        let mut events = within(CALL_LIMIT, drain::read(tx, lanes, &self.shared.floors(), per_lane, bytes))
            .await
            .map_err(RelayError::database("reading lanes"))?;
        let is_full = i64::try_from(events.len()).is_ok_and(|read| read >= per_lane);
        let mut diverted = 0;
        if !with_chains.is_empty() {
            let of_these = |event: &&PendingEvent| with_chains.iter().any(|known| known.lane == event.lane);
            let candidates: Vec<Uuid> = events.iter().filter(of_these).map(|event| event.event_id).collect();
            let gone = within(CALL_LIMIT, held::divert(tx, &candidates))
                .await
                .map_err(RelayError::database("setting events aside behind their aggregate's"))?;
            let gone: std::collections::HashSet<Uuid> = gone.into_iter().collect();
            events.retain(|event| !gone.contains(&event.event_id));
            diverted = gone.len();
            failpoint!(failpoints::AFTER_DIVERT);
        }
        let due = with_chains.iter().filter(|known| known.is_due).map(|known| known.lane).collect();
        Ok(Hot { events, due, diverted, is_full })
    }

    async fn publish(
        &mut self,
        publisher: &mut Publisher,
        events: Vec<PendingEvent>,
        source: Source,
        limit: Duration,
    ) -> Sent {
        if !events.is_empty() {
            histogram!(names::BATCH).record(u32::try_from(events.len()).unwrap_or(u32::MAX));
        }
        let mut sending = Sending {
            config: self.config,
            shared: self.shared,
            complaints: self.complaints,
            began: self.began,
            sent: Sent::default(),
        };
        sending.publish(publisher, events, source, limit).await;
        sending.sent
    }

    /// Marks what is safe and sets aside what failed; returns how long each event that is marked took.
    async fn write(
        &mut self,
        tx: &mut PgConnection,
        sent: &Sent,
        idle: Vec<Aggregate>,
    ) -> Result<Vec<f64>, RelayError> {
        let latencies = mark(tx, &sent.confirmed).await?;
        let mut settled: Vec<Aggregate> = sent.advanced.difference(&sent.failed).cloned().collect();
        settled.extend(idle);
        if !sent.failures.is_empty() {
            let held = within(CALL_LIMIT, held::hold(tx, &sent.failures, &self.config.held))
                .await
                .map_err(RelayError::database("setting failed events aside"))?;
            self.complaints.held(&held);
            failpoint!(failpoints::AFTER_HOLD);
            settled.extend(held.into_iter().filter(|event| event.is_skipped).map(|event| event.aggregate));
        }
        if !settled.is_empty() {
            within(CALL_LIMIT, held::settle(tx, &settled))
                .await
                .map_err(RelayError::database("settling chains"))?;
        }
        if !sent.unanswered.is_empty() {
            let unanswered: Vec<Aggregate> = sent.unanswered.iter().cloned().collect();
            within(CALL_LIMIT, held::postpone(tx, &unanswered, &self.config.held))
                .await
                .map_err(RelayError::database("putting chains off"))?;
        }
        failpoint!(failpoints::BEFORE_COMMIT);
        Ok(latencies)
    }
}

/// Takes lanes that nobody holds, at most so many.
async fn take(tx: &mut PgConnection, lanes: &[i16], most: usize) -> Result<Vec<i16>, RelayError> {
    within(CALL_LIMIT, drain::take_lanes(tx, lanes, i64::try_from(most).unwrap_or(1)))
        .await
        .map_err(RelayError::database("taking lanes"))
}

/// Marks confirmed events; returns how long each took.
async fn mark(tx: &mut PgConnection, confirmed: &[Uuid]) -> Result<Vec<f64>, RelayError> {
    if confirmed.is_empty() {
        return Ok(Vec::new());
    }
    within(CALL_LIMIT, drain::mark(tx, confirmed))
        .await
        .map_err(RelayError::database("marking confirmed events"))
}
