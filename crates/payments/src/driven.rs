//! The operations that claim their keys, told apart by name: for whoever drives on what another process left.

use std::time::Duration;

use semel_core::idempotency::engine::{Operation as _, Proceeded};
use semel_core::idempotency::store::{Fence, StuckKey};
use semel_core::idempotency::{Command as _, Scope};
use sqlx::PgPool;
use uuid::Uuid;

use crate::payments::CreatePayment;
use crate::payments::create::MakePayment;
use crate::provider::Provider;
use crate::refunds::CreateRefund;
use crate::refunds::create::MakeRefund;

/// Payments and their refunds.
#[derive(Clone, Debug)]
pub struct Driven<P> {
    payments: MakePayment<P>,
    refunds: MakeRefund<P>,
}

/// The names of the operations that can be driven on.
pub const OPERATIONS: [&str; 2] = [CreatePayment::OPERATION, CreateRefund::OPERATION];

impl<P: Provider> Driven<P> {
    /// Drives on what is paid so, and its refunds.
    #[must_use]
    pub fn new(payments: MakePayment<P>) -> Self {
        Self { refunds: MakeRefund::of(&payments), payments }
    }

    /// Reads the scope of a stuck key; none when it is of no operation that is driven here, or not to be read.
    #[must_use]
    pub fn scope(stuck: &StuckKey) -> Option<Scope> {
        let operation = OPERATIONS.into_iter().find(|name| *name == stuck.operation)?;
        Some(Scope { client: stuck.client_id.parse().ok()?, operation, key: stuck.key.parse().ok()? })
    }

    /// Returns the id of what this key makes.
    #[must_use]
    pub fn resource_id(&self, scope: &Scope) -> Uuid {
        if scope.operation == CreateRefund::OPERATION {
            self.refunds.resource_id(scope)
        } else {
            self.payments.resource_id(scope)
        }
    }

    /// Drives an execution on as far as it goes now.
    ///
    /// # Errors
    ///
    /// When the database fails.
    pub async fn proceed(
        &self,
        pool: &PgPool,
        scope: &Scope,
        fence: Fence,
        retention: Duration,
    ) -> Result<Proceeded, sqlx::Error> {
        if scope.operation == CreateRefund::OPERATION {
            self.refunds.proceed(pool, scope, fence, retention).await
        } else {
            self.payments.proceed(pool, scope, fence, retention).await
        }
    }
}
