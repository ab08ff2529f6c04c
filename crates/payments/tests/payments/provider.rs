//! A provider in memory: honest, unless a test says otherwise.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use semel_payments::provider::{
    Answer, Charged, Dedup, Fencing, LookUp, Prepared, Promises, Provider, StoredCharge, StoredRefund,
};
use tokio::sync::Semaphore;

/// What it can be called for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Call {
    Prepare,
    Charge,
    Get,
    Cancel,
    Refund,
    GetRefund,
}

/// What one call does instead of the honest thing.
#[derive(Clone, Debug)]
enum Script {
    /// Answers so, and does nothing.
    Say(Answer),
    /// Does the honest thing, and answers so.
    DoAndSay(Answer),
    /// Does the honest thing, waits, and answers honestly.
    Hold(Hold),
    /// Does nothing, waits, and answers so.
    HoldAndSay(Hold, Answer),
}

/// Where a call waits.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    reached: Arc<Semaphore>,
    released: Arc<Semaphore>,
}

impl Hold {
    fn new() -> Self {
        Self { reached: Arc::new(Semaphore::new(0)), released: Arc::new(Semaphore::new(0)) }
    }

    async fn wait(&self) {
        self.reached.add_permits(1);
        self.released.acquire().await.unwrap().forget();
    }

    /// Waits until a call waits here.
    pub(crate) async fn reached(&self) {
        let waiting = tokio::time::timeout(crate::bed::DEADLINE, self.reached.acquire());
        waiting.await.expect("waited for a call to be held").unwrap().forget();
    }

    /// Lets the call go on.
    pub(crate) fn release(&self) {
        self.released.add_permits(1);
    }
}

/// The provider; clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Scripted {
    name: &'static str,
    promises: Promises,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// All calls, in order.
    calls: Vec<Call>,
    /// What it was asked to charge, in order.
    sent: Vec<(StoredCharge, SystemTime)>,
    /// What it was asked to refund, in order.
    refunds: Vec<(StoredRefund, SystemTime)>,
    /// How often money moved, by key.
    moved: HashMap<String, u32>,
    /// How often money was given back, by the refund's key.
    given: HashMap<String, u32>,
    fenced: HashSet<String>,
    scripts: HashMap<Call, VecDeque<Script>>,
    closed: bool,
}

impl Scripted {
    pub(crate) fn new() -> Self {
        let promises = Promises { dedup: Dedup::ForEver, look_up: LookUp::ByKey, fence: Fencing::Cancel };
        Self { name: "scripted", promises, state: Arc::default() }
    }

    /// Has another name, and knows nothing.
    pub(crate) fn named(name: &'static str) -> Self {
        Self { name, ..Self::new() }
    }

    /// Promises other things.
    pub(crate) fn promising(mut self, promises: Promises) -> Self {
        self.promises = promises;
        self
    }

    fn then(&self, call: Call, script: Script) {
        self.state.lock().unwrap().scripts.entry(call).or_default().push_back(script);
    }

    /// Has the next such call answered so, with nothing done.
    pub(crate) fn say(&self, call: Call, answer: Answer) {
        self.then(call, Script::Say(answer));
    }

    /// Has the next such call done, and answered so.
    pub(crate) fn do_and_say(&self, call: Call, answer: Answer) {
        self.then(call, Script::DoAndSay(answer));
    }

    /// Has the answer of the next such call held, when it is done.
    pub(crate) fn hold(&self, call: Call) -> Hold {
        let hold = Hold::new();
        self.then(call, Script::Hold(hold.clone()));
        hold
    }

    /// Has the answer of the next such call held; it is this one, with nothing done.
    pub(crate) fn hold_and_say(&self, call: Call, answer: Answer) -> Hold {
        let hold = Hold::new();
        self.then(call, Script::HoldAndSay(hold.clone(), answer));
        hold
    }

    /// Is not to be called at the moment.
    pub(crate) fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    /// All calls so far, in order.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state.lock().unwrap().calls.clone()
    }

    /// Key and bytes of what it was asked to charge, in order.
    pub(crate) fn sent(&self) -> Vec<(String, Vec<u8>)> {
        let state = self.state.lock().unwrap();
        state.sent.iter().map(|(charge, _)| (charge.key.clone(), charge.request.clone())).collect()
    }

    /// Until when each of these may start.
    pub(crate) fn not_after(&self) -> Vec<SystemTime> {
        self.state.lock().unwrap().sent.iter().map(|(_, not_after)| *not_after).collect()
    }

    /// What the charges were prepared as that it was asked to make, in order.
    pub(crate) fn charged_as(&self) -> Vec<Option<String>> {
        let state = self.state.lock().unwrap();
        state.sent.iter().map(|(charge, _)| charge.reference.clone()).collect()
    }

    /// How often money moved, all in all.
    pub(crate) fn moved(&self) -> u32 {
        self.state.lock().unwrap().moved.values().sum()
    }

    /// How often money moved under a key.
    pub(crate) fn moved_by(&self, key: impl AsRef<str>) -> u32 {
        self.state.lock().unwrap().moved.get(key.as_ref()).copied().unwrap_or_default()
    }

    /// Key and bytes of what it was asked to refund, in order.
    pub(crate) fn refunds(&self) -> Vec<(String, Vec<u8>)> {
        let state = self.state.lock().unwrap();
        state.refunds.iter().map(|(refund, _)| (refund.key.clone(), refund.request.clone())).collect()
    }

    /// Until when each of these may start.
    pub(crate) fn refund_not_after(&self) -> Vec<SystemTime> {
        self.state.lock().unwrap().refunds.iter().map(|(_, not_after)| *not_after).collect()
    }

    /// How much money was given back, all in all.
    pub(crate) fn given(&self) -> i64 {
        let state = self.state.lock().unwrap();
        let amount =
            |key: &String| state.refunds.iter().find(|(refund, _)| refund.key == *key).unwrap().0.amount;
        state.given.iter().map(|(key, times)| amount(key) * i64::from(*times)).sum()
    }

    async fn answer(&self, call: Call, key: &str) -> Answer {
        on_its_way().await;
        let answer = self.answer_at_once(call, key).await;
        on_its_way().await;
        answer
    }

    async fn answer_at_once(&self, call: Call, key: &str) -> Answer {
        let script = {
            let mut state = self.state.lock().unwrap();
            state.calls.push(call);
            state.scripts.get_mut(&call).and_then(VecDeque::pop_front)
        };
        match script {
            None => self.honestly(call, key),
            Some(Script::Say(answer)) => answer,
            Some(Script::DoAndSay(answer)) => {
                self.honestly(call, key);
                answer
            }
            Some(Script::Hold(hold)) => {
                let answer = self.honestly(call, key);
                hold.wait().await;
                answer
            }
            Some(Script::HoldAndSay(hold, answer)) => {
                hold.wait().await;
                answer
            }
        }
    }

    fn honestly(&self, call: Call, key: &str) -> Answer {
        let mut state = self.state.lock().unwrap();
        let succeeded = Answer::Succeeded { reference: format!("ch_{key}") };
        let refunded = Answer::Succeeded { reference: format!("re_{key}") };
        let given = state.given.contains_key(key);
        let (moved, fenced) = (state.moved.contains_key(key), state.fenced.contains(key));
        match call {
            Call::Prepare => Answer::Succeeded { reference: format!("pi_{key}") },
            Call::Charge | Call::Get if fenced => Answer::Fenced,
            Call::Charge if moved && self.promises.dedup != Dedup::None => succeeded,
            Call::Charge => {
                *state.moved.entry(key.to_owned()).or_default() += 1;
                succeeded
            }
            Call::Get if moved => succeeded,
            Call::GetRefund if given => refunded,
            Call::Get | Call::GetRefund => Answer::NotFound,
            Call::Refund if given && self.promises.dedup != Dedup::None => refunded,
            Call::Refund => {
                *state.given.entry(key.to_owned()).or_default() += 1;
                refunded
            }
            Call::Cancel if moved => unknown("it has succeeded"),
            Call::Cancel if fenced => unknown("it is fenced already"),
            Call::Cancel => {
                state.fenced.insert(key.to_owned());
                Answer::Fenced
            }
        }
    }
}

impl Provider for Scripted {
    fn name(&self) -> &'static str {
        self.name
    }

    fn promises(&self) -> Promises {
        self.promises
    }

    fn encode(&self, amount: i64, currency: &str, source: &str, reference: &str) -> Vec<u8> {
        format!("{amount} {currency} {source} {reference}").into_bytes()
    }

    fn is_open(&self) -> bool {
        !self.state.lock().unwrap().closed
    }

    /// A fence stands for "never".
    async fn prepare(&self, charge: &StoredCharge, _not_after: SystemTime) -> Prepared {
        match self.answer(Call::Prepare, &charge.key).await {
            Answer::Succeeded { reference } => Prepared::Reference(reference),
            Answer::Fenced => Prepared::Never { reason: "scripted".to_owned() },
            answer => Prepared::Answered(answer),
        }
    }

    async fn charge(&self, charge: &StoredCharge, not_after: SystemTime) -> Answer {
        self.state.lock().unwrap().sent.push((charge.clone(), not_after));
        self.answer(Call::Charge, &charge.key).await
    }

    async fn get(&self, charge: &StoredCharge) -> Answer {
        self.answer(Call::Get, &charge.key).await
    }

    async fn cancel(&self, charge: &StoredCharge) -> Answer {
        self.answer(Call::Cancel, &charge.key).await
    }

    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8> {
        format!("{} {} {amount}", charge.key, charge.reference).into_bytes()
    }

    async fn refund(&self, refund: &StoredRefund, not_after: SystemTime) -> Answer {
        self.state.lock().unwrap().refunds.push((refund.clone(), not_after));
        self.answer(Call::Refund, &refund.key).await
    }

    async fn get_refund(&self, refund: &StoredRefund) -> Answer {
        self.answer(Call::GetRefund, &refund.key).await
    }
}

/// Takes a few polls, at each of which whoever calls may go.
async fn on_its_way() {
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
}

pub(crate) fn unknown(reason: &str) -> Answer {
    Answer::Unknown { reason: reason.to_owned() }
}
