//! The API over gRPC.

use std::fmt;

/// Version 1 of the service.
#[expect(
    clippy::pedantic,
    unused_qualifications,
    reason = "generated: what matters to a reader stands in proto/semel/payments/v1"
)]
pub mod v1 {
    tonic::include_proto!("semel.payments.v1");
}

use v1::CreatePaymentRequest;

/// The domain of the API's error infos.
pub const DOMAIN: &str = "payments.semel";
/// The full name of the service.
pub const SERVICE: &str = "semel.payments.v1.Payments";

/// Shows everything but the source, which is a secret.
impl fmt::Debug for CreatePaymentRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reference, amount, currency, source: _ } = self;
        f.debug_struct("CreatePaymentRequest")
            .field("reference", reference)
            .field("amount", amount)
            .field("currency", currency)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payment_does_not_show_its_source() {
        let request = CreatePaymentRequest {
            reference: "r".to_owned(),
            amount: 5,
            currency: "EUR".to_owned(),
            source: "tok_secret".to_owned(),
        };
        let shown = format!("{request:?}");
        assert!(shown.contains("EUR") && !shown.contains("tok_secret"), "{shown}");
    }
}
