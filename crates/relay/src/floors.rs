//! From which id on each lane is read.
//!
//! What is published leaves a dead entry in the hot index, and while some transaction keeps these from being cleaned up,
//! every read would step over all of them. So the prober raises a floor per lane, behind which nothing is left and nothing
//! can appear ([`horizon`](drain::horizon)): it notes how far the sequence has come and *then* who may have drawn an id;
//! once those have ended, its next probe raises each floor to the lane's oldest event, or past the noted position. That
//! probe sees only marks that are committed, so what is being published stays above the floor.
//!
//! A floor that is too low costs time. One that is too high would hide an event, so
//! * floors name the server's run, and are nothing on another one;
//! * a position counts only once the log up to it is safe: a crash may set the sequence back behind what was not;
//! * a new connection, another run, or a sequence that went back drops them all;
//! * every so often a probe without floors looks whether they hid anything ([`Keeper::swept`]). They never should have.
//!
//! They live in memory. A crash loses them, which costs time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use semel_core::outbox::drain::{Floors, LaneHead, Position, Probed, Writers};

/// How often the sequence and its writers are looked at while there is work.
const BUSY: Duration = Duration::from_millis(100);
/// How often it is looked whether writers have ended, while there is no work.
const WAITING: Duration = Duration::from_secs(1);
/// How often the sequence is looked at while there is no work.
const QUIET: Duration = Duration::from_secs(10);
/// How often a probe looks below the floors.
const SWEEP: Duration = Duration::from_secs(30);

/// Knows the floors, and what they wait for to rise.
#[derive(Debug)]
pub(crate) struct Keeper {
    floors: Floors,
    /// The highest position of the sequence that was seen.
    highest: i64,
    noted: Option<Noted>,
    /// Whether work was found since the last look.
    busy: bool,
    looked: Option<Instant>,
    swept: Instant,
}

/// A position of the sequence, and who may have drawn an id up to it.
#[derive(Debug)]
struct Noted {
    position: i64,
    /// The end of the log when it was noted.
    logged: i64,
    open: BTreeSet<String>,
    /// Whether those who were prepared meanwhile, which changed their ids, are among `open`.
    with_prepared: bool,
    is_settled: bool,
}

/// What is to be asked next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Look {
    /// Nothing yet.
    Nothing,
    /// How far the sequence has come, and then who writes.
    Sequence,
    /// Who still writes.
    Writers,
}

impl Keeper {
    /// Starts without floors.
    pub(crate) fn new(now: Instant) -> Self {
        Self { floors: Floors::NONE, highest: 0, noted: None, busy: false, looked: None, swept: now }
    }

    /// What may be left out.
    pub(crate) fn floors(&self) -> &Floors {
        &self.floors
    }

    /// Says what to ask now. Never more than is worth it: the list of locks is not free for the server.
    pub(crate) fn look(&mut self, now: Instant) -> Look {
        let (look, pause) = match &self.noted {
            None => (Look::Sequence, if self.busy { BUSY } else { QUIET }),
            Some(noted) if noted.is_settled => return Look::Nothing,
            Some(_) => (Look::Writers, if self.busy { BUSY } else { WAITING }),
        };
        if self.looked.is_some_and(|looked| now.duration_since(looked) < pause) {
            return Look::Nothing;
        }
        self.looked = Some(now);
        self.busy = false;
        look
    }

    /// Takes in how far the sequence has come; says whether it is worth asking who writes.
    pub(crate) fn came_to(&mut self, at: Position) -> bool {
        let Some(last) = at.last else {
            self.drop_all();
            return false;
        };
        if self.floors.run() != Some(at.run) || last < self.highest {
            self.floors = Floors::on(at.run);
            self.noted = None;
        }
        self.highest = last;
        self.floors.all().iter().any(|&floor| floor <= last)
    }

    /// Notes the position that was taken in last, with the writers of a moment after it.
    pub(crate) fn note(&mut self, writers: Writers) {
        if self.floors.run() != Some(writers.run) {
            return self.drop_all();
        }
        self.noted = Some(Noted {
            position: self.highest,
            logged: writers.logged,
            open: writers.open.clone(),
            with_prepared: false,
            is_settled: false,
        });
        self.settle(writers);
    }

    /// Takes in who still writes.
    pub(crate) fn settle(&mut self, now: Writers) {
        if self.floors.run() != Some(now.run) {
            return self.drop_all();
        }
        let Some(noted) = &mut self.noted else { return };
        noted.open.retain(|transaction| now.open.contains(transaction));
        if noted.open.is_empty() && !noted.with_prepared {
            // One that was noted may be among those that are prepared now. Once prepared, it keeps its id.
            noted.with_prepared = true;
            noted.open = now.prepared;
        }
        noted.is_settled = noted.open.is_empty() && now.flushed >= noted.logged;
    }

    /// Takes in what a probe found that began after the last look.
    pub(crate) fn probed(&mut self, probed: &Probed) {
        self.busy |= !probed.heads.is_empty();
        let Some(noted) = self.noted.take_if(|noted| noted.is_settled) else { return };
        if self.floors.run() == Some(probed.run) {
            self.floors.raise(&probed.heads, noted.position + 1);
        }
    }

    /// Says whether it is time for a probe without floors.
    pub(crate) fn is_sweep_due(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.swept) >= SWEEP;
        if is_due {
            self.swept = now;
        }
        is_due
    }

    /// Takes in what a probe without floors found; returns the lanes with an event that a floor hid. The floors are then
    /// not to be trusted, and dropped.
    pub(crate) fn swept(&mut self, probed: &Probed) -> Vec<LaneHead> {
        if self.floors.run() != Some(probed.run) {
            return Vec::new();
        }
        let hidden: Vec<LaneHead> = self.hidden(&probed.heads).collect();
        if !hidden.is_empty() {
            self.drop_all();
        }
        hidden
    }

    fn hidden<'a>(&'a self, heads: &'a [LaneHead]) -> impl Iterator<Item = LaneHead> + 'a {
        heads.iter().copied().filter(|head| head.id.is_some_and(|id| id < self.floors.of(head.lane)))
    }

    fn drop_all(&mut self) {
        self.floors = Floors::NONE;
        self.highest = 0;
        self.noted = None;
    }
}

#[cfg(test)]
mod tests;
