//! The reverse audit: the provider's lists of charges and of refunds against our payments and refunds.
//!
//! Promise: a charge that no payment accounts for, and a refund that no refund of ours accounts for, is told, once in the log
//! and for as long as it is listed in a gauge. Nothing is done about it; it is money in the wrong place, and a bug, a foreign
//! program on the provider's account or a database that lost its tail.
//!
//! How: every so often each list is read page by page, a few pages a pass, from a look-back until now. Each has rounds of its
//! own, so that one which is not to be read keeps nobody from the other; and no pass follows another at once, so that a long
//! list leaves the provider's rate limit to those who pay. Refunds have a list of their own, by their own time: of the charge
//! that one is of, only that it is old may be known. What was found lives in memory: another process, or this one after a
//! crash, finds and tells the same again.
//!
//! What it does not see: lists go by the time at which something was begun. What was still open whenever it was listed, and is
//! done when the look-back after its beginning is over, is never on a page as done.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::time::{Duration, SystemTime};

use ::metrics::gauge;
use semel_core::database;
use semel_core::disposition::{Disposed, Disposition};
use semel_core::lifecycle::{Pass, Work};
use semel_payments::audit::{self, Orphan};
use semel_payments::provider::{List, Listed, ListedMove, Provider};
use sqlx::PgPool;
use tokio::time::Instant;

use crate::metrics;

/// Most pages of a list in one pass.
const PAGES: usize = 10;
/// Most orphans of each kind that are remembered, and so told once only; the gauges end here, too.
const MOST_ORPHANS: usize = 10_000;

/// A pass that failed.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The database did.
    #[error("comparing the provider's lists with payments and refunds")]
    Database(#[from] sqlx::Error),
    /// The provider did.
    #[error("the provider does not list what it has done: {0}")]
    Provider(String),
}

impl Disposed for AuditError {
    fn disposition(&self) -> Disposition {
        match self {
            Self::Database(source) => database::disposition(source),
            Self::Provider(_) => Disposition::Retry,
        }
    }
}

/// Compares the provider's lists with payments and refunds.
#[derive(Debug)]
pub struct Audit<P> {
    source: Source<P>,
    charges: Audited,
    refunds: Audited,
}

/// Where lists are read from, how often and since when.
#[derive(Debug)]
struct Source<P> {
    pool: PgPool,
    provider: P,
    every: Duration,
    look_back: Duration,
}

/// A list, and what is known of it.
#[derive(Debug)]
struct Audited {
    list: List,
    /// When the next round begins; now, while it is none.
    due: Option<Instant>,
    round: Option<Round>,
    orphans: Orphans,
    /// It was told that there is no such list, when it was last asked for.
    is_missing: bool,
}

/// Entries of a list that nothing accounts for, by the provider's name.
#[derive(Debug, Default)]
struct Orphans(HashMap<String, Orphan>);

/// One reading of a list.
#[derive(Debug)]
struct Round {
    since: SystemTime,
    page: Option<String>,
    /// The orphans of the list up to here.
    found: HashSet<String>,
    /// How many more there are than are remembered.
    beyond: u64,
}

impl<P: Provider> Audit<P> {
    /// Audits the charges and refunds of the last `look_back`, a round every so often.
    #[must_use]
    pub fn new(pool: PgPool, provider: P, every: Duration, look_back: Duration) -> Self {
        let source = Source { pool, provider, every, look_back };
        Self { source, charges: Audited::of(List::Charges), refunds: Audited::of(List::Refunds) }
    }

    /// Returns how many entries of a list are known that nothing accounts for; none while there is no such list.
    #[must_use]
    pub fn orphans(&self, list: List) -> Option<usize> {
        let audited = match list {
            List::Charges => &self.charges,
            List::Refunds => &self.refunds,
        };
        (!audited.is_missing).then_some(audited.orphans.0.len())
    }

    /// Set again while it holds: a gauge that nobody refreshes disappears.
    #[expect(clippy::cast_precision_loss, reason = "bounded far below 2^53")]
    fn report(&self) {
        for (list, gauge) in
            [(List::Charges, metrics::ORPHAN_CHARGES), (List::Refunds, metrics::ORPHAN_REFUNDS)]
        {
            if let Some(orphans) = self.orphans(list) {
                gauge!(gauge).set(orphans as f64);
            }
        }
    }
}

impl Audited {
    fn of(list: List) -> Self {
        Self { list, due: None, round: None, orphans: Orphans::default(), is_missing: false }
    }

    /// Reads a few pages, if it is time, and says whether it was.
    async fn go_on<P: Provider>(&mut self, source: &Source<P>) -> Result<bool, AuditError> {
        if self.due.is_some_and(|due| Instant::now() < due) {
            return Ok(false);
        }
        self.due = None;
        // Left behind by a pass that fails, so that the next one begins anew: what was refused may be a page's name.
        let mut round = self.round.take().unwrap_or_else(|| Round {
            since: SystemTime::now().checked_sub(source.look_back).unwrap_or(SystemTime::UNIX_EPOCH),
            page: None,
            found: HashSet::new(),
            beyond: 0,
        });
        for _ in 0..PAGES {
            match source.provider.list(self.list, round.since, round.page.as_deref()).await {
                Listed::Page { moves, next } => {
                    self.is_missing = false;
                    for (listed, why) in audit::orphans(&source.pool, self.list, moves).await? {
                        if self.orphans.note(self.list, &listed, why) {
                            round.found.insert(listed.reference);
                        } else {
                            round.beyond += 1;
                        }
                    }
                    round.page = next;
                }
                Listed::Unsupported => {
                    // Nothing was read, so what is known stays known.
                    if !std::mem::replace(&mut self.is_missing, true) {
                        let of = name(self.list);
                        tracing::warn!("the provider has no list of {of}s, so that none can be audited");
                    }
                    self.due = Some(Instant::now() + source.every);
                    return Ok(true);
                }
                Listed::Failed { reason } => return Err(AuditError::Provider(reason)),
            }
            if round.page.is_none() {
                self.finish(&round);
                self.due = Some(Instant::now() + source.every);
                return Ok(true);
            }
        }
        self.round = Some(round);
        Ok(true)
    }

    /// What was not met again is accounted for by now, or past the look-back.
    fn finish(&mut self, round: &Round) {
        self.orphans.0.retain(|reference, _| round.found.contains(reference));
        if round.beyond > 0 {
            tracing::error!(
                kind = name(self.list),
                beyond = round.beyond,
                "the provider lists more that nothing accounts for than are told one by one"
            );
        }
    }
}

impl Orphans {
    /// Tells of an orphan that was not known as one; false when there are too many to remember it.
    fn note(&mut self, list: List, listed: &ListedMove, why: Orphan) -> bool {
        let is_full = self.0.len() >= MOST_ORPHANS;
        match self.0.entry(listed.reference.clone()) {
            Entry::Vacant(_) if is_full => return false,
            Entry::Vacant(place) => {
                place.insert(why);
            }
            Entry::Occupied(mut known) => {
                if known.insert(why) == why {
                    return true;
                }
            }
        }
        let said = match (list, why) {
            (List::Charges, Orphan::Unknown) => {
                "charged what no payment accounts for, none was asked for under its key: refund it at the provider"
            }
            (List::Charges, Orphan::SettledWithout) => {
                "charged what no payment accounts for, its own was settled without a charge: refund it at the provider"
            }
            (List::Charges, Orphan::SettledByAnother) => {
                "charged what no payment accounts for, its own was settled by another charge: refund it at the provider"
            }
            (List::Charges, Orphan::OtherAmount) => "charged another amount than its payment is of",
            (List::Refunds, Orphan::Unknown) => {
                "given back what no refund accounts for, none was asked for under its key"
            }
            (List::Refunds, Orphan::SettledWithout) => {
                "given back what no refund accounts for, its own was settled as failed"
            }
            (List::Refunds, Orphan::SettledByAnother) => {
                "given back what no refund accounts for, its own was settled by another"
            }
            (List::Refunds, Orphan::OtherAmount) => "given back another amount than its refund is of",
        };
        tracing::error!(
            kind = name(list),
            reference = listed.reference,
            provider_key = listed.key,
            amount = listed.amount,
            currency = listed.currency,
            "the provider has {said}"
        );
        true
    }
}

fn name(list: List) -> &'static str {
    match list {
        List::Charges => "charge",
        List::Refunds => "refund",
    }
}

impl<P: Provider> Work for Audit<P> {
    type Error = AuditError;

    async fn run_once(&mut self) -> Result<Pass, AuditError> {
        let charges = self.charges.go_on(&self.source).await;
        let refunds = self.refunds.go_on(&self.source).await;
        self.report();
        Ok(if charges? | refunds? { Pass::Worked } else { Pass::Idle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_beyond_the_bound_are_counted_and_not_forgotten_about() {
        let mut orphans = Orphans::default();
        let noted = |orphans: &mut Orphans, n: usize| {
            let reference = format!("ch_{n}");
            let listed = ListedMove { key: String::new(), reference, amount: 1, currency: "EUR".to_owned() };
            orphans.note(List::Charges, &listed, Orphan::Unknown)
        };
        assert!((0..MOST_ORPHANS).all(|n| noted(&mut orphans, n)));
        assert!(!noted(&mut orphans, MOST_ORPHANS), "one more is not remembered");
        assert!(noted(&mut orphans, 7), "one that is known is met again");
        assert_eq!(orphans.0.len(), MOST_ORPHANS);
    }
}
