//! The provider's charges against the payments.

use std::time::Duration;

use semel_core::disposition::{Disposed as _, Disposition};
use semel_core::lifecycle::{Pass, Work as _};
use semel_payments::provider::List;
use semel_reaper::audit::Audit;

use crate::database::{Database, Stuck, with_database};
use crate::provider::Desk;
use crate::refunds;

fn audit(db: &Database, provider: &Desk) -> Audit<Desk> {
    Audit::new(db.pool.clone(), provider.clone(), Duration::ZERO, Duration::from_hours(2))
}

#[tokio::test]
async fn a_charge_of_no_payment_is_found() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 10).await;
        let provider = Desk::new();
        for n in 0..10 {
            provider.charge_under(&format!("acme-{n}"));
        }
        let mut audit = audit(&db, &provider);
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(audit.orphans(List::Charges), Some(0), "all are of payments in processing");

        provider.charge_under("planted");
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(1));
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(1), "found again, and still one");

        provider.book().charges.pop();
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(0));
    })
    .await;
}

#[tokio::test]
async fn a_charge_of_a_payment_that_was_settled_otherwise_is_found() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 5).await;
        let provider = Desk::new();
        for n in 0..5 {
            provider.charge_under(&format!("acme-{n}"));
        }
        db.execute(
            "UPDATE payments SET status = outcome, version = 1, settled_at = now(), provider_reference = reference_,
                                 decline_code = CASE WHEN outcome = 'declined' THEN 'no_money' END
             FROM (VALUES
                ('acme-0', 'succeeded', 'ch_0'), ('acme-1', 'succeeded', 'ch_other'), ('acme-2', 'declined', NULL),
                ('acme-3', 'canceled', NULL)
             ) AS outcomes (key_, outcome, reference_)
             WHERE provider_key = key_",
        )
        .await;
        let mut audit = audit(&db, &provider);
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(3), "charged twice, declined and canceled");
    })
    .await;
}

#[tokio::test]
async fn a_refund_of_an_old_charge_made_behind_our_back_is_found_within_one_round() {
    with_database(async |db: Database| {
        refunds::plant(&db, 5, Duration::from_mins(1)).await;
        db.execute(
            "UPDATE refunds SET status = outcome, settled_at = now(), provider_reference = reference_,
                                failure_code = CASE WHEN outcome = 'failed' THEN 'account_closed' END
             FROM (VALUES
                ('back-1', 'succeeded', 're_1'), ('back-2', 'succeeded', 're_other'), ('back-3', 'failed', NULL)
             ) AS outcomes (key_, outcome, reference_)
             WHERE provider_key = key_",
        )
        .await;
        let provider = Desk::new();
        // Of one in processing, and of one that it settled.
        provider.refund_under("back-0", 500);
        provider.refund_under("back-1", 500);
        let mut audit = audit(&db, &provider);
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(audit.orphans(List::Refunds), Some(0));

        for (key, amount) in [("back-2", 500), ("back-3", 500), ("back-4", 501), ("planted", 500), ("", 500)] {
            provider.refund_under(key, amount);
        }
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Refunds), Some(5), "twice, failed, another amount, and two of no refund");
        assert_eq!(audit.orphans(List::Charges), Some(0), "none of their charges is listed");
        provider.book().given_back.truncate(3);
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Refunds), Some(1));
    })
    .await;
}

#[tokio::test]
async fn a_charge_of_another_amount_is_found() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 2).await;
        let provider = Desk::new();
        provider.charge_under("acme-0");
        provider.charge_under("acme-1");
        provider.book().charges[1].amount += 1;
        let mut audit = audit(&db, &provider);
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(1));
    })
    .await;
}

#[tokio::test]
async fn a_long_list_is_read_over_several_passes() {
    with_database(async |db: Database| {
        let provider = Desk::new();
        for n in 0..40 {
            provider.charge_under(&format!("planted-{n}"));
        }
        let mut audit = audit(&db, &provider);
        // Never at once: the provider's rate limit is there for those who pay.
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!((provider.book().lists, audit.orphans(List::Charges)), (11, Some(30)));
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!((provider.book().lists, audit.orphans(List::Charges)), (16, Some(40)));
    })
    .await;
}

#[tokio::test]
async fn a_provider_that_does_not_answer_is_asked_again_from_the_beginning() {
    with_database(async |db: Database| {
        let provider = Desk::new();
        for n in 0..40 {
            provider.charge_under(&format!("planted-{n}"));
        }
        let mut audit = audit(&db, &provider);
        audit.run_once().await.unwrap();
        provider.book().failing.extend([List::Charges, List::Refunds]);
        let error = audit.run_once().await.unwrap_err();
        assert_eq!(error.disposition(), Disposition::Retry);
        assert_eq!(audit.orphans(List::Charges), Some(30), "what is known stays known");
        provider.book().failing.clear();
        audit.run_once().await.unwrap();
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(List::Charges), Some(40));
    })
    .await;
}

#[tokio::test]
async fn between_two_rounds_nobody_is_asked() {
    with_database(async |db: Database| {
        let provider = Desk::new();
        let hour = Duration::from_hours(1);
        let mut audit = Audit::new(db.pool.clone(), provider.clone(), hour, hour);
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(audit.run_once().await.unwrap(), Pass::Idle);
        assert_eq!(provider.book().lists, 2, "one of charges, one of refunds");
    })
    .await;
}

#[tokio::test]
async fn a_list_that_always_fails_keeps_nobody_from_the_other() {
    with_database(async |db: Database| {
        let provider = Desk::new();
        provider.charge_under("planted");
        provider.refund_under("planted", 500);
        for (failing, read) in [(List::Charges, List::Refunds), (List::Refunds, List::Charges)] {
            provider.book().failing.insert(failing);
            let mut audit = audit(&db, &provider);
            for _ in 0..2 {
                audit.run_once().await.unwrap_err();
            }
            assert_eq!((audit.orphans(failing), audit.orphans(read)), (Some(0), Some(1)));
            provider.book().failing.clear();
        }
    })
    .await;
}

#[tokio::test]
async fn a_list_that_is_missing_for_a_while_is_forgotten_nothing_of_and_comes_back() {
    with_database(async |db: Database| {
        let provider = Desk::new();
        for n in 0..40 {
            provider.charge_under(&format!("planted-{n}"));
        }
        let mut audit = audit(&db, &provider);
        let lists = [List::Charges, List::Refunds];
        for (missing, charges, refunds) in [
            (&lists[..0], Some(30), Some(0)),
            (&lists[..0], Some(40), Some(0)),
            (&lists[..1], None, Some(0)),
            // Of so many, one pass meets thirty.
            (&lists[1..], Some(40), None),
            (&lists[..], None, None),
            (&lists[..0], Some(40), Some(0)),
        ] {
            provider.book().missing = missing.iter().copied().collect();
            assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
            assert_eq!((audit.orphans(List::Charges), audit.orphans(List::Refunds)), (charges, refunds));
        }
    })
    .await;
}
