//! Charges, fences and refunds that come late or are held: the order in which they are applied decides.

use std::time::Duration;

use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{
    Call, ChargeRequest, FaultKind, MoveClockRequest, OrderFaultRequest, Reason, charge, refund,
};
use tonic::{Code, Request};

use crate::rig::{Client, Rig, Scratch, fault, reason, request, seconds};

async fn order(client: &Client, kind: FaultKind, call: Call) {
    let hold = "gate".to_owned();
    client.order(OrderFaultRequest { hold, times: 1, ..fault(kind, call, "k") }).await;
}

const FAULT: What = What::Fault;
const HELD: What = What::Held;
const LET_GO: What = What::LetGo;
const APPLIED: What = What::Applied;
const REFUSED: What = What::Refused;

#[tokio::test]
async fn a_late_charge_finds_the_fence_that_came_first() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::ApplyLate, Call::Charge).await;
    let late = client.charging("k");
    client.once("k", HELD, Call::Charge).await;
    assert_eq!(client.get("k").await.unwrap_err().code(), Code::NotFound, "which proves nothing");
    client.cancel("k").await.unwrap();
    assert_eq!(client.release("gate").await, 1);
    assert_eq!(reason(late.await.unwrap()), Reason::Fenced);
    let charge = Call::Charge;
    assert_eq!(
        client.once("k", REFUSED, charge).await,
        [(FAULT, charge), (HELD, charge), (APPLIED, Call::Cancel), (LET_GO, charge), (REFUSED, charge)]
    );
    assert_eq!(client.get("k").await.unwrap().status(), charge::Status::Canceled);
    rig.stop().await;
}

#[tokio::test]
async fn a_fence_finds_the_late_charge_that_came_first() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::ApplyLate, Call::Charge).await;
    let late = client.charging("k");
    client.once("k", HELD, Call::Charge).await;
    client.release("gate").await;
    assert_eq!(late.await.unwrap().unwrap().status(), charge::Status::Succeeded);
    assert_eq!(reason(client.cancel("k").await), Reason::AlreadySucceeded);
    let charge = Call::Charge;
    assert_eq!(
        client.once("k", REFUSED, Call::Cancel).await,
        [(FAULT, charge), (HELD, charge), (LET_GO, charge), (APPLIED, charge), (REFUSED, Call::Cancel)]
    );
    rig.stop().await;
}

#[tokio::test]
async fn a_late_charge_is_applied_though_its_client_gave_up() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::ApplyLate, Call::Charge).await;
    let mut send = Request::new(request("k"));
    send.set_timeout(Duration::from_millis(20));
    let status = client.provider.clone().charge(send).await.unwrap_err();
    assert!(matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded), "{status:?}");
    client.once("k", HELD, Call::Charge).await;
    client.release("gate").await;
    client.once("k", APPLIED, Call::Charge).await;
    assert_eq!(client.get("k").await.unwrap().status(), charge::Status::Succeeded);
    rig.stop().await;
}

#[tokio::test]
async fn a_late_charge_is_applied_after_its_delay_though_its_connection_is_gone() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let delay = Some(prost_types::Duration { seconds: 0, nanos: 30_000_000 });
    client.order(OrderFaultRequest { delay, ..fault(FaultKind::ApplyLate, Call::Charge, "k") }).await;
    let other = rig.another().await;
    let gone = other.charging("k");
    client.once("k", HELD, Call::Charge).await;
    gone.abort();
    drop(other);
    client.once("k", APPLIED, Call::Charge).await;
    rig.stop().await;
}

#[tokio::test]
async fn a_late_charge_came_in_in_time_and_does_not_charge_again() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let now =
        client.control.clone().move_clock(MoveClockRequest { by: None }).await.unwrap().into_inner().now;
    let mut not_after = now.unwrap();
    not_after.seconds += 60;
    order(client, FaultKind::ApplyLate, Call::Charge).await;
    let late = tokio::spawn({
        let client = client.clone();
        async move { client.send(ChargeRequest { not_after: Some(not_after), ..request("k") }).await }
    });
    client.once("k", HELD, Call::Charge).await;
    client.control.clone().move_clock(MoveClockRequest { by: Some(seconds(120)) }).await.unwrap();
    let too_late = client.send(ChargeRequest { not_after: Some(not_after), ..request("k") }).await;
    assert_eq!(reason(too_late), Reason::TooLate);
    client.release("gate").await;
    let answer = late.await.unwrap().unwrap();
    assert_eq!(client.charge("k").await.unwrap(), answer);
    assert_eq!(book.entries().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn a_late_fence_finds_the_charge_that_came_first() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::ApplyLate, Call::Cancel).await;
    let late = client.canceling("k");
    client.once("k", HELD, Call::Cancel).await;
    client.charge("k").await.unwrap();
    client.release("gate").await;
    assert_eq!(reason(late.await.unwrap()), Reason::AlreadySucceeded);
    rig.stop().await;
}

#[tokio::test]
async fn a_held_charge_is_processing_and_its_key_in_use() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::HoldBeforeApply, Call::Charge).await;
    let held = client.charging("k");
    client.once("k", HELD, Call::Charge).await;
    assert_eq!(reason(client.charge("k").await), Reason::KeyInUse);
    let processing = client.get("k").await.unwrap();
    assert_eq!((processing.status(), processing.amount), (charge::Status::Processing, 1000));
    assert!(book.entries().is_empty());
    client.release("gate").await;
    let answer = held.await.unwrap().unwrap();
    assert_eq!(client.charge("k").await.unwrap(), answer);
    rig.stop().await;
}

#[tokio::test]
async fn a_fence_does_not_wait_for_a_held_charge() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::HoldBeforeApply, Call::Charge).await;
    let held = client.charging("k");
    client.once("k", HELD, Call::Charge).await;
    assert_eq!(client.cancel("k").await.unwrap().status(), charge::Status::Canceled);
    client.release("gate").await;
    assert_eq!(reason(held.await.unwrap()), Reason::Fenced);
    rig.stop().await;
}

#[tokio::test]
async fn a_charge_held_after_it_was_applied_is_known_before_it_is_answered() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::HoldAfterApply, Call::Charge).await;
    let held = client.charging("k");
    let charge = Call::Charge;
    assert_eq!(client.once("k", HELD, charge).await, [(FAULT, charge), (APPLIED, charge), (HELD, charge)]);
    let known = client.get("k").await.unwrap();
    assert_eq!(known.status(), charge::Status::Succeeded);
    assert!(!held.is_finished());
    client.release("gate").await;
    assert_eq!(held.await.unwrap().unwrap(), known);
    rig.stop().await;
}

#[tokio::test]
async fn a_cancel_can_be_held_before_and_after_its_fence() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    order(client, FaultKind::HoldAfterApply, Call::Cancel).await;
    let held = client.canceling("k");
    client.once("k", HELD, Call::Cancel).await;
    assert_eq!(reason(client.charge("k").await), Reason::Fenced, "the fence is there");
    client.release("gate").await;
    assert_eq!(held.await.unwrap().unwrap().status(), charge::Status::Canceled);

    client
        .order(OrderFaultRequest {
            hold: "before".to_owned(),
            ..fault(FaultKind::HoldBeforeApply, Call::Cancel, "free")
        })
        .await;
    let held = client.canceling("free");
    client.once("free", HELD, Call::Cancel).await;
    client.charge("free").await.unwrap();
    client.release("before").await;
    assert_eq!(reason(held.await.unwrap()), Reason::AlreadySucceeded, "the charge came first");
    rig.stop().await;
}

#[tokio::test]
async fn a_held_refund_is_processing() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("charge").await.unwrap();
    order(client, FaultKind::HoldBeforeApply, Call::Refund).await;
    let held = tokio::spawn({
        let client = client.clone();
        async move { client.refund("k", "charge", 400).await }
    });
    client.once("k", HELD, Call::Refund).await;
    assert_eq!(client.get_refund("k").await.unwrap().status(), refund::Status::Processing);
    assert_eq!(reason(client.refund("k", "charge", 400).await), Reason::KeyInUse);
    client.release("gate").await;
    assert_eq!(held.await.unwrap().unwrap().status(), refund::Status::Succeeded);
    rig.stop().await;
}
