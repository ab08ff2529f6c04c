//! The first transaction of a refund: key, refund, the provider's request, and its amount taken from what is left of the
//! payment, committed before a byte goes out. Or the refusal of what is not left, which is final.

use std::time::Duration;

use semel_core::database::{self, Failure};
use semel_core::derive;
use semel_core::idempotency::engine::{Begun, Hindrance, LEASE, Operation, Proceeded, Terms};
use semel_core::idempotency::store::{self, Fence, LookedUp, NewKey};
use semel_core::idempotency::{Scope, StoredResponse};
use semel_core::look_up_key;
use serde_json::{Map, json};
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::{CreateRefund, Refund, location, recovery};
use crate::payments::create::MakePayment;
use crate::payments::{self, Refundable, recovery_point};
use crate::problem::{self, ProblemBase};
use crate::provider::{Charged, Provider};

/// When a client is told to ask again whose payment has no outcome yet: most have one by then.
const PAYMENT_SETTLES_WITHIN: Duration = Duration::from_secs(2);

/// Refunding payments through the provider that they were made by.
#[derive(Clone, Debug)]
pub struct MakeRefund<P> {
    pub(crate) payments: MakePayment<P>,
}

impl<P: Provider> MakeRefund<P> {
    /// Refunds what is paid so.
    #[must_use]
    pub fn of(payments: &MakePayment<P>) -> Self {
        Self { payments: payments.clone() }
    }
}

impl<P: Provider> Operation for MakeRefund<P> {
    type Command = CreateRefund;

    fn resource_id(&self, scope: &Scope) -> Uuid {
        derive::from_key(&self.payments.namespace, scope, "refund")
    }

    fn may_begin(&self) -> bool {
        self.payments.provider.is_open()
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        look_up_key!(
            "refunds_look_up",
            "SELECT refund_id FROM refunds WHERE client_id = $1 AND operation = $2 AND idempotency_key = $3",
            connection,
            scope
        )
        .await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreateRefund,
        terms: &Terms<'_>,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let looked = self.look_up(&mut *connection, key.scope).await?;
        if looked.is_something() {
            return Ok(Begun::known(looked));
        }
        if let Some(most) = terms.most_in_progress()
            && store::count_in_progress(&mut *connection, &key.scope.client, most).await? >= most
        {
            return Ok(Some(Begun::Limited));
        }
        let begun = self.claim_or_refuse(&mut *connection, key, command, terms.retention).await;
        match begun {
            // At the key, whose duplicate is at work; or at the payment, and then the key is free.
            Err(error)
                if database::failure(&error) == Failure::LockTimeout
                    && payments::is_locked(connection, command.payment_id).await? =>
            {
                Ok(Some(Begun::Hindered(Hindrance::Busy)))
            }
            begun => begun,
        }
    }

    async fn proceed(
        &self,
        pool: &PgPool,
        scope: &Scope,
        fence: Fence,
        retention: Duration,
    ) -> Result<Proceeded, sqlx::Error> {
        recovery::proceed(&self.payments, pool, scope, fence, retention).await
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        &["refunds_pkey", "refunds_idempotency_key_once", "refunds_provider_key_once"]
    }
}

impl<P: Provider> MakeRefund<P> {
    async fn claim_or_refuse(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreateRefund,
        retention: Duration,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let payment = payments::refundable(&mut *connection, &key.scope.client, command.payment_id).await?;
        let Some(payment) = payment else { return Ok(Some(Begun::Hindered(Hindrance::Missing))) };
        match payment.status.as_str() {
            "processing" => {
                let retry_after = PAYMENT_SETTLES_WITHIN;
                return Ok(Some(Begun::Hindered(Hindrance::Passing { retry_after })));
            }
            "succeeded" if command.amount <= payment.left => {
                match self.claim(&mut *connection, key, command, &payment).await {
                    // Others have taken it since it was read.
                    Err(error) if is_more_than_is_left(&error) => {}
                    claimed => return Ok(claimed?.map(Begun::Claimed)),
                }
            }
            // Of what moved no money, and never will, nothing is left either.
            _ => {}
        }
        refuse(connection, &self.payments.problems, key, command, &payment, retention).await
    }

    async fn claim(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &CreateRefund,
        payment: &Refundable,
    ) -> Result<Option<Fence>, sqlx::Error> {
        // Derived, so that a database that lost its tail asks for the same refund under the same key.
        let provider_key =
            derive::from_key(&self.payments.namespace, key.scope, "provider_refund").to_string();
        let charge = Charged {
            key: payment.provider_key.clone(),
            reference: payment.provider_reference.clone().unwrap_or_default(),
        };
        let request = self.payments.provider.encode_refund(&charge, command.amount);
        let fence = sqlx::query_scalar!(
            "-- refunds_begin
            WITH key AS (
                -- First and gating: a concurrent duplicate waits here, and then writes nothing at all.
                INSERT INTO idempotency_keys (
                    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id, trace_context,
                    status, recovery_point, lease_until, provider_key, provider_request, provider_first_sent_at
                )
                SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, 'in_progress', $10, instant + $11, $12, $13, instant
                FROM payments, clock_timestamp() AS instant
                WHERE payments.payment_id = $14 AND payments.client_id = $1 AND payments.status = 'succeeded'
                ON CONFLICT DO NOTHING
                RETURNING client_id, operation, key, resource_id, provider_key, fence
            ), taken AS (
                -- Whoever else takes of it at this time holds the row's lock until it is known what is left. Past that the
                -- CHECK of the row refuses the whole statement.
                UPDATE payments SET refund_reserved = payments.refund_reserved + $15
                FROM key
                WHERE payments.payment_id = $14
                RETURNING payments.payment_id, payments.currency
            ), asked AS (
                INSERT INTO refunds (
                    refund_id, payment_id, client_id, operation, idempotency_key, amount, currency, status, provider_key
                )
                SELECT key.resource_id, taken.payment_id, key.client_id, key.operation, key.key, $15, taken.currency,
                       'processing', key.provider_key
                FROM key, taken
            )
            SELECT fence FROM key",
            key.scope.client.as_str(),
            key.scope.operation,
            key.scope.key.as_str(),
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
            command.payment_id,
            command.amount
        )
        .fetch_optional(connection)
        .await?;
        Ok(fence.map(Fence))
    }
}

fn is_more_than_is_left(error: &sqlx::Error) -> bool {
    let constraint = error.as_database_error().and_then(|error| error.constraint());
    constraint == Some("payments_refund_reserved_within_amount")
}

/// Writes the refusal of a refund for which not enough is left: completed key and refund, in one statement. None when the
/// key is known, or enough is left by now.
async fn refuse(
    connection: &mut PgConnection,
    problems: &ProblemBase,
    key: &NewKey<'_>,
    command: &CreateRefund,
    payment: &Refundable,
    retention: Duration,
) -> Result<Option<Begun>, sqlx::Error> {
    let response = refusal(problems, key.resource_id, command, &payment.currency);
    let written = sqlx::query_scalar!(
        r#"-- refunds_refuse
        WITH key AS (
            -- First and gating, as for one that is not refused.
            INSERT INTO idempotency_keys (
                client_id, operation, key, request_hash, hash_version, command, resource_id, request_id, trace_context,
                status, recovery_point, response_code, response_headers, response_body, completed_at, expires_at
            )
            SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, 'completed', 'completed', $10, $11, $12, instant, instant + $13
            FROM payments, clock_timestamp() AS instant
            WHERE payments.payment_id = $14 AND payments.client_id = $1
              AND (payments.status IN ('declined', 'canceled')
                   OR (payments.status = 'succeeded' AND payments.refund_reserved > payments.amount - $15))
            ON CONFLICT DO NOTHING
            RETURNING client_id, operation, key, resource_id, expires_at
        ), refused AS (
            INSERT INTO refunds (
                refund_id, payment_id, client_id, operation, idempotency_key, amount, currency, status, settled_at
            )
            SELECT resource_id, $14, client_id, operation, key, $15, $16, 'refused', clock_timestamp() FROM key
        )
        SELECT expires_at AS "expires_at!" FROM key"#,
        key.scope.client.as_str(),
        key.scope.operation,
        key.scope.key.as_str(),
        &key.hash.bytes[..],
        key.hash.version,
        key.command,
        key.resource_id,
        key.request.id,
        key.request.trace_context,
        store::code(&response),
        Json(&response.headers) as _,
        response.body,
        store::interval(retention),
        command.payment_id,
        command.amount,
        payment.currency
    )
    .fetch_optional(connection)
    .await?;
    Ok(written.map(|expires_at| Begun::Completed { response, expires_at }))
}

fn refusal(
    problems: &ProblemBase,
    refund_id: Uuid,
    command: &CreateRefund,
    currency: &str,
) -> StoredResponse {
    let refund = Refund {
        id: refund_id,
        payment_id: command.payment_id,
        status: "refused".to_owned(),
        amount: command.amount,
        currency: currency.to_owned(),
        failure_code: None,
    };
    problem::about(
        problems,
        problem::REFUND_EXCEEDS_PAYMENT,
        "Less than this was left of the payment, counting refunds whose outcome is open; nothing was given back. A smaller \
         refund needs another Idempotency-Key.",
        &location(refund_id),
        Map::from_iter([("refund".to_owned(), json!(refund))]),
    )
}
