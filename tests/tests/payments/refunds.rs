//! Refunds over real processes: SIGKILL of an API at every step, row by row, what is lost on the wire, and a provider that has
//! forgotten. Money is given back once, and everybody is told so.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind, Happening};
use semel_tests::client::{Answer, Client, Payment, Refund, ToldPayment, ToldRefund};
use semel_tests::payments::{BOUND, RefundIds, all_agree_on_refunds, completed, key_row, place_of, refunds};
use semel_tests::provider::Fault;
use semel_tests::system::{NAMESPACE, Running, System, call};
use semel_tests::wait::eventually;
use sqlx::{PgConnection, Row as _};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::crashes::{Death, Doomed, Heir, Left, die, standing};
use crate::support::{EXIT, joined, start, told};
use crate::wire::Loss;

/// What is paid, and what of it is given back.
const AMOUNTS: (i64, i64) = (4200, 1300);

/// A row of the crash table: what dies when, what it leaves of the key, and how many refunds the provider has made by then.
type Row = (&'static str, Death, Left, usize);

const ROWS: [Row; 12] = [
    ("before anything", Death::At("api.before_execute"), Left::Nothing, 0),
    ("tx 1 never arrives", Death::Claim(Loss::Statement), Left::Nothing, 0),
    ("tx 1 committed, its answer lost", Death::Claim(Loss::Answer), Left::Sent, 0),
    ("before a byte is sent", Death::At("refunds.before_send"), Left::Sent, 0),
    ("the provider at work", Death::Provider(FaultKind::HoldBeforeApply), Left::Sent, 0),
    ("the request on its way, and late", Death::Provider(FaultKind::ApplyLate), Left::Sent, 0),
    ("the provider's answer on its way", Death::Provider(FaultKind::HoldAfterApply), Left::Sent, 1),
    ("answered, before tx 2", Death::At("refunds.after_answer"), Left::Sent, 1),
    ("tx 2 never arrives", Death::Settlement(Loss::Statement), Left::Sent, 1),
    ("tx 2 committed, its answer lost", Death::Settlement(Loss::Answer), Left::Completed, 1),
    ("tx 2 committed and known", Death::At("refunds.after_settle"), Left::Completed, 1),
    ("before it answers", Death::At("api.before_respond"), Left::Completed, 1),
];

#[tokio::test(flavor = "multi_thread")]
async fn whenever_an_api_dies_its_refund_is_settled_by_a_reaper_or_by_a_retry() -> Result<()> {
    // Side by side: what takes long is that a lease ends.
    tokio::try_join!(crash_table(Heir::Reaper), crash_table(Heir::Retry))?;
    Ok(())
}

/// All rows side by side, each with an API of its own to die.
async fn crash_table(heir: Heir) -> Result<()> {
    let system = start(1, &[]).await?;
    if heir == Heir::Retry {
        system.reaper.daemon.kill().await?;
    }
    let system = Arc::new(system);
    let mut rows = JoinSet::new();
    for row in ROWS {
        let system = Arc::clone(&system);
        rows.spawn(async move { play(&system, row, heir).await.with_context(|| row.0) });
    }
    let (paid, refunded): (Vec<_>, Vec<_>) = joined(rows).await?.into_iter().unzip();
    assert_eq!(refunded.len(), ROWS.len());
    all_agree_on_refunds(&system, paid, refunded).await?;
    let system = Arc::into_inner(system).context("a row still runs")?;
    system.stop().await
}

/// Plays a row to its end: what the client is told of the payment and of its refund.
async fn play(system: &System, row: Row, heir: Heir) -> Result<(ToldPayment, ToldRefund)> {
    let (name, death, left, made) = row;
    let (paid, refund) = paid(system, &format!("refund: {name}")).await?;
    let (ids, control) = (RefundIds::of(&refund.key)?, system.place.control()?);
    let doomed = Doomed {
        key: &refund.key,
        provider_key: &ids.provider_key,
        call: Call::Refund,
        claim: &ids.provider_key,
        settlement: "PaymentRefunded",
    };
    die(system, &control, death, &doomed, |api| {
        let (client, refund) = (patient(system, api)?, refund.clone());
        Ok(tokio::spawn(async move { client.refund(&refund).await.map(drop) }))
    })
    .await?;

    let mut connection = system.place.payments.connect().await?;
    assert_eq!(standing(key_row(&mut connection, &refund.key).await?), left, "{name}");
    assert_eq!(refunds(&control, &ids.provider_key)?, made, "{name}");
    let taken = if left == Left::Nothing { 0 } else { AMOUNTS.1 };
    assert_eq!(reserved(&mut connection, refund.payment_id).await?, taken, "{name}");
    let is_late = matches!(death, Death::Provider(FaultKind::ApplyLate));
    if !is_late {
        control.release(&ids.provider_key).await?;
    }
    if heir == Heir::Reaper && left != Left::Nothing {
        completed(system, std::slice::from_ref(&refund.key), BOUND).await?;
    }
    let answer = system.client(0)?.refund_until_final(&refund).await?;
    let told = answer.told_refund(&refund.key)?;
    assert_eq!((told.status.as_str(), told.refund_id), ("succeeded", ids.refund), "{name}");
    // Nobody had answered it: a retry replays what was completed without it, and is first where it did the work.
    let replays = left == Left::Completed || (heir == Heir::Reaper && left == Left::Sent);
    assert_eq!(answer.is_replay(), replays, "{name}");
    if is_late {
        // The dead API's own request arrives after the one that was sent again, and finds the key's answer there.
        control.release(&ids.provider_key).await?;
        let replayed = |happening: &Happening| happening.what() == What::Replayed;
        let happenings = control.wait_for("the late refund to arrive", &ids.provider_key, replayed).await?;
        let applied = place_of(&happenings, What::Applied, Call::Refund)?;
        ensure!(
            applied < place_of(&happenings, What::LetGo, Call::Refund)?,
            "it was not late: {happenings:?}"
        );
    }

    let again = system.client(0)?.refund(&refund).await?;
    ensure!(again.is_replay() && again.body == answer.body, "{name}: answered differently the second time");
    assert_eq!(refunds(&control, &ids.provider_key)?, 1, "{name}");
    assert_eq!(reserved(&mut connection, refund.payment_id).await?, AMOUNTS.1, "{name}");
    assert_eq!(refund_events(&mut connection, refund.payment_id).await?, [ids.refunded], "{name}");
    Ok((paid, told))
}

/// Makes a payment, and a refund of a part of it to ask for.
async fn paid(system: &System, reference: &str) -> Result<(ToldPayment, Refund)> {
    let payment = Payment::new(reference, AMOUNTS.0);
    let (paid, _) = told(&system.client(0)?, &payment).await?;
    let refund = Refund::new(paid.payment_id, AMOUNTS.1);
    Ok((paid, refund))
}

fn patient(system: &System, api: &Running) -> Result<Client> {
    Client::with_patience(api.address.context("no API")?, &system.place.token, Duration::from_secs(90))
}

async fn reserved(connection: &mut PgConnection, payment: Uuid) -> Result<i64> {
    let query = sqlx::query("SELECT refund_reserved FROM payments WHERE payment_id = $1").bind(payment);
    Ok(query.fetch_one(connection).await?.try_get(0)?)
}

async fn refund_events(connection: &mut PgConnection, payment: Uuid) -> Result<Vec<Uuid>> {
    let query = "SELECT event_id FROM outbox WHERE aggregate_id = $1 AND event_type LIKE 'PaymentRefund%' ORDER BY id";
    let rows = sqlx::query(query).bind(payment.to_string()).fetch_all(connection).await?;
    rows.into_iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// Moves a refund's first send so far back.
async fn age(connection: &mut PgConnection, refund: &Refund, hours: i32) -> Result<()> {
    let aging =
        "UPDATE idempotency_keys SET provider_first_sent_at = clock_timestamp() - make_interval(hours => $2)
                 WHERE key = $1 AND status = 'in_progress'";
    let moved = sqlx::query(aging).bind(&refund.key).bind(hours).execute(connection).await?.rows_affected();
    ensure!(moved == 1, "the refund is not in progress");
    Ok(())
}

fn expect_problem(answer: &Answer, problem: &str) -> Result<()> {
    ensure!(answer.problem().as_deref() == Some(problem), "{}: {answer:?}", answer.status);
    Ok(())
}

/// The provider recognises keys for a day. A refund that it does not know of by then may still be on its way, and a second one
/// would not be recognised: so nobody sends, nobody rolls back, and a person finds it in their list.
#[tokio::test(flavor = "multi_thread")]
async fn past_the_horizon_a_refund_waits_for_a_person_and_its_late_request_is_no_second_one() -> Result<()> {
    let system = start(1, &[("SEMEL_REAPER_PERIOD", "1"), ("SEMEL_PROVIDER_HORIZON_HOURS", "24")]).await?;
    let (paid, refund) = paid(&system, "forgotten").await?;
    let (ids, control) = (RefundIds::of(&refund.key)?, system.place.control()?);
    // Taken over by nobody until it is too late: the reaper is away, and the client does not retry.
    system.reaper.daemon.kill().await?;
    let late = Fault::new(FaultKind::ApplyLate, Call::Refund).key(&ids.provider_key).times(1).hold("late");
    control.order(late).await?;
    let client = patient(&system, &system.apis[0])?;
    expect_problem(&client.refund(&refund).await?, "outcome-unknown")?;
    let mut connection = system.place.payments.connect().await?;
    age(&mut connection, &refund, 24).await?;

    let reaper = system.place.reaper("reaper-again", &[]).await?;
    let waits = || async {
        let mut connection = system.place.payments.connect().await.map_err(|error| error.to_string())?;
        let query =
            sqlx::query("SELECT needs_person_reason FROM idempotency_keys WHERE key = $1").bind(&refund.key);
        let reason: Option<String> = query
            .fetch_one(&mut connection)
            .await
            .and_then(|row| row.try_get(0))
            .map_err(|error| error.to_string())?;
        reason.ok_or("not yet".to_owned())
    };
    let reason = eventually("the refund to wait for a person", EXIT, waits).await?;
    ensure!(reason.contains("does not know of the refund"), "{reason}");
    expect_problem(&client.refund(&refund).await?, "needs-attention")?;
    assert_eq!(reserved(&mut connection, refund.payment_id).await?, AMOUNTS.1);
    let more = Refund::new(refund.payment_id, AMOUNTS.0 - AMOUNTS.1 + 1);
    let refused = client.refund(&more).await?;
    expect_problem(&refused, "refund-exceeds-payment")?;
    let sends = control.calls().await?.refund;
    assert_eq!(sends, 1, "sent again past the horizon");

    // The request arrives after all, and a person finds it in the provider's list.
    control.release("late").await?;
    let applied = |happening: &Happening| happening.what() == What::Applied;
    control.wait_for("the late refund to arrive", &ids.provider_key, applied).await?;
    let book = control.book()?;
    let line = book.iter().find(|line| line.key == ids.provider_key).context("no refund in the book")?;
    let refund_id = ids.refund.to_string();
    let keys = ["--namespace", NAMESPACE, "keys", "resolve", &refund_id, "--as", "refunded"];
    let because =
        ["--provider-reference", &line.reference, "--reason", "seen in their list", "--actor", "ada"];
    let arguments = [&keys[..], &because].concat();
    call("semel-reaper", &arguments, &system.place.payments.url()).await?;
    let settled = client.refund(&refund).await?;
    let told = [settled.told_refund(&refund.key)?, refused.told_refund(&more.key)?];
    assert_eq!((told[0].status.as_str(), told[1].status.as_str()), ("succeeded", "refused"));
    assert_eq!(refunds(&control, &ids.provider_key)?, 1);
    all_agree_on_refunds(&system, vec![paid], told.to_vec()).await?;
    reaper.daemon.terminate()?;
    ensure!(reaper.daemon.wait_exit(EXIT).await?.success(), "the reaper does not stop");
    system.stop().await
}

/// Refunds at once over two APIs, some of whose answers are lost: what is given back never exceeds the payment.
#[tokio::test(flavor = "multi_thread")]
async fn refunds_at_once_over_two_apis_give_back_what_was_paid_and_no_more() -> Result<()> {
    let system = start(2, &[("SEMEL_REAPER_PERIOD", "1")]).await?;
    let control = system.place.control()?;
    // The first ones fail, and the answers to the next ones are lost.
    control.order(Fault::new(FaultKind::Decline, Call::Refund).times(3).code("account_closed")).await?;
    control.order(Fault::new(FaultKind::AnswerUnavailable, Call::Refund).times(6)).await?;
    let (mut paid_for, mut asking) = (Vec::new(), JoinSet::new());
    for number in 0..4 {
        let (paid, _) = paid(&system, &format!("contended {number}")).await?;
        // Seven of 900 for 4200: four fit, and more where one fails before the others ask.
        for which in 0..7 {
            let (client, refund) = (system.client(which % 2)?, Refund::new(paid.payment_id, 900));
            asking.spawn(async move {
                let answer = client.refund_until_final(&refund).await?;
                answer.told_refund(&refund.key)
            });
        }
        paid_for.push(paid);
    }
    let told = joined(asking).await?;
    for paid in &paid_for {
        let book = control.book()?;
        let charge = semel_tests::payments::Ids::of(&paid.key)?.provider_key;
        let given: i64 = book
            .iter()
            .filter(|line| line.kind == "refund" && line.charge_key == charge)
            .map(|line| line.amount)
            .sum();
        let of_it = |status: &str| {
            told.iter().filter(|told| told.payment_id == paid.payment_id && told.status == status).count()
        };
        ensure!(given <= paid.amount, "{given} of {}", paid.amount);
        assert_eq!(i64::try_from(of_it("succeeded"))? * 900, given);
        ensure!(of_it("succeeded") + of_it("failed") + of_it("refused") == 7, "{told:?}");
        ensure!(of_it("succeeded") <= 4 && of_it("succeeded") + of_it("failed") >= 4, "{told:?}");
    }
    ensure!(told.iter().filter(|told| told.status == "failed").count() == 3, "{told:?}");
    all_agree_on_refunds(&system, paid_for, told).await?;
    system.stop().await
}
