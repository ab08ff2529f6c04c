//! Differences about refunds.

use semel_tests::provider::BookLine;
use semel_tests::reconcile::{RefundRow, Sources};
use uuid::Uuid;

use super::double;

/// Changes what one place says of a succeeded refund, by its id and its key towards the provider.
type Corrupt = fn(&mut Sources, Uuid, &str);

pub(super) const CORRUPTIONS: [(&str, Corrupt); 14] = [
    ("the client was not told of a refund", |s, refund, _| {
        s.told_refunds.retain(|told| told.refund_id != refund);
    }),
    ("the client was told another amount of a refund", |s, refund, _| {
        s.told_refunds.iter_mut().filter(|told| told.refund_id == refund).for_each(|told| told.amount += 1);
    }),
    ("the client was told that it failed", |s, refund, _| {
        let told = s.told_refunds.iter_mut().filter(|told| told.refund_id == refund);
        told.for_each(|told| "failed".clone_into(&mut told.status));
    }),
    ("a refund is gone", |s, refund, _| s.refunds.retain(|row| row.refund_id != refund)),
    ("a refund is doubled", |s, refund, _| double(&mut s.refunds, |row| row.refund_id == refund)),
    ("a refund's key differs", |s, refund, _| row(s, refund, |row| row.key.push('x'))),
    ("a refund is of another payment", |s, refund, _| row(s, refund, |row| row.payment_id = Uuid::nil())),
    ("a refund is in processing", |s, refund, _| {
        row(s, refund, |row| "processing".clone_into(&mut row.status));
    }),
    ("a refund is gone from the book", |s, _, key| s.provider.retain(|line| line.key != key)),
    ("a refund is doubled in the book", |s, _, key| double(&mut s.provider, |line| line.key == key)),
    ("a refund's amount differs in the book", |s, _, key| book(s, key, |line| line.amount += 1)),
    ("a refund is of another charge in the book", |s, _, key| book(s, key, |line| line.charge_key.push('x'))),
    ("a refund's booking is gone", |s, refund, _| {
        s.ledger.retain(|booking| booking.source_id != refund.to_string());
    }),
    ("a refund is booked as another amount", |s, refund, _| {
        let booking = s.ledger.iter_mut().filter(|booking| booking.source_id == refund.to_string());
        booking.for_each(|booking| booking.cash += 1);
    }),
];

/// Changes what one place says of the payment of such a refund, by the payment's id.
type CorruptPayment = fn(&mut Sources, Uuid);

pub(super) const CORRUPTIONS_OF_PAYMENT: [(&str, CorruptPayment); 2] = [
    ("a refund's event is gone", |s, payment| {
        let last = s.outbox.iter().rposition(|row| row.aggregate_id == payment.to_string());
        last.map(|last| s.outbox.remove(last));
    }),
    ("a payment has not all taken of it that was given back", |s, payment| {
        s.payments
            .iter_mut()
            .filter(|row| row.payment_id == payment)
            .for_each(|row| row.refund_reserved -= 1);
    }),
];

fn row(sources: &mut Sources, refund: Uuid, change: fn(&mut RefundRow)) {
    sources.refunds.iter_mut().filter(|row| row.refund_id == refund).for_each(change);
}

fn book(sources: &mut Sources, key: &str, change: fn(&mut BookLine)) {
    sources.provider.iter_mut().filter(|line| line.key == key).for_each(change);
}
