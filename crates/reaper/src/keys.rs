//! The subcommand `keys`: payments that wait for a person.
//!
//! Standard output holds results alone; a refusal is an error, and leaves with 1.

use std::error::Error;
use std::io::Write as _;

use semel_core::database;
use semel_core::idempotency::person::{self, Waiting};
use semel_core::schema::{self, ENGINE};
use semel_core::shown::{age, instant, lines, one_line, pretty};
use semel_payments::payments::operator::{self, Decision, Desk, Dossier};
use semel_payments::payments::settle::Verdict;
use semel_payments::schema::PAYMENTS;
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

use crate::NAME;
use crate::options::{KeysAction, Options, Outcome, Resolve};

pub(crate) async fn run(action: &KeysAction, options: &Options) -> Result<(), Box<dyn Error + Send + Sync>> {
    let decision = match action {
        KeysAction::Resolve(resolve) => Some((verdict(resolve)?, options.settling()?)),
        KeysAction::List { .. } | KeysAction::Show { .. } => None,
    };
    let url = options.database.url()?;
    schema::verify(&url, NAME, &[&ENGINE, &PAYMENTS]).await?;
    let pool = database::pool(&url, NAME, 1);
    let said = match (action, decision) {
        (KeysAction::Resolve(resolve), Some((verdict, settling))) => {
            let desk = Desk {
                pool: pool.clone(),
                namespace: settling.namespace,
                problems: settling.problems,
                retention: settling.key_retention,
            };
            decide(&desk, resolve, verdict).await?
        }
        (KeysAction::Show { payment_id, json }, _) => show(&pool, *payment_id, *json).await?,
        (KeysAction::List { json, limit }, _) => list(&pool, *limit, *json).await?,
        // A decision always comes with its verdict.
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
        "--as not-charged promises that no charge with this payment's key can succeed any more, and nothing here makes it \
         true: fence or cancel it at the provider first, then say so with --i-have-fenced-it"
    )]
    NotFenced,
    #[error("--as charged needs --provider-reference, and --as declined needs --code")]
    NothingToRestOn,
}

fn verdict(resolve: &Resolve) -> Result<Verdict, Incomplete> {
    let (reference, code) = (resolve.provider_reference.clone(), resolve.code.clone());
    match (resolve.outcome, reference, code) {
        (Outcome::Charged, Some(reference), _) => Ok(Verdict::Succeeded { reference }),
        (Outcome::Declined, reference, Some(code)) => Ok(Verdict::Declined { reference, code }),
        (Outcome::NotCharged, ..) if resolve.i_have_fenced_it => Ok(Verdict::Fenced),
        (Outcome::NotCharged, ..) => Err(Incomplete::NotFenced),
        (Outcome::Charged | Outcome::Declined, ..) => Err(Incomplete::NothingToRestOn),
    }
}

async fn decide(
    desk: &Desk,
    resolve: &Resolve,
    verdict: Verdict,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let (action, status) = match resolve.outcome {
        Outcome::Charged => ("keys resolve --as charged", "succeeded"),
        Outcome::Declined => ("keys resolve --as declined", "declined"),
        Outcome::NotCharged => ("keys resolve --as not-charged", "canceled"),
    };
    if resolve.outcome == Outcome::NotCharged {
        tracing::warn!(
            payment = %resolve.payment_id,
            "that no charge with this payment's key can succeed any more rests on your word alone"
        );
    }
    let decision = Decision { verdict, actor: &resolve.actor, action, reason: &resolve.reason };
    desk.settle(resolve.payment_id, &decision).await?;
    Ok(format!("{} {status}\n", resolve.payment_id))
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
    let row = |payment: &str, waits: &str, operation: &str, client: &str, reason: &str| {
        format!("{payment:36}  {waits:>8}  {operation:16}  {client:16}  {reason}\n")
    };
    let mut rows: Vec<_> = waiting
        .iter()
        .map(|key| {
            let (payment, waits) = (key.resource_id.to_string(), age(key.waited_s));
            row(&payment, &waits, &key.operation, &key.client_id, &one_line(&key.reason))
        })
        .collect();
    if !rows.is_empty() {
        rows.insert(0, row("PAYMENT", "WAITS", "OPERATION", "CLIENT", "REASON"));
    }
    rows.concat()
}

fn waiting_json(key: &Waiting) -> Value {
    json!({
        "payment_id": key.resource_id,
        "client_id": key.client_id,
        "operation": key.operation,
        "recovery_point": key.recovery_point,
        "needs_person_at": instant(key.since),
        "waits_seconds": key.waited_s,
        "reason": key.reason,
    })
}

/// A payment that is not there.
#[derive(Debug, thiserror::Error)]
#[error("there is no payment {0}")]
struct NoPayment(Uuid);

async fn show(
    pool: &PgPool,
    payment_id: Uuid,
    as_json: bool,
) -> Result<String, Box<dyn Error + Send + Sync>> {
    let dossier = operator::show(pool, payment_id).await?.ok_or(NoPayment(payment_id))?;
    let value = dossier_json(payment_id, &dossier);
    Ok(if as_json { pretty(&value) } else { lines(&value) })
}

fn dossier_json(payment_id: Uuid, dossier: &Dossier) -> Value {
    let payment = &dossier.payment;
    let evidence = dossier.evidence.iter().map(|answer| {
        json!({
            "answered_at": instant(answer.answered_at),
            "call": answer.call,
            "outcome": answer.outcome,
            "provider_reference": answer.provider_reference,
            "decline_code": answer.decline_code,
            "fence": answer.fence,
        })
    });
    json!({
        "payment": {
            "id": payment_id,
            "status": payment.status,
            "client_id": payment.client_id,
            "operation": payment.operation,
            "reference": payment.reference,
            "amount": payment.amount,
            "currency": payment.currency,
            "provider_key": payment.provider_key,
            "provider_reference": payment.provider_reference,
            "decline_code": payment.decline_code,
            "created_at": instant(payment.created_at),
            "settled_at": payment.settled_at.map(instant),
        },
        "key": dossier.key.as_ref().map(|key| json!({
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
        })),
        "provider_answers": evidence.collect::<Value>(),
    })
}
