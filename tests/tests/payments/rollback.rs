//! A charge that arrives late against the rollback of its payment, in every order that there is, each order forced by the
//! provider's holds: never a charge without a succeeded payment, never a rolled-back payment with a charge.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind, Happening, Reason};
use semel_tests::client::Payment;
use semel_tests::gate::Gate;
use semel_tests::payments::{
    BOUND, Ids, all_agree, charges, completed, is_refusal, place_of, refusal, sends,
};
use semel_tests::provider::{Control, Fault};
use semel_tests::system::System;
use sqlx::Row as _;

use crate::support::{STUCK_SOON, all_told, given_up, in_full, place_to_start, start};

/// When the late charge arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Arrives {
    BeforeTheCancel,
    BetweenTheCancelAndItsAnswer,
    AfterTheRollback,
    /// After the cancel whose answer is lost, and before or after another reaper's.
    BeforeTheSecondCancel,
    AfterTheSecondCancel,
}

impl Arrives {
    const fn charges(self) -> bool {
        matches!(self, Self::BeforeTheCancel)
    }
}

/// A payment, and when its charge arrives.
struct Round {
    payment: Payment,
    ids: Ids,
    arrives: Arrives,
    happenings: Vec<Happening>,
    released: BTreeSet<String>,
}

impl Round {
    fn late(&self) -> String {
        self.ids.provider_key.clone()
    }

    fn cancel(&self) -> String {
        format!("cancel-{}", self.ids.provider_key)
    }

    fn saw(&self, what: What, call: Call) -> bool {
        self.happenings.iter().any(|seen| seen.what() == what && seen.call() == call)
    }

    /// The hold to release next, now that this much has happened.
    fn next(&self, is_rolled_back: bool) -> Option<String> {
        let fenced_off = || self.happenings.iter().any(|seen| is_refusal(seen, Call::Charge, Reason::Fenced));
        let releases: &[(bool, String)] = &match self.arrives {
            Arrives::BeforeTheCancel => [
                (self.saw(What::Held, Call::Cancel), self.late()),
                (self.saw(What::Applied, Call::Charge), self.cancel()),
            ],
            Arrives::BetweenTheCancelAndItsAnswer => {
                [(self.saw(What::Held, Call::Cancel), self.late()), (fenced_off(), self.cancel())]
            }
            _ => [(is_rolled_back, self.late()), (false, String::new())],
        };
        releases
            .iter()
            .find(|(now, hold)| *now && !self.released.contains(hold))
            .map(|(_, hold)| hold.clone())
    }

    fn is_over(&self) -> bool {
        let charge_ended = sends(&self.happenings) == 1;
        charge_ended
            && (!self.happenings.iter().any(|seen| seen.hold == self.cancel())
                || self.saw(What::LetGo, Call::Cancel))
    }

    /// Checks that things happened in the order that this round is for.
    fn check(&self) -> Result<()> {
        let at = |what, call| place_of(&self.happenings, what, call);
        let refused = |call, reason| refusal(&self.happenings, call, reason);
        let order = match self.arrives {
            Arrives::BeforeTheCancel => vec![
                at(What::Held, Call::Cancel)?,
                at(What::Applied, Call::Charge)?,
                at(What::LetGo, Call::Cancel)?,
                refused(Call::Cancel, Reason::AlreadySucceeded)?,
            ],
            Arrives::BetweenTheCancelAndItsAnswer => vec![
                at(What::Applied, Call::Cancel)?,
                at(What::Held, Call::Cancel)?,
                refused(Call::Charge, Reason::Fenced)?,
                at(What::LetGo, Call::Cancel)?,
            ],
            Arrives::AfterTheRollback => vec![
                at(What::Applied, Call::Cancel)?,
                at(What::LetGo, Call::Charge)?,
                refused(Call::Charge, Reason::Fenced)?,
            ],
            Arrives::BeforeTheSecondCancel => vec![
                at(What::Fault, Call::Cancel)?,
                at(What::Applied, Call::Cancel)?,
                refused(Call::Charge, Reason::Fenced)?,
                refused(Call::Cancel, Reason::AlreadyCanceled)?,
            ],
            Arrives::AfterTheSecondCancel => vec![
                at(What::Fault, Call::Cancel)?,
                at(What::Applied, Call::Cancel)?,
                refused(Call::Cancel, Reason::AlreadyCanceled)?,
                refused(Call::Charge, Reason::Fenced)?,
            ],
        };
        ensure!(order.is_sorted(), "{:?} did not happen: {:?}", self.arrives, self.happenings);
        ensure!(sends(&self.happenings) == 1, "somebody sent again: {:?}", self.happenings);
        ensure!(self.charges_at_most_fits(), "both charged and fenced: {:?}", self.happenings);
        Ok(())
    }

    fn charges_at_most_fits(&self) -> bool {
        self.saw(What::Applied, Call::Charge) == self.arrives.charges()
            && self.saw(What::Applied, Call::Cancel) != self.arrives.charges()
    }
}

/// Payments whose charge is on its way for as long as the test wants, and whose API has given it up.
async fn stuck(system: &System, control: &Control, arrivals: &[Arrives]) -> Result<Vec<Round>> {
    let mut rounds = Vec::new();
    for (number, &arrives) in arrivals.iter().enumerate() {
        let payment = Payment::new(&format!("round-{number}"), 1000 + i64::try_from(number)?);
        let ids = Ids::of(&payment.key)?;
        let round = Round { payment, ids, arrives, happenings: Vec::new(), released: BTreeSet::new() };
        let late = Fault::new(FaultKind::ApplyLate, Call::Charge).hold(&round.late());
        let cancel = |kind| Fault::new(kind, Call::Cancel);
        let faults = match arrives {
            Arrives::BeforeTheCancel => vec![late, cancel(FaultKind::HoldBeforeApply).hold(&round.cancel())],
            Arrives::BetweenTheCancelAndItsAnswer => {
                vec![late, cancel(FaultKind::HoldAfterApply).hold(&round.cancel())]
            }
            Arrives::AfterTheRollback => vec![late],
            Arrives::BeforeTheSecondCancel | Arrives::AfterTheSecondCancel => {
                vec![late, cancel(FaultKind::AnswerLost)]
            }
        };
        for fault in faults {
            control.order(fault.key(&round.ids.provider_key).times(1)).await?;
        }
        rounds.push(round);
    }
    let asked: Vec<Payment> = rounds.iter().map(|round| round.payment.clone()).collect();
    given_up(system, control, &asked).await?;
    Ok(rounds)
}

/// Asks all clients' questions, and checks each round by what happened.
async fn conclude(system: System, control: &Control, mut rounds: Vec<Round>) -> Result<usize> {
    let payments: Vec<Payment> = rounds.iter().map(|round| round.payment.clone()).collect();
    let told = all_told(&system.client(0)?, &payments).await?;
    for (round, told) in rounds.iter_mut().zip(&told) {
        round.happenings = control.happenings(&round.ids.provider_key).await?;
        round.check()?;
        let charged = charges(control, &round.ids.provider_key)?;
        assert_eq!(charged, usize::from(round.arrives.charges()), "{:?}", round.arrives);
        assert_eq!(told.status, if charged == 1 { "succeeded" } else { "canceled" }, "{:?}", round.arrives);
    }
    all_agree(&system, told).await?;
    system.stop().await?;
    Ok(rounds.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_charge_and_a_rollback_never_both_happen_whichever_comes_first() -> Result<()> {
    let (first, second) = tokio::try_join!(first_cancels(), second_cancels())?;
    println!("{first} rounds with one cancel, {second} with two");
    Ok(())
}

/// The late charge before, during and after the one cancel there is.
async fn first_cancels() -> Result<usize> {
    let mut system = start(2, STUCK_SOON).await?;
    // The second reaper: they share the work.
    let second = system.place.reaper("reaper-2", &[]).await?;
    let control = system.place.control()?;
    let each = if in_full() { 50 } else { 3 };
    let orders = [Arrives::BeforeTheCancel, Arrives::BetweenTheCancelAndItsAnswer, Arrives::AfterTheRollback];
    let arrivals: Vec<Arrives> = orders.into_iter().cycle().take(orders.len() * each).collect();
    let mut rounds = stuck(&system, &control, &arrivals).await?;
    force(&system, &control, &mut rounds).await?;
    system.apis.push(second);
    conclude(system, &control, rounds).await
}

/// Releases each round's holds in the order that it is for, until all late charges have arrived.
async fn force(system: &System, control: &Control, rounds: &mut [Round]) -> Result<()> {
    let places: HashMap<String, usize> =
        rounds.iter().enumerate().map(|(place, round)| (round.ids.provider_key.clone(), place)).collect();
    let mut connection = system.place.payments.connect().await?;
    let (began, mut last) = (Instant::now(), 0);
    loop {
        for happening in control.happenings_after(last, "").await? {
            last = happening.sequence;
            if let Some(&place) = places.get(&happening.key) {
                rounds[place].happenings.push(happening);
            }
        }
        let canceled = "SELECT provider_key FROM payments WHERE status = 'canceled'";
        let canceled = sqlx::query(canceled).fetch_all(&mut connection).await?;
        let canceled: BTreeSet<String> =
            canceled.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        for round in rounds.iter_mut() {
            if let Some(hold) = round.next(canceled.contains(&round.ids.provider_key)) {
                control.release(&hold).await?;
                round.released.insert(hold);
            }
        }
        let open: Vec<&Round> = rounds.iter().filter(|round| !round.is_over()).collect();
        let Some(first) = open.first() else { return Ok(()) };
        if began.elapsed() > Duration::from_mins(2) {
            bail!("{} rounds are open, first {:?}: {:?}", open.len(), first.arrives, first.happenings);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The late charge before and after the second cancel, the answer to the first being lost.
async fn second_cancels() -> Result<usize> {
    let (systems, each) = if in_full() { (9, 6) } else { (1, 4) };
    let rounds = stream::iter((0..systems).map(|_| second_cancel(each))).buffer_unordered(3);
    let rounds: Vec<usize> = rounds.try_collect().await?;
    Ok(rounds.iter().sum())
}

/// A reaper dies that has lost the answers to its cancels; another one cancels again.
async fn second_cancel(each: usize) -> Result<usize> {
    let mut system = start(1, STUCK_SOON).await?;
    let control = system.place.control()?;
    let orders = [Arrives::BeforeTheSecondCancel, Arrives::AfterTheSecondCancel];
    let arrivals: Vec<Arrives> = orders.into_iter().cycle().take(each).collect();
    // The first reaper is started when all of them are due: it takes nothing more while it waits for answers.
    system.reaper.daemon.kill().await?;
    let rounds = stuck(&system, &control, &arrivals).await?;
    let (place, gate) = (place_to_start().await?, Gate::at("payments.after_cancel"));
    system.reaper = system.place.reaper("first", &gate.env()?).await?;
    for round in &rounds {
        let is_fenced = |seen: &Happening| seen.what() == What::Applied && seen.call() == Call::Cancel;
        control.wait_for("the first cancel", &round.ids.provider_key, is_fenced).await?;
    }
    // All of them: one that went on would ask, and settle by what it is told.
    gate.wait_for(each).await?;
    system.reaper.daemon.kill().await?;
    drop(place);
    for round in rounds.iter().filter(|round| round.arrives == Arrives::BeforeTheSecondCancel) {
        control.release(&round.late()).await?;
        let fenced_off = |seen: &Happening| is_refusal(seen, Call::Charge, Reason::Fenced);
        control.wait_for("the late charge to meet the fence", &round.ids.provider_key, fenced_off).await?;
    }
    system.reaper = system.place.reaper("second", &[]).await?;
    let keys: Vec<String> = rounds.iter().map(|round| round.payment.key.clone()).collect();
    completed(&system, &keys, BOUND).await?;
    for round in rounds.iter().filter(|round| round.arrives == Arrives::AfterTheSecondCancel) {
        control.release(&round.late()).await?;
        let fenced_off = |seen: &Happening| is_refusal(seen, Call::Charge, Reason::Fenced);
        control.wait_for("the late charge to meet the fence", &round.ids.provider_key, fenced_off).await?;
    }
    conclude(system, &control, rounds).await
}
