//! What a person asks about a payment that waits for one, and decides.
//!
//! A decision is one transaction: the key is taken, with a fence of its own; the decision is written down as evidence, and
//! settles the payment, by the same statement as an answer of the provider; and an entry in `operator_actions` says who
//! decided, and why. A decision against what the provider is known to have said is refused.

use std::time::Duration;

use semel_core::database::{self, Lent};
use semel_core::derive::Namespace;
use semel_core::idempotency::engine::LEASE;
use semel_core::idempotency::person::{self, Standing};
use semel_core::idempotency::store::StuckKey;
use semel_core::idempotency::{Command as _, Scope};
use semel_core::operators::{self, Action};
use sqlx::{Connection as _, PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::CreatePayment;
use super::settle::{self, Settled, Verdict, Witness};
use crate::problem::ProblemBase;

/// A payment as a person sees it.
#[derive(Clone, Debug)]
pub struct Record {
    /// The account.
    pub client_id: String,
    /// The operation that created it.
    pub operation: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
    /// `processing`, `succeeded`, `declined` or `canceled`.
    pub status: String,
    /// The key that the provider was asked under.
    pub provider_key: String,
    /// The provider's own name for the charge.
    pub provider_reference: Option<String>,
    /// Why it was declined.
    pub decline_code: Option<String>,
    /// When it was asked for.
    pub created_at: OffsetDateTime,
    /// When its outcome was written.
    pub settled_at: Option<OffsetDateTime>,
}

/// A definitive answer that was written down.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// What was answered: `charge`, `get`, `cancel` or `operator`.
    pub call: String,
    /// `succeeded`, `declined` or `fenced`.
    pub outcome: String,
    /// The provider's own name for the charge.
    pub provider_reference: Option<String>,
    /// Why it was declined.
    pub decline_code: Option<String>,
    /// The acquisition under which it was asked.
    pub fence: i64,
    /// When it was written down.
    pub answered_at: OffsetDateTime,
}

/// All that is known of a payment.
#[derive(Clone, Debug)]
pub struct Dossier {
    /// The payment.
    pub payment: Record,
    /// Its key; none once that is expired and reaped.
    pub key: Option<Standing>,
    /// What the provider said, at most a hundred answers, the oldest first.
    pub evidence: Vec<Evidence>,
}

/// Returns all that is known of a payment; none when there is no such payment.
///
/// # Errors
///
/// When the database fails.
pub async fn show(pool: &PgPool, payment_id: Uuid) -> Result<Option<Dossier>, sqlx::Error> {
    database::call(pool, async |connection| dossier(connection, payment_id).await).await
}

async fn dossier(connection: &mut PgConnection, payment_id: Uuid) -> Result<Option<Dossier>, sqlx::Error> {
    let row = sqlx::query!(
        "-- payments_show
        SELECT client_id, operation, idempotency_key, reference, amount, currency, status, provider_key, provider_reference,
               decline_code, created_at, settled_at
        FROM payments WHERE payment_id = $1",
        payment_id
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let key = person::standing(connection, &row.client_id, &row.operation, &row.idempotency_key).await?;
    let evidence = sqlx::query_as!(
        Evidence,
        "-- provider_answers_show
        SELECT call, outcome, provider_reference, decline_code, fence, answered_at FROM provider_answers
        WHERE payment_id = $1 ORDER BY answered_at LIMIT 100",
        payment_id
    )
    .fetch_all(&mut *connection)
    .await?;
    let payment = Record {
        client_id: row.client_id,
        operation: row.operation,
        reference: row.reference,
        amount: row.amount,
        currency: row.currency,
        status: row.status,
        provider_key: row.provider_key,
        provider_reference: row.provider_reference,
        decline_code: row.decline_code,
        created_at: row.created_at,
        settled_at: row.settled_at,
    };
    Ok(Some(Dossier { payment, key, evidence }))
}

/// What a person has decided.
#[derive(Clone, Debug)]
pub struct Decision<'a> {
    /// What became of the payment.
    pub verdict: Verdict,
    /// Who decides.
    pub actor: &'a str,
    /// By which command.
    pub action: &'a str,
    /// Why.
    pub reason: &'a str,
}

/// A decision that was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Undecided {
    /// There is no such payment.
    #[error("there is no payment {0}")]
    Unknown(Uuid),
    /// It is settled.
    #[error("payment {payment_id} is settled: {status}")]
    Settled {
        /// The payment.
        payment_id: Uuid,
        /// How.
        status: String,
    },
    /// It is not settled, and does not wait for a person.
    #[error("payment {0} does not wait for a person: recovery still works at it")]
    NotWaiting(Uuid),
    /// The provider has said something else.
    #[error(
        "payment {payment_id}: the provider is known to have said {said}, which is not for a person to overrule"
    )]
    Contradicts {
        /// The payment.
        payment_id: Uuid,
        /// What.
        said: String,
    },
    /// The key holds what this version cannot read.
    #[error("the key of payment {0} is none that this version can read")]
    Unreadable(Uuid),
    /// The database failed, and nothing was decided.
    #[error("deciding about payment {payment_id}: nothing was written")]
    Database {
        /// The payment.
        payment_id: Uuid,
        /// Why.
        source: sqlx::Error,
    },
    /// The commit was sent, and its answer was lost.
    #[error(
        "deciding about payment {payment_id}: whether it was written is not known, so look at the payment again"
    )]
    Open {
        /// The payment.
        payment_id: Uuid,
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

impl Desk {
    /// Settles a payment that waits for a person.
    ///
    /// # Errors
    ///
    /// When it does not wait, the provider is known to have said something else, or the database fails.
    pub async fn settle(&self, payment_id: Uuid, decision: &Decision<'_>) -> Result<(), Undecided> {
        let failed = |source| Undecided::Database { payment_id, source };
        let mut connection = Lent::from(&self.pool).await.map_err(failed)?;
        let decided =
            connection.call(async |connection| Ok(self.decide(connection, payment_id, decision).await));
        decided.await.unwrap_or_else(|source| Err(Undecided::Open { payment_id, source }))
    }

    async fn decide(
        &self,
        connection: &mut PgConnection,
        payment_id: Uuid,
        decision: &Decision<'_>,
    ) -> Result<(), Undecided> {
        let failed = |source| Undecided::Database { payment_id, source };
        let mut tx = connection.begin().await.map_err(failed)?;
        let taken =
            person::take(&mut tx, CreatePayment::OPERATION, payment_id, LEASE).await.map_err(failed)?;
        let Some(taken) = taken else { return Err(self.why_not(&mut tx, payment_id).await) };
        if let Some(said) = settle::evidence(&mut *tx, payment_id).await.map_err(failed)?
            && !agree(&said, &decision.verdict)
        {
            return Err(Undecided::Contradicts { payment_id, said: format!("{said:?}") });
        }
        if !self.write(&mut tx, payment_id, &taken, decision).await? {
            return Err(self.why_not(&mut tx, payment_id).await);
        }
        let action = Action {
            actor: decision.actor,
            action: decision.action,
            subject: &payment_id.to_string(),
            reason: decision.reason,
        };
        operators::record(&mut tx, &action).await.map_err(failed)?;
        tx.commit().await.map_err(|source| Undecided::Open { payment_id, source })
    }

    async fn write(
        &self,
        tx: &mut PgConnection,
        payment_id: Uuid,
        taken: &StuckKey,
        decision: &Decision<'_>,
    ) -> Result<bool, Undecided> {
        let failed = |source| Undecided::Database { payment_id, source };
        let (Ok(client), Ok(key)) = (taken.client_id.parse(), taken.key.parse()) else {
            return Err(Undecided::Unreadable(payment_id));
        };
        let scope = Scope { client, operation: CreatePayment::OPERATION, key };
        let payment = sqlx::query!(
            "-- payments_to_settle
            SELECT reference, amount, currency, provider_key FROM payments WHERE payment_id = $1",
            payment_id
        )
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
        let Some(payment) = payment else { return Ok(false) };
        let settled = Settled {
            scope: &scope,
            fence: taken.fence,
            payment_id,
            reference: &payment.reference,
            amount: payment.amount,
            currency: &payment.currency,
            provider_key: &payment.provider_key,
        };
        let (verdict, retention) = (&decision.verdict, self.retention);
        let response = verdict.response(&settled, &self.problems);
        let event = verdict.event(&self.namespace, &settled);
        let written =
            settle::write(&mut *tx, &settled, verdict, Witness::Operator, &response, &event, retention).await;
        Ok(written.map_err(failed)?.is_some())
    }

    async fn why_not(&self, connection: &mut PgConnection, payment_id: Uuid) -> Undecided {
        match settle::status(connection, payment_id).await {
            Ok(None) => Undecided::Unknown(payment_id),
            Ok(Some(status)) if status == "processing" => Undecided::NotWaiting(payment_id),
            Ok(Some(status)) => Undecided::Settled { payment_id, status },
            Err(source) => Undecided::Database { payment_id, source },
        }
    }
}

/// Says whether a decision is what the provider has said.
fn agree(said: &Verdict, decided: &Verdict) -> bool {
    match (said, decided) {
        (Verdict::Succeeded { reference: said }, Verdict::Succeeded { reference: decided }) => {
            said == decided
        }
        (said, decided) => std::mem::discriminant(said) == std::mem::discriminant(decided),
    }
}
