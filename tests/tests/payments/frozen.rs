//! An API that freezes with a payment in its hands, for longer than its lease: the reaper finishes; when it continues, what it
//! does shows in the evidence alone, and its client gets the stored answer.

use anyhow::{Context as _, Result, ensure};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind, Happening};
use semel_tests::client::{Payment, ToldPayment};
use semel_tests::gate::Gate;
use semel_tests::payments::{BOUND, Ids, all_agree, charges, completed, evidence, untouchable};
use semel_tests::provider::{Control, Fault};
use semel_tests::system::{Running, System};

use crate::support::{Asked, EXIT, connected, place_to_start, start, told};

/// Where it freezes.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// At a failpoint.
    At(&'static str),
    /// While the provider waits with the charge at this fault's hold.
    Provider(FaultKind),
}

/// A step, and how many answers of the provider are written down in the end, if that is certain: what arrives while it is
/// frozen is read or timed out, as it happens.
type Row = (&'static str, Step, Option<i64>);

const ROWS: [Row; 7] = [
    ("before tx 1", Step::At("api.before_execute"), Some(1)),
    ("before it sends", Step::At("payments.before_send"), Some(2)),
    ("the request on its way, and late", Step::Provider(FaultKind::ApplyLate), None),
    ("the provider at work", Step::Provider(FaultKind::HoldBeforeApply), None),
    ("the provider's answer on its way", Step::Provider(FaultKind::HoldAfterApply), None),
    ("after the answer", Step::At("payments.after_answer"), Some(2)),
    ("after tx 2", Step::At("payments.after_settle"), Some(1)),
];

/// A frozen API and what it has in its hands.
struct Frozen {
    row: Row,
    api: Running,
    gate: Option<Gate>,
    asked: Asked,
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_frozen_past_its_lease_touches_nothing_but_evidence_afterwards() -> Result<()> {
    let system = start(1, &[]).await?;
    let control = system.place.control()?;
    let freezing = ROWS.map(|row| freeze(&system, &control, row));
    let frozen = futures_util::future::try_join_all(freezing).await?;

    // No key yet: there is nothing for the reaper, and the client's retry at another API does it all.
    told(&system.client(0)?, &frozen[0].asked.payment).await?;
    for frozen in &frozen {
        if let Step::Provider(FaultKind::HoldBeforeApply | FaultKind::HoldAfterApply) = frozen.row.1 {
            control.release(&frozen.asked.ids.provider_key).await?;
        }
    }
    let keys: Vec<String> = frozen.iter().map(|frozen| frozen.asked.payment.key.clone()).collect();
    completed(&system, &keys, BOUND).await?;
    for frozen in &frozen {
        assert_eq!(charges(&control, &frozen.asked.ids.provider_key)?, 1, "{}", frozen.row.0);
        control.release(&frozen.asked.ids.provider_key).await?;
    }
    system.place.settled(EXIT).await?;
    let before = untouchable(&system).await?;

    for frozen in &frozen {
        if let Some(gate) = &frozen.gate {
            gate.open()?;
        }
        frozen.api.daemon.cont()?;
    }
    let mut all = Vec::new();
    for frozen in frozen {
        let name = frozen.row.0;
        all.push(thaw(&system, &control, frozen, &before).await.with_context(|| name)?);
    }
    assert_eq!(untouchable(&system).await?, before, "a stale owner wrote");
    all_agree(&system, all).await?;
    system.stop().await
}

async fn freeze(system: &System, control: &Control, row: Row) -> Result<Frozen> {
    let (name, step, _) = row;
    let _place = place_to_start().await?;
    let payment = Payment::new(&format!("frozen: {name}"), 4400);
    let gate = match step {
        Step::At(failpoint) => Some(Gate::at(failpoint)),
        Step::Provider(_) => None,
    };
    let env = gate.as_ref().map(Gate::env).transpose()?;
    let env = env.as_ref().map_or(&[][..], |env| &env[..]);
    let api = system.place.api(&format!("frozen-{}", payment.key), env).await?;
    let key = Ids::of(&payment.key)?.provider_key;
    if let Step::Provider(kind) = step {
        control.order(Fault::new(kind, Call::Charge).key(&key).times(1).hold(&key)).await?;
    }
    connected(system, &api).await?;
    let asked = Asked::of(system, &api, payment)?;
    match &gate {
        Some(gate) => gate.wait_for(1).await?,
        None => {
            drop(control.wait_for("the charge to be held", &key, |seen| seen.what() == What::Held).await?);
        }
    }
    api.daemon.freeze().await?;
    Ok(Frozen { row, api, gate, asked })
}

/// Lets one of them end what it had in its hands, and returns what its client is told.
async fn thaw(system: &System, control: &Control, frozen: Frozen, before: &[String]) -> Result<ToldPayment> {
    let Frozen { row: (name, step, evident), api, gate: _gate, asked } = frozen;
    let (payment, ids) = (asked.payment.clone(), asked.ids.clone());
    // The stored answer; or, after that long, that it took too long, and its retry has the stored answer.
    let answer = asked.answer().await?;
    let stored = system.client(0)?.pay(&payment).await?;
    if answer.headers.contains_key("retry-after") {
        assert_eq!(answer.problem().as_deref(), Some("outcome-unknown"), "{name}");
    } else {
        ensure!(answer.status == stored.status && answer.body == stored.body, "{name}: {answer:?}");
    }
    let (told, retry) = told(&system.place.client(&api)?, &payment).await?;
    ensure!(retry.is_replay() && retry.body == stored.body, "{name}: not the stored answer: {retry:?}");
    assert_eq!(told.status, "succeeded", "{name}");

    if matches!(step, Step::At("payments.before_send")) {
        // Long after the time until which it may start; but its key has an answer by now.
        let replayed = |happening: &Happening| happening.what() == What::Replayed;
        control.wait_for("the charge of one that was frozen", &ids.provider_key, replayed).await?;
    }
    // A stop waits for what it still does.
    api.daemon.terminate()?;
    let status = api.daemon.wait_exit(EXIT).await?;
    ensure!(status.success(), "{name}: it left with {status}: {:?}", api.daemon.lines());
    assert_eq!(untouchable(system).await?, before, "{name}: a stale owner wrote");
    let written = evidence(system, ids.payment).await?;
    ensure!(evident.is_none_or(|evident| evident == written), "{name}: {written} answers are written down");
    assert_eq!(charges(control, &ids.provider_key)?, 1, "{name}");
    Ok(told)
}
