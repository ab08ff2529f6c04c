//! A batch: what a worker does inside the transaction that holds its lanes.
//!
//! It marks what was confirmed earlier and not marked, reads chains that are due and the hot path, diverts what belongs
//! behind a chain, publishes, marks, and sets aside what failed. Bounded in events, bytes and time, chains included: they
//! have a quarter of the events and of the bytes, and the last fifth of the time.

use std::time::Instant;

use metrics::histogram;
use semel_broker::Publisher;
use semel_core::database::{CALL_LIMIT, within};
use semel_core::failpoint;
use semel_core::lifecycle::Pass;
use semel_core::outbox::drain::{self, PendingEvent};
use semel_core::outbox::held::{self, Aggregate, Due};
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
}

/// What a batch came to; it is not committed yet.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) pass: Pass,
    /// The lanes, which the transaction holds.
    pub(crate) lanes: Vec<i16>,
    /// How long each event that is marked took from its creation, in seconds.
    pub(crate) latencies: Vec<f64>,
    /// Why the publisher cannot be used any more.
    pub(crate) broken: Option<semel_broker::Error>,
}

/// What is to be sent.
struct Read {
    hot: Vec<PendingEvent>,
    due: Due,
    /// Events that were set aside behind a chain.
    diverted: usize,
    /// Whether a lane may hold more.
    is_full: bool,
}

impl Batch<'_> {
    /// Takes lanes, publishes what they hold, marks what is safe and sets aside what failed.
    pub(crate) async fn run(
        &mut self,
        tx: &mut PgConnection,
        waiting: &[i16],
        publisher: &mut Publisher,
    ) -> Result<Done, RelayError> {
        let began = Instant::now();
        let share = waiting.len().div_ceil(usize::from(self.config.workers));
        let lanes = within(CALL_LIMIT, drain::take_lanes(tx, waiting, i64::try_from(share).unwrap_or(1)))
            .await
            .map_err(RelayError::database("taking lanes"))?;
        if lanes.is_empty() {
            return Ok(Done { pass: Pass::Idle, lanes, latencies: Vec::new(), broken: None });
        }
        let _held = self.shared.hold(lanes.len());
        // Before anything of these lanes is read, or it would be sent again.
        let mut latencies = mark(tx, &self.shared.unmarked().of(&lanes)).await?;
        let read = self.read(tx, &lanes).await?;
        histogram!(names::CLAIM).record(began.elapsed().as_secs_f64());
        failpoint!(failpoints::AFTER_TAKE);
        let events = read.hot.len() + read.due.events.len();
        if events > 0 {
            histogram!(names::BATCH).record(u32::try_from(events).unwrap_or(u32::MAX));
        }

        let (diverted, is_full, idle) = (read.diverted, read.is_full, read.due.idle.clone());
        let sent = self.publish(publisher, read).await;
        let has_moved = !sent.confirmed.is_empty() || !sent.failures.is_empty() || diverted > 0;
        latencies.extend(mark(tx, &sent.confirmed).await?);
        self.write(tx, &sent, idle).await?;
        failpoint!(failpoints::BEFORE_COMMIT);
        let pass = match (has_moved, is_full) {
            (true, true) => Pass::Full,
            (true, false) => Pass::Worked,
            (false, _) => Pass::Idle,
        };
        Ok(Done { pass, lanes, latencies, broken: sent.broken })
    }

    async fn read(&self, tx: &mut PgConnection, lanes: &[i16]) -> Result<Read, RelayError> {
        let count = i64::try_from(lanes.len()).unwrap_or(i64::MAX);
        let mut per_lane = (i64::from(self.config.batch) / count).max(1);
        let mut bytes = i64::from(self.config.batch_bytes) / count;
        let with_chains = within(CALL_LIMIT, held::lanes_with_chains(tx, lanes))
            .await
            .map_err(RelayError::database("looking for chains"))?;
        let mut due = Due::default();
        if !with_chains.is_empty() {
            let (most, most_bytes) = ((per_lane / 4).max(1), (bytes / 4).max(1));
            due = within(CALL_LIMIT, held::due(tx, &with_chains, most, most_bytes))
                .await
                .map_err(RelayError::database("reading chains that are due"))?;
            // A chain that is not due, or dead, takes nothing from the hot path.
            let spent: usize = due.events.iter().map(|event| event.payload.len()).sum();
            let share = |total: usize| i64::try_from(total).unwrap_or(i64::MAX) / count;
            per_lane = (per_lane - share(due.events.len()).min(most)).max(1);
            bytes = (bytes - share(spent)).max(1);
        }
        let mut hot = within(CALL_LIMIT, drain::read(tx, lanes, &self.shared.floors(), per_lane, bytes))
            .await
            .map_err(RelayError::database("reading lanes"))?;
        let is_full = i64::try_from(hot.len()).is_ok_and(|read| read >= per_lane);
        let mut diverted = 0;
        if !with_chains.is_empty() {
            let of_these = |event: &&PendingEvent| with_chains.contains(&event.lane);
            let candidates: Vec<Uuid> = hot.iter().filter(of_these).map(|event| event.event_id).collect();
            let gone = within(CALL_LIMIT, held::divert(tx, &candidates))
                .await
                .map_err(RelayError::database("setting events aside behind their aggregate's"))?;
            let gone: std::collections::HashSet<Uuid> = gone.into_iter().collect();
            hot.retain(|event| !gone.contains(&event.event_id));
            diverted = gone.len();
            failpoint!(failpoints::AFTER_DIVERT);
        }
        Ok(Read { hot, due, diverted, is_full })
    }

    /// Publishes the hot path first: a chain may lead to a queue that answers only when its time is up.
    async fn publish(&mut self, publisher: &mut Publisher, read: Read) -> Sent {
        let all = self.config.batch_time;
        let for_hot = if read.due.events.is_empty() { all } else { all * 4 / 5 };
        let mut sending = Sending {
            config: self.config,
            shared: self.shared,
            complaints: self.complaints,
            began: Instant::now(),
            sent: Sent::default(),
        };
        sending.publish(publisher, read.hot, Source::Hot, for_hot).await;
        sending.publish(publisher, read.due.events, Source::Chains(read.due.oldest), all).await;
        sending.sent
    }

    async fn write(
        &mut self,
        tx: &mut PgConnection,
        sent: &Sent,
        idle: Vec<Aggregate>,
    ) -> Result<(), RelayError> {
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
        Ok(())
    }
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
