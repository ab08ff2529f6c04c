//! The payment provider: its service, and the reasons of its refusals.
//!
//! A reason travels as `google.rpc.ErrorInfo` in the status details, which every gRPC library reads.

use std::collections::HashMap;
use std::fmt;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Version 1 of the service, and the simulator's control.
#[expect(
    clippy::pedantic,
    unused_qualifications,
    reason = "generated: what matters to a reader stands in proto/semel/provider/v1"
)]
pub mod v1 {
    tonic::include_proto!("semel.provider.v1");
}

use v1::{ChargeOrder, Reason};

/// The domain of the provider's error infos.
pub const DOMAIN: &str = "provider.semel";
const PREFIX: &str = "REASON_";

/// Shows everything but the source, which is a secret.
impl fmt::Debug for ChargeOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { amount, currency, source: _, reference } = self;
        f.debug_struct("ChargeOrder")
            .field("amount", amount)
            .field("currency", currency)
            .field("reference", reference)
            .finish_non_exhaustive()
    }
}

impl Reason {
    /// Returns the status code that belongs to this reason.
    #[must_use]
    pub fn code(self) -> Code {
        match self {
            Self::KeyInUse => Code::Aborted,
            _ => Code::FailedPrecondition,
        }
    }

    /// Returns the name on the wire, `KEY_MISMATCH`.
    #[must_use]
    pub fn wire_name(self) -> &'static str {
        self.as_str_name().trim_start_matches(PREFIX)
    }

    /// Makes the refusal for this reason.
    #[must_use]
    pub fn refuse(self, message: impl Into<String>) -> Status {
        let details =
            ErrorDetails::with_error_info(self.wire_name(), DOMAIN, HashMap::<String, String>::new());
        Status::with_error_details(self.code(), message, details)
    }

    /// Reads the reason of a refusal; `None` without one, with one that is not known here, or of another domain.
    #[must_use]
    pub fn of(status: &Status) -> Option<Self> {
        let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN)?;
        Self::from_str_name(&format!("{PREFIX}{}", info.reason)).filter(|reason| *reason != Self::Unspecified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_survives_the_wire() {
        for number in 1.. {
            let Ok(reason) = Reason::try_from(number) else {
                assert_eq!(number, 10, "all reasons were tried");
                break;
            };
            let sent = reason.refuse("no").into_http::<()>();
            let received = Status::from_header_map(sent.headers()).unwrap();
            assert_eq!((received.code(), received.message()), (reason.code(), "no"));
            assert_eq!(Reason::of(&received), Some(reason));
        }
    }

    #[test]
    fn a_foreign_or_unknown_reason_is_none() {
        let with = |reason: &str, domain: &str| {
            let details = ErrorDetails::with_error_info(reason, domain, HashMap::<String, String>::new());
            Status::with_error_details(Code::FailedPrecondition, "", details)
        };
        assert_eq!(Reason::of(&with("FENCED", DOMAIN)), Some(Reason::Fenced));
        assert_eq!(Reason::of(&with("FENCED", "elsewhere")), None);
        assert_eq!(Reason::of(&with("UNSPECIFIED", DOMAIN)), None);
        assert_eq!(Reason::of(&with("NEWER", DOMAIN)), None);
        assert_eq!(Reason::of(&Status::failed_precondition("bare")), None);
    }

    #[test]
    fn an_order_does_not_show_its_source() {
        let order = ChargeOrder {
            amount: 5,
            currency: "EUR".to_owned(),
            source: "tok_secret".to_owned(),
            reference: "r".to_owned(),
        };
        let request = v1::ChargeRequest { key: "k".to_owned(), order: Some(order), not_after: None };
        let shown = format!("{request:?}");
        assert!(shown.contains("EUR") && !shown.contains("tok_secret"), "{shown}");
    }
}
