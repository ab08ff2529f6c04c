//! The records that follow from the book's entries, with an undo for those that were not saved.

use std::collections::HashMap;

use semel_proto::provider::v1::{Charge, Refund, charge, refund};
use time::OffsetDateTime;

use crate::book::{Entry, Kind};
use crate::clock::timestamp;

/// A charge or a decline.
#[derive(Clone, Debug)]
pub(super) struct Charged {
    key: String,
    reference: String,
    pub(super) amount: i64,
    pub(super) currency: String,
    /// Why it was declined; `None`: it was not.
    pub(super) code: Option<String>,
    pub(super) at: OffsetDateTime,
    pub(super) refunded: i64,
    /// The digest of the order.
    pub(super) order: String,
}

/// A refund, failed or not.
#[derive(Clone, Debug)]
pub(super) struct Refunded {
    key: String,
    reference: String,
    pub(super) charge_key: String,
    pub(super) amount: i64,
    currency: String,
    /// Why it failed; `None`: it did not.
    code: Option<String>,
    pub(super) at: OffsetDateTime,
}

/// What became of a charge's key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate {
    /// The index of its latest charge or decline.
    Charged(usize),
    /// A fence.
    Fenced,
}

/// A charge's key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) fate: Fate,
    /// When it was first used, since it was last forgotten.
    pub(super) at: OffsetDateTime,
}

#[derive(Debug)]
enum Undo {
    Charge(String, Option<Known>),
    Fence(String, Option<Known>),
    Refund { key: String, before: Option<usize>, charge: usize, amount: i64 },
}

/// All records.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// In the order in which they happened.
    pub(super) charges: Vec<Charged>,
    pub(super) keys: HashMap<String, Known>,
    /// In the order in which they happened.
    pub(super) refunds: Vec<Refunded>,
    /// The index of a refund's key's latest.
    refund_keys: HashMap<String, usize>,
    pub(super) last_seq: u64,
    undo: Vec<Undo>,
}

impl Records {
    /// Enters one more entry; `None`, and nothing changes, when it does not follow from those before it.
    pub(super) fn enter(&mut self, entry: &Entry) -> Option<()> {
        if entry.seq != self.last_seq + 1 {
            return None;
        }
        let key = entry.key.clone();
        let undo = match entry.kind {
            Kind::Charge | Kind::Decline => {
                self.charges.push(Charged {
                    key: key.clone(),
                    reference: entry.reference.clone(),
                    amount: entry.amount?,
                    currency: entry.currency.clone(),
                    code: (entry.kind == Kind::Decline).then(|| entry.code.clone()),
                    at: entry.at,
                    refunded: 0,
                    order: entry.order.clone(),
                });
                let known = Known { fate: Fate::Charged(self.charges.len() - 1), at: entry.at };
                Undo::Charge(key.clone(), self.keys.insert(key, known))
            }
            Kind::Fence => {
                let known = Known { fate: Fate::Fenced, at: entry.at };
                Undo::Fence(key.clone(), self.keys.insert(key, known))
            }
            Kind::Refund | Kind::RefundFailure => {
                let amount = entry.amount?;
                let Fate::Charged(charge) = self.keys.get(&entry.charge_key)?.fate else { return None };
                let failed = entry.kind == Kind::RefundFailure;
                let moved = if failed { 0 } else { amount };
                self.charges[charge].refunded += moved;
                let refunded = Refunded {
                    key: key.clone(),
                    reference: entry.reference.clone(),
                    charge_key: entry.charge_key.clone(),
                    amount,
                    currency: entry.currency.clone(),
                    code: failed.then(|| entry.code.clone()),
                    at: entry.at,
                };
                self.refunds.push(refunded);
                let before = self.refund_keys.insert(key.clone(), self.refunds.len() - 1);
                Undo::Refund { key, before, charge, amount: moved }
            }
        };
        self.undo.push(undo);
        self.last_seq = entry.seq;
        Some(())
    }

    /// What was entered stays.
    pub(super) fn keep(&mut self) {
        self.undo.clear();
    }

    /// What was entered since the last `keep` is taken back, newest first.
    pub(super) fn undo(&mut self) {
        while let Some(undo) = self.undo.pop() {
            self.last_seq -= 1;
            match undo {
                Undo::Charge(key, before) => {
                    self.charges.pop();
                    restore(&mut self.keys, key, before);
                }
                Undo::Fence(key, before) => restore(&mut self.keys, key, before),
                Undo::Refund { key, before, charge, amount } => {
                    self.charges[charge].refunded -= amount;
                    self.refunds.pop();
                    restore(&mut self.refund_keys, key, before);
                }
            }
        }
    }

    /// Returns the latest charge or decline of a key.
    pub(super) fn charge_of(&self, key: &str) -> Option<&Charged> {
        match self.keys.get(key)?.fate {
            Fate::Charged(at) => self.charges.get(at),
            Fate::Fenced => None,
        }
    }

    /// Returns the latest refund of a key, failed or not.
    pub(super) fn refund_of(&self, key: &str) -> Option<&Refunded> {
        self.refunds.get(*self.refund_keys.get(key)?)
    }
}

fn restore<T>(map: &mut HashMap<String, T>, key: String, before: Option<T>) {
    match before {
        Some(before) => drop(map.insert(key, before)),
        None => drop(map.remove(&key)),
    }
}

impl Charged {
    /// As it is answered.
    pub(super) fn answer(&self) -> Charge {
        let status = match self.code {
            None => charge::Status::Succeeded,
            Some(_) => charge::Status::Declined,
        };
        Charge {
            key: self.key.clone(),
            reference: self.reference.clone(),
            amount: self.amount,
            currency: self.currency.clone(),
            status: status.into(),
            decline_code: self.code.clone().unwrap_or_default(),
            created_at: Some(timestamp(self.at)),
            refunded: self.refunded,
        }
    }
}

impl Refunded {
    /// As it is answered.
    pub(super) fn answer(&self) -> Refund {
        let status = match self.code {
            None => refund::Status::Succeeded,
            Some(_) => refund::Status::Failed,
        };
        Refund {
            key: self.key.clone(),
            reference: self.reference.clone(),
            charge_key: self.charge_key.clone(),
            amount: self.amount,
            currency: self.currency.clone(),
            status: status.into(),
            failure_code: self.code.clone().unwrap_or_default(),
            created_at: Some(timestamp(self.at)),
        }
    }
}
