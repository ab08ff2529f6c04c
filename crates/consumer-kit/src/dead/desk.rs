//! Decisions about dead letters, carried out in waves.
//!
//! A survey goes first: it tells how many letters can be held, and so how many the broker may send while others are being
//! put back. Of each wave, first the decision is written down; then, for a replay, the copies are published and confirmed; then the
//! letters are acknowledged.

use semel_broker::{Delivery, Outcome, Outgoing, Publisher, Settled};
use semel_core::database;
use semel_core::failpoint;
use semel_core::operators::{self, Deeds};
use time::OffsetDateTime;

use super::letter::{Filter, Letter, before};
use super::walk::{MOST_HELD, Walk};
use super::{Bound, DeadError, DeadLetters, LONGEST_REDELIVERY, failed_to};
use crate::copies::headers;
#[cfg(feature = "failpoints")]
use crate::failpoints;

/// Most letters of a wave. The broker's channel keeps acknowledgements back while more than 32 of them are on their way to a
/// quorum queue (`quorum_commands_soft_limit`), and forgets those when it is closed: their letters would be here again.
const WAVE: usize = 16;
/// Most bytes of payload of a wave.
const WAVE_BYTES: usize = 4 * 1024 * 1024;

/// What is done with letters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// They go back to the consumer's own queue, as if they had never failed.
    Replay,
    /// They are gone.
    Discard,
}

/// What a person decides.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// What is done.
    pub verdict: Verdict,
    /// The id of the message that is meant, if it is one.
    pub message_id: Option<&'a str>,
    /// Which letters are meant otherwise.
    pub filter: Filter,
    /// Most letters to decide about.
    pub limit: usize,
    /// Whether letters are replayed whose event may have taken effect and be forgotten.
    pub is_forced: bool,
    /// Whether nothing is changed.
    pub is_dry_run: bool,
    /// Who, 1 to 255 bytes.
    pub actor: &'a str,
    /// Why, 1 to 4096 bytes.
    pub reason: &'a str,
}

/// What became of a letter that is meant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fate {
    /// The decision is carried out, or would be.
    Done,
    /// It was put back, but is still here, too: the connection was lost in between. Its event takes effect once.
    DoneAndKept,
    /// It is older than what the consumer remembers, so that its event might take effect twice. It stays.
    TooOld,
}

/// What was decided, as far as it got.
#[derive(Debug, Default)]
pub struct Decided {
    /// How many letters it was carried out on.
    pub done: usize,
    /// How many stay, because they are too old.
    pub too_old: usize,
    /// Why there may be more.
    pub bound: Option<Bound>,
}

type Held = (Letter, Delivery);

struct Desk<'a> {
    letters: &'a DeadLetters,
    decision: &'a Decision<'a>,
    tell: &'a mut (dyn FnMut(&Letter, Fate) + Send),
    now: OffsetDateTime,
    publisher: Option<Publisher>,
    decided: Decided,
}

impl DeadLetters {
    /// Carries out a decision, and tells of each letter as soon as it is carried out on it. Letters that arrive meanwhile are
    /// not meant, those that are put back and die again among them.
    ///
    /// # Errors
    ///
    /// When broker or database cannot be used, or a copy is not taken by the queue. What was told of is done.
    ///
    /// # Cancel safety
    ///
    /// A replay that is dropped may have put back letters that stay here, too; nothing is lost.
    pub async fn decide(
        &self,
        decision: &Decision<'_>,
        tell: &mut (dyn FnMut(&Letter, Fate) + Send),
    ) -> Result<Decided, DeadError> {
        self.sees_that_decisions_can_be_written_down().await?;
        let now = self.now().await?;
        let mut desk =
            Desk { letters: self, decision, tell, now, publisher: None, decided: Decided::default() };
        let result = desk.run().await;
        if let Some(publisher) = desk.publisher.take() {
            publisher.close().await;
        }
        result?;
        let decided = desk.decided;
        match decision.message_id {
            Some(id) if decided.done + decided.too_old == 0 => {
                Err(DeadError::NoLetter { letter: id.to_owned(), queue: self.dead_queue() })
            }
            _ => Ok(decided),
        }
    }
}

impl Desk<'_> {
    async fn run(&mut self) -> Result<(), DeadError> {
        let mut survey = Walk::open(self.letters, MOST_HELD).await?;
        if self.decision.is_dry_run {
            let surveyed = self.walk(&mut survey).await;
            self.decided.bound = self.decided.bound.or(survey.bound());
            survey.close().await;
            return surveyed;
        }
        let surveyed = survey.finish().await;
        let (bound, there) = (survey.bound(), survey.passed());
        survey.close().await;
        surveyed?;
        let mut walk = Walk::open(self.letters, there).await?;
        let walked = self.walk(&mut walk).await;
        let others = walk.bound().filter(|bound| *bound == Bound::Others);
        self.decided.bound = self.decided.bound.or(bound).or(others);
        walk.close().await;
        walked
    }

    /// Walks to the end, also when as many as may be are decided about: see [`Walk::finish`].
    async fn walk(&mut self, walk: &mut Walk) -> Result<(), DeadError> {
        let (mut wave, mut bytes): (Vec<Held>, usize) = (Vec::new(), 0);
        loop {
            let is_complete = wave.len() >= WAVE || bytes >= WAVE_BYTES;
            let next = if is_complete { None } else { walk.next().await? };
            match next {
                Some((letter, delivery)) => {
                    if self.is_meant(&letter, wave.len()) {
                        bytes += delivery.body.len();
                        wave.push((letter, delivery));
                    }
                }
                None if wave.is_empty() => return Ok(()),
                None => {
                    self.settle(walk, std::mem::take(&mut wave)).await?;
                    bytes = 0;
                }
            }
        }
    }

    /// Whether the decision is carried out on a letter, beside so many others that it is about to be carried out on.
    fn is_meant(&mut self, letter: &Letter, others: usize) -> bool {
        let Decision { verdict, message_id, filter, is_forced, limit, .. } = self.decision;
        let is_meant = match message_id {
            Some(id) => letter.message_id.as_deref() == Some(id),
            None => filter.takes(letter, self.now),
        };
        if !is_meant {
            return false;
        }
        // What is put back now may be delivered as late as any message, and has to be remembered until then.
        let remembered = before(self.now, self.letters.retention.saturating_sub(LONGEST_REDELIVERY));
        let is_too_old = letter.oldest_effect().is_none_or(|since| since <= remembered);
        if *verdict == Verdict::Replay && is_too_old && !is_forced {
            self.decided.too_old += 1;
            (self.tell)(letter, Fate::TooOld);
            return false;
        }
        if self.decided.done + others >= *limit {
            self.decided.bound = Some(Bound::Limit);
            return false;
        }
        true
    }

    async fn settle(&mut self, walk: &mut Walk, wave: Vec<Held>) -> Result<(), DeadError> {
        if self.decision.is_dry_run {
            for (letter, _) in wave {
                self.done(&letter, Fate::Done);
            }
            return Ok(());
        }
        self.write_down(&wave).await?;
        let outcomes = match self.decision.verdict {
            Verdict::Replay => self.put_back(&wave).await?,
            Verdict::Discard => vec![Outcome::Confirmed; wave.len()],
        };
        failpoint!(failpoints::BEFORE_LETTER_ACK);
        let mut failed = None;
        for ((letter, delivery), outcome) in wave.into_iter().zip(outcomes) {
            if outcome != Outcome::Confirmed {
                failed.get_or_insert_with(|| self.not_put_back(&letter, outcome));
                continue;
            }
            let fate = match (delivery.ack().await, self.decision.verdict) {
                (Settled::Sent, _) => Fate::Done,
                (Settled::Lost, Verdict::Replay) => Fate::DoneAndKept,
                (Settled::Lost, Verdict::Discard) => {
                    failed.get_or_insert_with(|| DeadError::NotDiscarded(letter.name().to_owned()));
                    continue;
                }
            };
            walk.acknowledged(letter.payload_bytes);
            self.done(&letter, fate);
        }
        failed.map_or(Ok(()), Err)
    }

    fn done(&mut self, letter: &Letter, fate: Fate) {
        self.decided.done += 1;
        (self.tell)(letter, fate);
    }

    async fn write_down(&self, wave: &[Held]) -> Result<(), DeadError> {
        let subjects: Vec<String> = wave.iter().map(|(letter, _)| self.subject(letter)).collect();
        let deeds = Deeds {
            actor: self.decision.actor,
            action: match self.decision.verdict {
                Verdict::Replay => "dead replay",
                Verdict::Discard => "dead discard",
            },
            subjects: &subjects,
            reason: self.decision.reason,
        };
        let recorded = database::call(&self.letters.pool, async |connection| {
            operators::record_all(connection, &deeds).await
        });
        recorded.await.map_err(failed_to("write the decision down"))
    }

    /// Names a letter in the audit, without control characters, and within its bound.
    fn subject(&self, letter: &Letter) -> String {
        let event_type = letter.event_type.as_deref().unwrap_or("of no type");
        let subject = format!("{}: {} {event_type}", self.letters.queue, letter.name());
        let subject = subject.replace(char::is_control, " ");
        subject[..subject.floor_char_boundary(MAX_SUBJECT)].to_owned()
    }

    async fn put_back(&mut self, wave: &[Held]) -> Result<Vec<Outcome>, DeadError> {
        let mut publisher = match self.publisher.take().filter(Publisher::is_usable) {
            Some(publisher) => publisher,
            None => Publisher::open(&self.letters.broker, &self.letters.name()).await?,
        };
        let copies = wave.iter().map(|(_, delivery)| self.copy(delivery)).collect();
        failpoint!(failpoints::BEFORE_REPLAY);
        let wave = publisher.publish_wave(copies).await;
        self.publisher = Some(publisher);
        Ok(wave.outcomes)
    }

    /// As it was before it failed. Where it was published at first is kept: its next dead letter tells that again.
    fn copy(&self, delivery: &Delivery) -> Outgoing {
        let forgotten = [
            headers::ATTEMPTS,
            headers::FIRST_FAILED_AT,
            headers::FAILED_AT,
            headers::ERROR,
            headers::REASON,
            headers::CONSUMER,
        ];
        let copy = forgotten.iter().fold(delivery.copy(), |copy, name| copy.without_header(name));
        Outgoing::copy_to_queue(self.letters.queue.as_str(), copy)
    }

    fn not_put_back(&self, letter: &Letter, outcome: Outcome) -> DeadError {
        DeadError::NotPutBack {
            letter: letter.name().to_owned(),
            queue: self.letters.queue.clone(),
            outcome: match outcome {
                Outcome::Returned { reason } => format!("there is no such queue: {reason}"),
                Outcome::Refused { reason } => format!("refused, {reason}"),
                Outcome::Unknown { reason } => format!("unknown, {reason}"),
                Outcome::Unconfirmed => "not confirmed in time".to_owned(),
                Outcome::Nacked => "not taken".to_owned(),
                Outcome::Confirmed => "confirmed".to_owned(),
            },
        }
    }
}

/// Of an entry in the audit, in bytes.
const MAX_SUBJECT: usize = 1024;
