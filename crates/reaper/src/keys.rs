//! The subcommand `keys`: payments and refunds that wait for a person.
//!
//! Standard output holds results alone; a refusal is an error, and leaves with 1.

use std::error::Error;
use std::io::Write as _;

use semel_core::database;
use semel_core::idempotency::person::{self, Standing, Waiting};
use semel_core::schema::{self, ENGINE};
use semel_core::shown::{age, instant, lines, one_line, pretty};
use semel_payments::operator::{Decision, Desk, Evidence, Ruling};
use semel_payments::schema::PAYMENTS;
use semel_payments::{payments, refunds};
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

use crate::NAME;
use crate::options::{KeysAction, Options, Outcome, Resolve};

pub(crate) async fn run(action: &KeysAction, options: &Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    let decision = match action {
        KeysAction::Resolve(resolve) => Some((ruling(resolve)?, options.settling()?)),
        KeysAction::List { .. } | KeysAction::Show { .. } => None,
    };
    let url = options.database.url()?;
    schema::verify(&url, NAME, &[&ENGINE, &PAYMENTS]).await?;
    let pool = database::pool(&url, NAME, 1);
    let said = match (action, decision) {
        (KeysAction::Resolve(resolve), Some((ruling, settling))) => {
            let desk = Desk {
                pool: pool.clone(),
                namespace: settling.namespace,
                problems: settling.problems,
                retention: settling.key_retention,
            };
            decide(&desk, resolve, ruling).await?
        }
        (KeysAction::Show { id, json }, _) => show(&pool, *id, *json).await?,
        (KeysAction::List { json, limit }, _) => list(&pool, *limit, *json).await?,
        // A decision always comes with its ruling.
        (KeysAction::Resolve(_), None) => String::new(),
    };
    pool.close().await;
    std::io::stdout().write_all(said.as_bytes())?;
    Ok(())
}

/// A decision that lacks something.
#[derive(Debug, thiserror::Error)]
enum Incomplete {
    #[error(
        "--as not-charged and --as refund-failed promise that no charge or refund with this key can succeed any more, and \
         nothing here makes it true: fence or cancel it at the provider first, then say so with --i-have-fenced-it"
    )]
    NotFenced,
    #[error(
        "--as charged and --as refunded need --provider-reference, --as declined and --as refund-failed need --code"
    )]
    NothingToRestOn,
}

fn ruling(resolve: &Resolve) -> Result<Ruling, Incomplete> {
    use payments::settle::Verdict as Charge;
    use refunds::settle::Verdict as Refund;
    let (reference, code) = (resolve.provider_reference.clone(), resolve.code.clone());
    let is_fenced = resolve.i_have_fenced_it;
    match (resolve.outcome, reference, code) {
        (Outcome::NotCharged | Outcome::RefundFailed, ..) if !is_fenced => Err(Incomplete::NotFenced),
        (Outcome::Charged, Some(reference), _) => Ok(Charge::Succeeded { reference }.into()),
        (Outcome::Declined, reference, Some(code)) => Ok(Charge::Declined { reference, code }.into()),
        (Outcome::NotCharged, ..) => Ok(Charge::Fenced.into()),
        (Outcome::Refunded, Some(reference), _) => Ok(Refund::Succeeded { reference }.into()),
        (Outcome::RefundFailed, reference, Some(code)) => Ok(Refund::Failed { reference, code }.into()),
        _ => Err(Incomplete::NothingToRestOn),
    }
}

async fn decide(
    desk: &Desk,
    resolve: &Resolve,
    ruling: Ruling,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let (action, status) = match resolve.outcome {
        Outcome::Charged => ("keys resolve --as charged", "succeeded"),
        Outcome::Declined => ("keys resolve --as declined", "declined"),
        Outcome::NotCharged => ("keys resolve --as not-charged", "canceled"),
        Outcome::Refunded => ("keys resolve --as refunded", "succeeded"),
        Outcome::RefundFailed => ("keys resolve --as refund-failed", "failed"),
    };
    if matches!(resolve.outcome, Outcome::NotCharged | Outcome::RefundFailed) {
        tracing::warn!(
            resource = %resolve.id,
            "that no charge or refund with this key can succeed any more rests on your word alone"
        );
    }
    let decision = Decision { ruling, actor: &resolve.actor, action, reason: &resolve.reason };
    desk.settle(resolve.id, &decision).await?;
    Ok(format!("{} {status}\n", resolve.id))
}

async fn list(pool: &PgPool, limit: i64, as_json: bool) -> Result<String, Box<dyn Error + Send + Sync>> {
    let waiting = database::call(pool, async |connection| person::waiting(connection, limit).await).await?;
    if waiting.is_empty() {
        tracing::info!("no key waits for a person");
    }
    if i64::try_from(waiting.len()).is_ok_and(|count| count == limit) {
        tracing::warn!(limit, "there may be more: raise --limit");
    }
    Ok(if as_json { pretty(&waiting.iter().map(waiting_json).collect()) } else { table(&waiting) })
}

fn table(waiting: &[Waiting]) -> String {
    let row = |id: &str, waits: &str, operation: &str, client: &str, reason: &str| {
        format!("{id:36}  {waits:>8}  {operation:16}  {client:16}  {reason}\n")
    };
    let mut rows: Vec<_> = waiting
        .iter()
        .map(|key| {
            let (id, waits) = (key.resource_id.to_string(), age(key.waited_s));
            row(&id, &waits, &key.operation, &key.client_id, &one_line(&key.reason))
        })
        .collect();
    if !rows.is_empty() {
        rows.insert(0, row("ID", "WAITS", "OPERATION", "CLIENT", "REASON"));
    }
    rows.concat()
}

fn waiting_json(key: &Waiting) -> Value {
    json!({
        "id": key.resource_id,
        "client_id": key.client_id,
        "operation": key.operation,
        "recovery_point": key.recovery_point,
        "needs_person_at": instant(key.since),
        "waits_seconds": key.waited_s,
        "reason": key.reason,
    })
}

/// What is not there.
#[derive(Debug, thiserror::Error)]
#[error("there is no payment or refund {0}")]
struct Neither(Uuid);

async fn show(pool: &PgPool, id: Uuid, as_json: bool) -> Result<String, Box<dyn Error + Send + Sync>> {
    let value = if let Some(dossier) = payments::operator::show(pool, id).await? {
        let payment = payment_json(id, &dossier.record);
        json!({
            "payment": payment, "key": key_json(dossier.key.as_ref()), "provider_answers": answers_json(&dossier.evidence),
        })
    } else {
        let dossier = refunds::operator::show(pool, id).await?.ok_or(Neither(id))?;
        let refund = refund_json(id, &dossier.record);
        json!({
            "refund": refund, "key": key_json(dossier.key.as_ref()), "provider_answers": answers_json(&dossier.evidence),
        })
    };
    Ok(if as_json { pretty(&value) } else { lines(&value) })
}

fn payment_json(id: Uuid, payment: &payments::operator::Record) -> Value {
    json!({
        "id": id,
        "status": payment.status,
        "client_id": payment.client_id,
        "operation": payment.operation,
        "reference": payment.reference,
        "amount": payment.amount,
        "refund_reserved": payment.refund_reserved,
        "currency": payment.currency,
        "provider": payment.provider,
        "provider_key": payment.provider_key,
        "provider_reference": payment.provider_reference,
        "decline_code": payment.decline_code,
        "created_at": instant(payment.created_at),
        "settled_at": payment.settled_at.map(instant),
    })
}

fn refund_json(id: Uuid, refund: &refunds::operator::Record) -> Value {
    json!({
        "id": id,
        "payment_id": refund.payment_id,
        "status": refund.status,
        "client_id": refund.client_id,
        "operation": refund.operation,
        "amount": refund.amount,
        "currency": refund.currency,
        "provider_key": refund.provider_key,
        "provider_reference": refund.provider_reference,
        "failure_code": refund.failure_code,
        "created_at": instant(refund.created_at),
        "settled_at": refund.settled_at.map(instant),
    })
}

fn key_json(key: Option<&Standing>) -> Value {
    let Some(key) = key else { return Value::Null };
    json!({
        "sha256": key.key_sha256,
        "status": key.status,
        "recovery_point": key.recovery_point,
        "fence": key.fence,
        "attempts": key.attempts,
        "lease_until": key.lease_until.map(instant),
        "next_check_at": key.next_check_at.map(instant),
        "needs_person_at": key.needs_person_at.map(instant),
        "needs_person_reason": key.needs_person_reason,
        "request_id": key.request_id,
        "provider_first_sent_at": key.provider_first_sent_at.map(instant),
        "response_code": key.response_code,
        "created_at": instant(key.created_at),
        "completed_at": key.completed_at.map(instant),
        "expires_at": key.expires_at.map(instant),
    })
}

fn answers_json(answers: &[Evidence]) -> Value {
    let answers = answers.iter().map(|answer| {
        json!({
            "answered_at": instant(answer.answered_at),
            "call": answer.call,
            "outcome": answer.outcome,
            "provider_reference": answer.provider_reference,
            "decline_code": answer.decline_code,
            "fence": answer.fence,
        })
    });
    answers.collect()
}
