//! SIGKILL of an API at every step of a payment, row by row: one charge, one payment, one event, one booking, and the retry
//! is told of it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_proto::payments::v1::payment::Status;
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind};
use semel_tests::calls::Caller;
use semel_tests::client::{Payment, ToldPayment};
use semel_tests::payments::{
    BOUND, Ids, KeyRow, all_agree, charges, completed, key_row, longest_in_progress, place_of,
};
use semel_tests::provider::{Control, Fault};
use semel_tests::system::{Running, System};
use semel_tests::wait::eventually;
use sqlx::{PgConnection, Row as _};
use tokio::task::{JoinHandle, JoinSet};

use crate::support::{Asked, EXIT, connected, joined, place_to_start, start, told};
use crate::wire::{Loss, Wire};

/// How the API dies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Death {
    /// By its own hand, at a failpoint.
    At(&'static str),
    /// While the provider waits with the charge or refund at this fault's hold.
    Provider(FaultKind),
    /// While the transaction that claims the key, or its answer, is lost on the wire.
    Claim(Loss),
    /// While the transaction that settles, or its answer, is lost on the wire.
    Settlement(Loss),
}

/// What the dead leave of the key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Left {
    Nothing,
    Sent,
    Completed,
}

/// A row of the crash table: what dies when, what it leaves of the key, and how many charges the provider has made by then.
type Row = (&'static str, Death, Left, usize);

const ROWS: [Row; 13] = [
    ("before anything", Death::At("api.before_execute"), Left::Nothing, 0),
    ("tx 1 never arrives", Death::Claim(Loss::Statement), Left::Nothing, 0),
    ("tx 1 committed, its answer lost", Death::Claim(Loss::Answer), Left::Sent, 0),
    ("before a byte is sent", Death::At("payments.before_send"), Left::Sent, 0),
    ("the provider at work", Death::Provider(FaultKind::HoldBeforeApply), Left::Sent, 0),
    ("the request on its way, and late", Death::Provider(FaultKind::ApplyLate), Left::Sent, 0),
    ("the provider's answer on its way", Death::Provider(FaultKind::HoldAfterApply), Left::Sent, 1),
    ("answered, before tx 2", Death::At("payments.after_answer"), Left::Sent, 1),
    ("tx 2 never arrives", Death::Settlement(Loss::Statement), Left::Sent, 1),
    ("tx 2 committed, its answer lost", Death::Settlement(Loss::Answer), Left::Completed, 1),
    ("tx 2 committed and known", Death::At("payments.after_settle"), Left::Completed, 1),
    ("after the engine", Death::At("api.after_commit"), Left::Completed, 1),
    ("before it answers", Death::At("api.before_respond"), Left::Completed, 1),
];

/// The rows that are played once more by a client that speaks gRPC: one of each kind of what is left.
const CALLED: [&str; 5] = [
    "before anything",
    "before a byte is sent",
    "the provider's answer on its way",
    "tx 2 committed, its answer lost",
    "before it answers",
];

/// How the client speaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Speech {
    Http,
    Grpc,
}

/// Who drives on what the dead left.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Heir {
    /// The reaper; nobody asks before it has.
    Reaper,
    /// The client's retries; there is no reaper.
    Retry,
}

#[tokio::test(flavor = "multi_thread")]
async fn whenever_an_api_dies_its_payment_is_settled_by_a_reaper_or_by_a_retry() -> Result<()> {
    // Side by side: what takes long is that a lease ends.
    let (by_reaper, by_retry) = tokio::try_join!(crash_table(Heir::Reaper), crash_table(Heir::Retry))?;
    println!("the longest was in progress for {by_reaper:?} with a reaper, {by_retry:?} without");
    Ok(())
}

/// All rows side by side, each with an API of its own to die. Returns for how long the longest was in progress.
async fn crash_table(heir: Heir) -> Result<Duration> {
    let system = start(1, &[]).await?;
    if heir == Heir::Retry {
        system.reaper.daemon.kill().await?;
    }
    let system = Arc::new(system);
    let mut rows = JoinSet::new();
    let called = ROWS.into_iter().filter(|row| CALLED.contains(&row.0)).map(|row| (row, Speech::Grpc));
    for (row, speech) in ROWS.into_iter().map(|row| (row, Speech::Http)).chain(called) {
        let system = Arc::clone(&system);
        rows.spawn(async move {
            play(&system, row, heir, speech).await.with_context(|| format!("{speech:?}: {}", row.0))
        });
    }
    let told = joined(rows).await?;
    assert_eq!(told.len(), ROWS.len() + CALLED.len());
    let longest = longest_in_progress(&system).await?;
    all_agree(&system, told).await?;
    let system = Arc::into_inner(system).context("a row still runs")?;
    system.stop().await?;
    Ok(longest)
}

/// Plays a row to its end: what the client is told.
async fn play(system: &System, row: Row, heir: Heir, speech: Speech) -> Result<ToldPayment> {
    let (name, death, left, charged) = row;
    let payment = Payment::new(&format!("crash {speech:?}: {name}"), 4200);
    let (ids, control) = (Ids::of(&payment.key)?, system.place.control()?);
    let doomed = Doomed {
        key: &payment.key,
        provider_key: &ids.provider_key,
        call: Call::Charge,
        // What identifies the statement: no other one before it has this text among its arguments.
        claim: &payment.reference,
        settlement: "PaymentCreated",
    };
    die(system, &control, death, &doomed, |api| {
        if speech == Speech::Http {
            let asked = Asked::of(system, api, payment.clone())?;
            return Ok(tokio::spawn(async move { asked.answer().await.map(drop) }));
        }
        let (caller, payment) = (caller(system, api)?, payment.clone());
        Ok(tokio::spawn(async move { Ok(caller.pay(&payment).await.map(drop)?) }))
    })
    .await?;

    let mut connection = system.place.payments.connect().await?;
    assert_eq!(standing(key_row(&mut connection, &payment.key).await?), left, "{name}");
    assert_eq!(charges(&control, &ids.provider_key)?, charged, "{name}");
    if !matches!(death, Death::Provider(FaultKind::ApplyLate)) {
        control.release(&ids.provider_key).await?;
    }
    if heir == Heir::Reaper && left != Left::Nothing {
        completed(system, std::slice::from_ref(&payment.key), BOUND).await?;
    }
    // Nobody had answered it: a retry replays what was completed without it, and is first where it did the work.
    let mut replays = left == Left::Completed || (heir == Heir::Reaper && left == Left::Sent);
    if speech == Speech::Grpc {
        let api = system.apis.first().context("no API")?;
        let called = caller(system, api)?.pay_until_told(&payment).await?;
        assert_eq!((called.payment.status(), called.is_replay), (Status::Succeeded, replays), "{name}");
        assert_eq!((called.payment.id, called.payment.amount), (ids.payment.to_string(), payment.amount));
        replays = true;
    }
    let (settled, answer) = told(&system.client(0)?, &payment).await?;
    assert_eq!(settled.status, "succeeded", "{name}");
    assert_eq!(answer.is_replay(), replays, "{name}");
    if matches!(death, Death::Provider(FaultKind::ApplyLate)) {
        the_late_charge_changes_nothing(&control, &ids).await?;
    }

    let again = system.client(0)?.pay(&payment).await?;
    ensure!(again.is_replay() && again.body == answer.body, "{name}: answered differently the second time");
    assert_eq!(charges(&control, &ids.provider_key)?, 1, "{name}");
    assert_eq!(
        events_of(&mut connection, &ids).await?,
        [("PaymentCreated".to_owned(), ids.created)],
        "{name}"
    );
    Ok(settled)
}

fn caller(system: &System, api: &Running) -> Result<Caller> {
    Caller::with_patience(api.address.context("no API")?, &system.place.token, EXIT * 3)
}

/// What an API dies with in its hands.
pub(crate) struct Doomed<'a> {
    /// The client's key.
    pub(crate) key: &'a str,
    /// The key towards the provider.
    pub(crate) provider_key: &'a str,
    /// What the provider is asked to do.
    pub(crate) call: Call,
    /// A text that stands first among the arguments of the statement that claims the key.
    pub(crate) claim: &'a str,
    /// One that stands first among those of the statement that settles.
    pub(crate) settlement: &'a str,
}

/// Lets an API die with what it is asked for in its hands.
pub(crate) async fn die(
    system: &System,
    control: &Control,
    death: Death,
    doomed: &Doomed<'_>,
    ask: impl FnOnce(&Running) -> Result<JoinHandle<Result<()>>>,
) -> Result<()> {
    let _place = place_to_start().await?;
    let wire = match death {
        Death::Claim(loss) => Some(Wire::to(&system.place, doomed.claim, loss).await?),
        Death::Settlement(loss) => Some(Wire::to(&system.place, doomed.settlement, loss).await?),
        _ => None,
    };
    if let Death::Provider(kind) = death {
        let hold = doomed.provider_key;
        control.order(Fault::new(kind, doomed.call).key(hold).times(1).hold(hold)).await?;
    }
    let plan = match death {
        Death::At(failpoint) => format!("{failpoint}=abort"),
        _ => String::new(),
    };
    let mut env = vec![("SEMEL_FAILPOINTS", plan.as_str())];
    env.extend(wire.as_ref().map(|wire| ("DATABASE_URL", wire.url.as_str())));
    let api = system.place.api(&format!("doomed-{}", doomed.key), &env).await?;
    connected(system, &api).await?;
    let asked = ask(&api)?;
    match (death, &wire) {
        (Death::At(_), _) => {
            ensure!(!api.daemon.wait_exit(EXIT).await?.success(), "it lives");
        }
        (Death::Provider(_), _) => {
            let held = |happening: &_| is_held(happening);
            control.wait_for("the call to be held", doomed.provider_key, held).await?;
        }
        (_, Some(wire)) => wire.has_lost().await?,
        (_, None) => {}
    }
    kill(&api).await?;
    ensure!(asked.await?.is_err(), "an answer came from an API that died before it");
    Ok(())
}

fn is_held(happening: &semel_proto::provider::v1::Happening) -> bool {
    happening.what() == What::Held
}

pub(crate) async fn kill(doomed: &Running) -> Result<()> {
    if doomed.daemon.is_running() {
        doomed.daemon.kill().await?;
    }
    Ok(())
}

pub(crate) fn standing(row: Option<KeyRow>) -> Left {
    match row {
        None => Left::Nothing,
        Some(row) if row.status == "completed" => Left::Completed,
        Some(row) => {
            assert_eq!((row.recovery_point.as_str(), row.attempts), ("sent", 1));
            Left::Sent
        }
    }
}

/// The dead API's own request arrives after the one that was sent again, and finds the key's answer there.
async fn the_late_charge_changes_nothing(control: &Control, ids: &Ids) -> Result<()> {
    control.release(&ids.provider_key).await?;
    let replayed = |happening: &semel_proto::provider::v1::Happening| happening.what() == What::Replayed;
    let happenings = control.wait_for("the late charge to arrive", &ids.provider_key, replayed).await?;
    let applied = place_of(&happenings, What::Applied, Call::Charge)?;
    ensure!(applied < place_of(&happenings, What::LetGo, Call::Charge)?, "it was not late: {happenings:?}");
    Ok(())
}

pub(crate) async fn events_of(connection: &mut PgConnection, ids: &Ids) -> Result<Vec<(String, uuid::Uuid)>> {
    let rows = sqlx::query("SELECT event_type, event_id FROM outbox WHERE aggregate_id = $1 ORDER BY id")
        .bind(ids.payment.to_string())
        .fetch_all(connection)
        .await?;
    rows.into_iter().map(|row| Ok((row.try_get("event_type")?, row.try_get("event_id")?))).collect()
}

/// The API lives, and only the connection dies: the same statement again finds the key completed, by itself.
#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_loses_the_answer_to_its_settlement_finds_it_and_answers() -> Result<()> {
    let system = start(0, &[]).await?;
    let wire = Wire::to(&system.place, "PaymentCreated", Loss::AnswerByReset).await?;
    let api = system.place.api("cut-off", &[("DATABASE_URL", &wire.url)]).await?;
    let payment = Payment::new("cut off", 4300);
    let ids = Ids::of(&payment.key)?;
    let answer = system.place.client(&api)?.pay(&payment).await?;
    wire.has_lost().await?;
    ensure!(!answer.is_replay(), "its own answer is marked as a replay");
    let told = answer.told(&payment.key)?;
    assert_eq!(told.status, "succeeded");
    assert_eq!(charges(&system.place.control()?, &ids.provider_key)?, 1);
    let looked = || async {
        let mut connection = system.place.payments.connect().await.ok()?;
        (events_of(&mut connection, &ids).await.ok()?.len() == 1).then_some(())
    };
    eventually("one event", EXIT, looked).await?;
    all_agree(&system, vec![told]).await?;
    api.daemon.terminate()?;
    ensure!(api.daemon.wait_exit(EXIT).await?.success(), "it does not stop");
    system.stop().await
}
