//! Every kind of fault: what the client sees, what was applied, and that the hit is recorded.

use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{
    Call, CountCallsRequest, FaultKind, LiftFaultsRequest, ListChargesRequest, OrderFaultRequest, Reason,
    charge, refund,
};
use tonic::Code;

use crate::rig::{Client, Rig, Scratch, fault, reason};

/// Asserts that exactly these hits of a fault are recorded for the key.
async fn assert_hits(client: &Client, key: &str, number: u64, kind: FaultKind, call: Call, times: usize) {
    let happenings = client.happenings(key).await;
    let hits =
        happenings.iter().filter(|happening| happening.what() == What::Fault && happening.fault == number);
    let hits: Vec<_> = hits.map(|hit| (hit.kind(), hit.call())).collect();
    assert_eq!(hits, vec![(kind, call); times], "{happenings:?}");
}

async fn lift(client: &Client, fault: u64) {
    client.control.clone().lift_faults(LiftFaultsRequest { fault }).await.unwrap();
}

#[tokio::test]
async fn a_lost_answer_was_applied_and_never_comes() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let order = OrderFaultRequest { times: 1, ..fault(FaultKind::AnswerLost, Call::Charge, "k") };
    let number = client.order(order).await;
    let lost = client.charging("k");
    client.once("k", What::Applied, Call::Charge).await;
    assert_hits(client, "k", number, FaultKind::AnswerLost, Call::Charge, 1).await;
    assert!(!lost.is_finished());
    lost.abort();
    let again = client.charge("k").await.unwrap();
    assert_eq!(again.status(), charge::Status::Succeeded);
    assert_eq!(book.entries().len(), 1);
    client.once("k", What::Replayed, Call::Charge).await;
    rig.stop().await;
}

#[tokio::test]
async fn answers_that_tell_nothing_may_or_may_not_have_been_applied() {
    let cases = [
        (FaultKind::AnswerUnavailable, Code::Unavailable, true),
        (FaultKind::Refuse, Code::Unavailable, false),
        (FaultKind::Flapping, Code::Unavailable, false),
        (FaultKind::Outage, Code::Unavailable, false),
        (FaultKind::Sticky500, Code::Internal, false),
        (FaultKind::InUse, Code::Aborted, false),
    ];
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    for (kind, code, applied) in cases {
        let key = kind.as_str_name();
        let number = client.order(OrderFaultRequest { times: 1, ..fault(kind, Call::Charge, key) }).await;
        let status = client.charge(key).await.unwrap_err();
        assert_eq!(status.code(), code, "{key}");
        assert_eq!(Reason::of(&status), (code == Code::Aborted).then_some(Reason::KeyInUse), "{key}");
        assert_eq!(client.get(key).await.is_ok(), applied, "{key}");
        assert_hits(client, key, number, kind, Call::Charge, 1).await;
        lift(client, number).await;
        assert_eq!(client.charge(key).await.unwrap().status(), charge::Status::Succeeded, "{key}");
    }
    assert_eq!(book.entries().len(), cases.len());
    rig.stop().await;
}

#[tokio::test]
async fn a_stuck_key_stays_stuck_whether_or_not_it_was_applied() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    for (key, applied) in [("yes", true), ("no", false)] {
        let number = client
            .order(OrderFaultRequest { applied, ..fault(FaultKind::Sticky500, Call::Charge, key) })
            .await;
        for _ in 0..3 {
            assert_eq!(client.charge(key).await.unwrap_err().code(), Code::Internal);
        }
        assert_eq!(client.get(key).await.is_ok(), applied);
        assert_hits(client, key, number, FaultKind::Sticky500, Call::Charge, 3).await;
    }
    assert_eq!(book.entries().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn flapping_serves_every_second_call() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let number = client.order(fault(FaultKind::Flapping, Call::Charge, "k")).await;
    let mut served = Vec::new();
    for _ in 0..4 {
        served.push(client.charge("k").await.is_ok());
    }
    assert_eq!(served, [false, true, false, true]);
    assert_hits(client, "k", number, FaultKind::Flapping, Call::Charge, 2).await;
    rig.stop().await;
}

#[tokio::test]
async fn an_outage_is_for_everyone_until_it_is_lifted() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let number = client.order(fault(FaultKind::Outage, Call::Unspecified, "")).await;
    assert_eq!(client.charge("k").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.get("k").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.cancel("k").await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.refund("k", "k", 1).await.unwrap_err().code(), Code::Unavailable);
    assert_eq!(client.get_refund("k").await.unwrap_err().code(), Code::Unavailable);
    let list = client.provider.clone().list_charges(ListChargesRequest::default()).await;
    assert_eq!(list.unwrap_err().code(), Code::Unavailable);
    lift(client, number).await;
    client.charge("k").await.unwrap();
    let hits = client.happenings("").await.iter().filter(|happening| happening.what() == What::Fault).count();
    let calls = client.control.clone().count_calls(CountCallsRequest {}).await.unwrap().into_inner();
    assert_eq!((hits, calls.charge), (6, 2));
    rig.stop().await;
}

#[tokio::test]
async fn declines_a_charge_and_fails_a_refund_as_ordered() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let declining = |call, key| OrderFaultRequest {
        code: "as_ordered".to_owned(),
        times: 1,
        ..fault(FaultKind::Decline, call, key)
    };
    let number = client.order(declining(Call::Charge, "declined")).await;
    let declined = client.charge("declined").await.unwrap();
    assert_eq!((declined.status(), declined.decline_code.as_str()), (charge::Status::Declined, "as_ordered"));
    assert_eq!(client.charge("declined").await.unwrap(), declined);
    assert_hits(client, "declined", number, FaultKind::Decline, Call::Charge, 1).await;

    client.charge("k").await.unwrap();
    let number = client.order(declining(Call::Refund, "r")).await;
    let failed = client.refund("r", "k", 1000).await.unwrap();
    assert_eq!((failed.status(), failed.failure_code.as_str()), (refund::Status::Failed, "as_ordered"));
    assert_eq!(client.refund("r", "k", 1000).await.unwrap(), failed);
    assert_eq!(client.get("k").await.unwrap().refunded, 0);
    assert_hits(client, "r", number, FaultKind::Decline, Call::Refund, 1).await;
    rig.stop().await;
}

#[tokio::test]
async fn answers_of_charges_can_be_spoilt_in_every_way() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("k").await.unwrap();
    for call in [Call::Charge, Call::Get, Call::Cancel] {
        for kind in [FaultKind::Garbage, FaultKind::WrongKey, FaultKind::WrongAmount] {
            let key = if call == Call::Cancel { kind.as_str_name() } else { "k" };
            let number = client.order(OrderFaultRequest { times: 1, ..fault(kind, call, key) }).await;
            let answer = match call {
                Call::Charge => client.charge(key).await,
                Call::Get => client.get(key).await,
                _ => client.cancel(key).await,
            };
            let answer = answer.unwrap();
            match kind {
                FaultKind::Garbage => {
                    assert_eq!((answer.status(), answer.key.as_str()), (charge::Status::Unspecified, ""));
                }
                FaultKind::WrongKey => assert_ne!(answer.key, key),
                _ => {
                    assert_eq!(answer.key, key);
                    assert_ne!(answer.amount, if call == Call::Cancel { 0 } else { 1000 });
                }
            }
            assert_hits(client, key, number, kind, call, 1).await;
        }
    }
    assert_eq!(client.get("k").await.unwrap().amount, 1000, "only the answers were spoilt");
    rig.stop().await;
}

#[tokio::test]
async fn answers_of_refunds_can_be_spoilt_and_lost() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    client.charge("k").await.unwrap();
    for (call, kind) in [
        (Call::Refund, FaultKind::WrongAmount),
        (Call::Refund, FaultKind::WrongKey),
        (Call::GetRefund, FaultKind::Garbage),
        (Call::Refund, FaultKind::AnswerUnavailable),
        (Call::Refund, FaultKind::InUse),
        (Call::GetRefund, FaultKind::Refuse),
    ] {
        let number = client.order(OrderFaultRequest { times: 1, ..fault(kind, call, "r") }).await;
        let answer = match call {
            Call::Refund => client.refund("r", "k", 10).await,
            _ => client.get_refund("r").await,
        };
        match (kind, answer) {
            (FaultKind::WrongAmount, Ok(answer)) => assert_ne!(answer.amount, 10),
            (FaultKind::WrongKey, Ok(answer)) => assert_ne!(answer.key, "r"),
            (FaultKind::Garbage, Ok(answer)) => assert_eq!(answer.status(), refund::Status::Unspecified),
            (FaultKind::InUse, answer @ Err(_)) => assert_eq!(reason(answer), Reason::KeyInUse),
            (_, answer) => assert_eq!(answer.unwrap_err().code(), Code::Unavailable),
        }
        assert_hits(client, "r", number, kind, call, 1).await;
    }
    assert_eq!(client.get("k").await.unwrap().refunded, 10, "refunded once");
    rig.stop().await;
}

#[tokio::test]
async fn a_latency_delays_and_nothing_else() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let client = &rig.client;
    let delay = Some(prost_types::Duration { seconds: 0, nanos: 20_000_000 });
    let number =
        client.order(OrderFaultRequest { delay, ..fault(FaultKind::Latency, Call::Charge, "k") }).await;
    let began = std::time::Instant::now();
    client.charge("k").await.unwrap();
    assert!(began.elapsed().as_millis() >= 20);
    assert_hits(client, "k", number, FaultKind::Latency, Call::Charge, 1).await;
    rig.stop().await;
}

#[tokio::test]
async fn an_order_that_cannot_happen_is_refused() {
    let book = Scratch::new();
    let rig = Rig::start(&book.0).await;
    let mut control = rig.client.control.clone();
    let refused = control.order_fault(fault(FaultKind::Decline, Call::Get, "k")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    rig.stop().await;
}
