//! Payments whose owner is gone.

use std::collections::HashMap;
use std::time::Duration;

use semel_core::credentials;
use semel_core::lifecycle::{Lifecycle, Pace, Pass, Work as _, drive};
use semel_payments::provider::Answer;
use semel_reaper::recovery::Recovery;
use tokio::time::Instant;

use crate::database::{Database, RETENTION, Stuck, outcome, with_database};
use crate::provider::Desk;

fn recovery(db: &Database, provider: &Desk) -> Recovery<Desk> {
    // Long enough for what a test has a pass do, however slow the machine.
    Recovery::new(db.pool.clone(), provider.operation(), RETENTION).with_pass(Duration::from_mins(1))
}

async fn settled(db: &Database, key: &str, status: &str, code: i16, event: &str) {
    let expected = (status.to_owned(), "completed".to_owned(), Some(code), vec![event.to_owned()]);
    assert_eq!(outcome(db, key).await, expected, "{key}");
}

async fn revoke(db: &Database, credential_id: &str) {
    sqlx::query("UPDATE api_credentials SET revoked_at = now() WHERE credential_id = $1")
        .bind(credential_id)
        .execute(&db.pool)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_young_one_is_sent_again_and_charged_once() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 2).await;
        let provider = Desk::new();
        // Its first send had reached the provider, and the answer was lost.
        provider.charge_under("acme-1");
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Worked);
        for key in ["acme-0", "acme-1"] {
            settled(&db, key, "succeeded", 201, "PaymentCreated").await;
        }
        assert_eq!(provider.book().charges.len(), 2);
        assert!(provider.called("get").is_empty());
        let secrets =
            "SELECT count(*) FROM idempotency_keys WHERE command ? 'source' OR provider_request IS NOT NULL";
        assert_eq!(db.count(secrets).await, 0);
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Idle);
    })
    .await;
}

#[tokio::test]
async fn an_old_one_is_asked_about_and_finished_or_fenced() {
    with_database(async |db: Database| {
        Stuck::OLD.plant(&db, 2).await;
        let provider = Desk::new();
        provider.charge_under("acme-1");
        recovery(&db, &provider).run_once().await.unwrap();
        settled(&db, "acme-0", "canceled", 424, "PaymentCanceled").await;
        settled(&db, "acme-1", "succeeded", 201, "PaymentCreated").await;
        assert!(provider.called("charge").is_empty(), "nobody sends past the window");
        assert!(provider.book().fences.contains("acme-0"));
    })
    .await;
}

#[tokio::test]
async fn one_that_was_about_to_be_fenced_is_fenced_or_found_charged() {
    with_database(async |db: Database| {
        // Young enough to be sent, which a committed `canceling` rules out for ever.
        Stuck { sent_ago: Duration::from_mins(1), ..Stuck::CANCELING }.plant(&db, 3).await;
        let provider = Desk::new();
        provider.charge_under("acme-1");
        // Its fence was set, and the answer lost.
        provider.book().fences.insert("acme-2".to_owned());
        recovery(&db, &provider).run_once().await.unwrap();
        settled(&db, "acme-0", "canceled", 424, "PaymentCanceled").await;
        settled(&db, "acme-1", "succeeded", 201, "PaymentCreated").await;
        settled(&db, "acme-2", "canceled", 424, "PaymentCanceled").await;
        assert!(provider.called("charge").is_empty());
    })
    .await;
}

#[tokio::test]
async fn evidence_settles_before_anybody_is_asked() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1).await;
        db.execute(
            "INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence)
             SELECT payment_id, provider_key, 'charge', 'succeeded', 'ch_zombie', 1 FROM payments",
        )
        .await;
        let provider = Desk::new();
        recovery(&db, &provider).run_once().await.unwrap();
        settled(&db, "acme-0", "succeeded", 201, "PaymentCreated").await;
        assert!(provider.book().calls.is_empty());
        assert_eq!(db.texts("SELECT provider_reference FROM payments").await, ["ch_zombie"]);
    })
    .await;
}

#[tokio::test]
async fn nobody_sends_for_a_client_that_is_shut_out() {
    with_database(async |db: Database| {
        for client in ["acme", "rotated"] {
            Stuck { client, ..Stuck::YOUNG }.plant(&db, 1).await;
            let old = credentials::operator::create(
                &db.pool,
                &client.parse().unwrap(),
                &credentials::Scopes::all(),
            )
            .await
            .unwrap();
            revoke(&db, &old.credential_id).await;
        }
        credentials::operator::create(&db.pool, &"rotated".parse().unwrap(), &credentials::Scopes::all())
            .await
            .unwrap();
        let provider = Desk::new();
        recovery(&db, &provider).run_once().await.unwrap();
        assert_eq!(provider.called("charge"), ["rotated-0"]);
        settled(&db, "acme-0", "canceled", 424, "PaymentCanceled").await;
        settled(&db, "rotated-0", "succeeded", 201, "PaymentCreated").await;
    })
    .await;
}

#[tokio::test]
async fn what_a_shut_out_client_was_charged_is_not_forgotten() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1).await;
        let credential =
            credentials::operator::create(&db.pool, &"acme".parse().unwrap(), &credentials::Scopes::all())
                .await
                .unwrap();
        revoke(&db, &credential.credential_id).await;
        let provider = Desk::new();
        provider.charge_under("acme-0");
        recovery(&db, &provider).run_once().await.unwrap();
        settled(&db, "acme-0", "succeeded", 201, "PaymentCreated").await;
        assert!(provider.called("charge").is_empty());
    })
    .await;
}

#[tokio::test]
async fn what_nobody_can_find_out_waits_for_a_person_and_is_left_alone() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1).await;
        let provider = Desk::primitive();
        let mut recovery = recovery(&db, &provider);
        assert_eq!(recovery.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(recovery.run_once().await.unwrap(), Pass::Idle);
        assert_eq!(outcome(&db, "acme-0").await.0, "processing");
        assert_eq!(
            db.texts("SELECT needs_person_reason FROM idempotency_keys").await,
            ["the provider can neither tell what happened nor fence the charge"]
        );
        assert!(provider.book().calls.is_empty());
    })
    .await;
}

#[tokio::test]
async fn what_the_provider_tells_nothing_of_for_a_day_waits_for_a_person() {
    with_database(async |db: Database| {
        Stuck::OLD.plant(&db, 1).await;
        for client in ["early", "later"] {
            Stuck { client, sent_ago: Duration::from_hours(25), ..Stuck::OLD }.plant(&db, 1).await;
        }
        // The other one of a day ago has hardly been asked about: its reaper was away.
        db.execute("UPDATE idempotency_keys SET attempts = 1000 WHERE provider_key IN ('acme-0', 'later-0')")
            .await;
        let provider = Desk::new();
        for key in ["acme-0", "early-0", "later-0"] {
            provider.book().unclear.insert(key.to_owned());
        }
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Worked);
        assert_eq!(
            db.texts("SELECT provider_key FROM idempotency_keys WHERE needs_person_at IS NOT NULL").await,
            ["later-0"]
        );
        assert_eq!(provider.called("cancel").len(), 3);
        assert_eq!(outcome(&db, "acme-0").await.0, "processing");
    })
    .await;
}

#[tokio::test]
async fn one_that_is_under_way_is_looked_at_later() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1).await;
        let provider = Desk::new();
        provider.book().instead.insert("acme-0".to_owned(), Answer::InProgress);
        let mut recovery = recovery(&db, &provider);
        assert_eq!(recovery.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(recovery.run_once().await.unwrap(), Pass::Idle);
        assert_eq!(provider.called("charge").len(), 1);
        provider.book().instead.clear();
        db.execute("UPDATE idempotency_keys SET next_check_at = now()").await;
        assert_eq!(recovery.run_once().await.unwrap(), Pass::Worked);
        settled(&db, "acme-0", "succeeded", 201, "PaymentCreated").await;
    })
    .await;
}

#[tokio::test]
async fn what_has_an_owner_or_another_operation_is_left_alone() {
    with_database(async |db: Database| {
        Stuck { client: "foreign", operation: "payouts.create", ..Stuck::YOUNG }.plant(&db, 1).await;
        Stuck::YOUNG.plant(&db, 1).await;
        db.execute(
            "UPDATE idempotency_keys SET lease_until = now() + INTERVAL '20 s' WHERE provider_key = 'acme-0'",
        )
        .await;
        let provider = Desk::new();
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Idle);
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys WHERE attempts > 1").await, 0);
        assert!(provider.book().calls.is_empty());
    })
    .await;
}

#[tokio::test]
async fn what_goes_wrong_with_one_stays_with_it() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 20).await;
        let provider = Desk::new();
        provider.book().cursed.insert("acme-3".to_owned());
        // A key whose payment the database refuses to settle, and one of a client that this version cannot read.
        db.execute("UPDATE idempotency_keys SET client_id = 'ACME' WHERE provider_key = 'acme-5'").await;
        db.execute("ALTER TABLE payments ADD CHECK (provider_key <> 'acme-7' OR status = 'processing')")
            .await;
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Worked);
        assert_eq!(
            db.texts("SELECT provider_key FROM idempotency_keys WHERE status = 'in_progress' ORDER BY 1")
                .await,
            ["acme-3", "acme-5", "acme-7"]
        );
        assert_eq!(db.count("SELECT count(*) FROM payments WHERE status = 'succeeded'").await, 17);
    })
    .await;
}

#[tokio::test]
async fn what_the_provider_is_silent_about_keeps_nothing_that_comes_due_waiting() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 10).await;
        let lease =
            "UPDATE idempotency_keys SET lease_until = now() + INTERVAL '1 h' WHERE provider_key = 'acme-9'";
        db.execute(lease).await;
        let provider = Desk::new();
        provider.book().silent.extend((0..9).map(|n| format!("acme-{n}")));
        let mut recovery = Recovery::new(db.pool.clone(), provider.operation(), RETENTION);
        let comes_due = async {
            while provider.called("charge").len() < 9 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            db.execute("UPDATE idempotency_keys SET lease_until = now() WHERE provider_key = 'acme-9'").await;
        };
        let passes = async {
            while outcome(&db, "acme-9").await.0 == "processing" {
                recovery.run_once().await.unwrap();
            }
        };
        let both = async { tokio::join!(comes_due, passes) };
        assert!(
            tokio::time::timeout(Duration::from_secs(25), both).await.is_ok(),
            "waited for acme-9 in vain"
        );
        settled(&db, "acme-9", "succeeded", 201, "PaymentCreated").await;
        // Their leases last for longer: nobody has taken them over from themselves.
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys WHERE attempts > 2").await, 0);
    })
    .await;
}

#[tokio::test]
async fn what_a_pass_left_running_is_finished_at_the_stop() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1).await;
        let provider = Desk::new();
        provider.book().silent.insert("acme-0".to_owned());
        let mut recovery =
            Recovery::new(db.pool.clone(), provider.operation(), RETENTION).with_pass(Duration::ZERO);
        let life = Lifecycle::new();
        let pace = Pace {
            shortest: Duration::from_millis(1),
            longest: Duration::from_millis(1),
            wake: None,
            heartbeat: None,
        };
        let stop = async {
            while provider.called("charge").is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            life.stop();
            provider.speak();
        };
        let (driven, ()) = tokio::join!(drive("recovery", &mut recovery, &pace, &life), stop);
        driven.unwrap();
        // As a daemon does then; what was still running would be cut off.
        drop(recovery);
        settled(&db, "acme-0", "succeeded", 201, "PaymentCreated").await;
    })
    .await;
}

#[tokio::test]
async fn one_stuck_payment_does_not_wait_for_a_thousand_of_another_client() {
    with_database(async |db: Database| {
        Stuck { client: "big", dead_for: Duration::from_hours(1), ..Stuck::YOUNG }.plant(&db, 1000).await;
        Stuck { client: "small", dead_for: Duration::from_secs(1), ..Stuck::YOUNG }.plant(&db, 1).await;
        let provider = Desk::new();
        assert_eq!(recovery(&db, &provider).run_once().await.unwrap(), Pass::Full);
        settled(&db, "small-0", "succeeded", 201, "PaymentCreated").await;
        assert_eq!(provider.called("charge").len(), 64, "a pass is bounded");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_reapers_share_a_thousand_stuck_payments() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 1000).await;
        let provider = Desk::new();
        let began = Instant::now();
        let reap = async |caller: &'static str| {
            let operation = provider.for_caller(caller).operation();
            let mut recovery = Recovery::new(db.another_pool(12), operation, RETENTION);
            while recovery.run_once().await.unwrap() != Pass::Idle {}
        };
        tokio::join!(reap("first"), reap("second"));
        let took = began.elapsed();
        let mut shares: HashMap<&str, usize> = HashMap::new();
        for (caller, call, _) in &provider.book().calls {
            assert_eq!(*call, "charge");
            *shares.entry(caller).or_default() += 1;
        }
        println!("1,000 stuck payments in {took:?}: {shares:?}");
        assert_eq!(shares.values().sum::<usize>(), 1000, "each was driven once");
        assert!(shares.values().all(|&share| share >= 200), "{shares:?}");
        assert_eq!(db.count("SELECT count(*) FROM payments WHERE status = 'succeeded'").await, 1000);
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys WHERE attempts <> 2").await, 0);
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 1000);
    })
    .await;
}
