//! A reaper that dies or freezes between the word that nobody sends any more and the end: another one finishes, nobody sends,
//! and the payment is rolled back or charged, never both.

use anyhow::{Context as _, Result, ensure};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind, Happening, Reason};
use semel_tests::client::Payment;
use semel_tests::gate::Gate;
use semel_tests::payments::{
    BOUND, Ids, all_agree, charges, completed, evidence, is_refusal, key_row, sends, untouchable,
};
use semel_tests::provider::{Control, Fault};
use semel_tests::system::{Running, System};

use crate::support::{EXIT, STUCK_SOON, all_told, given_up, place_to_start, start};

/// How many payments one reaper has in its hands: half are charged late and half are not. It drives 16 at a time.
const PAYMENTS: usize = 4;

/// Where the reaper is caught.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    /// Nobody sends any more, and the cancel is not sent.
    BeforeTheCancel,
    /// The provider has answered the cancel.
    AfterTheCancel,
}

/// What becomes of it there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fate {
    Killed,
    /// Until its leases are over and another one has finished.
    Frozen,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reaper_that_dies_or_freezes_while_it_cancels_is_succeeded_by_another() -> Result<()> {
    // Side by side: what takes long is that a lease ends.
    tokio::try_join!(
        async { caught(Step::BeforeTheCancel, Fate::Killed).await.context("killed before the cancel") },
        async { caught(Step::AfterTheCancel, Fate::Killed).await.context("killed after the cancel") },
        async { caught(Step::BeforeTheCancel, Fate::Frozen).await.context("frozen before the cancel") },
        async { caught(Step::AfterTheCancel, Fate::Frozen).await.context("frozen after the cancel") },
    )?;
    Ok(())
}

/// A payment whose first request is under way for as long as the test wants.
struct Late {
    payment: Payment,
    ids: Ids,
    /// Whether that request is let in before the cancel.
    charged: bool,
}

async fn caught(step: Step, fate: Fate) -> Result<()> {
    let system = start(1, STUCK_SOON).await?;
    system.reaper.daemon.kill().await?;
    let control = system.place.control()?;
    let payments = stuck(&system, &control, step).await?;
    let keys: Vec<String> = payments.iter().map(|late| late.payment.key.clone()).collect();

    let gate = Gate::at(match step {
        Step::BeforeTheCancel => "payments.after_canceling",
        Step::AfterTheCancel => "payments.after_cancel",
    });
    let place = place_to_start().await?;
    let reaper = system.place.reaper("caught", &gate.env()?).await?;
    if step == Step::AfterTheCancel {
        let_in_before_the_cancel(&control, &payments).await?;
    }
    gate.wait_for(PAYMENTS).await?;
    drop(place);
    match fate {
        Fate::Killed => drop(reaper.daemon.kill().await?),
        Fate::Frozen => reaper.daemon.freeze().await?,
    }
    nothing_but_the_word_is_written(&system, &payments).await?;
    if step == Step::BeforeTheCancel {
        for late in payments.iter().filter(|late| late.charged) {
            control.release(&late.ids.provider_key).await?;
            control.wait_for("the late charge", &late.ids.provider_key, is_charged).await?;
        }
    }

    let heir = system.place.reaper("heir", &[]).await?;
    // Some of the clients ask meanwhile; they drive it on as well, and must not send either.
    let hurried: Vec<Payment> = payments.iter().step_by(3).map(|late| late.payment.clone()).collect();
    let client = system.client(0)?;
    tokio::try_join!(all_told(&client, &hurried), completed(&system, &keys, BOUND))?;
    for late in payments.iter().filter(|late| !late.charged) {
        control.release(&late.ids.provider_key).await?;
        control.wait_for("the late charge to meet the fence", &late.ids.provider_key, is_fenced_off).await?;
    }
    let asked: Vec<Payment> = payments.iter().map(|late| late.payment.clone()).collect();
    let told = all_told(&client, &asked).await?;
    for (late, told) in payments.iter().zip(&told) {
        assert_eq!(
            told.status,
            if late.charged { "succeeded" } else { "canceled" },
            "{}",
            late.payment.reference
        );
        assert_eq!(charges(&control, &late.ids.provider_key)?, usize::from(late.charged));
        let happenings = control.happenings(&late.ids.provider_key).await?;
        assert_eq!(sends(&happenings), 1, "somebody sent again: {happenings:?}");
    }
    if fate == Fate::Frozen {
        wakes_without_a_trace(&system, &control, &reaper, &gate, step, &payments).await?;
    }
    all_agree(&system, told).await?;
    heir.daemon.terminate()?;
    ensure!(heir.daemon.wait_exit(EXIT).await?.success(), "the heir does not stop");
    system.stop().await
}

/// Payments whose request dawdles on its way, until their API has given it up and the send window is over.
async fn stuck(system: &System, control: &Control, step: Step) -> Result<Vec<Late>> {
    let mut payments = Vec::new();
    for number in 0..PAYMENTS {
        let payment = Payment::new(&format!("late-{number}"), 6000 + i64::try_from(number)?);
        let late = Late { ids: Ids::of(&payment.key)?, charged: number % 2 == 0, payment };
        let key = &late.ids.provider_key;
        control.order(Fault::new(FaultKind::ApplyLate, Call::Charge).key(key).times(1).hold(key)).await?;
        if late.charged && step == Step::AfterTheCancel {
            let fault = Fault::new(FaultKind::HoldBeforeApply, Call::Cancel).key(key).times(1);
            control.order(fault.hold(&cancel_hold(&late.ids))).await?;
        }
        payments.push(late);
    }
    let asked: Vec<Payment> = payments.iter().map(|late| late.payment.clone()).collect();
    given_up(system, control, &asked).await?;
    Ok(payments)
}

/// The provider's answer to the cancel is then that it has charged.
async fn let_in_before_the_cancel(control: &Control, payments: &[Late]) -> Result<()> {
    for late in payments.iter().filter(|late| late.charged) {
        let cancel_is_held = |happening: &Happening| is_held(happening) && happening.call() == Call::Cancel;
        control.wait_for("the cancel to be held", &late.ids.provider_key, cancel_is_held).await?;
        control.release(&late.ids.provider_key).await?;
        control.wait_for("the late charge", &late.ids.provider_key, is_charged).await?;
        control.release(&cancel_hold(&late.ids)).await?;
    }
    Ok(())
}

async fn nothing_but_the_word_is_written(system: &System, payments: &[Late]) -> Result<()> {
    let mut connection = system.place.payments.connect().await?;
    for late in payments {
        let key = key_row(&mut connection, &late.payment.key).await?;
        let seen = key.map(|key| (key.status, key.recovery_point));
        assert_eq!(
            seen,
            Some(("in_progress".to_owned(), "canceling".to_owned())),
            "{}",
            late.payment.reference
        );
        assert_eq!(evidence(system, late.ids.payment).await?, 0, "{}", late.payment.reference);
    }
    Ok(())
}

/// The frozen reaper wakes with leases that are over: what it does then shows in the evidence alone.
async fn wakes_without_a_trace(
    system: &System,
    control: &Control,
    reaper: &Running,
    gate: &Gate,
    step: Step,
    payments: &[Late],
) -> Result<()> {
    system.place.settled(EXIT).await?;
    let before = untouchable(system).await?;
    gate.open()?;
    reaper.daemon.cont()?;
    // A stop waits for what it has in its hands.
    reaper.daemon.terminate()?;
    let status = reaper.daemon.wait_exit(EXIT).await?;
    ensure!(status.success(), "it left with {status}: {:?}", reaper.daemon.lines());
    assert_eq!(untouchable(system).await?, before, "a stale owner wrote");
    for late in payments {
        let written = evidence(system, late.ids.payment).await?;
        if step == Step::AfterTheCancel && !late.charged {
            assert_eq!(written, 2, "what the frozen one had been told is written down");
        } else {
            // Its connection to the provider may have been given up meanwhile, and it asks in vain.
            ensure!((1..=2).contains(&written), "{written} answers are written down");
        }
        let happenings = control.happenings(&late.ids.provider_key).await?;
        assert_eq!(sends(&happenings), 1, "somebody sent again: {happenings:?}");
    }
    Ok(())
}

fn cancel_hold(ids: &Ids) -> String {
    format!("cancel-{}", ids.provider_key)
}

fn is_held(happening: &Happening) -> bool {
    happening.what() == What::Held
}

fn is_charged(happening: &Happening) -> bool {
    happening.what() == What::Applied && happening.call() == Call::Charge
}

fn is_fenced_off(happening: &Happening) -> bool {
    is_refusal(happening, Call::Charge, Reason::Fenced)
}
