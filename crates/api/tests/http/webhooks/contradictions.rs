//! Events that contradict what is written: told, and nothing changes.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use semel_payments::metrics::CONTRADICTIONS;

use super::*;

/// Counts contradictions.
#[derive(Default)]
struct Counting(Arc<AtomicU64>);

impl Counting {
    /// Returns how many there were since it was asked last.
    fn more(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

impl Recorder for Counting {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() == CONTRADICTIONS { Counter::from_arc(Arc::clone(&self.0)) } else { Counter::noop() }
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

async fn counting(test: impl AsyncFnOnce(Database, Server, Provider, &Counting)) {
    let counting = Counting::default();
    // For this thread, on which test and server run.
    let _guard = metrics::set_default_local_recorder(&counting);
    with_webhooks(SECRET, async |db, server, provider| test(db, server, provider, &counting).await).await;
}

/// Makes a payment whose charge is known, and still in processing.
async fn known(db: &Database, server: &Server, provider: &Provider) -> String {
    let key = lost(db, server, provider).await;
    db.execute("UPDATE idempotency_keys SET provider_reference = 'ch_' || provider_key").await;
    key
}

#[tokio::test]
async fn a_success_of_a_payment_that_was_rolled_back_is_told_though_it_failed_half_way() {
    counting(async |db, server, provider, counting| {
        let key = known(&db, &server, &provider).await;
        told(&server, &intent("evt_1", "payment_intent.canceled", &key, "canceled")).await;
        assert_eq!(db.stands().await, standing("canceled", 1, 1));
        // Whatever comes after the entry fails.
        db.execute(
            "CREATE FUNCTION hide() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN ALTER TABLE payments RENAME TO hidden; RETURN NULL; END $$",
        )
        .await;
        db.execute(
            "CREATE TRIGGER zz_hide AFTER INSERT ON provider_answers FOR EACH ROW EXECUTE FUNCTION hide()",
        )
        .await;
        let event = succeeded("evt_2", &key);
        let failed = send(&server, &event).await;
        assert!(failed.status >= 500, "{failed:?}");
        db.execute("DROP TRIGGER zz_hide ON provider_answers").await;
        db.execute("ALTER TABLE hidden RENAME TO payments").await;
        assert_eq!((db.stands().await, counting.more()), (standing("canceled", 1, 2), 0));
        told(&server, &event).await;
        assert_eq!((db.stands().await, counting.more()), (standing("canceled", 1, 2), 1));
    })
    .await;
}

#[tokio::test]
async fn a_success_that_is_heard_while_it_is_settled_otherwise_is_told() {
    counting(async |db, server, provider, counting| {
        let key = known(&db, &server, &provider).await;
        // After the settlement has looked for one.
        db.execute(
            "CREATE FUNCTION hear() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence)
                VALUES (NEW.payment_id, NEW.provider_key, 'charge', 'succeeded', 'ch_late', 1);
                RETURN NEW;
             END $$",
        )
        .await;
        db.execute("CREATE TRIGGER hear BEFORE UPDATE ON payments FOR EACH ROW EXECUTE FUNCTION hear()").await;
        told(&server, &intent("evt_1", "payment_intent.canceled", &key, "canceled")).await;
        assert_eq!((db.stands().await, counting.more()), (standing("canceled", 1, 1), 1));
    })
    .await;
}

#[tokio::test]
async fn a_charge_under_our_key_that_is_not_the_one_that_was_made_is_told() {
    counting(async |db, server, provider, counting| {
        let key = known(&db, &server, &provider).await;
        let changed = |id: &str, name: &str, value: Value| {
            let mut event = succeeded(id, &key);
            event["data"]["object"][name] = value;
            event
        };
        let contradicting = [
            changed("evt_1", "amount", json!(1251)),
            changed("evt_2", "amount_received", json!(1)),
            changed("evt_3", "currency", json!("usd")),
            changed("evt_4", "id", json!("ch_another")),
        ];
        for event in &contradicting {
            told(&server, event).await;
            assert_eq!((db.stands().await, counting.more()), (standing("processing", 0, 0), 1), "{event}");
        }
        told(&server, &succeeded("evt_5", &key)).await;
        assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 1, 1), 0));
        for (event, heard) in contradicting.iter().zip([1, 1, 1, 2]) {
            told(&server, event).await;
            assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 1, heard), 1), "{event}");
        }
        // The other mode's, and what moved nothing, is nobody's money.
        told(&server, &changed("evt_6", "livemode", json!(true))).await;
        let mut event = intent("evt_7", "payment_intent.canceled", &key, "canceled");
        event["data"]["object"]["id"] = json!("ch_another");
        told(&server, &event).await;
        assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 1, 2), 0));
    })
    .await;
}

#[tokio::test]
async fn a_refund_under_our_key_that_is_not_as_it_was_asked_is_told() {
    counting(async |db, server, provider, counting| {
        let payment = server.payment("k", 1250).send(server.address).await;
        let path = format!("{}/refunds", payment.header("location").unwrap());
        let charge = format!("ch_{}", db.provider_key().await);
        provider.then_refund(Script::LoseAnswer);
        let asking = server.post_to(&path, r#"{"amount":500}"#).header("Idempotency-Key", "r");
        asking.send(server.address).await.expect_problem(503, "outcome-unknown");
        let key = db.refund_key("r").await;
        let event = |id: &str, status: &str| refund(id, "refund.updated", &key, &charge, status);
        let changed = |id: &str, name: &str, value: Value| {
            let mut event = event(id, "succeeded");
            event["data"]["object"][name] = value;
            event
        };
        for event in [
            changed("evt_1", "amount", json!(501)),
            changed("evt_2", "currency", json!("usd")),
            changed("evt_3", "payment_intent", json!("ch_another")),
        ] {
            told(&server, &event).await;
            assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 1, 0), 1), "{event}");
        }
        told(&server, &event("evt_4", "succeeded")).await;
        assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 2, 1), 0));
        // Made twice; and the one that was made has failed after all, as often as that is told.
        told(&server, &changed("evt_5", "id", json!("re_another"))).await;
        assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 2, 2), 1));
        for _ in 0..2 {
            told(&server, &event("evt_6", "failed")).await;
            assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 2, 3), 1));
        }
        // That another one failed says nothing of it.
        let mut other = event("evt_7", "failed");
        other["data"]["object"]["id"] = json!("re_another");
        told(&server, &other).await;
        assert_eq!((db.stands().await, counting.more()), (standing("succeeded", 2, 3), 0));
    })
    .await;
}
