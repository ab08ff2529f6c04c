//! The reverse audit: the provider's list of charges against our payments.
//!
//! Promise: a charge that no payment accounts for, or of which more was given back than refunds account for, is told, once in
//! the log and for as long as it is listed in a gauge. Nothing is done about it; it is money in the wrong place, and a bug, a
//! foreign program on the provider's account or a database that lost its tail.
//!
//! How: every so often the list is read page by page, a few pages a pass, from a look-back until now. What was found lives
//! in memory: another process, or this one after a crash, finds and tells the same again.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use ::metrics::gauge;
use semel_core::database;
use semel_core::disposition::{Disposed, Disposition};
use semel_core::lifecycle::{Pass, Work};
use semel_payments::payments::audit::{self, Orphan};
use semel_payments::provider::{Listed, ListedCharge, Provider};
use sqlx::PgPool;
use tokio::time::Instant;

use crate::metrics;

/// Most pages of one pass.
const PAGES: usize = 10;
/// Most orphans that are remembered, and so told once only; the gauge ends here, too.
const MOST_ORPHANS: usize = 10_000;

/// A pass that failed.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The database did.
    #[error("comparing the provider's charges with the payments")]
    Database(#[from] sqlx::Error),
    /// The provider did.
    #[error("the provider does not list its charges: {0}")]
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

/// Compares the provider's charges with the payments.
#[derive(Debug)]
pub struct Audit<P> {
    pool: PgPool,
    provider: P,
    every: Duration,
    look_back: Duration,
    /// When the next round begins; now, while it is none.
    due: Option<Instant>,
    round: Option<Round>,
    /// By the provider's name.
    known: HashMap<String, Orphan>,
    tells_no_list: bool,
}

/// One reading of the list.
#[derive(Debug)]
struct Round {
    since: SystemTime,
    page: Option<String>,
    found: HashSet<String>,
}

impl<P: Provider> Audit<P> {
    /// Audits the charges of the last `look_back`, a round every so often.
    #[must_use]
    pub fn new(pool: PgPool, provider: P, every: Duration, look_back: Duration) -> Self {
        Self {
            pool,
            provider,
            every,
            look_back,
            due: None,
            round: None,
            known: HashMap::new(),
            tells_no_list: false,
        }
    }

    /// Returns how many charges are known that no payment accounts for.
    #[must_use]
    pub fn orphans(&self) -> usize {
        self.known.len()
    }

    fn note(&mut self, round: &mut Round, charge: &ListedCharge, why: Orphan) {
        if !self.known.contains_key(&charge.reference) && self.known.len() >= MOST_ORPHANS {
            return;
        }
        round.found.insert(charge.reference.clone());
        if self.known.insert(charge.reference.clone(), why) == Some(why) {
            return;
        }
        let said = match why {
            Orphan::NoPayment => {
                "charged what no payment accounts for, none was asked for under its key: refund it at the provider"
            }
            Orphan::SettledWithout => {
                "charged what no payment accounts for, its own was settled without a charge: refund it at the provider"
            }
            Orphan::SettledByAnother => {
                "charged what no payment accounts for, its own was settled by another charge: refund it at the provider"
            }
            Orphan::RefundedBeyond => "given more of a charge back than refunds account for",
        };
        tracing::error!(
            charge = charge.reference,
            provider_key = charge.key,
            amount = charge.amount,
            refunded = charge.refunded,
            currency = charge.currency,
            "the provider has {said}"
        );
    }

    #[expect(clippy::cast_precision_loss, reason = "bounded far below 2^53")]
    fn report(&self) {
        gauge!(metrics::ORPHANS).set(self.known.len() as f64);
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
        let mut round =
            self.round.take().unwrap_or_else(|| Round { since, page: None, found: HashSet::new() });
        for _ in 0..PAGES {
            let (charges, next) = match self.provider.list(round.since, round.page.as_deref()).await {
                Listed::Page { charges, next } => (charges, next),
                Listed::Unsupported => {
                    if !std::mem::replace(&mut self.tells_no_list, true) {
                        tracing::warn!("the provider has no list of charges, so that none can be audited");
                    }
                    return Ok(Pass::Idle);
                }
                Listed::Failed { reason } => return Err(AuditError::Provider(reason)),
            };
            for (charge, why) in audit::orphans(&self.pool, charges).await? {
                self.note(&mut round, &charge, why);
            }
            round.page = next;
            if round.page.is_none() {
                // What was not met again is accounted for by now, or past the look-back.
                self.known.retain(|reference, _| round.found.contains(reference));
                self.due = Some(Instant::now() + self.every);
                self.report();
                return Ok(Pass::Worked);
            }
        }
        self.round = Some(round);
        self.report();
        Ok(Pass::Full)
    }
}
