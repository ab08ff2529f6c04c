//! The book comes first: nobody is told what it does not hold, and a restart knows what it holds.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::sync::{Arc, Condvar, Mutex};

use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, CountCallsRequest, FaultKind, OrderFaultRequest, Reason, charge};
use semel_provider_sim::book::Storage;
use tonic::Code;

use crate::rig::{Rig, Scratch, eventually, fault, reason};

#[tokio::test]
async fn a_restart_gives_the_same_answers() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let charged = rig.client.charge("charged").await.unwrap();
    let fenced = rig.client.cancel("fenced").await.unwrap();
    let refunded = rig.client.refund("r", "charged", 400).await.unwrap();
    let known = rig.client.get("charged").await.unwrap();
    rig.stop().await;

    let rig = Rig::start(&book.0).await;
    assert_eq!(rig.client.charge("charged").await.unwrap(), charged);
    assert_eq!(rig.client.get("charged").await.unwrap(), known);
    assert_eq!(rig.client.get("fenced").await.unwrap(), fenced);
    assert_eq!(reason(rig.client.charge("fenced").await), Reason::Fenced);
    assert_eq!(rig.client.refund("r", "charged", 400).await.unwrap(), refunded);
    assert_eq!(reason(rig.client.refund("s", "charged", 601).await), Reason::ExceedsCharge);
    rig.client.charge("new").await.unwrap();
    let numbers: Vec<_> = book.entries().iter().map(|entry| entry.seq).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    rig.stop().await;
}

#[tokio::test]
async fn a_torn_last_line_has_not_happened() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    rig.client.charge("k").await.unwrap();
    rig.stop().await;
    let whole = fs::read(&book.0).unwrap();
    let mut file = OpenOptions::new().append(true).open(&book.0).unwrap();
    file.write_all(&whole[..whole.len() / 2]).unwrap();

    let rig = Rig::start(&book.0).await;
    assert_eq!(fs::read(&book.0).unwrap(), whole);
    rig.client.charge("other").await.unwrap();
    assert_eq!(book.entries().len(), 2);
    rig.stop().await;
}

/// A storage that a test opens and breaks.
#[derive(Clone, Default)]
struct Gate {
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Default)]
struct State {
    broken: bool,
    shut: bool,
    waiting: bool,
    lines: Vec<u8>,
}

impl Gate {
    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.0.lock().unwrap());
        self.state.1.notify_all();
    }

    fn get<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.0.lock().unwrap())
    }
}

impl Storage for Gate {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut state = self.state.0.lock().unwrap();
        state.waiting = true;
        while state.shut {
            state = self.state.1.wait(state).unwrap();
        }
        state.waiting = false;
        if state.broken {
            return Err(io::Error::other("broken"));
        }
        state.lines.extend_from_slice(lines);
        Ok(())
    }
}

#[tokio::test]
async fn a_book_that_fails_means_that_nothing_was_applied() {
    let gate = Gate::default();
    let rig = Rig::over(Box::new(gate.clone()), &[]).await;
    let client = &rig.client;
    client.charge("before").await.unwrap();
    gate.set(|state| state.broken = true);
    assert_eq!(client.charge("k").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.cancel("fenced").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.refund("r", "before", 1).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.get("k").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(client.get("fenced").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(client.get("before").await.unwrap().refunded, 0);
    assert!(client.happenings("k").await.is_empty());
    gate.set(|state| state.broken = false);
    client.charge("k").await.unwrap();
    let lines = gate.get(|state| String::from_utf8(state.lines.clone()).unwrap());
    assert_eq!(lines.lines().count(), 2);
    rig.stop().await;
}

#[tokio::test]
async fn nobody_is_told_before_the_line_is_written() {
    let gate = Gate::default();
    let rig = Rig::over(Box::new(gate.clone()), &[]).await;
    let client = &rig.client;
    gate.set(|state| state.shut = true);
    let charging = client.charging("k");
    eventually("the line to be on its way", async || gate.get(|state| state.waiting).then_some(())).await;
    // These are behind the line, too: a look-up must not tell what is not yet written.
    let looking = tokio::spawn({
        let client = client.clone();
        async move { client.get("k").await }
    });
    let canceling = client.canceling("k");
    eventually("all three calls to have come in", async || {
        let calls = client.control.clone().count_calls(CountCallsRequest {}).await.unwrap().into_inner();
        (calls.charge + calls.get + calls.cancel == 3).then_some(())
    })
    .await;
    assert!(client.happenings("k").await.is_empty());
    assert!(!charging.is_finished() && !looking.is_finished() && !canceling.is_finished());
    gate.set(|state| state.shut = false);
    assert_eq!(charging.await.unwrap().unwrap().status(), charge::Status::Succeeded);
    assert_eq!(looking.await.unwrap().unwrap().status(), charge::Status::Succeeded);
    assert_eq!(reason(canceling.await.unwrap()), Reason::AlreadySucceeded);
    rig.stop().await;
}

#[tokio::test]
async fn a_stop_ends_what_waits_without_applying_it() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    for (key, kind) in [("held", FaultKind::HoldBeforeApply), ("late", FaultKind::ApplyLate)] {
        let hold = "never".to_owned();
        client.order(OrderFaultRequest { hold, ..fault(kind, Call::Charge, key) }).await;
    }
    client.order(fault(FaultKind::AnswerLost, Call::Charge, "lost")).await;
    let waiting = ["held", "late", "lost"].map(|key| client.charging(key));
    client.once("held", What::Held, Call::Charge).await;
    client.once("late", What::Held, Call::Charge).await;
    client.once("lost", What::Applied, Call::Charge).await;
    rig.stop().await;
    for call in waiting {
        assert_eq!(call.await.unwrap().unwrap_err().code(), Code::Unavailable);
    }
    let keys: Vec<_> = book.entries().into_iter().map(|entry| entry.key).collect();
    assert_eq!(keys, ["lost"]);
}
