//! The provider that a deployment has chosen: one type for daemons, whichever adapter is behind it.

use std::time::SystemTime;

use semel_core::idempotency::InvalidCommand;

use super::grpc::GrpcProvider;
use super::stripe::StripeProvider;
use super::{Answer, Charged, List, Listed, Prepared, Promises, Provider, StoredCharge, StoredRefund};

/// One of the adapters that ship.
#[derive(Clone, Debug)]
pub enum Chosen {
    /// A provider that speaks `semel.provider.v1`.
    Grpc(Box<GrpcProvider>),
    /// Stripe.
    Stripe(Box<StripeProvider>),
}

impl From<GrpcProvider> for Chosen {
    fn from(provider: GrpcProvider) -> Self {
        Self::Grpc(Box::new(provider))
    }
}

impl From<StripeProvider> for Chosen {
    fn from(provider: StripeProvider) -> Self {
        Self::Stripe(Box::new(provider))
    }
}

/// Asks whichever it is.
macro_rules! of {
    ($chosen:expr, $provider:ident => $ask:expr) => {
        match $chosen {
            Chosen::Grpc($provider) => $ask,
            Chosen::Stripe($provider) => $ask,
        }
    };
}

impl Provider for Chosen {
    fn promises(&self) -> Promises {
        of!(self, provider => provider.promises())
    }

    fn accepts(&self, currency: &str, source: &str) -> Result<(), InvalidCommand> {
        of!(self, provider => provider.accepts(currency, source))
    }

    fn encode(&self, amount: i64, currency: &str, source: &str, reference: &str) -> Vec<u8> {
        of!(self, provider => provider.encode(amount, currency, source, reference))
    }

    fn is_open(&self) -> bool {
        of!(self, provider => provider.is_open())
    }

    async fn prepare(&self, charge: &StoredCharge, not_after: SystemTime) -> Prepared {
        of!(self, provider => provider.prepare(charge, not_after).await)
    }

    async fn charge(&self, charge: &StoredCharge, not_after: SystemTime) -> Answer {
        of!(self, provider => provider.charge(charge, not_after).await)
    }

    async fn get(&self, charge: &StoredCharge) -> Answer {
        of!(self, provider => provider.get(charge).await)
    }

    async fn cancel(&self, charge: &StoredCharge) -> Answer {
        of!(self, provider => provider.cancel(charge).await)
    }

    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8> {
        of!(self, provider => provider.encode_refund(charge, amount))
    }

    async fn refund(&self, refund: &StoredRefund, not_after: SystemTime) -> Answer {
        of!(self, provider => provider.refund(refund, not_after).await)
    }

    async fn get_refund(&self, refund: &StoredRefund) -> Answer {
        of!(self, provider => provider.get_refund(refund).await)
    }

    async fn list(&self, list: List, since: SystemTime, page: Option<&str>) -> Listed {
        of!(self, provider => provider.list(list, since, page).await)
    }
}
