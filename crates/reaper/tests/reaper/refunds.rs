//! Refunds whose owner is gone, and those that wait for a person.

use std::time::Duration;

use semel_core::lifecycle::{Pass, Work as _};
use semel_payments::provider::Answer;
use semel_reaper::recovery::Recovery;
use semel_reaper::retention::{Kept, Retention};
use serde_json::Value;
use uuid::Uuid;

use crate::database::{Database, RETENTION, Stuck, outcome, with_database};
use crate::keys::{printed, reaper, refused, resolve};
use crate::provider::Desk;

const MINUTE: Duration = Duration::from_mins(1);
const DAY: Duration = Duration::from_hours(24);

/// Plants so many stuck refunds of 500 of payments of 1250, under the provider's keys `back-0`, `back-1`, …, whose requests
/// went out first so long ago.
pub(crate) async fn plant(db: &Database, count: i32, sent_ago: Duration) {
    sqlx::query(
        "WITH paid AS (
            INSERT INTO payments (
                payment_id, client_id, operation, idempotency_key, reference, amount, currency, status, provider,
                provider_key, provider_reference, version, settled_at, refund_reserved
            )
            SELECT gen_random_uuid(), 'acme', 'payments.create', 'paid-' || n, 'A-1', 1250, 'EUR', 'succeeded', 'desk',
                   'paid-' || n,
                   'ch_' || n, 1, now(), 500
            FROM generate_series(0, $1 - 1) AS n
            RETURNING payment_id, substr(provider_key, 6) AS n
        ), keys AS (
            INSERT INTO idempotency_keys (
                client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
                status, recovery_point, lease_until, provider_key, provider_request, provider_first_sent_at, created_at
            )
            SELECT 'acme', 'refunds.create', 'secret-' || n, decode(repeat('07', 32), 'hex'), 1, '{}', gen_random_uuid(),
                   gen_random_uuid(), 'in_progress', 'sent', now() - INTERVAL '30 s', 'back-' || n, 'order', now() - $2,
                   now() - $2
            FROM paid
            RETURNING *
        )
        INSERT INTO refunds (
            refund_id, payment_id, client_id, operation, idempotency_key, amount, currency, status, provider_key
        )
        SELECT resource_id, payment_id, client_id, operation, key, 500, 'EUR', 'processing', provider_key
        FROM keys JOIN paid ON provider_key = 'back-' || n",
    )
    .bind(count)
    .bind(sent_ago)
    .execute(&db.pool)
    .await
    .unwrap();
}

/// Returns status of the refund, its key's status, its response, its payment's last event, and how much is taken.
async fn stands(db: &Database, provider_key: &str) -> (String, String, Option<i16>, Option<String>, i64) {
    sqlx::query_as(
        "SELECT r.status, k.status, k.response_code,
                (SELECT event_type FROM outbox WHERE aggregate_id = p.payment_id::TEXT ORDER BY id DESC LIMIT 1),
                p.refund_reserved
         FROM refunds AS r JOIN payments AS p USING (payment_id) JOIN idempotency_keys AS k ON k.resource_id = r.refund_id
         WHERE r.provider_key = $1",
    )
    .bind(provider_key)
    .fetch_one(&db.pool)
    .await
    .unwrap()
}

fn settled(
    status: &str,
    code: i16,
    event: &str,
    taken: i64,
) -> (String, String, Option<i16>, Option<String>, i64) {
    (status.to_owned(), "completed".to_owned(), Some(code), Some(event.to_owned()), taken)
}

fn open() -> (String, String, Option<i16>, Option<String>, i64) {
    ("processing".to_owned(), "in_progress".to_owned(), None, None, 500)
}

fn recovery(db: &Database, provider: &Desk) -> Recovery<Desk> {
    Recovery::new(db.pool.clone(), provider.operation(), RETENTION).with_pass(MINUTE)
}

async fn refund_of(db: &Database, provider_key: &str) -> String {
    let id: Uuid = sqlx::query_scalar("SELECT refund_id FROM refunds WHERE provider_key = $1")
        .bind(provider_key)
        .fetch_one(&db.pool)
        .await
        .unwrap();
    id.to_string()
}

#[tokio::test]
async fn stuck_refunds_are_driven_on_beside_stuck_payments() {
    with_database(async |db: Database| {
        plant(&db, 3, MINUTE).await;
        Stuck::YOUNG.plant(&db, 1).await;
        let provider = Desk::new();
        // One had reached the provider, and another is not to be.
        provider.book().refunds.push("back-1".to_owned());
        let (reference, code) = (None, "account_closed".to_owned());
        provider.book().instead.insert("back-2".to_owned(), Answer::Declined { reference, code });
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Worked);
        for key in ["back-0", "back-1"] {
            assert_eq!(stands(&db, key).await, settled("succeeded", 201, "PaymentRefunded", 500), "{key}");
        }
        assert_eq!(stands(&db, "back-2").await, settled("failed", 402, "PaymentRefundFailed", 0));
        assert_eq!(outcome(&db, "acme-0").await.0, "succeeded");
        let mut made = provider.book().refunds.clone();
        made.sort();
        assert_eq!(made, ["back-0", "back-1"]);
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Idle);
    })
    .await;
}

#[tokio::test]
async fn an_old_refund_is_asked_about_and_never_fenced() {
    with_database(async |db: Database| {
        plant(&db, 2, Duration::from_hours(1)).await;
        let provider = Desk::new();
        provider.book().refunds.push("back-0".to_owned());
        recovery(&db, &provider).run_once().await.unwrap();
        for key in ["back-0", "back-1"] {
            assert_eq!(stands(&db, key).await, settled("succeeded", 201, "PaymentRefunded", 500), "{key}");
        }
        // What the provider did not know of was sent again: it recognises keys for ever.
        assert_eq!(provider.called("refund"), ["back-1"]);
        assert_eq!(provider.called("get_refund").len(), 2);
        assert!(provider.called("cancel").is_empty());
    })
    .await;
}

/// Plants refunds that wait for a person, as recovery leaves them.
async fn plant_waiting(db: &Database, count: i32) {
    plant(db, count, DAY).await;
    let provider = Desk::primitive();
    assert_eq!(recovery(db, &provider).run_once().await.unwrap(), Pass::Worked);
    assert!(provider.book().calls.is_empty(), "it can neither recognise a key nor be asked");
}

#[tokio::test]
async fn one_that_nobody_can_find_out_waits_for_a_person_and_its_amount_stays_taken() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        assert_eq!(stands(&db, "back-0").await, open());
        assert_eq!(recovery(&db, &Desk::new()).run_once().await.unwrap(), Pass::Idle, "nobody touches it");

        let id = refund_of(&db, "back-0").await;
        let listed: Value = serde_json::from_str(&printed(&reaper(&db, &["list", "--json"]))).unwrap();
        assert_eq!(
            (&listed[0]["id"], &listed[0]["operation"]),
            (&id.clone().into(), &"refunds.create".into())
        );
        let json = printed(&reaper(&db, &["show", &id, "--json"]));
        let shown: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&shown["refund"]["status"], &shown["refund"]["amount"]),
            (&"processing".into(), &500.into())
        );
        assert_eq!(shown["key"]["recovery_point"], "sent");
        assert!(!json.contains("secret-0"), "{json}");
        let payment = shown["refund"]["payment_id"].as_str().unwrap();
        let of_payment = printed(&reaper(&db, &["show", payment]));
        assert!(of_payment.contains("payment.refund_reserved: 500"), "{of_payment}");
    })
    .await;
}

#[tokio::test]
async fn a_person_settles_a_refund_either_way_and_leaves_a_trace() {
    with_database(async |db: Database| {
        plant_waiting(&db, 2).await;
        let (made, failed) = (refund_of(&db, "back-0").await, refund_of(&db, "back-1").await);
        let refunded = ["--as", "refunded", "--provider-reference", "re_7"];
        // What it is about is said by the outcome.
        let mistaken =
            refused(&reaper(&db, &resolve(&made, &["--as", "charged", "--provider-reference", "re_7"])));
        assert!(mistaken.contains("there is no payment"), "{mistaken}");
        assert_eq!(printed(&reaper(&db, &resolve(&made, &refunded))), format!("{made} succeeded\n"));
        assert_eq!(stands(&db, "back-0").await, settled("succeeded", 201, "PaymentRefunded", 500));

        let arrived = ["--as", "refund-failed", "--code", "never_arrived"];
        let promised = refused(&reaper(&db, &resolve(&failed, &arrived)));
        assert!(promised.contains("--i-have-fenced-it"), "{promised}");
        assert_eq!(stands(&db, "back-1").await, open());
        let promising = [&arrived[..], &["--i-have-fenced-it"]].concat();
        assert_eq!(printed(&reaper(&db, &resolve(&failed, &promising))), format!("{failed} failed\n"));
        assert_eq!(stands(&db, "back-1").await, settled("failed", 402, "PaymentRefundFailed", 0));
        assert_eq!(
            db.texts("SELECT action FROM operator_actions ORDER BY acted_at").await,
            ["keys resolve --as refunded", "keys resolve --as refund-failed"]
        );
        let again = refused(&reaper(&db, &resolve(&made, &refunded)));
        assert!(again.contains("is settled: succeeded"), "{again}");
    })
    .await;
}

#[tokio::test]
async fn evidence_stays_until_its_refund_is_settled() {
    with_database(async |db: Database| {
        plant(&db, 2, MINUTE).await;
        db.execute(
            "UPDATE refunds SET status = 'failed', failure_code = 'x', settled_at = now() WHERE provider_key = 'back-1'",
        )
        .await;
        db.execute(
            "INSERT INTO provider_answers (payment_id, refund_id, provider_key, call, outcome, decline_code, fence, answered_at)
             SELECT payment_id, refund_id, provider_key, 'refund', 'declined', 'x', 1, now() - INTERVAL '401 days'
             FROM refunds",
        )
        .await;
        let mut retention = Retention::new(db.pool.clone(), Kept::ProviderAnswers, 400 * DAY, 100);
        retention.run_once().await.unwrap();
        assert_eq!(db.texts("SELECT provider_key FROM provider_answers").await, ["back-0"]);
    })
    .await;
}

#[tokio::test]
async fn a_refund_is_settled_by_a_name_that_its_payments_provider_gives_to_refunds() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        db.execute("UPDATE payments SET provider = 'stripe:test'").await;
        let id = refund_of(&db, "back-0").await;
        let named = |name| ["--as", "refunded", "--provider-reference", name];
        let error = refused(&reaper(&db, &resolve(&id, &named("pi_7"))));
        assert!(error.contains("stripe:test") && error.contains("re_"), "{error}");
        assert_eq!(stands(&db, "back-0").await, open());
        printed(&reaper(&db, &resolve(&id, &named("re_7"))));
    })
    .await;
}
