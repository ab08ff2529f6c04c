//! What the desk reads from an order.

use std::fmt::Write as _;

use prost::Message as _;
use semel_proto::provider::v1::ChargeOrder;
use sha2::{Digest as _, Sha256};

/// Cards that are always declined, as the test tokens of real providers are; returns the decline code.
pub(super) fn declined_by(source: &str) -> Option<&'static str> {
    match source {
        "tok_declined" => Some("card_declined"),
        "tok_insufficient" => Some("insufficient_funds"),
        _ => None,
    }
}

/// Hexadecimal SHA-256 of the encoded order: two orders are the same when their digests are.
pub(super) fn digest(order: &ChargeOrder) -> String {
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(order.encode_to_vec()) {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
