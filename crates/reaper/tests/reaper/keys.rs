//! `semel-reaper keys`: payments and refunds that wait for a person.

use std::process::{Command, Output};
use std::time::Duration;

use semel_core::derive;
use semel_core::idempotency::Scope;
use semel_core::lifecycle::{Pass, Work as _};
use semel_payments::operator::{Decision, Desk, Undecided};
use semel_payments::payments::settle::Verdict;
use semel_reaper::recovery::Recovery;
use serde_json::Value;
use uuid::Uuid;

use crate::database::{Database, RETENTION, Stuck, outcome, payment_of, with_database};
use crate::provider;

/// Runs the program as a person would.
pub(crate) fn reaper(db: &Database, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_semel-reaper"))
        .env_clear()
        .args(["--database-url", &db.address, "--namespace", "test", "--problem-base-url", "/errors"])
        .arg("keys")
        .args(arguments)
        .output()
        .unwrap()
}

pub(crate) fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Plants payments that wait for a person, as recovery leaves them, and beside them one that does not.
async fn plant_waiting(db: &Database, count: i32) {
    Stuck::OLD.plant(db, count).await;
    let provider = provider::Desk::primitive();
    let mut recovery = Recovery::new(db.pool.clone(), provider.operation(), RETENTION);
    assert_eq!(recovery.run_once().await.unwrap(), Pass::Worked);
    Stuck { client: "stuck", ..Stuck::OLD }.plant(db, 1).await;
}

pub(crate) fn resolve<'a>(payment: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["resolve", payment, "--actor", "ada", "--reason", "asked them on the phone"], more].concat()
}

const CHARGED: [&str; 4] = ["--as", "charged", "--provider-reference", "ch_7"];

async fn actions(db: &Database) -> Vec<(String, String, String, String)> {
    sqlx::query_as("SELECT actor, action, subject, reason FROM operator_actions ORDER BY acted_at")
        .fetch_all(&db.pool)
        .await
        .unwrap()
}

#[tokio::test]
async fn lists_what_waits_and_nothing_else() {
    with_database(async |db: Database| {
        assert_eq!(printed(&reaper(&db, &["list"])), "");
        assert_eq!(printed(&reaper(&db, &["list", "--json"])), "[]\n");
        plant_waiting(&db, 2).await;
        db.execute(
            "UPDATE idempotency_keys SET needs_person_at = now() - INTERVAL '3 hours' WHERE provider_key = 'acme-1'",
        )
        .await;
        let waiting: Value = serde_json::from_str(&printed(&reaper(&db, &["list", "--json"]))).unwrap();
        let ids: Vec<_> = waiting.as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap()).collect();
        let expected = [payment_of(&db, "acme-1").await, payment_of(&db, "acme-0").await].map(|id| id.to_string());
        assert_eq!(ids, expected, "the one that waits longest first");
        assert!(waiting[0]["waits_seconds"].as_i64().unwrap() >= 3 * 3600);

        let text = printed(&reaper(&db, &["list", "--limit", "1"]));
        assert_eq!(text.lines().count(), 2, "{text}");
        let row = text.lines().nth(1).unwrap();
        assert!(row.starts_with(&expected[0]) && row.contains(" 3 h ") && row.contains("neither tell"), "{row}");
    })
    .await;
}

#[tokio::test]
async fn shows_all_but_secrets() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        let id = payment_of(&db, "acme-0").await.to_string();
        db.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, decline_code, fence)
             SELECT payment_id, provider_key, 'get', 'declined', 'no_money', 7 FROM payments",
        )
        .await;
        let json = printed(&reaper(&db, &["show", &id, "--json"]));
        let shown: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(shown["payment"]["status"], "processing");
        assert_eq!(
            (&shown["payment"]["provider"], &shown["payment"]["provider_key"]),
            (&"desk".into(), &"acme-0".into())
        );
        assert_eq!(shown["key"]["recovery_point"], "sent");
        assert_eq!(shown["key"]["attempts"], 2);
        assert_eq!(shown["provider_answers"][0]["decline_code"], "no_money");
        let text = printed(&reaper(&db, &["show", &id]));
        assert!(text.contains("key.needs_person_reason: the provider can neither tell"), "{text}");
        let hash = db.texts("SELECT encode(sha256('secret-acme-0'), 'hex')").await.remove(0);
        for output in [&json, &text] {
            assert!(output.contains(&hash), "{output}");
            for secret in ["secret-acme-0", "tok_s3cret"] {
                assert!(!output.contains(secret), "{output}");
            }
        }
        let nobody = Uuid::new_v4().to_string();
        assert!(refused(&reaper(&db, &["show", &nobody])).contains("there is no payment"));
    })
    .await;
}

#[tokio::test]
async fn a_person_settles_a_payment_once_and_leaves_a_trace() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        let payment = payment_of(&db, "acme-0").await;
        let id = payment.to_string();
        let scope = Scope {
            client: "acme".parse().unwrap(),
            operation: "payments.create",
            key: "secret-acme-0".parse().unwrap(),
        };
        assert_eq!(printed(&reaper(&db, &resolve(&id, &CHARGED))), format!("{id} succeeded\n"));
        let settled = ("succeeded", "completed", Some(201), vec!["PaymentCreated".to_owned()]);
        let (payment_status, key_status, code, events) = outcome(&db, "acme-0").await;
        assert_eq!((payment_status.as_str(), key_status.as_str(), code, events), settled);
        // The same identity as if the provider had been heard: a consumer takes effect of it once.
        let event: Uuid =
            sqlx::query_scalar("SELECT event_id FROM outbox").fetch_one(&db.pool).await.unwrap();
        assert_eq!(event, derive::from_key(&"test".parse().unwrap(), &scope, "PaymentCreated"));
        let expected =
            ["ada", "keys resolve --as charged", &id, "asked them on the phone"].map(str::to_owned);
        assert_eq!(actions(&db).await.into_iter().map(<[String; 4]>::from).collect::<Vec<_>>(), [expected]);
        assert_eq!(
            db.texts("SELECT call || ' ' || outcome || ' ' || provider_reference FROM provider_answers")
                .await,
            ["operator succeeded ch_7"]
        );

        let again = refused(&reaper(&db, &resolve(&id, &["--as", "declined", "--code", "no_money"])));
        assert!(again.contains("is settled: succeeded"), "{again}");
        assert_eq!(actions(&db).await.len(), 1);
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 1);
    })
    .await;
}

#[tokio::test]
async fn each_outcome_settles_as_the_providers_word_would() {
    with_database(async |db: Database| {
        plant_waiting(&db, 2).await;
        let (declined, not_charged) = (payment_of(&db, "acme-0").await, payment_of(&db, "acme-1").await);
        let (declined, not_charged) = (declined.to_string(), not_charged.to_string());
        printed(&reaper(&db, &resolve(&declined, &["--as", "declined", "--code", "no_money"])));
        let (status, _, code, events) = outcome(&db, "acme-0").await;
        assert_eq!(
            (status.as_str(), code, events),
            ("declined", Some(402), vec!["PaymentDeclined".to_owned()])
        );

        let promised = refused(&reaper(&db, &resolve(&not_charged, &["--as", "not-charged"])));
        assert!(promised.contains("--i-have-fenced-it"), "{promised}");
        assert_eq!(outcome(&db, "acme-1").await.0, "processing");
        printed(&reaper(&db, &resolve(&not_charged, &["--as", "not-charged", "--i-have-fenced-it"])));
        let (status, _, code, events) = outcome(&db, "acme-1").await;
        assert_eq!(
            (status.as_str(), code, events),
            ("canceled", Some(424), vec!["PaymentCanceled".to_owned()])
        );
    })
    .await;
}

#[tokio::test]
async fn refuses_what_is_not_for_a_person() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        let stuck = payment_of(&db, "stuck-0").await.to_string();
        assert!(refused(&reaper(&db, &resolve(&stuck, &CHARGED))).contains("does not wait for a person"));
        let nobody = Uuid::new_v4().to_string();
        assert!(refused(&reaper(&db, &resolve(&nobody, &CHARGED))).contains("there is no payment"));

        db.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, provider_key, 'charge', 'succeeded', 'ch_zombie', 7 FROM payments",
        )
        .await;
        let id = payment_of(&db, "acme-0").await.to_string();
        for against in [&CHARGED[..], &["--as", "not-charged", "--i-have-fenced-it"]] {
            let error = refused(&reaper(&db, &resolve(&id, against)));
            assert!(error.contains("ch_zombie"), "{error}");
        }
        assert!(actions(&db).await.is_empty());
        assert_eq!(outcome(&db, "acme-0").await.0, "processing");
        let agreed = ["--as", "charged", "--provider-reference", "ch_zombie"];
        printed(&reaper(&db, &resolve(&id, &agreed)));
    })
    .await;
}

fn desk(db: &Database) -> Desk {
    Desk {
        pool: db.pool.clone(),
        namespace: "test".parse().unwrap(),
        problems: "/errors".parse().unwrap(),
        retention: Duration::from_hours(24),
    }
}

fn decision(reason: &str) -> Decision<'_> {
    Decision { ruling: Verdict::Fenced.into(), actor: "ada", action: "keys resolve", reason }
}

#[tokio::test]
async fn of_two_decisions_at_once_one_is_carried_out() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        let (desk, payment) = (desk(&db), payment_of(&db, "acme-0").await);
        let (first, second) = (decision("first"), decision("second"));
        let (first, second) = tokio::join!(desk.settle(payment, &first), desk.settle(payment, &second));
        let refused = first.err().into_iter().chain(second.err()).collect::<Vec<_>>();
        assert!(matches!(refused[..], [Undecided::Settled { .. }]), "{refused:?}");
        assert_eq!(actions(&db).await.len(), 1);
    })
    .await;
}

#[tokio::test]
async fn without_its_trace_nothing_is_settled() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        let payment = payment_of(&db, "acme-0").await;
        let too_long = "r".repeat(4097);
        let undecided = desk(&db).settle(payment, &decision(&too_long)).await.unwrap_err();
        assert!(matches!(undecided, Undecided::Database { .. }), "{undecided:?}");
        assert_eq!(outcome(&db, "acme-0").await.0, "processing");
        assert_eq!(db.count("SELECT count(*) FROM provider_answers").await, 0);
        // It waits as before.
        assert!(printed(&reaper(&db, &["list"])).contains(&payment.to_string()));
        desk(&db).settle(payment, &decision("short")).await.unwrap();
    })
    .await;
}

/// The audit would tell of another one, and a refund would be asked for by it.
#[tokio::test]
async fn a_name_that_the_provider_does_not_give_to_such_things_is_refused() {
    with_database(async |db: Database| {
        plant_waiting(&db, 1).await;
        db.execute("UPDATE payments SET provider = 'stripe:live'").await;
        let id = payment_of(&db, "acme-0").await.to_string();
        for named in ["ch_7", "pi_", "re_7", " pi_7", "pi_7/refunds"] {
            let charged = ["--as", "charged", "--provider-reference", named];
            let error = refused(&reaper(&db, &resolve(&id, &charged)));
            assert!(error.contains("stripe:live") && error.contains("pi_"), "{named}: {error}");
            assert_eq!(outcome(&db, "acme-0").await.0, "processing", "{named}");
        }
        printed(&reaper(&db, &resolve(&id, &["--as", "charged", "--provider-reference", "pi_7"])));
        assert_eq!(outcome(&db, "acme-0").await.0, "succeeded");
    })
    .await;
}
