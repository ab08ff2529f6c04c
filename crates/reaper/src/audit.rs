//! The reverse audit: the provider's lists of charges and of refunds against our payments and refunds.
//!
//! Promise: a charge that no payment accounts for, and a refund that no refund of ours accounts for, is told, once in the log
//! and for as long as it is listed in a gauge. Nothing is done about it; it is money in the wrong place, and a bug, a foreign
//! program on the provider's account or a database that lost its tail.
//!
//! How: every so often the lists are read one after the other, page by page, a few pages a pass, from a look-back until now.
//! Refunds have a list of their own, by their own time: of the charge that one is of, only that it is old may be known. What
//! was found lives in memory: another process, or this one after a crash, finds and tells the same again.

use std::collections::{HashMap, HashSet};
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

/// Most pages of one pass.
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
    pool: PgPool,
    provider: P,
    every: Duration,
    look_back: Duration,
    /// When the next round begins; now, while it is none.
    due: Option<Instant>,
    round: Option<Round>,
    charges: Known,
    refunds: Known,
}

/// What is known of a list.
#[derive(Debug, Default)]
struct Known {
    /// Those that nothing accounts for, by the provider's name.
    orphans: HashMap<String, Orphan>,
    /// It was told that there is no such list.
    is_missing: bool,
}

/// One reading of the lists.
#[derive(Debug)]
struct Round {
    since: SystemTime,
    list: List,
    page: Option<String>,
    /// The orphans of the list up to here.
    found: HashSet<String>,
}

impl<P: Provider> Audit<P> {
    /// Audits the charges and refunds of the last `look_back`, a round every so often.
    #[must_use]
    pub fn new(pool: PgPool, provider: P, every: Duration, look_back: Duration) -> Self {
        let (charges, refunds) = (Known::default(), Known::default());
        Self { pool, provider, every, look_back, due: None, round: None, charges, refunds }
    }

    /// Returns how many entries of a list are known that nothing accounts for.
    #[must_use]
    pub fn orphans(&self, list: List) -> usize {
        match list {
            List::Charges => self.charges.orphans.len(),
            List::Refunds => self.refunds.orphans.len(),
        }
    }

    fn known(&mut self, list: List) -> &mut Known {
        match list {
            List::Charges => &mut self.charges,
            List::Refunds => &mut self.refunds,
        }
    }

    /// Reads a page, and says whether the list goes on.
    async fn read(&mut self, round: &mut Round) -> Result<bool, AuditError> {
        match self.provider.list(round.list, round.since, round.page.as_deref()).await {
            Listed::Page { moves, next } => {
                for (listed, why) in audit::orphans(&self.pool, round.list, moves).await? {
                    if self.known(round.list).note(round.list, &listed, why) {
                        round.found.insert(listed.reference);
                    }
                }
                round.page = next;
            }
            Listed::Unsupported => {
                if !std::mem::replace(&mut self.known(round.list).is_missing, true) {
                    let of = name(round.list);
                    tracing::warn!("the provider has no list of {of}s, so that none can be audited");
                }
                round.page = None;
            }
            Listed::Failed { reason } => return Err(AuditError::Provider(reason)),
        }
        Ok(round.page.is_some())
    }

    #[expect(clippy::cast_precision_loss, reason = "bounded far below 2^53")]
    fn report(&self) {
        for (list, gauge) in
            [(&self.charges, metrics::ORPHAN_CHARGES), (&self.refunds, metrics::ORPHAN_REFUNDS)]
        {
            if !list.is_missing {
                gauge!(gauge).set(list.orphans.len() as f64);
            }
        }
    }
}

impl Known {
    /// Tells of an orphan that was not known as one; false when there are too many to remember it.
    fn note(&mut self, list: List, listed: &ListedMove, why: Orphan) -> bool {
        if !self.orphans.contains_key(&listed.reference) && self.orphans.len() >= MOST_ORPHANS {
            return false;
        }
        if self.orphans.insert(listed.reference.clone(), why) == Some(why) {
            return true;
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
        if self.due.is_some_and(|due| Instant::now() < due) {
            // Set again while it holds: a gauge that nobody refreshes disappears.
            self.report();
            return Ok(Pass::Idle);
        }
        self.due = None;
        let since = SystemTime::now().checked_sub(self.look_back).unwrap_or(SystemTime::UNIX_EPOCH);
        // Left behind by a pass that fails, so that the next one begins anew: what was refused may be a page's name.
        let mut round = self.round.take().unwrap_or_else(|| Round {
            since,
            list: List::Charges,
            page: None,
            found: HashSet::new(),
        });
        for _ in 0..PAGES {
            if self.read(&mut round).await? {
                continue;
            }
            // What was not met again is accounted for by now, or past the look-back.
            let found = std::mem::take(&mut round.found);
            self.known(round.list).orphans.retain(|reference, _| found.contains(reference));
            match round.list {
                List::Charges => round.list = List::Refunds,
                List::Refunds => {
                    self.due = Some(Instant::now() + self.every);
                    self.report();
                    return Ok(Pass::Worked);
                }
            }
        }
        self.round = Some(round);
        self.report();
        Ok(Pass::Full)
    }
}
