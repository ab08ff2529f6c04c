//! A provider in memory: idempotent, with fences, and with answers to order.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use semel_payments::payments::create::MakePayment;
use semel_payments::problem::ProblemBase;
use semel_payments::provider::{
    Answer, Charged, Dedup, Fencing, List, Listed, ListedMove, LookUp, Promises, Provider, StoredCharge,
    StoredRefund,
};

use tokio::sync::Notify;

/// How many charges a page of the list has.
const PAGE: usize = 3;

/// One client's view of the provider; clones share the provider.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    /// Who calls, so that calls can be told apart.
    caller: &'static str,
    promises: Promises,
    book: Arc<Mutex<Book>>,
    spoke: Arc<Notify>,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    /// In the order in which they were made.
    pub(crate) charges: Vec<ListedMove>,
    /// Refunds that only the list knows, in order.
    pub(crate) given_back: Vec<ListedMove>,
    /// Keys of the refunds that were made, in order.
    pub(crate) refunds: Vec<String>,
    pub(crate) fences: HashSet<String>,
    /// Answers to charges of these keys, instead of charging.
    pub(crate) instead: HashMap<String, Answer>,
    /// Keys whose calls panic.
    pub(crate) cursed: HashSet<String>,
    /// Keys whose charges are not answered until [`Desk::speak`].
    pub(crate) silent: HashSet<String>,
    /// Keys of which nothing can be told, and which cannot be fenced.
    pub(crate) unclear: HashSet<String>,
    /// Caller, call and key.
    pub(crate) calls: Vec<(&'static str, &'static str, String)>,
    pub(crate) lists: usize,
    /// Lists that are not answered.
    pub(crate) failing: HashSet<List>,
    /// Lists that there are not.
    pub(crate) missing: HashSet<List>,
}

impl Desk {
    pub(crate) fn new() -> Self {
        let promises = Promises { dedup: Dedup::ForEver, look_up: LookUp::ByKey, fence: Fencing::Cancel };
        Self { caller: "", promises, book: Arc::default(), spoke: Arc::default() }
    }

    /// One that can only charge, and forgets whom.
    pub(crate) fn primitive() -> Self {
        let promises = Promises { dedup: Dedup::None, look_up: LookUp::None, fence: Fencing::None };
        Self { promises, ..Self::new() }
    }

    /// Answers what it was silent about.
    pub(crate) fn speak(&self) {
        self.book().silent.clear();
        self.spoke.notify_one();
    }

    pub(crate) fn for_caller(&self, caller: &'static str) -> Self {
        Self { caller, ..self.clone() }
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Charges behind everybody's back.
    pub(crate) fn charge_under(&self, key: &str) -> String {
        let reference = format!("ch_{}", self.book().charges.len());
        self.book().charges.push(ListedMove {
            key: key.to_owned(),
            reference: reference.clone(),
            amount: 1250,
            currency: "EUR".to_owned(),
        });
        reference
    }

    /// Gives back behind everybody's back.
    pub(crate) fn refund_under(&self, key: &str, amount: i64) {
        let mut book = self.book();
        let reference = format!("re_{}", book.given_back.len());
        book.given_back.push(ListedMove {
            key: key.to_owned(),
            reference,
            amount,
            currency: "EUR".to_owned(),
        });
    }

    /// Returns the calls of one kind, by key.
    pub(crate) fn called(&self, call: &str) -> Vec<String> {
        let book = self.book();
        book.calls.iter().filter(|(_, made, _)| *made == call).map(|(.., key)| key.clone()).collect()
    }

    pub(crate) fn operation(&self) -> MakePayment<Self> {
        let problems: ProblemBase = "/errors".parse().unwrap();
        MakePayment::new("test".parse().unwrap(), self.clone(), problems)
    }

    fn enter(&self, call: &'static str, key: &str) -> MutexGuard<'_, Book> {
        let mut book = self.book();
        book.calls.push((self.caller, call, key.to_owned()));
        assert!(!book.cursed.contains(key), "a call that was to panic");
        book
    }
}

impl Book {
    fn succeeded(&self, key: &str) -> Option<Answer> {
        let charge = self.charges.iter().find(|charge| charge.key == key)?;
        Some(Answer::Succeeded { reference: charge.reference.clone() })
    }
}

impl Provider for Desk {
    fn promises(&self) -> Promises {
        self.promises
    }

    fn encode(&self, amount: i64, currency: &str, _: &str, reference: &str) -> Vec<u8> {
        format!("{amount} {currency} {reference}").into_bytes()
    }

    fn is_open(&self) -> bool {
        true
    }

    async fn charge(&self, charge: &StoredCharge, _not_after: SystemTime) -> Answer {
        // Others get a turn, as they do while a real provider is awaited.
        tokio::task::yield_now().await;
        {
            let book = self.enter("charge", &charge.key);
            if let Some(answer) = book.instead.get(&charge.key) {
                return answer.clone();
            }
            if book.fences.contains(&charge.key) {
                return Answer::Fenced;
            }
            if let Some(answer) = book.succeeded(&charge.key) {
                return answer;
            }
        }
        while self.book().silent.contains(&charge.key) {
            self.spoke.notified().await;
        }
        Answer::Succeeded { reference: self.charge_under(&charge.key) }
    }

    async fn get(&self, charge: &StoredCharge) -> Answer {
        let book = self.enter("get", &charge.key);
        if book.unclear.contains(&charge.key) {
            return Answer::Unknown { reason: "an error of ours".to_owned() };
        }
        let fenced = book.fences.contains(&charge.key).then_some(Answer::Fenced);
        book.succeeded(&charge.key).or(fenced).unwrap_or(Answer::NotFound)
    }

    async fn cancel(&self, charge: &StoredCharge) -> Answer {
        let mut book = self.enter("cancel", &charge.key);
        if book.unclear.contains(&charge.key)
            || book.succeeded(&charge.key).is_some()
            || !book.fences.insert(charge.key.clone())
        {
            return Answer::Unknown { reason: "it is too late for that".to_owned() };
        }
        Answer::Fenced
    }

    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8> {
        format!("{} {amount}", charge.key).into_bytes()
    }

    async fn refund(&self, refund: &StoredRefund, _not_after: SystemTime) -> Answer {
        let mut book = self.enter("refund", &refund.key);
        if let Some(answer) = book.instead.get(&refund.key) {
            return answer.clone();
        }
        if !book.refunds.contains(&refund.key) {
            book.refunds.push(refund.key.clone());
        }
        Answer::Succeeded { reference: format!("re_{}", refund.key) }
    }

    async fn get_refund(&self, refund: &StoredRefund) -> Answer {
        let book = self.enter("get_refund", &refund.key);
        if book.refunds.contains(&refund.key) {
            return Answer::Succeeded { reference: format!("re_{}", refund.key) };
        }
        Answer::NotFound
    }

    async fn list(&self, list: List, _: SystemTime, page: Option<&str>) -> Listed {
        let mut book = self.book();
        book.lists += 1;
        if book.missing.contains(&list) {
            return Listed::Unsupported;
        }
        if book.failing.contains(&list) {
            return Listed::Failed { reason: "not today".to_owned() };
        }
        let from = page.map_or(0, |page| page.parse().unwrap());
        let listed = match list {
            List::Charges => &book.charges,
            List::Refunds => &book.given_back,
        };
        let moves: Vec<_> = listed.iter().skip(from).take(PAGE).cloned().collect();
        let next = (from + PAGE < listed.len()).then(|| (from + PAGE).to_string());
        Listed::Page { moves, next }
    }
}
