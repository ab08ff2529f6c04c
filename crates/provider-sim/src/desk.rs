//! What the provider knows, and what it answers: a state machine without input or output.
//!
//! Whatever changes money or fences is an entry for the book first. The entries that a call caused are applied here at once,
//! so that the next call sees them, but nobody outside may be told before they are saved: whoever drives the desk takes the
//! unsaved entries, makes them durable, and then keeps or undoes them. A restart enters the same entries again.

use std::collections::HashMap;

use semel_proto::provider::v1::{
    Charge, ChargeOrder, ListChargesResponse, ListRefundsResponse, Reason, Refund, charge, refund,
};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::book::{BookError, Entry, Kind};
use crate::clock::timestamp;

mod order;
mod records;

use order::{declined_by, digest};
use records::{Fate, Records};

/// How many entries the book may have.
const MOST_ENTRIES: u64 = 2_000_000;

/// A charge to make.
#[derive(Clone, Debug)]
pub(crate) struct ChargeAsk {
    pub(crate) key: String,
    pub(crate) order: ChargeOrder,
    pub(crate) not_after: Option<OffsetDateTime>,
}

/// A refund to make.
#[derive(Clone, Debug)]
pub(crate) struct RefundAsk {
    pub(crate) key: String,
    pub(crate) charge_key: String,
    pub(crate) amount: i64,
    pub(crate) not_after: Option<OffsetDateTime>,
}

/// What a fault changes about how a call is executed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Manner {
    /// The call came in then, and was on its way since.
    pub(crate) arrived: Option<OffsetDateTime>,
    /// The charge is declined, or the refund fails, with this code.
    pub(crate) code: Option<String>,
    /// The key was claimed for this call before.
    pub(crate) claimed: bool,
}

/// An answer, and how it came about.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Done<T> {
    pub(crate) answer: T,
    pub(crate) how: How,
}

/// How an answer came about.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum How {
    /// It was written, with this reference.
    Written(String),
    /// It had been given before.
    Known,
    /// Something was looked up.
    Read,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Refusal {
    /// The contract says so.
    For(Reason),
    /// Nothing is known about the key.
    NotFound,
    /// There is no room for another entry.
    Full,
}

/// The kinds of keys: a charge and a refund may have the same.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Side {
    Charge,
    Refund,
}

#[derive(Clone, Debug)]
enum Working {
    Charge(ChargeAsk),
    Refund(RefundAsk, String),
}

/// The desk.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    records: Records,
    /// Keys that a call is working on. They live in memory alone: a crash ends the calls, too.
    in_use: HashMap<(Side, String), Working>,
    horizon: Option<Duration>,
    unsaved: Vec<Entry>,
    /// Keys that were claimed since the last save.
    unsaved_claims: Vec<(Side, String)>,
}

impl Desk {
    /// Starts from the entries of a book.
    pub(crate) fn new(entries: &[Entry], horizon: Option<Duration>) -> Result<Self, BookError> {
        let mut desk = Self { horizon, ..Self::default() };
        for entry in entries {
            desk.records.enter(entry).ok_or(BookError::Order { seq: entry.seq })?;
        }
        desk.records.keep();
        Ok(desk)
    }

    /// Sets how long keys are remembered.
    pub(crate) fn set_horizon(&mut self, horizon: Option<Duration>) {
        self.horizon = horizon;
    }

    /// Charges, unless the key has an answer.
    pub(crate) fn charge(
        &mut self,
        ask: &ChargeAsk,
        manner: Manner,
        now: OffsetDateTime,
    ) -> Result<Done<Charge>, Refusal> {
        if manner.claimed {
            self.in_use.remove(&(Side::Charge, ask.key.clone()));
        }
        // A claimed call has started when it claimed the key.
        let start = (!manner.claimed).then(|| manner.arrived.unwrap_or(now));
        if let Some(known) = self.may_charge(ask, start, now)? {
            return Ok(Done { answer: known, how: How::Known });
        }
        let ChargeOrder { amount, currency, source, reference: _ } = &ask.order;
        let code = manner.code.or_else(|| declined_by(source).map(str::to_owned));
        let kind = if code.is_some() { Kind::Decline } else { Kind::Charge };
        let reference = format!("ch_{}", Uuid::new_v4().simple());
        let entry = Entry {
            amount: Some(*amount),
            currency: currency.clone(),
            code: code.unwrap_or_default(),
            order: digest(&ask.order),
            reference: reference.clone(),
            ..self.next(kind, &ask.key, now)
        };
        self.write(entry)?;
        let answer = self.get(&ask.key, now)?.answer;
        Ok(Done { answer, how: How::Written(reference) })
    }

    /// Claims the key of a charge, which is then in use until it is executed; false, and nothing changes, when it need not or
    /// may not start.
    pub(crate) fn claim_charge(&mut self, ask: &ChargeAsk, now: OffsetDateTime) -> bool {
        let starts = self.may_charge(ask, Some(now), now) == Ok(None);
        if starts {
            self.claim(Side::Charge, &ask.key, Working::Charge(ask.clone()));
        }
        starts
    }

    /// Returns the answer that the key has, or whether it may get one.
    fn may_charge(
        &self,
        ask: &ChargeAsk,
        start: Option<OffsetDateTime>,
        now: OffsetDateTime,
    ) -> Result<Option<Charge>, Refusal> {
        match self.remembered(&ask.key, now) {
            Some(Fate::Charged(at)) if self.records.charges[at].order == digest(&ask.order) => {
                // The first answer, from before any refund.
                return Ok(Some(Charge { refunded: 0, ..self.records.charges[at].answer() }));
            }
            Some(Fate::Charged(_)) => return Err(Refusal::For(Reason::KeyMismatch)),
            Some(Fate::Fenced) => return Err(Refusal::For(Reason::Fenced)),
            None => {}
        }
        if self.in_use.contains_key(&(Side::Charge, ask.key.clone())) {
            return Err(Refusal::For(Reason::KeyInUse));
        }
        if start.zip(ask.not_after).is_some_and(|(start, not_after)| start > not_after) {
            return Err(Refusal::For(Reason::TooLate));
        }
        Ok(None)
    }

    /// Tells what is known about a charge.
    pub(crate) fn get(&self, key: &str, now: OffsetDateTime) -> Result<Done<Charge>, Refusal> {
        let read = |answer| Ok(Done { answer, how: How::Read });
        if let Some(Working::Charge(ask)) = self.in_use.get(&(Side::Charge, key.to_owned())) {
            // Another charge of a key that was forgotten may be known; what is asked for is the one under way.
            if self.remembered(key, now).is_none() {
                return read(Charge {
                    key: key.to_owned(),
                    amount: ask.order.amount,
                    currency: ask.order.currency.clone(),
                    status: charge::Status::Processing.into(),
                    ..Charge::default()
                });
            }
        }
        let known = self.records.keys.get(key).ok_or(Refusal::NotFound)?;
        match known.fate {
            Fate::Charged(at) => read(self.records.charges[at].answer()),
            Fate::Fenced if self.forgets(known.at, now) => Err(Refusal::NotFound),
            Fate::Fenced => read(fence(key, known.at)),
        }
    }

    /// Fences a key.
    pub(crate) fn cancel(&mut self, key: &str, now: OffsetDateTime) -> Result<Done<Charge>, Refusal> {
        if let Some(known) = self.records.keys.get(key) {
            let forgotten = self.forgets(known.at, now);
            let declined = |at: usize| self.records.charges[at].code.is_some();
            match known.fate {
                // A decline or a fence that is forgotten no longer keeps a later charge from succeeding.
                Fate::Charged(at) if declined(at) && !forgotten => {
                    return Err(Refusal::For(Reason::AlreadyDeclined));
                }
                Fate::Fenced if !forgotten => return Err(Refusal::For(Reason::AlreadyCanceled)),
                Fate::Charged(at) if !declined(at) => return Err(Refusal::For(Reason::AlreadySucceeded)),
                Fate::Charged(_) | Fate::Fenced => {}
            }
        }
        let entry = self.next(Kind::Fence, key, now);
        self.write(entry)?;
        Ok(Done { answer: fence(key, now), how: How::Written(String::new()) })
    }

    /// Refunds, unless the key has an answer.
    pub(crate) fn refund(
        &mut self,
        ask: &RefundAsk,
        manner: Manner,
        now: OffsetDateTime,
    ) -> Result<Done<Refund>, Refusal> {
        if manner.claimed {
            self.in_use.remove(&(Side::Refund, ask.key.clone()));
        }
        // A claimed call has started when it claimed the key.
        let start = (!manner.claimed).then(|| manner.arrived.unwrap_or(now));
        if let Some(known) = self.may_refund(ask, start, now)? {
            return Ok(Done { answer: known, how: How::Known });
        }
        let kind = if manner.code.is_some() { Kind::RefundFailure } else { Kind::Refund };
        let reference = format!("re_{}", Uuid::new_v4().simple());
        let entry = Entry {
            reference: reference.clone(),
            amount: Some(ask.amount),
            currency: self.currency(&ask.charge_key),
            charge_key: ask.charge_key.clone(),
            code: manner.code.unwrap_or_default(),
            ..self.next(kind, &ask.key, now)
        };
        self.write(entry)?;
        let answer = self.get_refund(&ask.key)?.answer;
        Ok(Done { answer, how: How::Written(reference) })
    }

    /// Claims the key of a refund, as `claim_charge` does.
    pub(crate) fn claim_refund(&mut self, ask: &RefundAsk, now: OffsetDateTime) -> bool {
        let starts = self.may_refund(ask, Some(now), now) == Ok(None);
        if starts {
            let currency = self.currency(&ask.charge_key);
            self.claim(Side::Refund, &ask.key, Working::Refund(ask.clone(), currency));
        }
        starts
    }

    fn may_refund(
        &self,
        ask: &RefundAsk,
        start: Option<OffsetDateTime>,
        now: OffsetDateTime,
    ) -> Result<Option<Refund>, Refusal> {
        let known = self.records.refund_of(&ask.key).filter(|known| !self.forgets(known.at, now));
        if let Some(known) = known {
            let same = known.charge_key == ask.charge_key && known.amount == ask.amount;
            return if same { Ok(Some(known.answer())) } else { Err(Refusal::For(Reason::KeyMismatch)) };
        }
        if self.in_use.contains_key(&(Side::Refund, ask.key.clone())) {
            return Err(Refusal::For(Reason::KeyInUse));
        }
        if start.zip(ask.not_after).is_some_and(|(start, not_after)| start > not_after) {
            return Err(Refusal::For(Reason::TooLate));
        }
        let charge = self.records.charge_of(&ask.charge_key).filter(|charge| charge.code.is_none());
        let charge = charge.ok_or(Refusal::For(Reason::ChargeNotSucceeded))?;
        if ask.amount > charge.amount - charge.refunded {
            return Err(Refusal::For(Reason::ExceedsCharge));
        }
        Ok(None)
    }

    /// Tells what is known about a refund.
    pub(crate) fn get_refund(&self, key: &str) -> Result<Done<Refund>, Refusal> {
        let known = self.records.refund_of(key).map(records::Refunded::answer);
        let working = || match self.in_use.get(&(Side::Refund, key.to_owned())) {
            Some(Working::Refund(ask, currency)) => Some(Refund {
                key: key.to_owned(),
                charge_key: ask.charge_key.clone(),
                amount: ask.amount,
                currency: currency.clone(),
                status: refund::Status::Processing.into(),
                ..Refund::default()
            }),
            _ => None,
        };
        let answer = known.or_else(working).ok_or(Refusal::NotFound)?;
        Ok(Done { answer, how: How::Read })
    }

    /// Lists charges from that index on.
    pub(crate) fn list(
        &self,
        from: usize,
        most: usize,
        since: Option<OffsetDateTime>,
    ) -> Done<ListChargesResponse> {
        let (page, next) =
            page(&self.records.charges, from, most, |charge| since.is_none_or(|since| charge.at >= since));
        let charges = page.into_iter().map(records::Charged::answer).collect();
        Done { answer: ListChargesResponse { charges, next_page_token: next }, how: How::Read }
    }

    /// Lists refunds from that index on.
    pub(crate) fn list_refunds(
        &self,
        from: usize,
        most: usize,
        since: Option<OffsetDateTime>,
    ) -> Done<ListRefundsResponse> {
        let (page, next) =
            page(&self.records.refunds, from, most, |refund| since.is_none_or(|since| refund.at >= since));
        let refunds = page.into_iter().map(records::Refunded::answer).collect();
        Done { answer: ListRefundsResponse { refunds, next_page_token: next }, how: How::Read }
    }

    /// Returns what was applied and is not saved.
    pub(crate) fn unsaved(&self) -> &[Entry] {
        &self.unsaved
    }

    /// What was applied is saved.
    pub(crate) fn keep(&mut self) {
        self.unsaved.clear();
        self.unsaved_claims.clear();
        self.records.keep();
    }

    /// What was applied could not be saved: it has not happened.
    pub(crate) fn undo(&mut self) {
        self.unsaved.clear();
        for claim in self.unsaved_claims.drain(..) {
            self.in_use.remove(&claim);
        }
        self.records.undo();
    }

    fn write(&mut self, entry: Entry) -> Result<(), Refusal> {
        if self.records.last_seq >= MOST_ENTRIES {
            return Err(Refusal::Full);
        }
        let entered = self.records.enter(&entry);
        debug_assert!(entered.is_some(), "the desk follows its own rules");
        self.unsaved.push(entry);
        Ok(())
    }

    fn claim(&mut self, side: Side, key: &str, working: Working) {
        self.in_use.insert((side, key.to_owned()), working);
        self.unsaved_claims.push((side, key.to_owned()));
    }

    fn next(&self, kind: Kind, key: &str, at: OffsetDateTime) -> Entry {
        Entry { kind, key: key.to_owned(), at, ..Entry::blank(self.records.last_seq + 1) }
    }

    fn remembered(&self, key: &str, now: OffsetDateTime) -> Option<Fate> {
        self.records.keys.get(key).filter(|known| !self.forgets(known.at, now)).map(|known| known.fate)
    }

    fn forgets(&self, first_use: OffsetDateTime, now: OffsetDateTime) -> bool {
        self.horizon.is_some_and(|horizon| now - first_use > horizon)
    }

    fn currency(&self, charge_key: &str) -> String {
        self.records.charge_of(charge_key).map(|charge| charge.currency.clone()).unwrap_or_default()
    }
}

/// Returns those that are wanted from that index on, at most so many, and the index of the next one as a token.
fn page<T>(all: &[T], from: usize, most: usize, wanted: impl Fn(&T) -> bool) -> (Vec<&T>, String) {
    let mut wanted = all.iter().enumerate().skip(from).filter(|(_, one)| wanted(one));
    let page = wanted.by_ref().take(most).map(|(_, one)| one).collect();
    let next = wanted.next().map(|(index, _)| index.to_string()).unwrap_or_default();
    (page, next)
}

fn fence(key: &str, at: OffsetDateTime) -> Charge {
    let created_at = Some(timestamp(at));
    Charge { key: key.to_owned(), status: charge::Status::Canceled.into(), created_at, ..Charge::default() }
}

#[cfg(test)]
mod tests;
