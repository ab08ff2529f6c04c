//! The demo's verdict: agreement is exit code 0; a difference in any of the places is not, and names its id.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Intent, Payment, Refund};
use semel_tests::process::binary;
use semel_tests::provider::BookLine;
use semel_tests::reconcile::{PaymentRow, Sources};
use semel_tests::services::Services;
use semel_tests::system::{Shape, System};
use uuid::Uuid;

mod refunds;

/// Asks the verdict of the program that plays the demo.
fn verdict(sources: &Sources) -> Result<(Option<i32>, String)> {
    let file: PathBuf = std::env::temp_dir().join(format!("semel-sources-{}.json", Uuid::new_v4()));
    std::fs::write(&file, serde_json::to_vec(sources)?)?;
    let output = Command::new(env!("CARGO_BIN_EXE_semel-bed")).arg("reconcile").arg(&file).output()?;
    std::fs::remove_file(&file)?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?))
}

#[tokio::test]
async fn a_difference_in_any_place_fails_and_names_the_id() -> Result<()> {
    ensure!(binary("semel-api").is_ok(), "run `cargo xtask test`, which builds the daemons");
    let services = Services::from_env()?;
    let system = System::start(&services, Shape { apis: 1, relays: 1, env: &[] }).await?;
    let client = system.client(0)?;
    let mut acknowledged = Vec::new();
    for number in 0..5 {
        let intent = Intent::new(&format!("order-{number}"), 100 + number);
        acknowledged.push(client.place_until_final(&intent).await?.acknowledged(&intent.key)?);
    }
    let mut told = Vec::new();
    for number in 0..3 {
        let payment = Payment::new(&format!("payment-{number}"), 300 + number);
        told.push(client.pay_until_final(&payment).await?.told(&payment.key)?);
    }
    let mut declined = Payment::new("declined", 400);
    "tok_declined".clone_into(&mut declined.source);
    told.push(client.pay_until_final(&declined).await?.told(&declined.key)?);
    let mut told_refunds = Vec::new();
    // Of 302, and so the second one is refused.
    for _ in 0..2 {
        let refund = Refund::new(told[2].payment_id, 200);
        told_refunds.push(client.refund_until_final(&refund).await?.told_refund(&refund.key)?);
    }
    system.place.settled(Duration::from_secs(30)).await?;
    let sound = system.sources_with_refunds(acknowledged, told, told_refunds).await?;
    system.stop().await?;

    let (code, said) = verdict(&sound)?;
    assert_eq!(code, Some(0), "{said}");
    ensure!(said.contains("All places agree"), "{said}");

    let order = sound.orders[2].order_id;
    let event =
        sound.outbox.iter().find(|row| row.aggregate_id == order.to_string()).expect("its event").event_id;
    for (what, named, corrupt) in CORRUPTIONS {
        let mut sources = sound.clone();
        corrupt(&mut sources, order, event);
        let id = match named {
            Named::Order => order,
            Named::Event => event,
        };
        differs(what, &sources, &id.to_string())?;
    }
    let payment = sound.told[1].payment_id;
    let row = sound.payments.iter().find(|row| row.payment_id == payment).context("its row")?;
    for (what, corrupt) in CORRUPTIONS_OF_PAYMENTS {
        let mut sources = sound.clone();
        corrupt(&mut sources, payment, &row.provider_key);
        differs(what, &sources, &payment.to_string())?;
    }
    let (refund, refunded) = (sound.told_refunds[0].refund_id, sound.told_refunds[0].payment_id);
    let key = sound.refunds.iter().find_map(|row| row.provider_key.clone()).context("its key")?;
    for (what, corrupt) in refunds::CORRUPTIONS {
        let mut sources = sound.clone();
        corrupt(&mut sources, refund, &key);
        differs(what, &sources, &refund.to_string())?;
    }
    for (what, corrupt) in refunds::CORRUPTIONS_OF_PAYMENT {
        let mut sources = sound.clone();
        corrupt(&mut sources, refunded);
        differs(what, &sources, &refunded.to_string())?;
    }
    let mut sources = sound.clone();
    double(&mut sources.provider, |line| line.kind == "refund");
    sources.provider.last_mut().context("its double")?.key = "unheard-of refund".to_owned();
    differs("a refund in the book that nobody knows of", &sources, "unheard-of refund")?;

    let mut sources = sound.clone();
    sources.provider.push(BookLine { key: "unheard-of".to_owned(), ..charge_of(&sound, &row.provider_key)? });
    differs("a charge that no payment knows of", &sources, "unheard-of")
}

/// Checks that the verdict is no, and names this id.
fn differs(what: &str, sources: &Sources, id: &str) -> Result<()> {
    let (code, said) = verdict(sources)?;
    assert_eq!(code, Some(1), "{what}: {said}");
    ensure!(said.contains(id), "{what}: {id} is not named in {said}");
    ensure!(!said.contains("All places agree"), "{what}: {said}");
    Ok(())
}

fn charge_of(sources: &Sources, provider_key: &str) -> Result<BookLine> {
    let charge = sources.provider.iter().find(|line| line.kind == "charge" && line.key == provider_key);
    charge.cloned().context("no charge")
}

/// Which id the verdict must name.
#[derive(Clone, Copy)]
enum Named {
    Order,
    Event,
}

/// Changes what one place says of an order and its event.
type Corrupt = fn(&mut Sources, Uuid, Uuid);

const CORRUPTIONS: [(&str, Named, Corrupt); 14] = [
    ("an acknowledgement is gone", Named::Order, |s, order, _| {
        s.acknowledged.retain(|a| a.order_id != order);
    }),
    ("an acknowledged amount differs", Named::Order, |s, order, _| {
        s.acknowledged.iter_mut().filter(|a| a.order_id == order).for_each(|a| a.amount += 1);
    }),
    ("an order is gone", Named::Order, |s, order, _| s.orders.retain(|row| row.order_id != order)),
    ("an order is doubled", Named::Order, |s, order, _| double(&mut s.orders, |row| row.order_id == order)),
    ("an order's currency differs", Named::Order, |s, order, _| {
        s.orders
            .iter_mut()
            .filter(|row| row.order_id == order)
            .for_each(|row| "USD".clone_into(&mut row.currency));
    }),
    ("an event is gone from the outbox", Named::Order, |s, _, event| {
        s.outbox.retain(|row| row.event_id != event);
    }),
    ("an event is doubled in the outbox", Named::Order, |s, _, event| {
        double(&mut s.outbox, |row| row.event_id == event);
    }),
    ("an event is not published", Named::Event, |s, _, event| {
        s.outbox.iter_mut().filter(|row| row.event_id == event).for_each(|row| row.published = false);
    }),
    ("a message was never routed", Named::Event, |s, _, event| s.tap.retain(|m| m.event_id != event)),
    ("a message is in no outbox", Named::Event, |s, _, event| s.outbox.retain(|row| row.event_id != event)),
    ("a booking is gone", Named::Order, |s, order, _| s.ledger.retain(|b| b.source_id != order.to_string())),
    ("a booking is doubled", Named::Order, |s, order, _| {
        double(&mut s.ledger, |b| b.source_id == order.to_string());
    }),
    ("a booking's amount differs", Named::Order, |s, order, _| {
        s.ledger.iter_mut().filter(|b| b.source_id == order.to_string()).for_each(|b| b.receivables += 1);
    }),
    ("a booking does not balance", Named::Order, |s, order, _| {
        s.ledger.iter_mut().filter(|b| b.source_id == order.to_string()).for_each(|b| b.sales += 1);
    }),
];

/// Changes what one place says of a succeeded payment, by its id and its key towards the provider.
type CorruptPayment = fn(&mut Sources, Uuid, &str);

const CORRUPTIONS_OF_PAYMENTS: [(&str, CorruptPayment); 17] = [
    ("the client was not told", |s, payment, _| s.told.retain(|told| told.payment_id != payment)),
    ("the client was told another amount", |s, payment, _| {
        s.told.iter_mut().filter(|told| told.payment_id == payment).for_each(|told| told.amount += 1);
    }),
    ("the client was told that it was declined", |s, payment, _| {
        let told = s.told.iter_mut().filter(|told| told.payment_id == payment);
        told.for_each(|told| "declined".clone_into(&mut told.status));
    }),
    ("a payment is gone", |s, payment, _| s.payments.retain(|row| row.payment_id != payment)),
    ("a payment is doubled", |s, payment, _| double(&mut s.payments, |row| row.payment_id == payment)),
    ("a payment's amount differs", |s, payment, _| row(s, payment, |row| row.amount += 1)),
    ("a payment's key differs", |s, payment, _| row(s, payment, |row| row.key.push('x'))),
    ("a payment is in processing", |s, payment, _| {
        row(s, payment, |row| "processing".clone_into(&mut row.status));
    }),
    ("a charged payment was rolled back", |s, payment, _| {
        row(s, payment, |row| "canceled".clone_into(&mut row.status));
        let told = s.told.iter_mut().filter(|told| told.payment_id == payment);
        told.for_each(|told| "canceled".clone_into(&mut told.status));
        s.ledger.retain(|booking| booking.source_id != payment.to_string());
    }),
    ("a charge is gone", |s, _, key| s.provider.retain(|line| line.key != key)),
    ("a charge is doubled", |s, _, key| double(&mut s.provider, |line| line.key == key)),
    ("a charge's amount differs", |s, _, key| {
        s.provider.iter_mut().filter(|line| line.key == key).for_each(|line| line.amount += 1);
    }),
    ("a charge's currency differs", |s, _, key| {
        let line = s.provider.iter_mut().filter(|line| line.key == key);
        line.for_each(|line| "USD".clone_into(&mut line.currency));
    }),
    ("a payment's event is gone", |s, payment, _| {
        s.outbox.retain(|row| row.aggregate_id != payment.to_string());
    }),
    ("a payment's event is doubled", |s, payment, _| {
        double(&mut s.outbox, |row| row.aggregate_id == payment.to_string());
    }),
    ("a payment's booking is gone", |s, payment, _| {
        s.ledger.retain(|booking| booking.source_id != payment.to_string());
    }),
    ("a payment is booked as another amount", |s, payment, _| {
        let booking = s.ledger.iter_mut().filter(|booking| booking.source_id == payment.to_string());
        booking.for_each(|booking| booking.cash += 1);
    }),
];

fn row(sources: &mut Sources, payment: Uuid, change: fn(&mut PaymentRow)) {
    sources.payments.iter_mut().filter(|row| row.payment_id == payment).for_each(change);
}

fn double<T: Clone>(rows: &mut Vec<T>, is_meant: impl Fn(&T) -> bool) {
    let twin = rows.iter().find(|row| is_meant(row)).cloned();
    rows.extend(twin);
}

#[test]
fn an_event_that_overtakes_its_predecessor_is_a_difference_and_a_repeat_is_none() -> Result<()> {
    let row = |id: i64| {
        serde_json::json!({"event_id": Uuid::from_u128(id.unsigned_abs().into()), "id": id,
            "aggregate_type": "shipment", "aggregate_id": "s", "published": true})
    };
    let message = |id: i64| {
        serde_json::json!({"event_id": Uuid::from_u128(id.unsigned_abs().into()), "event_type": "ShipmentMoved",
            "aggregate_type": "shipment", "aggregate_id": "s", "aggregate_version": null, "outbox_id": id,
            "payload": {}, "headers": {}})
    };
    let sources = |arrivals: &[i64]| -> Result<Sources> {
        let value = serde_json::json!({"acknowledged": [], "orders": [], "ledger": [],
            "outbox": [row(1), row(2), row(3)], "tap": arrivals.iter().map(|id| message(*id)).collect::<Vec<_>>()});
        Ok(serde_json::from_value(value)?)
    };
    let (code, said) = verdict(&sources(&[1, 2, 1, 2, 3])?)?;
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = verdict(&sources(&[1, 3, 2])?)?;
    assert_eq!(code, Some(1), "{said}");
    ensure!(said.contains(&Uuid::from_u128(2).to_string()) && said.contains("overtaken"), "{said}");
    Ok(())
}
