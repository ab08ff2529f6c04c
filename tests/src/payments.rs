//! What a test knows of a payment or refund: its ids, before it is asked for, and what database and provider say of it.

use std::time::Duration;

use anyhow::{Context as _, Result};
use semel_core::derive;
use semel_core::idempotency::Scope;
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, Happening, Reason};
use sqlx::{PgConnection, Row as _};
use uuid::Uuid;

use crate::client::{Acknowledged, ToldPayment, ToldRefund};
use crate::provider::Control;
use crate::reconcile::reconcile;
use crate::system::{NAMESPACE, System, TENANT};
use crate::wait::eventually;

/// How long a payment may stay in processing while everybody is healthy, and a little.
pub const BOUND: Duration = Duration::from_secs(60 + 10);

/// The ids that follow from a key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ids {
    /// The payment's.
    pub payment: Uuid,
    /// The key towards the provider.
    pub provider_key: String,
    /// The id of the event that tells that it succeeded.
    pub created: Uuid,
}

impl Ids {
    /// The ids of the payment that a system's client asks for under this key.
    ///
    /// # Errors
    ///
    /// The key is none.
    pub fn of(key: &str) -> Result<Self> {
        let scope = Scope { client: TENANT.parse()?, operation: "payments.create", key: key.parse()? };
        let id = |step: &str| Ok::<_, anyhow::Error>(derive::from_key(&NAMESPACE.parse()?, &scope, step));
        Ok(Self {
            payment: id("payment")?,
            provider_key: id("charge")?.to_string(),
            created: id("PaymentCreated")?,
        })
    }
}

/// The ids that follow from a refund's key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RefundIds {
    /// The refund's.
    pub refund: Uuid,
    /// The key towards the provider.
    pub provider_key: String,
    /// The id of the event that tells that it succeeded.
    pub refunded: Uuid,
}

impl RefundIds {
    /// The ids of the refund that a system's client asks for under this key.
    ///
    /// # Errors
    ///
    /// The key is none.
    pub fn of(key: &str) -> Result<Self> {
        let scope = Scope { client: TENANT.parse()?, operation: "refunds.create", key: key.parse()? };
        let id = |step: &str| Ok::<_, anyhow::Error>(derive::from_key(&NAMESPACE.parse()?, &scope, step));
        Ok(Self {
            refund: id("refund")?,
            provider_key: id("provider_refund")?.to_string(),
            refunded: id("PaymentRefunded")?,
        })
    }
}

/// Where a key stands.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct KeyRow {
    /// `in_progress` or `completed`.
    pub status: String,
    /// `sent`, `canceling` or `completed`.
    pub recovery_point: String,
    /// How often it was acquired.
    pub attempts: i32,
}

/// Reads where a key stands; none when it is not known.
///
/// # Errors
///
/// The database fails.
pub async fn key_row(connection: &mut PgConnection, key: &str) -> Result<Option<KeyRow>> {
    let row = sqlx::query("SELECT status, recovery_point, attempts FROM idempotency_keys WHERE key = $1")
        .bind(key)
        .fetch_optional(connection)
        .await?;
    row.map(|row| {
        Ok(KeyRow {
            status: row.try_get("status")?,
            recovery_point: row.try_get("recovery_point")?,
            attempts: row.try_get("attempts")?,
        })
    })
    .transpose()
}

/// Waits until all of these keys are completed.
///
/// # Errors
///
/// They are not, by the deadline.
pub async fn completed(system: &System, keys: &[String], deadline: Duration) -> Result<()> {
    let look = || async {
        let done = "SELECT count(*) FROM idempotency_keys WHERE key = ANY($1) AND status = 'completed'";
        let mut connection = system.place.payments.connect().await.map_err(|error| error.to_string())?;
        let row = sqlx::query(done).bind(keys).fetch_one(&mut connection).await;
        let done: i64 = row.and_then(|row| row.try_get(0)).map_err(|error| error.to_string())?;
        if usize::try_from(done) == Ok(keys.len()) {
            Ok(())
        } else {
            Err(format!("{done} of {}", keys.len()))
        }
    };
    eventually("the keys to be completed", deadline, look).await
}

/// The longest time for which one of a database's completed keys was in progress.
///
/// # Errors
///
/// The database fails.
pub async fn longest_in_progress(system: &System) -> Result<Duration> {
    let mut connection = system.place.payments.connect().await?;
    let longest = "SELECT COALESCE(max(EXTRACT(EPOCH FROM completed_at - created_at)), 0)::FLOAT8
                   FROM idempotency_keys WHERE status = 'completed'";
    let seconds: f64 = sqlx::query(longest).fetch_one(&mut connection).await?.try_get(0)?;
    Ok(Duration::from_secs_f64(seconds.max(0.0)))
}

/// Everything that a stale owner must not touch: each row of payments, refunds, keys and events, column by column.
///
/// # Errors
///
/// The database fails.
pub async fn untouchable(system: &System) -> Result<Vec<String>> {
    let rows = "SELECT to_jsonb(p)::TEXT FROM payments AS p
                UNION ALL SELECT to_jsonb(r)::TEXT FROM refunds AS r
                UNION ALL SELECT to_jsonb(k)::TEXT FROM idempotency_keys AS k
                UNION ALL SELECT to_jsonb(o)::TEXT FROM outbox AS o ORDER BY 1";
    let mut connection = system.place.payments.connect().await?;
    let rows = sqlx::query(rows).fetch_all(&mut connection).await?;
    rows.into_iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// How many answers of the provider about a payment are written down.
///
/// # Errors
///
/// The database fails.
pub async fn evidence(system: &System, payment: Uuid) -> Result<i64> {
    let mut connection = system.place.payments.connect().await?;
    let count = sqlx::query("SELECT count(*) FROM provider_answers WHERE payment_id = $1").bind(payment);
    Ok(count.fetch_one(&mut connection).await?.try_get(0)?)
}

/// How many times the provider's book has charged under this key.
///
/// # Errors
///
/// The book cannot be read.
pub fn charges(control: &Control, provider_key: &str) -> Result<usize> {
    let book = control.book()?;
    Ok(book.iter().filter(|line| line.kind == "charge" && line.key == provider_key).count())
}

/// How many times the provider's book has given money back under this key.
///
/// # Errors
///
/// The book cannot be read.
pub fn refunds(control: &Control, provider_key: &str) -> Result<usize> {
    let book = control.book()?;
    Ok(book.iter().filter(|line| line.kind == "refund" && line.key == provider_key).count())
}

/// Waits until everything is published and booked, and checks that all places agree with what the client was told.
///
/// # Errors
///
/// They do not; the message says about what.
pub async fn all_agree(system: &System, told: Vec<ToldPayment>) -> Result<()> {
    all_agree_on(system, Vec::new(), told, Vec::new()).await
}

/// As [`all_agree`], where payments were refunded.
///
/// # Errors
///
/// They do not; the message says about what.
pub async fn all_agree_on_refunds(
    system: &System,
    told: Vec<ToldPayment>,
    refunds: Vec<ToldRefund>,
) -> Result<()> {
    all_agree_on(system, Vec::new(), told, refunds).await
}

/// As [`all_agree`], where orders were placed and payments refunded.
///
/// # Errors
///
/// They do not; the message says about what.
pub async fn all_agree_on(
    system: &System,
    acknowledged: Vec<Acknowledged>,
    told: Vec<ToldPayment>,
    refunds: Vec<ToldRefund>,
) -> Result<()> {
    system.place.settled(Duration::from_mins(2)).await?;
    // An outcome may be written after that look, and is then still on its way to the others; a contradiction stays one.
    let compared = || async {
        let sources = system
            .sources_with_refunds(acknowledged.clone(), told.clone(), refunds.clone())
            .await
            .map_err(|error| error.to_string())?;
        let differences = reconcile(&sources);
        if differences.is_empty() { Ok(()) } else { Err(format!("{differences:?}")) }
    };
    eventually("all places to agree", Duration::from_mins(1), compared).await
}

/// Finds the place of something among what happened.
///
/// # Errors
///
/// It did not happen.
pub fn place_of(happenings: &[Happening], what: What, call: Call) -> Result<u64> {
    let found = happenings.iter().find(|happening| happening.what() == what && happening.call() == call);
    found
        .map(|found| found.sequence)
        .with_context(|| format!("{what:?} of {call:?} is not in {happenings:?}"))
}

/// Finds the place of a refusal among what happened.
///
/// # Errors
///
/// There was none for this reason.
pub fn refusal(happenings: &[Happening], call: Call, reason: Reason) -> Result<u64> {
    let found = happenings.iter().find(|happening| is_refusal(happening, call, reason));
    found
        .map(|found| found.sequence)
        .with_context(|| format!("{reason:?} of {call:?} is not in {happenings:?}"))
}

/// Says whether a call was refused for this reason.
#[must_use]
pub fn is_refusal(happening: &Happening, call: Call, reason: Reason) -> bool {
    happening.what() == What::Refused && happening.call() == call && happening.reason() == reason
}

/// How many charges came to an end, whichever.
#[must_use]
pub fn sends(happenings: &[Happening]) -> usize {
    let ends = [What::Applied, What::Replayed, What::Refused];
    happenings
        .iter()
        .filter(|happening| happening.call() == Call::Charge && ends.contains(&happening.what()))
        .count()
}
