//! What any provider promises.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use semel_proto::provider::v1::{
    CancelChargeRequest, Charge, ChargeOrder, ChargeRequest, CountCallsRequest, ListChargesRequest,
    MoveClockRequest, Reason, SetHorizonRequest, charge, refund,
};
use semel_provider_sim::book::Kind;
use tonic::Code;

use crate::rig::{Client, Rig, Scratch, reason, request, seconds};

fn altered(key: &str, change: impl FnOnce(&mut ChargeOrder)) -> ChargeRequest {
    let mut request = request(key);
    change(request.order.as_mut().unwrap());
    request
}

async fn move_clock(client: &Client, by: i64) -> prost_types::Timestamp {
    let request = MoveClockRequest { by: Some(seconds(by)) };
    client.control.clone().move_clock(request).await.unwrap().into_inner().now.unwrap()
}

#[tokio::test]
async fn charges_once_per_key_even_when_64_ask_at_a_time() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let calls = (0..64).map(|_| rig.client.charge("k"));
    let answers: Vec<_> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
    assert_eq!((answers[0].status(), answers[0].amount), (charge::Status::Succeeded, 1000));
    assert!(answers[0].reference.starts_with("ch_"));
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    let entries = book.entries();
    assert_eq!(entries.len(), 1);
    assert_eq!(
        (entries[0].kind, entries[0].key.as_str(), entries[0].amount),
        (Kind::Charge, "k", Some(1000))
    );
    rig.stop().await;
}

#[tokio::test]
async fn gives_every_reason_of_the_contract() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("charged").await.unwrap();
    client.cancel("fenced").await.unwrap();
    client.send(altered("declined", |order| order.source = "tok_declined".to_owned())).await.unwrap();
    let before = book.entries();

    assert_eq!(reason(client.send(altered("charged", |order| order.amount += 1)).await), Reason::KeyMismatch);
    assert_eq!(reason(client.charge("fenced").await), Reason::Fenced);
    assert_eq!(reason(client.cancel("charged").await), Reason::AlreadySucceeded);
    assert_eq!(reason(client.cancel("fenced").await), Reason::AlreadyCanceled);
    assert_eq!(reason(client.cancel("declined").await), Reason::AlreadyDeclined);
    assert_eq!(reason(client.refund("r", "declined", 1).await), Reason::ChargeNotSucceeded);
    assert_eq!(reason(client.refund("r", "charged", 1001).await), Reason::ExceedsCharge);
    assert_eq!(book.entries(), before, "a refusal writes nothing");
    rig.stop().await;
}

#[tokio::test]
async fn a_decline_is_an_answer() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    for (source, code) in [("tok_declined", "card_declined"), ("tok_insufficient", "insufficient_funds")] {
        let request = altered(code, |order| order.source = source.to_owned());
        let first = rig.client.send(request.clone()).await.unwrap();
        assert_eq!((first.status(), first.decline_code.as_str()), (charge::Status::Declined, code));
        assert_eq!(rig.client.send(request).await.unwrap(), first);
        assert_eq!(rig.client.get(code).await.unwrap(), first);
    }
    rig.stop().await;
}

#[tokio::test]
async fn refuses_to_start_after_its_time_by_its_own_clock() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let mut not_after = move_clock(client, 0).await;
    not_after.seconds += 300;
    let until = |key| ChargeRequest { not_after: Some(not_after), ..request(key) };
    let first = client.send(until("in-time")).await.unwrap();
    move_clock(client, 301).await;
    assert_eq!(reason(client.send(until("late")).await), Reason::TooLate);
    assert_eq!(client.get("late").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(client.send(until("in-time")).await.unwrap(), first, "nothing has to start");
    move_clock(client, -301).await;
    client.send(until("late")).await.unwrap();
    rig.stop().await;
}

#[tokio::test]
async fn a_key_past_the_horizon_charges_again() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let horizon = SetHorizonRequest { horizon: Some(seconds(24 * 3600)) };
    client.control.clone().set_horizon(horizon).await.unwrap();
    let first = client.charge("k").await.unwrap();
    move_clock(client, 23 * 3600).await;
    assert_eq!(client.charge("k").await.unwrap(), first);
    move_clock(client, 2 * 3600).await;
    let second = client.charge("k").await.unwrap();
    assert_ne!(second.reference, first.reference);
    let keys: Vec<_> = book.entries().into_iter().map(|entry| (entry.kind, entry.key)).collect();
    assert_eq!(keys, [(Kind::Charge, "k".to_owned()), (Kind::Charge, "k".to_owned())]);
    rig.stop().await;
}

#[tokio::test]
async fn refunds_once_per_key_and_within_the_charge() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("k").await.unwrap();
    let refunds =
        join_all((0..8).map(|number| client.refund(if number < 4 { "r" } else { "s" }, "k", 600))).await;
    let (done, refused): (Vec<_>, Vec<_>) = refunds.into_iter().partition(Result::is_ok);
    assert_eq!((done.len(), refused.len()), (4, 4), "one of the two, and its repeats");
    let done = done[0].as_ref().unwrap();
    assert_eq!((done.status(), done.amount, done.currency.as_str()), (refund::Status::Succeeded, 600, "EUR"));
    assert_eq!(client.get_refund(&done.key).await.unwrap(), *done);
    assert_eq!(client.get("k").await.unwrap().refunded, 600);
    assert_eq!(reason(client.refund(&done.key, "k", 1).await), Reason::KeyMismatch);
    assert_eq!(client.get_refund("unknown").await.unwrap_err().code(), Code::NotFound);
    rig.stop().await;
}

#[tokio::test]
async fn lists_every_charge_by_pages() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let keys: BTreeSet<_> = (0..7).map(|number| format!("k{number}")).collect();
    for key in &keys {
        rig.client.charge(key).await.unwrap();
    }
    rig.client.cancel("fenced").await.unwrap();
    let (mut listed, mut page_token, mut pages) = (Vec::<Charge>::new(), String::new(), 0);
    loop {
        let request = ListChargesRequest { page_size: 3, page_token, created_since: None };
        let page = rig.client.provider.clone().list_charges(request).await.unwrap().into_inner();
        assert!(page.charges.len() <= 3);
        listed.extend(page.charges);
        pages += 1;
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!((pages, listed.len()), (3, 7));
    assert_eq!(listed.into_iter().map(|charge| charge.key).collect::<BTreeSet<_>>(), keys);
    for (page_size, page_token) in [(101, ""), (-1, ""), (1, "elsewhere")] {
        let request =
            ListChargesRequest { page_size, page_token: page_token.to_owned(), created_since: None };
        let refused = rig.client.provider.clone().list_charges(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    rig.stop().await;
}

#[tokio::test]
async fn refuses_what_the_contract_does_not_allow() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    for request in [
        request(""),
        request("with blank"),
        request("ä"),
        request(&"k".repeat(256)),
        ChargeRequest { order: None, ..request("k") },
        altered("k", |order| order.amount = 0),
        altered("k", |order| order.amount = 1_000_000_000_001),
        altered("k", |order| order.currency = "eur".to_owned()),
        altered("k", |order| order.source.clear()),
        altered("k", |order| order.reference = "r".repeat(256)),
        ChargeRequest { not_after: Some(prost_types::Timestamp { seconds: 0, nanos: -1 }), ..request("k") },
    ] {
        let described = format!("{request:?}");
        assert_eq!(client.send(request).await.unwrap_err().code(), Code::InvalidArgument, "{described}");
    }
    let huge = CancelChargeRequest { key: "k".repeat(65 * 1024) };
    assert_eq!(client.provider.clone().cancel_charge(huge).await.unwrap_err().code(), Code::OutOfRange);
    assert_eq!(client.refund("r", "k", -1).await.unwrap_err().code(), Code::InvalidArgument);
    assert!(book.entries().is_empty());
    rig.stop().await;
}

#[tokio::test]
async fn counts_the_calls_that_came_in() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("k").await.unwrap();
    client.charge("k").await.unwrap();
    client.get("unknown").await.unwrap_err();
    client.cancel("k").await.unwrap_err();
    client.refund("r", "k", 1).await.unwrap();
    client.get_refund("r").await.unwrap();
    let calls = client.control.clone().count_calls(CountCallsRequest {}).await.unwrap().into_inner();
    let counts = [calls.charge, calls.get, calls.cancel, calls.refund, calls.get_refund, calls.list];
    assert_eq!(counts, [2, 1, 1, 1, 1, 0]);
    rig.stop().await;
}
