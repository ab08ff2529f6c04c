//! The adapter to Stripe: `PaymentIntent`s in two steps, cards, and refunds.
//!
//! Promise: what any adapter promises, with these of Stripe's own: it recognises a key for a day, a charge can be looked up
//! and fenced for ever by the reference that it was prepared as, and a refund can be looked up.
//!
//! How: an intent is created unconfirmed, which moves no money, and its id is committed by whoever drives the payment on.
//! Only then it is confirmed, by that id. So the one call that moves money is about an object that can always be asked
//! about, and that stands still for good once it is canceled or has succeeded: a confirmation that is late, or repeated
//! when Stripe has forgotten its key, cannot move money a second time. A cancel carries no key of its own, for a failure
//! kept under one would be the answer for a day; repeated, it does no harm.
//!
//! A card that is declined leaves an intent that can be confirmed again. So a decline is told only once the intent is
//! canceled; and so it is with an authentication that the payer would have to go through, for which there is no way here.
//!
//! What it does not do: captures, saved cards, means of payment other than cards, accounts of others. It never searches:
//! Stripe's search lags behind, so that what it does not find proves nothing.
//!
//! In a crash between the steps there is an intent that nobody confirmed. The same creation under the same key gives it
//! back for a day; later it is left alone, since only what has a committed reference is ever confirmed.

pub mod account;
pub mod classify;
mod currency;
mod http;
mod listing;
pub mod objects;
pub mod webhook;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ::http::Method;
use form_urlencoded::Serializer;
use metrics::{counter, histogram};
use semel_core::idempotency::InvalidCommand;
use tokio::time::Instant as Until;

use self::account::{ApiBase, ApiKey};
use self::classify::{Asked, AskedRefund, Class, Confirmed, Refusal, Reply};
use self::http::{Call, Http, NoReply};
use self::objects::{self as told, IntentStatus, KEY, Name, PaymentIntent, Refund};
use super::breaker::{Breaker, SPARED};
use super::{
    Answer, Charged, DEADLINE, Dedup, Fencing, List, Listed, LookUp, Prepared, Promises, Provider,
    StoredCharge, StoredRefund, declined,
};
use crate::metrics::{PROVIDER_CALLS, PROVIDER_SECONDS};

pub use self::http::NoAuthorities;

/// For how long Stripe recognises an idempotency key, at least.
pub const HORIZON: Duration = Duration::from_hours(24);
/// How many entries a page of a list has.
const PAGE: usize = 100;
/// Most pages, of a hundred each, of one payment's refunds.
const REFUND_PAGES: usize = 10;

/// An account at Stripe; clones share connections and breaker.
#[derive(Clone, Debug)]
pub struct StripeProvider {
    http: Http,
    breaker: Breaker,
    /// The audit's: a list that is refused for being asked for too often says nothing about charges.
    lists: Breaker,
    livemode: bool,
    deadline: Duration,
}

impl StripeProvider {
    /// Uses the account of this key; connects when it is first called.
    ///
    /// # Errors
    ///
    /// When the machine has no usable certificates of authorities.
    pub fn new(base: ApiBase, key: &ApiKey) -> Result<Self, NoAuthorities> {
        let (livemode, http) = (key.is_live(), Http::new(base, key)?);
        Ok(Self {
            http,
            breaker: Breaker::default(),
            lists: Breaker::default(),
            livemode,
            deadline: DEADLINE,
        })
    }

    /// Replaces the deadline of a call.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Makes a call of the port, unless the provider is spared, and counts what it came to.
    async fn counted(&self, call: &'static str, answer: impl Future<Output = Answer> + Send) -> Answer {
        if !self.breaker.admits() {
            return Answer::NotExecuted { reason: SPARED.to_owned() };
        }
        let answer = answer.await;
        counter!(PROVIDER_CALLS, "call" => call, "outcome" => answer.label()).increment(1);
        answer
    }

    /// Sends one request, and tells the breaker whether anybody is there.
    async fn send(&self, name: &'static str, call: Call, until: Until) -> Result<Reply, Answer> {
        self.send_by(&self.breaker, name, call, until).await
    }

    async fn send_by(
        &self,
        breaker: &Breaker,
        name: &'static str,
        call: Call,
        until: Until,
    ) -> Result<Reply, Answer> {
        let began = Instant::now();
        let outcome = self.http.call(call, until).await;
        histogram!(PROVIDER_SECONDS, "call" => name).record(began.elapsed().as_secs_f64());
        match outcome {
            // A key that is refused is as good as nobody there: nothing new is to begin.
            Ok(Reply { status: 401 | 403 | 429 | 500.., .. }) | Err(_) => breaker.failed(),
            Ok(_) => breaker.answered(),
        }
        outcome.map_err(|none| match none {
            NoReply::NotSent(reason) => Answer::NotExecuted { reason },
            NoReply::Lost(reason) => Answer::Unknown { reason },
        })
    }

    async fn intent(&self, name: &'static str, call: Call, until: Until) -> Result<PaymentIntent, Unread> {
        let reply = self.send(name, call, until).await.map_err(Unread::NoReply)?;
        classify::read(&reply).map_err(Unread::Refused)
    }

    async fn confirm(&self, charge: &StoredCharge, reference: &str) -> Answer {
        let until = self.until();
        let asked = self.asked(charge);
        let confirm = post(
            format!("{}/confirm", intents(reference)),
            Vec::new(),
            Some(format!("{}:confirm", charge.key)),
        );
        let reply = match self.send("charge", confirm, until).await {
            Ok(reply) => reply,
            Err(answer) => return answer,
        };
        let confirmed = match classify::confirmed(&reply, &asked) {
            Confirmed::Ask(refusal) => {
                tracing::warn!(intent = reference, "a confirmation was refused: {}", refusal.reason);
                match self.intent("get", get(intents(reference)), until).await {
                    Ok(intent) => classify::attempted(&intent, &asked, Some(&refusal)),
                    Err(unread) => return unread.answer(),
                }
            }
            confirmed => confirmed,
        };
        match confirmed {
            Confirmed::Answered(answer) => answer,
            Confirmed::Failed { code } => self.decline(reference, &asked, &code, until).await,
            Confirmed::Ask(refusal) => refusal.answer(),
        }
    }

    /// Cancels what has failed, after which that is final.
    async fn decline(&self, reference: &str, asked: &Asked<'_>, code: &str, until: Until) -> Answer {
        let mut canceled = self.intent("cancel", cancel(reference), until).await;
        if let Err(Unread::Refused(refusal)) = canceled {
            // It may have been canceled before; or somebody else has confirmed it.
            tracing::debug!(intent = reference, "a cancel was refused: {}", refusal.reason);
            canceled = self.intent("get", get(intents(reference)), until).await;
        }
        match canceled.map(|intent| classify::charged(&intent, asked)) {
            Ok(Answer::Fenced) => declined(reference, code),
            Ok(answer) => answer,
            Err(unread) => unread.answer(),
        }
    }

    async fn look_up(&self, refund: &StoredRefund, intent: &str, until: Until) -> Answer {
        let asked =
            AskedRefund { intent, key: &refund.key, amount: refund.amount, currency: &refund.currency };
        let (mut after, mut failed): (Option<Name>, Option<Answer>) = (None, None);
        for _ in 0..REFUND_PAGES {
            let mut query = vec![("payment_intent", intent), ("limit", "100")];
            query.extend(after.as_ref().map(|after| ("starting_after", after.as_str())));
            let page = get(format!("/v1/refunds?{}", form(&query)));
            let reply = match self.send("get_refund", page, until).await {
                Ok(reply) => reply,
                Err(answer) => return answer,
            };
            let page: told::List<Refund> = match classify::read(&reply) {
                Ok(page) => page,
                Err(refusal) => return refusal.answer(),
            };
            let ours =
                |found: &&Refund| found.metadata.key.as_ref().is_some_and(|key| key.as_str() == refund.key);
            for answer in page.data.iter().filter(ours).map(|found| classify::refunded(found, &asked)) {
                match answer {
                    // Where the key was forgotten there may be another, which gives the money back.
                    failure @ Answer::Declined { .. } => failed = Some(failure),
                    answer => return answer,
                }
            }
            match page.data.into_iter().last() {
                Some(last) if page.has_more => after = Some(last.id),
                _ => return failed.unwrap_or(Answer::NotFound),
            }
        }
        Answer::Unknown { reason: "the payment has too many refunds to look through".to_owned() }
    }

    async fn read_list(
        &self,
        name: &'static str,
        list: List,
        since: SystemTime,
        page: Option<&str>,
    ) -> Listed {
        let since = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().to_string();
        let limit = PAGE.to_string();
        let mut query = vec![("created[gte]", since.as_str()), ("limit", &limit)];
        query.extend(page.map(|page| ("starting_after", page)));
        let path = match list {
            List::Charges => "/v1/payment_intents",
            List::Refunds => "/v1/refunds",
        };
        let read = match list {
            List::Charges => |reply: &Reply| classify::read(reply).map(listing::charges),
            List::Refunds => |reply: &Reply| classify::read(reply).map(listing::refunds),
        };
        let call = get(format!("{path}?{}", form(&query)));
        match self.send_by(&self.lists, name, call, self.until()).await {
            Err(answer) => Listed::Failed { reason: format!("{answer:?}") },
            Ok(reply) => read(&reply).unwrap_or_else(|refusal| Listed::Failed { reason: refusal.reason }),
        }
    }

    fn asked<'a>(&self, charge: &'a StoredCharge) -> Asked<'a> {
        Asked {
            reference: charge.reference.as_deref(),
            key: &charge.key,
            amount: charge.amount,
            currency: &charge.currency,
            livemode: self.livemode,
        }
    }

    fn until(&self) -> Until {
        Until::now() + self.deadline
    }
}

/// An object that was not to be had.
enum Unread {
    NoReply(Answer),
    Refused(Refusal),
}

impl Unread {
    fn answer(self) -> Answer {
        match self {
            Self::NoReply(answer) => answer,
            Self::Refused(refusal) => refusal.answer(),
        }
    }
}

impl Provider for StripeProvider {
    fn promises(&self) -> Promises {
        Promises { dedup: Dedup::For(HORIZON), look_up: LookUp::ByReference, fence: Fencing::Cancel }
    }

    fn accepts(&self, currency: &str, source: &str) -> Result<(), InvalidCommand> {
        let invalid = |field, reason: String| Err(InvalidCommand { field, reason });
        if !currency::is_the_same(currency) {
            return invalid(
                "currency",
                format!("{currency} is not taken: the provider counts it in another unit than ISO 4217"),
            );
        }
        if !source.starts_with("pm_") {
            return invalid(
                "source",
                "must be the id of a PaymentMethod, such as \"pm_card_visa\"".to_owned(),
            );
        }
        Ok(())
    }

    fn encode(&self, amount: i64, currency: &str, source: &str, reference: &str) -> Vec<u8> {
        let (amount, currency) = (amount.to_string(), currency.to_ascii_lowercase());
        form(&[
            ("amount", amount.as_str()),
            ("currency", &currency),
            ("payment_method", source),
            ("payment_method_types[]", "card"),
            ("capture_method", "automatic"),
            ("metadata[semel_payment]", reference),
        ])
        .into_bytes()
    }

    fn is_open(&self) -> bool {
        self.breaker.is_open_for_calls()
    }

    async fn prepare(&self, charge: &StoredCharge, not_after: SystemTime) -> Prepared {
        if !self.breaker.admits() {
            return Prepared::Answered(Answer::NotExecuted { reason: SPARED.to_owned() });
        }
        if let Some(answer) = too_late(not_after) {
            return Prepared::Answered(answer);
        }
        let asked = Asked { reference: None, ..self.asked(charge) };
        let create = post(
            "/v1/payment_intents".to_owned(),
            keyed(&charge.request, &charge.key),
            Some(format!("{}:create", charge.key)),
        );
        let prepared = match self.send("prepare", create, self.until()).await {
            Ok(reply) => classify::prepared(&reply, &asked),
            Err(answer) => Prepared::Answered(answer),
        };
        let outcome = match &prepared {
            Prepared::Reference(_) => "succeeded",
            Prepared::Never { .. } => "unknown",
            Prepared::Answered(answer) => answer.label(),
        };
        counter!(PROVIDER_CALLS, "call" => "prepare", "outcome" => outcome).increment(1);
        prepared
    }

    async fn charge(&self, charge: &StoredCharge, not_after: SystemTime) -> Answer {
        let Some(reference) = &charge.reference else {
            return Answer::NotExecuted { reason: "it is not prepared".to_owned() };
        };
        if let Some(answer) = too_late(not_after) {
            return answer;
        }
        self.counted("charge", self.confirm(charge, reference)).await
    }

    async fn get(&self, charge: &StoredCharge) -> Answer {
        let Some(reference) = &charge.reference else { return Answer::NotFound };
        let looked = async {
            match self.intent("get", get(intents(reference)), self.until()).await {
                Ok(intent) => classify::charged(&intent, &self.asked(charge)),
                Err(Unread::Refused(Refusal { class: Class::Missing, .. })) => Answer::NotFound,
                Err(unread) => unread.answer(),
            }
        };
        self.counted("get", looked).await
    }

    async fn cancel(&self, charge: &StoredCharge) -> Answer {
        let Some(reference) = &charge.reference else { return Answer::NotFound };
        let canceled = async {
            match self.intent("cancel", cancel(reference), self.until()).await {
                // Also one of which an attempt had failed: whoever looks it up is told so.
                Ok(intent) if intent.status == IntentStatus::Canceled => {
                    classify::charged(&intent, &self.asked(charge))
                }
                Ok(_) => Answer::Unknown { reason: "it was not canceled".to_owned() },
                Err(unread) => unread.answer(),
            }
        };
        self.counted("cancel", canceled).await
    }

    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8> {
        form(&[("payment_intent", &charge.reference), ("amount", &amount.to_string())]).into_bytes()
    }

    async fn refund(&self, refund: &StoredRefund, not_after: SystemTime) -> Answer {
        let Some(intent) = refunded_intent(&refund.request) else { return unreadable() };
        if let Some(answer) = too_late(not_after) {
            return answer;
        }
        let asked = AskedRefund {
            intent: &intent,
            key: &refund.key,
            amount: refund.amount,
            currency: &refund.currency,
        };
        let made = async {
            let until = self.until();
            let body = keyed(&refund.request, &refund.key);
            let call = post("/v1/refunds".to_owned(), body, Some(format!("{}:refund", refund.key)));
            let reply = match self.send("refund", call, until).await {
                Ok(reply) => reply,
                Err(answer) => return answer,
            };
            match classify::read(&reply) {
                Ok(refund) => classify::refunded(&refund, &asked),
                // The same again would be answered the same: what was made of it shows in the list alone.
                Err(Refusal { class: Class::Sticky, .. }) => self.look_up(refund, &intent, until).await,
                Err(refusal) => classify::refund_refused(refusal),
            }
        };
        self.counted("refund", made).await
    }

    async fn get_refund(&self, refund: &StoredRefund) -> Answer {
        let Some(intent) = refunded_intent(&refund.request) else { return unreadable() };
        self.counted("get_refund", self.look_up(refund, &intent, self.until())).await
    }

    async fn list(&self, list: List, since: SystemTime, page: Option<&str>) -> Listed {
        if !self.lists.admits() {
            return Listed::Failed { reason: SPARED.to_owned() };
        }
        let name = match list {
            List::Charges => "list",
            List::Refunds => "list_refunds",
        };
        let listed = self.read_list(name, list, since, page).await;
        let outcome = if matches!(listed, Listed::Page { .. }) { "succeeded" } else { "unknown" };
        counter!(PROVIDER_CALLS, "call" => name, "outcome" => outcome).increment(1);
        listed
    }
}

fn intents(reference: &str) -> String {
    // A reference is one of Stripe's; whatever else it may hold, it stays one segment of the path.
    format!(
        "/v1/payment_intents/{}",
        form_urlencoded::byte_serialize(reference.as_bytes()).collect::<String>()
    )
}

fn get(target: String) -> Call {
    Call { method: Method::GET, target, body: Vec::new(), key: None }
}

fn post(target: String, body: Vec<u8>, key: Option<String>) -> Call {
    Call { method: Method::POST, target, body, key }
}

fn cancel(reference: &str) -> Call {
    post(format!("{}/cancel", intents(reference)), Vec::new(), None)
}

fn form(pairs: &[(&str, &str)]) -> String {
    Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// Adds the key to a stored form, by which an object is told to be ours.
fn keyed(stored: &[u8], key: &str) -> Vec<u8> {
    let ours = form(&[(&format!("metadata[{KEY}]"), key)]);
    [stored, b"&", ours.as_bytes()].concat()
}

fn refunded_intent(request: &[u8]) -> Option<String> {
    form_urlencoded::parse(request)
        .find(|(name, _)| name == "payment_intent")
        .map(|(_, intent)| intent.into_owned())
        .filter(|intent| !intent.is_empty())
}

fn unreadable() -> Answer {
    Answer::Mismatch { reason: "the stored request cannot be read".to_owned() }
}

/// Stripe cannot be told when not to begin any more. It need not: see the module's head. This spares it what would be late
/// before it has left.
fn too_late(not_after: SystemTime) -> Option<Answer> {
    (SystemTime::now() > not_after)
        .then(|| Answer::NotExecuted { reason: "too late to be sent any more".to_owned() })
}

#[cfg(test)]
mod tests;
