//! The first transaction of a payment: key, payment and the provider's request, committed before a byte goes out.

use std::time::Duration;

use semel_core::derive::{self, Namespace};
use semel_core::idempotency::engine::{Begun, LEASE, Operation, Proceeded, Terms};
use semel_core::idempotency::store::{self, Fence, LookedUp, NewKey};
use semel_core::idempotency::{Command as _, InvalidCommand, Scope};
use semel_core::{begin_key, look_up_key};
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{CreatePayment, recovery, recovery_point};
use crate::problem::ProblemBase;
use crate::provider::{DEADLINE, Provider};

/// Making payments through a provider.
#[derive(Clone, Debug)]
pub struct MakePayment<P> {
    pub(crate) namespace: Namespace,
    pub(crate) provider: P,
    pub(crate) problems: ProblemBase,
    pub(crate) window: Duration,
}

/// For how long after the first send the stored request is sent again; past it the provider is asked, and the key fenced.
pub const SEND_WINDOW: Duration = Duration::from_mins(5);

/// What a lease leaves for the writes around a call to the provider.
const FOR_WRITES: Duration = Duration::from_secs(10);

/// The provider's deadline ends while the lease is alive, and with time to write the answer down.
const _: () = assert!(LEASE.as_secs() > DEADLINE.as_secs() + FOR_WRITES.as_secs());

impl<P: Provider> MakePayment<P> {
    /// Makes payments of this deployment.
    #[must_use]
    pub fn new(namespace: Namespace, provider: P, problems: ProblemBase) -> Self {
        Self { namespace, provider, problems, window: SEND_WINDOW }
    }

    /// Replaces the send window.
    #[must_use]
    pub fn with_window(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }
}

impl<P: Provider> Operation for MakePayment<P> {
    type Command = CreatePayment;

    fn resource_id(&self, scope: &Scope) -> Uuid {
        derive::from_key(&self.namespace, scope, "payment")
    }

    fn validate(&self, command: &CreatePayment) -> Result<(), InvalidCommand> {
        command.validate()?;
        self.provider.accepts(&command.currency, &command.source)
    }

    fn may_begin(&self) -> bool {
        self.provider.is_open()
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        look_up_key!(
            "payments_look_up",
            "SELECT payment_id FROM payments WHERE client_id = $1 AND operation = $2 AND idempotency_key = $3",
            connection,
            scope
        )
        .await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreatePayment,
        terms: &Terms<'_>,
    ) -> Result<Option<Begun>, sqlx::Error> {
        // Derived, so that a database that lost its tail asks for the same charge under the same key.
        let provider_key = derive::from_key(&self.namespace, key.scope, "charge").to_string();
        let request = self.provider.encode(
            command.amount,
            &command.currency,
            &command.source,
            &key.resource_id.to_string(),
        );
        let begun = begin_key!(
            "payments_begin",
            "SELECT payment_id FROM payments WHERE client_id = $1 AND operation = $2 AND idempotency_key = $3",
            "live AS MATERIALIZED (
                SELECT count(*) AS keys FROM (
                    SELECT FROM idempotency_keys WHERE client_id = $1 AND status = 'in_progress' LIMIT $17
                ) AS live
            ), key AS (
                -- First and gating: a concurrent duplicate waits here, and then writes nothing at all.
                INSERT INTO idempotency_keys (
                    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id, trace_context,
                    status, recovery_point, lease_until, provider_key, provider_request, provider_first_sent_at
                )
                SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, 'in_progress', $10, instant + $11, $12, $13, instant
                FROM outcome, clock_timestamp() AS instant
                WHERE outcome.id IS NULL AND ($17 IS NULL OR (SELECT keys FROM live) < $17)
                ON CONFLICT DO NOTHING
                RETURNING client_id, operation, key, resource_id, provider_key, fence, expires_at
            ), asked AS (
                INSERT INTO payments (
                    payment_id, client_id, operation, idempotency_key, reference, amount, currency, status, provider,
                    provider_key
                )
                SELECT resource_id, client_id, operation, key, $14, $15, $16, 'processing', $18, provider_key FROM key
            )",
            "$17 IS NOT NULL AND (SELECT keys FROM live) >= $17",
            connection,
            key.scope,
            &key.hash.bytes[..],
            key.hash.version,
            key.command,
            key.resource_id,
            key.request.id,
            key.request.trace_context,
            recovery_point::SENT,
            store::interval(LEASE),
            provider_key,
            request,
            command.reference,
            command.amount,
            command.currency,
            terms.most_in_progress(),
            self.provider.name()
        )
        .await?;
        Ok(match begun.claimed {
            Some(fence) => Some(Begun::Claimed(Fence(fence))),
            None => Begun::known(begun),
        })
    }

    async fn proceed(
        &self,
        pool: &PgPool,
        scope: &Scope,
        fence: Fence,
        retention: Duration,
    ) -> Result<Proceeded, sqlx::Error> {
        recovery::proceed(self, pool, scope, fence, retention).await
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        &["payments_pkey", "payments_idempotency_key_once", "payments_provider_key_once"]
    }
}
