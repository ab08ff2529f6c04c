//! Refunds of payments, in the same bed.

mod making;
mod racing;
mod recovering;

use semel_core::idempotency::engine::{self, Answer, Operation as _};
use semel_core::idempotency::{Command as _, Request, Scope, StoredResponse};
use semel_payments::refunds::create::MakeRefund;
use semel_payments::refunds::{CreateRefund, Refund};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::bed::{Bed, RETENTION, body, expect_fresh, payment, request};
use crate::provider::{Call, Scripted, unknown};

/// What there is of the refund of a key.
#[derive(Debug, Eq, PartialEq, sqlx::FromRow)]
struct Seen {
    /// Its status.
    refund: String,
    /// Status and recovery point.
    key: String,
    /// Call and outcome of what was written down about it, in order.
    evidence: Vec<String>,
    /// How much of its payment refunds have taken.
    taken: i64,
}

fn seen(refund: &str, key: &str, evidence: &[&str], taken: i64) -> Seen {
    let evidence = evidence.iter().map(|&text| text.to_owned()).collect();
    Seen { refund: refund.to_owned(), key: key.to_owned(), evidence, taken }
}

/// A refund whose outcome is not known, and how much is taken.
fn open(taken: i64) -> Seen {
    seen("processing", "in_progress sent", &[], taken)
}

fn succeeded(evidence: &[&str], taken: i64) -> Seen {
    seen("succeeded", "completed completed", evidence, taken)
}

fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: CreateRefund::OPERATION, key: key.parse().unwrap() }
}

fn refund_of(response: &StoredResponse) -> Refund {
    serde_json::from_slice(&response.body).unwrap()
}

impl Bed {
    fn refunds(&self) -> MakeRefund<Scripted> {
        MakeRefund::of(&self.operation())
    }

    /// Makes a payment of 1250, and returns its id.
    async fn paid(&self, key: &str) -> Uuid {
        body(&expect_fresh(self.ask(key, &payment(), &request()).await, 201)).id
    }

    /// Asks for a refund under this key.
    async fn refund(&self, key: &str, payment_id: Uuid, amount: i64) -> Answer {
        self.refund_as(key, payment_id, amount, &request()).await
    }

    async fn refund_as(&self, key: &str, payment_id: Uuid, amount: i64, request: &Request) -> Answer {
        let command = CreateRefund { payment_id, amount };
        engine::run(&self.pool, &self.refunds(), &scope(key), &command, request, RETENTION).await.unwrap()
    }

    /// Does so beside the test.
    fn start_refunding(&self, key: &'static str, payment_id: Uuid, amount: i64) -> JoinHandle<Answer> {
        let bed = self.clone();
        tokio::spawn(async move { bed.refund(key, payment_id, amount).await })
    }

    /// Begins a refund of 500 under the key `r` whose outcome stays unknown; the provider has done nothing.
    async fn begin_unknown_refund(&self) -> Uuid {
        let payment = self.paid("p").await;
        self.provider.say(Call::Refund, unknown("the answer was lost"));
        let answer = self.refund("r", payment, 500).await;
        assert!(matches!(answer, Answer::Unknown { .. }), "{answer:?}");
        payment
    }

    async fn seen_refund(&self, key: &str) -> Seen {
        sqlx::query_as(
            "SELECT r.status AS refund, k.status || ' ' || k.recovery_point AS key, p.refund_reserved AS taken,
                    ARRAY(SELECT call || ' ' || outcome FROM provider_answers AS a WHERE a.refund_id = r.refund_id
                          ORDER BY answered_at) AS evidence
             FROM refunds AS r JOIN payments AS p USING (payment_id)
             JOIN idempotency_keys AS k ON k.key = r.idempotency_key AND k.operation = r.operation
             WHERE r.idempotency_key = $1",
        )
        .bind(key)
        .fetch_one(&self.pool)
        .await
        .unwrap()
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Version and type of a payment's events, in the order of their ids.
    async fn events_of(&self, payment: Uuid) -> Vec<(i64, String)> {
        sqlx::query_as("SELECT aggregate_version, event_type FROM outbox WHERE aggregate_id = $1 ORDER BY id")
            .bind(payment.to_string())
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }
}

/// Returns the refund's id that this key makes.
fn made_by(bed: &Bed, key: &str) -> Uuid {
    bed.refunds().resource_id(&scope(key))
}
