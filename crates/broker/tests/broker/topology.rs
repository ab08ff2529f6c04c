//! Declaring, again and differently.

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{ConnectionProperties, ExchangeKind};
use semel_broker::topology::{Consumers, declare, declare_exchange, verify};
use semel_broker::{Acceptance, Disposition, Error, Topology};

use crate::support::{Bed, raw_url};

fn topology(bed: &Bed) -> Topology {
    let topology =
        Topology::new(&bed.exchange, bed.queue_name(), vec!["payment.*".into(), "refund.#".into()]);
    bed.remove_queue(&topology.dead_queue());
    topology
}

#[tokio::test]
async fn declaring_again_changes_nothing() {
    Bed::run(async |bed| {
        let topology = topology(bed);
        declare(&bed.connection, &topology).await.unwrap();
        declare(&bed.connection, &topology).await.unwrap();
        verify(&bed.connection, &topology).await.unwrap();
        let mut publisher = bed.publisher().await;
        let keys = ["payment.succeeded", "refund.a.b", "payment.a.b"];
        let wave = publisher.publish_wave(keys.iter().map(|key| bed.outgoing(key, "x")).collect()).await;
        let routed: Vec<bool> =
            wave.outcomes.iter().map(|outcome| *outcome == semel_broker::Outcome::Confirmed).collect();
        assert_eq!(routed, [true, true, false]);
        bed.wait_for_count(&topology.queue, 2).await;
    })
    .await;
}

#[tokio::test]
async fn another_setting_is_an_error_that_names_it() {
    Bed::run(async |bed| {
        let before = topology(bed);
        declare(&bed.connection, &before).await.unwrap();
        let limit = Topology { delivery_limit: 7, ..before.clone() };
        let single = Topology { consumers: Consumers::SingleActive, ..before.clone() };
        for (changed, argument) in [(limit, "x-delivery-limit"), (single, "x-single-active-consumer")] {
            for error in [
                declare(&bed.connection, &changed).await.unwrap_err(),
                verify(&bed.connection, &changed).await.unwrap_err(),
            ] {
                assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
                assert_eq!(error.disposition(), Disposition::Fatal);
                let text = error.to_string();
                for part in [before.queue.as_str(), argument, "drain and delete it"] {
                    assert!(text.contains(part), "{text}");
                }
            }
        }
        // The connection survived it.
        declare(&bed.connection, &before).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn verifying_makes_nothing() {
    Bed::run(async |bed| {
        let topology = topology(bed);
        for _ in 0..2 {
            let error = verify(&bed.connection, &topology).await.unwrap_err();
            assert_eq!(error.reply_code(), Some(404), "{error:?}");
        }
        let nowhere = Topology { exchange: bed.exchange_name(), ..topology };
        assert_eq!(verify(&bed.connection, &nowhere).await.unwrap_err().reply_code(), Some(404));
        let asked = bed.publisher().await.exchange_takes(&nowhere.exchange).await.unwrap();
        assert_eq!(asked, Acceptance::Missing);
    })
    .await;
}

#[tokio::test]
async fn an_exchange_of_another_type_is_an_error_that_names_it() {
    Bed::run(async |bed| {
        let name = bed.exchange_name();
        let raw = lapin::Connection::connect(&raw_url(), ConnectionProperties::default()).await.unwrap();
        let channel = raw.create_channel().await.unwrap();
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        channel
            .exchange_declare(name.as_str().into(), ExchangeKind::Fanout, durable, FieldTable::default())
            .await
            .unwrap();
        let error = declare_exchange(&bed.connection, &name).await.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
        assert!(error.to_string().contains(&name) && error.to_string().contains("type"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_name_that_is_too_long_is_an_error_and_no_panic() {
    Bed::run(async |bed| {
        let topology = Topology::new(&bed.exchange, "q".repeat(251), Vec::new());
        let error = declare(&bed.connection, &topology).await.unwrap_err();
        assert!(matches!(error, Error::Name(_)), "{error:?}");
    })
    .await;
}
