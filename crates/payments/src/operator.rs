//! What a person asks about a payment or refund that waits for one, and decides.
//!
//! A decision is one transaction: the key is taken, with a fence of its own; the decision is written down as evidence, and
//! settles what it is about, by the same statement as an answer of the provider; and an entry in `operator_actions` says who
//! decided, and why. A decision against what the provider is known to have said is refused.

use std::fmt;
use std::time::Duration;

use semel_core::database::Lent;
use semel_core::derive::Namespace;
use semel_core::idempotency::engine::LEASE;
use semel_core::idempotency::person::{self, Standing};
use semel_core::idempotency::store::Fence;
use semel_core::idempotency::{Command as _, Scope};
use semel_core::operators::{self, Action};
use sqlx::{Connection as _, PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::payments::{self, CreatePayment};
use crate::problem::ProblemBase;
use crate::provider::{self, List};
use crate::refunds::{self, CreateRefund};

/// A definitive answer that was written down.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// What was answered: `charge`, `get`, `cancel`, `refund`, `get_refund` or `operator`.
    pub call: String,
    /// `succeeded`, `declined` or `fenced`.
    pub outcome: String,
    /// The provider's own name for the charge or refund.
    pub provider_reference: Option<String>,
    /// Why it was declined.
    pub decline_code: Option<String>,
    /// The acquisition under which it was asked.
    pub fence: i64,
    /// When it was written down.
    pub answered_at: OffsetDateTime,
}

/// All that is known of a payment or refund.
#[derive(Clone, Debug)]
pub struct Dossier<R> {
    /// Its row.
    pub record: R,
    /// Its key; none once that is expired and reaped.
    pub key: Option<Standing>,
    /// What the provider said, at most a hundred answers, the oldest first.
    pub evidence: Vec<Evidence>,
}

/// What became of a payment or refund, as a person has decided.
#[derive(Clone, Debug)]
pub enum Ruling {
    /// Of a payment.
    Payment(payments::settle::Verdict),
    /// Of a refund.
    Refund(refunds::settle::Verdict),
}

impl Ruling {
    const fn about(&self, id: Uuid) -> Subject {
        match self {
            Self::Payment(_) => Subject { noun: "payment", id },
            Self::Refund(_) => Subject { noun: "refund", id },
        }
    }

    /// Returns the provider's name for it, where the decision has one.
    fn reference(&self) -> Option<&str> {
        match self {
            Self::Payment(verdict) => verdict.reference(),
            Self::Refund(verdict) => verdict.reference(),
        }
    }

    const fn operation(&self) -> &'static str {
        match self {
            Self::Payment(_) => CreatePayment::OPERATION,
            Self::Refund(_) => CreateRefund::OPERATION,
        }
    }
}

impl From<payments::settle::Verdict> for Ruling {
    fn from(verdict: payments::settle::Verdict) -> Self {
        Self::Payment(verdict)
    }
}

impl From<refunds::settle::Verdict> for Ruling {
    fn from(verdict: refunds::settle::Verdict) -> Self {
        Self::Refund(verdict)
    }
}

/// What a person has decided.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// What became of it.
    pub ruling: Ruling,
    /// Who decides.
    pub actor: &'a str,
    /// By which command.
    pub action: &'a str,
    /// Why.
    pub reason: &'a str,
}

/// What is decided about.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    noun: &'static str,
    id: Uuid,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.noun, self.id)
    }
}

/// A decision that was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Undecided {
    /// There is no such payment or refund.
    #[error("there is no {0}")]
    Unknown(Subject),
    /// It is settled.
    #[error("{subject} is settled: {status}")]
    Settled {
        /// What.
        subject: Subject,
        /// How.
        status: String,
    },
    /// It is not settled, and does not wait for a person.
    #[error("{0} does not wait for a person: recovery still works at it")]
    NotWaiting(Subject),
    /// The provider has said something else.
    #[error("{subject}: the provider is known to have said {said}, which is not for a person to overrule")]
    Contradicts {
        /// About what.
        subject: Subject,
        /// What.
        said: String,
    },
    /// The provider gives other names to such things.
    #[error("{subject}: {given:?} is no name of {provider} for it, which begin with {prefix}")]
    NoSuchName {
        /// Of what.
        subject: Subject,
        /// The name.
        given: String,
        /// Whose.
        provider: String,
        /// How they begin.
        prefix: &'static str,
    },
    /// The key holds what this version cannot read.
    #[error("the key of {0} is none that this version can read")]
    Unreadable(Subject),
    /// The database failed, and nothing was decided.
    #[error("deciding about {subject}: nothing was written")]
    Database {
        /// About what.
        subject: Subject,
        /// Why.
        source: sqlx::Error,
    },
    /// The commit was sent, and its answer was lost.
    #[error("deciding about {subject}: whether it was written is not known, so look at it again")]
    Open {
        /// About what.
        subject: Subject,
        /// Why.
        source: sqlx::Error,
    },
}

/// Carries out what a person decides.
#[derive(Clone, Debug)]
pub struct Desk {
    /// The database.
    pub pool: PgPool,
    /// The deployment, part of the event's id.
    pub namespace: Namespace,
    /// Where the pages about problems are, for the stored response.
    pub problems: ProblemBase,
    /// For how long the response is replayed.
    pub retention: Duration,
}

/// A key that was taken for a decision.
pub(crate) struct Taken {
    pub(crate) id: Uuid,
    pub(crate) scope: Scope,
    pub(crate) fence: Fence,
}

impl Desk {
    /// Settles a payment or refund that waits for a person.
    ///
    /// # Errors
    ///
    /// When it does not wait, the provider is known to have said something else, or the database fails.
    pub async fn settle(&self, id: Uuid, decision: &Decision<'_>) -> Result<(), Undecided> {
        let subject = decision.ruling.about(id);
        let failed = |source| Undecided::Database { subject, source };
        let mut connection = Lent::from(&self.pool).await.map_err(failed)?;
        let decided = connection.call(async |connection| Ok(self.decide(connection, id, decision).await));
        decided.await.unwrap_or_else(|source| Err(Undecided::Open { subject, source }))
    }

    async fn decide(
        &self,
        connection: &mut PgConnection,
        id: Uuid,
        decision: &Decision<'_>,
    ) -> Result<(), Undecided> {
        let ruling = &decision.ruling;
        let subject = ruling.about(id);
        let failed = |source| Undecided::Database { subject, source };
        let mut tx = connection.begin().await.map_err(failed)?;
        let stuck = person::take(&mut tx, ruling.operation(), id, LEASE).await.map_err(failed)?;
        let Some(stuck) = stuck else { return Err(why_not(&mut tx, ruling, subject).await) };
        let (Ok(client), Ok(key)) = (stuck.client_id.parse(), stuck.key.parse()) else {
            return Err(Undecided::Unreadable(subject));
        };
        let scope = Scope { client, operation: ruling.operation(), key };
        if let Some(said) = said_otherwise(&mut tx, id, ruling).await.map_err(failed)? {
            return Err(Undecided::Contradicts { subject, said });
        }
        if let Some(misnamed) = misnamed(&mut tx, id, ruling).await.map_err(failed)? {
            return Err(misnamed);
        }
        let taken = Taken { id, scope, fence: stuck.fence };
        let written = match ruling {
            Ruling::Payment(verdict) => payments::operator::write(self, &mut tx, &taken, verdict).await,
            Ruling::Refund(verdict) => refunds::operator::write(self, &mut tx, &taken, verdict).await,
        };
        if !written.map_err(failed)? {
            return Err(why_not(&mut tx, ruling, subject).await);
        }
        let action = Action {
            actor: decision.actor,
            action: decision.action,
            subject: &id.to_string(),
            reason: decision.reason,
        };
        operators::record(&mut tx, &action).await.map_err(failed)?;
        tx.commit().await.map_err(|source| Undecided::Open { subject, source })
    }
}

/// Returns what the provider is known to have said, if that is not what was decided.
async fn said_otherwise(
    connection: &mut PgConnection,
    id: Uuid,
    ruling: &Ruling,
) -> Result<Option<String>, sqlx::Error> {
    let said = match ruling {
        Ruling::Payment(decided) => payments::settle::on_record(connection, id)
            .await?
            .filter(|said| !said.agrees_with(decided))
            .map(|said| format!("{said:?}")),
        Ruling::Refund(decided) => refunds::settle::on_record(connection, id)
            .await?
            .filter(|said| !said.agrees_with(decided))
            .map(|said| format!("{said:?}")),
    };
    Ok(said)
}

/// Says how the name that is decided with is none of its provider's. A refund would be asked for by it, and the audit compare it.
async fn misnamed(
    connection: &mut PgConnection,
    id: Uuid,
    ruling: &Ruling,
) -> Result<Option<Undecided>, sqlx::Error> {
    let Some(given) = ruling.reference() else { return Ok(None) };
    let (provider, list) = match ruling {
        Ruling::Payment(_) => (payments::operator::provider(connection, id).await?, List::Charges),
        Ruling::Refund(_) => (refunds::operator::provider(connection, id).await?, List::Refunds),
    };
    let Some(provider) = provider else { return Ok(None) };
    let Some(prefix) = provider::prefix_of_names(&provider, list) else { return Ok(None) };
    let is_bare = given.len() > prefix.len() && given.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let (subject, given) = (ruling.about(id), given.to_owned());
    Ok((!is_bare || !given.starts_with(prefix)).then_some(Undecided::NoSuchName {
        subject,
        given,
        provider,
        prefix,
    }))
}

async fn why_not(connection: &mut PgConnection, ruling: &Ruling, subject: Subject) -> Undecided {
    let status = match ruling {
        Ruling::Payment(_) => payments::settle::status(connection, subject.id).await,
        Ruling::Refund(_) => refunds::settle::status(connection, subject.id).await,
    };
    match status {
        Ok(None) => Undecided::Unknown(subject),
        Ok(Some(status)) if status == "processing" => Undecided::NotWaiting(subject),
        Ok(Some(status)) => Undecided::Settled { subject, status },
        Err(source) => Undecided::Database { subject, source },
    }
}
