//! The adapter to a provider that speaks `semel.provider.v1` over gRPC.

use std::time::{Duration, Instant, SystemTime};

use metrics::{counter, histogram};
use prost::Message as _;
use semel_proto::provider::v1::payment_provider_client::PaymentProviderClient;
use semel_proto::provider::v1::{
    CancelChargeRequest, Charge, ChargeOrder, ChargeRequest, GetChargeRequest, GetRefundRequest,
    ListChargesRequest, ListChargesResponse, ListRefundsRequest, ListRefundsResponse, Reason, Refund,
    RefundRequest, charge, refund,
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Response, Status};

use super::breaker::{Breaker, SPARED};
use super::{
    Answer, Charged, DEADLINE, Dedup, Fencing, List, Listed, ListedMove, LookUp, Promises, Provider,
    StoredCharge, StoredRefund, clean, declined, succeeded,
};
use crate::metrics::{PROVIDER_CALLS, PROVIDER_SECONDS};

/// A message of the provider is small.
const MESSAGE_LIMIT: usize = 64 * 1024;
/// How many entries a page of a list has: all of them at their longest fit into a message.
const PAGE: i32 = 50;
/// Most bytes kept of the provider's own words.
const WORDS: usize = 200;

/// A provider behind a gRPC endpoint; clones share connection and breaker.
#[derive(Clone, Debug)]
pub struct GrpcProvider {
    client: PaymentProviderClient<Channel>,
    breaker: Breaker,
    /// The audit's: a list that is refused for being asked for too often says nothing about charges.
    lists: Breaker,
    dedup: Dedup,
    deadline: Duration,
}

/// An endpoint that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("not an endpoint such as http://provider:7070")]
pub struct InvalidEndpoint(#[source] tonic::transport::Error);

impl GrpcProvider {
    /// Uses the provider at this endpoint, which it connects to when it is first called.
    ///
    /// # Errors
    ///
    /// When the endpoint is no URL.
    pub fn new(endpoint: &str, dedup: Dedup) -> Result<Self, InvalidEndpoint> {
        Self::certified_by(endpoint, None, dedup)
    }

    /// As [`GrpcProvider::new`], and trusts these authorities (PEM) to certify it, beside the machine's.
    ///
    /// # Errors
    ///
    /// When the endpoint is no URL, or the authorities are no certificates.
    pub fn certified_by(
        endpoint: &str,
        authorities: Option<&str>,
        dedup: Dedup,
    ) -> Result<Self, InvalidEndpoint> {
        let mut channel = Endpoint::from_shared(endpoint.to_owned()).map_err(InvalidEndpoint)?;
        if endpoint.starts_with("https://") {
            let tls = ClientTlsConfig::new().with_native_roots();
            let tls = match authorities {
                Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
                None => tls,
            };
            channel = channel.tls_config(tls).map_err(InvalidEndpoint)?;
        }
        let channel = channel
            .connect_timeout(Duration::from_secs(3))
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            .connect_lazy();
        let client = PaymentProviderClient::new(channel)
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        Ok(Self { client, breaker: Breaker::default(), lists: Breaker::default(), dedup, deadline: DEADLINE })
    }

    /// Replaces the deadline of a call.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Asks about a charge or refund, and classifies the answer.
    async fn ask<T, F>(&self, call: &'static str, read: impl FnOnce(&T) -> Answer + Send, made: F) -> Answer
    where
        T: Send,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        let answer = match self.call(&self.breaker, call, made).await {
            // Not a call: it is not counted.
            Called::Spared => return Answer::NotExecuted { reason: SPARED.to_owned() },
            Called::Answered(answer) => read(&answer),
            Called::Refused(status) => refused(call, &status),
            Called::Silent => Answer::Unknown { reason: format!("no answer within {:?}", self.deadline) },
        };
        counter!(PROVIDER_CALLS, "call" => call, "outcome" => answer.label()).increment(1);
        answer
    }

    /// Asks for a page of a list.
    async fn ask_for_page<T, F>(
        &self,
        call: &'static str,
        read: impl FnOnce(T) -> Listed + Send,
        made: F,
    ) -> Listed
    where
        T: Send,
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        let (listed, outcome) = match self.call(&self.lists, call, made).await {
            Called::Spared => return Listed::Failed { reason: SPARED.to_owned() },
            Called::Answered(page) => (read(page), "succeeded"),
            Called::Refused(status) if status.code() == Code::Unimplemented => {
                (Listed::Unsupported, "not_executed")
            }
            Called::Refused(status) => {
                let reason = format!("{:?}: {}", status.code(), clean(status.message(), WORDS));
                (Listed::Failed { reason }, "unknown")
            }
            Called::Silent => {
                (Listed::Failed { reason: format!("no answer within {:?}", self.deadline) }, "unknown")
            }
        };
        counter!(PROVIDER_CALLS, "call" => call, "outcome" => outcome).increment(1);
        listed
    }

    /// Makes one call: breaker, deadline, duration.
    async fn call<T, F>(&self, breaker: &Breaker, call: &'static str, made: F) -> Called<T>
    where
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        if !breaker.admits() {
            return Called::Spared;
        }
        let began = Instant::now();
        let outcome = tokio::time::timeout(self.deadline, made).await;
        histogram!(PROVIDER_SECONDS, "call" => call).record(began.elapsed().as_secs_f64());
        let (called, is_away) = match outcome {
            Err(_) => (Called::Silent, true),
            Ok(Ok(answer)) => (Called::Answered(answer.into_inner()), false),
            Ok(Err(status)) => {
                let is_away = is_away(&status);
                (Called::Refused(status), is_away)
            }
        };
        if is_away {
            breaker.failed();
        } else {
            breaker.answered();
        }
        called
    }
}

/// What came of a call.
enum Called<T> {
    /// An answer.
    Answered(T),
    /// A refusal, by the provider or on the way.
    Refused(Status),
    /// Nothing, within the deadline.
    Silent,
    /// It was not made: the provider is spared.
    Spared,
}

impl Provider for GrpcProvider {
    fn promises(&self) -> Promises {
        Promises { dedup: self.dedup, look_up: LookUp::ByKey, fence: Fencing::Cancel }
    }

    fn encode(&self, amount: i64, currency: &str, source: &str, reference: &str) -> Vec<u8> {
        let order = ChargeOrder {
            amount,
            currency: currency.to_owned(),
            source: source.to_owned(),
            reference: reference.to_owned(),
        };
        order.encode_to_vec()
    }

    fn is_open(&self) -> bool {
        self.breaker.is_open_for_calls()
    }

    async fn charge(&self, charge: &StoredCharge, not_after: SystemTime) -> Answer {
        let Ok(order) = ChargeOrder::decode(&charge.request[..]) else { return unreadable() };
        let request =
            ChargeRequest { key: charge.key.clone(), order: Some(order), not_after: Some(not_after.into()) };
        let mut client = self.client.clone();
        self.ask("charge", |answer| classify(answer, charge), async move {
            client.charge(Request::new(request)).await
        })
        .await
    }

    async fn get(&self, charge: &StoredCharge) -> Answer {
        let request = GetChargeRequest { key: charge.key.clone() };
        let mut client = self.client.clone();
        self.ask("get", |answer| classify(answer, charge), async move {
            client.get_charge(Request::new(request)).await
        })
        .await
    }

    async fn cancel(&self, charge: &StoredCharge) -> Answer {
        let request = CancelChargeRequest { key: charge.key.clone() };
        let mut client = self.client.clone();
        self.ask("cancel", |answer| classify(answer, charge), async move {
            client.cancel_charge(Request::new(request)).await
        })
        .await
    }

    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8> {
        // Key and time belong to the send.
        RefundRequest { charge_key: charge.key.clone(), amount, ..RefundRequest::default() }.encode_to_vec()
    }

    async fn refund(&self, refund: &StoredRefund, not_after: SystemTime) -> Answer {
        let Ok(stored) = RefundRequest::decode(&refund.request[..]) else { return unreadable() };
        let charge_key = stored.charge_key.clone();
        let request = RefundRequest { key: refund.key.clone(), not_after: Some(not_after.into()), ..stored };
        let mut client = self.client.clone();
        let read = |answer: &Refund| classify_refund(answer, refund, &charge_key);
        self.ask("refund", read, async move { client.refund(Request::new(request)).await }).await
    }

    async fn get_refund(&self, refund: &StoredRefund) -> Answer {
        let Ok(stored) = RefundRequest::decode(&refund.request[..]) else { return unreadable() };
        let request = GetRefundRequest { key: refund.key.clone() };
        let mut client = self.client.clone();
        let read = |answer: &Refund| classify_refund(answer, refund, &stored.charge_key);
        self.ask("get_refund", read, async move { client.get_refund(Request::new(request)).await }).await
    }

    async fn list(&self, list: List, since: SystemTime, page: Option<&str>) -> Listed {
        let token = page.unwrap_or_default().to_owned();
        let mut client = self.client.clone();
        match list {
            List::Charges => {
                let request = ListChargesRequest {
                    page_size: PAGE,
                    page_token: token,
                    created_since: Some(since.into()),
                };
                let made = async move { client.list_charges(Request::new(request)).await };
                self.ask_for_page("list", read_page, made).await
            }
            List::Refunds => {
                let request = ListRefundsRequest {
                    page_size: PAGE,
                    page_token: token,
                    created_since: Some(since.into()),
                };
                let made = async move { client.list_refunds(Request::new(request)).await };
                self.ask_for_page("list_refunds", read_refunds, made).await
            }
        }
    }
}

/// Keeps what succeeded.
fn read_page(page: ListChargesResponse) -> Listed {
    let succeeded = page.charges.into_iter().filter(|charge| charge.status() == charge::Status::Succeeded);
    let moves =
        succeeded.map(|charge| moved(&charge.key, &charge.reference, charge.amount, &charge.currency));
    Listed::Page { moves: moves.collect(), next: next(page.next_page_token) }
}

/// Keeps what succeeded, likewise.
fn read_refunds(page: ListRefundsResponse) -> Listed {
    let succeeded = page.refunds.into_iter().filter(|refund| refund.status() == refund::Status::Succeeded);
    let moves =
        succeeded.map(|refund| moved(&refund.key, &refund.reference, refund.amount, &refund.currency));
    Listed::Page { moves: moves.collect(), next: next(page.next_page_token) }
}

fn moved(key: &str, reference: &str, amount: i64, currency: &str) -> ListedMove {
    let (key, reference) = (clean(key, 255), clean(reference, 255));
    ListedMove { key, reference, amount, currency: clean(currency, 3) }
}

fn next(token: String) -> Option<String> {
    Some(token).filter(|token| !token.is_empty())
}

fn unknown(reason: &str) -> Answer {
    Answer::Unknown { reason: reason.to_owned() }
}

fn unreadable() -> Answer {
    Answer::Mismatch { reason: "the stored request cannot be read".to_owned() }
}

/// Reads an answer, and believes it only if it is about what was asked.
fn classify(answer: &Charge, sent: &StoredCharge) -> Answer {
    if answer.key != sent.key {
        return unknown("the provider answered about another key");
    }
    let about_the_same = answer.amount == sent.amount && answer.currency == sent.currency;
    match answer.status() {
        charge::Status::Succeeded | charge::Status::Declined if !about_the_same => {
            unknown("the provider answered about another amount")
        }
        charge::Status::Succeeded => succeeded(&answer.reference),
        charge::Status::Declined => declined(&answer.reference, &answer.decline_code),
        charge::Status::Processing => Answer::InProgress,
        charge::Status::Canceled => Answer::Fenced,
        charge::Status::Unspecified => unknown("the provider answered without a status"),
    }
}

/// Reads an answer about a refund, likewise.
fn classify_refund(answer: &Refund, sent: &StoredRefund, charge_key: &str) -> Answer {
    if answer.key != sent.key || answer.charge_key != charge_key {
        return unknown("the provider answered about another key");
    }
    let about_the_same = answer.amount == sent.amount && answer.currency == sent.currency;
    match answer.status() {
        refund::Status::Succeeded | refund::Status::Failed if !about_the_same => {
            unknown("the provider answered about another amount")
        }
        refund::Status::Succeeded => succeeded(&answer.reference),
        refund::Status::Failed => declined(&answer.reference, &answer.failure_code),
        refund::Status::Processing => Answer::InProgress,
        refund::Status::Unspecified => unknown("the provider answered without a status"),
    }
}

/// Reads a refusal. What is not certain to have executed nothing is unknown.
fn refused(call: &str, status: &Status) -> Answer {
    let reason = format!("{:?}: {}", status.code(), clean(status.message(), WORDS));
    match Reason::of(status) {
        Some(Reason::Fenced) if call == "charge" => return Answer::Fenced,
        Some(Reason::KeyInUse) => return Answer::InProgress,
        Some(Reason::TooLate) => return Answer::NotExecuted { reason },
        Some(Reason::KeyMismatch) => return Answer::Mismatch { reason },
        // Nothing was executed, and yet it is no decline: the provider does not remember it. What we have on record says
        // that the money is there to be given back, so somebody else has been at it.
        Some(Reason::ChargeNotSucceeded | Reason::ExceedsCharge) if call == "refund" => {
            return Answer::Mismatch { reason };
        }
        _ => {}
    }
    match status.code() {
        Code::NotFound if call == "get" || call == "get_refund" => Answer::NotFound,
        Code::Unauthenticated | Code::PermissionDenied | Code::ResourceExhausted => {
            Answer::NotExecuted { reason }
        }
        // The transport's own error, when the connection was refused before a byte was sent.
        Code::Unavailable if was_never_sent(status) => Answer::NotExecuted { reason },
        _ => Answer::Unknown { reason },
    }
}

/// Says whether the request cannot have left: no connection came about.
fn was_never_sent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.kind() == std::io::ErrorKind::ConnectionRefused;
        }
        source = error.source();
    }
    false
}

/// Says whether the failure means that the provider is away, as opposed to an answer.
fn is_away(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> StoredCharge {
        StoredCharge {
            key: "k".to_owned(),
            request: Vec::new(),
            amount: 5,
            currency: "EUR".to_owned(),
            reference: None,
        }
    }

    fn answered(change: impl FnOnce(&mut Charge)) -> Answer {
        let mut answer = Charge {
            key: "k".to_owned(),
            reference: "ch_1".to_owned(),
            amount: 5,
            currency: "EUR".to_owned(),
            status: charge::Status::Succeeded.into(),
            ..Charge::default()
        };
        change(&mut answer);
        classify(&answer, &sent())
    }

    #[test]
    fn believes_only_answers_about_what_was_asked() {
        assert_eq!(answered(|_| {}), Answer::Succeeded { reference: "ch_1".to_owned() });
        let garbage: [fn(&mut Charge); 6] = [
            |c| c.key = "other".to_owned(),
            |c| c.amount = 6,
            |c| c.currency = "USD".to_owned(),
            |c| c.status = 0,
            |c| c.status = 77,
            |c| c.reference = "\0\n".to_owned(),
        ];
        for change in garbage {
            assert!(matches!(answered(change), Answer::Unknown { .. }), "{:?}", answered(change));
        }
    }

    fn answered_refund(change: impl FnOnce(&mut Refund)) -> Answer {
        let mut answer = Refund {
            key: "r".to_owned(),
            reference: "re_1".to_owned(),
            charge_key: "k".to_owned(),
            amount: 5,
            currency: "EUR".to_owned(),
            status: refund::Status::Succeeded.into(),
            ..Refund::default()
        };
        change(&mut answer);
        let (key, currency) = ("r".to_owned(), "EUR".to_owned());
        classify_refund(&answer, &StoredRefund { key, request: Vec::new(), amount: 5, currency }, "k")
    }

    #[test]
    fn believes_only_answers_about_the_refund_that_was_asked_for() {
        assert_eq!(answered_refund(|_| {}), Answer::Succeeded { reference: "re_1".to_owned() });
        let failed = answered_refund(|r| {
            r.status = refund::Status::Failed.into();
            r.failure_code = "account_closed".to_owned();
        });
        let (reference, code) = (Some("re_1".to_owned()), "account_closed".to_owned());
        assert_eq!(failed, Answer::Declined { reference, code });
        assert_eq!(answered_refund(|r| r.status = refund::Status::Processing.into()), Answer::InProgress);
        let garbage: [fn(&mut Refund); 7] = [
            |r| r.key = "other".to_owned(),
            |r| r.charge_key = "other".to_owned(),
            |r| r.amount = 6,
            |r| r.currency = "USD".to_owned(),
            |r| r.status = 0,
            |r| r.status = 77,
            |r| r.reference = "\0\n".to_owned(),
        ];
        for change in garbage {
            let answer = answered_refund(change);
            assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
        }
    }

    #[test]
    fn cuts_and_cleans_what_the_provider_says() {
        let decline = answered(|c| {
            c.status = charge::Status::Declined.into();
            c.decline_code = format!("no\0money{}", "é".repeat(100));
        });
        let Answer::Declined { code, .. } = decline else { panic!("{decline:?}") };
        assert!(code.starts_with("nomoney") && code.len() <= 63, "{code}");
    }

    #[test]
    fn a_page_keeps_what_succeeded() {
        let charge = |key: &str, status: charge::Status| Charge {
            key: key.to_owned(),
            reference: format!("ch_{key}"),
            status: status.into(),
            ..Charge::default()
        };
        let page = ListChargesResponse {
            charges: vec![charge("1", charge::Status::Declined), charge("2", charge::Status::Succeeded)],
            next_page_token: String::new(),
        };
        let Listed::Page { moves, next: None } = read_page(page) else { panic!("no last page") };
        assert_eq!(moves.iter().map(|charge| charge.key.as_str()).collect::<Vec<_>>(), ["2"]);

        let refund = |key: &str, status: refund::Status| Refund {
            key: key.to_owned(),
            status: status.into(),
            ..Refund::default()
        };
        let page = ListRefundsResponse {
            refunds: vec![
                refund("1", refund::Status::Failed),
                refund("2", refund::Status::Succeeded),
                refund("3", refund::Status::Processing),
            ],
            next_page_token: "3".to_owned(),
        };
        let Listed::Page { moves, next: Some(next) } = read_refunds(page) else {
            panic!("no page before the last")
        };
        assert_eq!(moves.iter().map(|refund| refund.key.as_str()).collect::<Vec<_>>(), ["2"]);
        assert_eq!(next, "3");
    }

    #[test]
    fn classifies_refusals() {
        let kind = |call: &str, status: Status| refused(call, &status).label();
        assert_eq!(kind("charge", Reason::Fenced.refuse("")), "fenced");
        assert_eq!(kind("charge", Reason::KeyMismatch.refuse("")), "mismatch");
        assert_eq!(kind("charge", Reason::KeyInUse.refuse("")), "in_progress");
        assert_eq!(kind("charge", Reason::TooLate.refuse("")), "not_executed");
        assert_eq!(kind("get", Status::not_found("")), "not_found");
        assert_eq!(kind("get_refund", Status::not_found("")), "not_found");
        assert_eq!(kind("refund", Status::not_found("")), "unknown");
        assert_eq!(kind("refund", Reason::TooLate.refuse("")), "not_executed");
        for contradicts in [Reason::KeyMismatch, Reason::ChargeNotSucceeded, Reason::ExceedsCharge] {
            assert_eq!(kind("refund", contradicts.refuse("")), "mismatch");
        }
        for proves_nothing in [Reason::AlreadyCanceled, Reason::AlreadySucceeded, Reason::AlreadyDeclined] {
            assert_eq!(kind("cancel", proves_nothing.refuse("")), "unknown");
        }
        assert_eq!(kind("charge", Status::unauthenticated("")), "not_executed");
        assert_eq!(kind("charge", Status::permission_denied("")), "not_executed");
        for code in
            [Code::Internal, Code::Unavailable, Code::DeadlineExceeded, Code::NotFound, Code::DataLoss]
        {
            assert_eq!(kind("charge", Status::new(code, "")), "unknown", "{code:?}");
        }
    }
}
