//! The provider's charges against the payments.

use std::time::Duration;

use semel_core::disposition::{Disposed as _, Disposition};
use semel_core::lifecycle::{Pass, Work as _};
use semel_reaper::audit::Audit;

use crate::database::{Database, Stuck, with_database};
use crate::provider::Desk;

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
        assert_eq!(audit.orphans(), 0, "all are of payments in processing");

        provider.charge_under("planted");
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(), 1);
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(), 1, "found again, and still one");

        provider.book().charges.pop();
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(), 0);
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
        assert_eq!(audit.orphans(), 3, "charged twice, declined and canceled");
    })
    .await;
}

#[tokio::test]
async fn what_was_given_back_beyond_what_refunds_took_is_found() {
    with_database(async |db: Database| {
        Stuck::YOUNG.plant(&db, 2).await;
        let provider = Desk::new();
        db.execute(
            "UPDATE payments SET status = 'succeeded', version = 1, settled_at = now(), refund_reserved = 500,
                                 provider_reference = 'ch_' || substr(provider_key, 6)",
        )
        .await;
        for n in 0..2 {
            provider.charge_under(&format!("acme-{n}"));
        }
        let mut audit = audit(&db, &provider);
        // Less than is taken is a refund under way.
        (provider.book().charges[0].refunded, provider.book().charges[1].refunded) = (0, 500);
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(), 0);
        provider.book().charges[1].refunded = 501;
        audit.run_once().await.unwrap();
        assert_eq!(audit.orphans(), 1);
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
        assert_eq!(audit.run_once().await.unwrap(), Pass::Full);
        assert_eq!((provider.book().lists, audit.orphans()), (10, 30));
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!((provider.book().lists, audit.orphans()), (14, 40));
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
        provider.book().list_fails = true;
        let error = audit.run_once().await.unwrap_err();
        assert_eq!(error.disposition(), Disposition::Retry);
        assert_eq!(audit.orphans(), 30, "what is known stays known");
        provider.book().list_fails = false;
        assert_eq!(audit.run_once().await.unwrap(), Pass::Full);
        assert_eq!(audit.run_once().await.unwrap(), Pass::Worked);
        assert_eq!(audit.orphans(), 40);
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
        assert_eq!(provider.book().lists, 1);
    })
    .await;
}
