//! What a credential's scopes allow: each resource has one to read it and one to write it. Refunds are a matter of payments.
//!
//! It is asked after the credential and before anything else, on every retry too: a credential that may not write is not
//! answered from what was stored. Where a request leads nowhere, no scope is asked for, and that is what it is told.

use clap::ValueEnum;
use http::Method;
use semel_core::credentials::Scopes;
use semel_core::idempotency::Command as _;
use semel_payments::orders::CreateOrder;
use semel_payments::payments::CreatePayment;
use semel_payments::refunds::CreateRefund;

use crate::error::ApiError;
use crate::grpc::service as calls;
use crate::orders::{ORDER, ORDERS};
use crate::payments::{PAYMENT, PAYMENTS};
use crate::refunds::{ALL_REFUNDS, REFUND, REFUNDS};

/// A scope.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Access {
    /// Reading orders, and how their keys stand.
    #[value(name = "orders:read")]
    OrdersRead,
    /// Placing orders.
    #[value(name = "orders:write")]
    OrdersWrite,
    /// Reading payments and refunds, and how their keys stand.
    #[value(name = "payments:read")]
    PaymentsRead,
    /// Making payments and refunds.
    #[value(name = "payments:write")]
    PaymentsWrite,
}

impl Access {
    /// As credentials have it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OrdersRead => "orders:read",
            Self::OrdersWrite => "orders:write",
            Self::PaymentsRead => "payments:read",
            Self::PaymentsWrite => "payments:write",
        }
    }

    /// What a request needs; none where it is for no route, or its handler asks.
    pub(crate) fn of_request(method: &Method, route: &str) -> Option<Self> {
        let is_read = [Method::GET, Method::HEAD].contains(method);
        let (read, write) = match route {
            ORDERS | ORDER => (Self::OrdersRead, Self::OrdersWrite),
            PAYMENTS | PAYMENT | REFUNDS | REFUND | ALL_REFUNDS => (Self::PaymentsRead, Self::PaymentsWrite),
            _ => return None,
        };
        (is_read || method == Method::POST).then_some(if is_read { read } else { write })
    }

    /// What a call needs; none where there is no such one, or its handler asks.
    pub(crate) fn of_call(path: &str) -> Option<Self> {
        match path {
            calls::CREATE_ORDER => Some(Self::OrdersWrite),
            calls::GET_ORDER | calls::LIST_ORDERS => Some(Self::OrdersRead),
            calls::CREATE_PAYMENT | calls::CREATE_REFUND => Some(Self::PaymentsWrite),
            calls::GET_PAYMENT | calls::LIST_PAYMENTS | calls::GET_REFUND | calls::LIST_REFUNDS => {
                Some(Self::PaymentsRead)
            }
            _ => None,
        }
    }

    /// What asking how a key of this operation stands needs; none where there is no such operation.
    pub(crate) fn of_key(operation: &str) -> Option<Self> {
        match operation {
            CreateOrder::OPERATION => Some(Self::OrdersRead),
            CreatePayment::OPERATION | CreateRefund::OPERATION => Some(Self::PaymentsRead),
            _ => None,
        }
    }
}

/// Checks that a credential allows what is needed.
pub(crate) fn check(scopes: &Scopes, needed: Option<Access>) -> Result<(), ApiError> {
    match needed {
        Some(access) if !scopes.allow(access.name()) => Err(ApiError::Forbidden { scope: access.name() }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::CALLS;

    #[test]
    fn what_is_typed_is_what_is_stored() {
        for access in Access::value_variants() {
            assert_eq!(access.to_possible_value().unwrap().get_name(), access.name());
        }
    }

    #[test]
    fn every_call_asks_for_a_scope_but_those_that_need_none() {
        let without: Vec<_> = CALLS.into_iter().filter(|call| Access::of_call(call).is_none()).collect();
        let key = calls::GET_IDEMPOTENCY_KEY;
        assert_eq!(
            without,
            [key, crate::grpc::HEALTH_CHECK, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
        );
    }
}
