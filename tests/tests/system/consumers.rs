//! Ledgers that are killed, and brokers that restart, under load: every order is booked once.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::progress::Progress;
use semel_tests::services::Services;
use semel_tests::system::{Env, Place};
use semel_tests::wait::eventually;

const SOON: Duration = Duration::from_mins(3);
const EXIT: Duration = Duration::from_mins(1);

/// `cargo xtask test --full` asks for all of them.
fn rounds(full: usize, else_: usize) -> usize {
    if std::env::var_os("SEMEL_TEST_FULL").is_some() { full } else { else_ }
}

/// Orders that were placed so far. There are a few per aggregate, one after another.
struct Orders<'a> {
    place: &'a Place,
    placed: i64,
}

impl Orders<'_> {
    async fn place(&mut self, count: i64) -> Result<()> {
        let insert = "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload)
            SELECT md5(n::TEXT)::UUID, 'order', (n % 50)::TEXT, n, 'OrderPlaced', jsonb_build_object(
                'order_id', md5(n::TEXT)::UUID, 'client_id', 'acme', 'amount', n, 'currency', 'EUR')
            FROM generate_series($1 + 1, $1 + $2) AS n";
        let mut connection = self.place.payments.connect().await?;
        sqlx::query(insert).bind(self.placed).bind(count).execute(&mut connection).await?;
        self.placed += count;
        Ok(())
    }

    /// Waits until all are booked, and sees that none is booked twice, parked or dead.
    async fn are_booked_once(&self) -> Result<()> {
        let look = || async {
            let seen = self.booked().await.map_err(|error| error.to_string())?;
            if seen.0 >= self.placed { Ok(()) } else { Err(format!("{seen:?} of {}", self.placed)) }
        };
        eventually("every order to be booked", SOON, look).await?;
        assert_eq!(self.booked().await?, (self.placed, self.placed, 0));
        let management = self.place.vhost.management().context("no management")?;
        let dead = format!("{}.dead", self.place.queue);
        let none = || async {
            let queues =
                management.queues(self.place.vhost.name()).await.map_err(|error| error.to_string())?;
            match queues.iter().find(|queue| queue.name == dead).map(|queue| queue.messages) {
                Some(0) => Ok(()),
                other => Err(format!("{other:?} dead letters")),
            }
        };
        eventually("no dead letter", EXIT, none).await?;
        Ok(())
    }

    /// Distinct orders, bookings, and parked events.
    async fn booked(&self) -> Result<(i64, i64, i64)> {
        let count = "SELECT count(DISTINCT event_id), count(*), (SELECT count(*) FROM parked_events)
            FROM ledger_transactions";
        let mut connection = self.place.books.connect().await?;
        Ok(sqlx::query_as(count).fetch_one(&mut connection).await?)
    }
}

async fn ledgers_die_at(failpoint: &str, env: Env<'_>) -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    place.ledger("first", env).await?.daemon.kill().await?;
    let _relay = place.relay("relay", &[]).await?;
    let mut orders = Orders { place: &place, placed: 0 };
    for round in 0..rounds(34, 2) {
        orders.place(60).await?;
        let plan = format!("{failpoint}={}*off->abort", 3 + round % 20);
        let env: Vec<_> = env.iter().copied().chain([("SEMEL_FAILPOINTS", plan.as_str())]).collect();
        // It may die before it was seen to be ready.
        if let Ok(doomed) = place.ledger(&format!("doomed-{round}"), &env).await {
            orders.place(20).await?;
            ensure!(!doomed.daemon.wait_exit(EXIT).await?.success(), "it lives");
        }
    }
    let _heir = place.ledger("heir", env).await?;
    orders.are_booked_once().await
}

const IN_ORDER: Env<'static> = &[("SEMEL_LEDGER_ORDERING", "aggregate")];

#[tokio::test]
async fn ledgers_that_die_before_their_commit_under_load_book_every_order_once() -> Result<()> {
    ledgers_die_at("inbox.before_commit", &[]).await
}

#[tokio::test]
async fn ledgers_that_die_between_commit_and_ack_under_load_book_every_order_once() -> Result<()> {
    ledgers_die_at("inbox.after_commit", &[]).await
}

#[tokio::test]
async fn ledgers_that_die_after_their_ack_under_load_book_every_order_once() -> Result<()> {
    ledgers_die_at("inbox.after_ack", &[]).await
}

#[tokio::test]
async fn ledgers_that_keep_an_order_and_die_under_load_book_every_order_once() -> Result<()> {
    for failpoint in ["inbox.before_commit", "inbox.after_commit"] {
        ledgers_die_at(failpoint, IN_ORDER).await?;
    }
    Ok(())
}

async fn broker_restarts(name: &str, env: Env<'_>) -> Result<()> {
    // A server of this test's own, since a restart is everybody's.
    let place = Services::from_env()?.place().own(name);
    let services = Services::start_private(place, Progress::Silent).await?;
    let outcome = restarts(&services, env).await;
    services.remove(Progress::Silent).await?;
    outcome
}

async fn restarts(services: &Services, env: Env<'_>) -> Result<()> {
    let server = services.rabbitmq.private().context("a private server")?;
    let place = Place::make(services).await?;
    let _ledgers = [place.ledger("ledger-1", env).await?, place.ledger("ledger-2", env).await?];
    let _relay = place.relay("relay", &[]).await?;
    // A queue is on disk for certain only after a stop in order.
    server.restart().await?;
    let mut orders = Orders { place: &place, placed: 0 };
    for round in 0..rounds(20, 3) {
        orders.place(300).await?;
        let before = orders.booked().await?.0;
        let goes_on = || async {
            let now = orders.booked().await.map_err(|error| error.to_string())?.0;
            if now > before { Ok(()) } else { Err(format!("{now} are booked")) }
        };
        eventually("the ledgers to be at work", SOON, goes_on).await?;
        if round % 2 == 0 {
            server.kill().await?;
            orders.place(100).await?;
            server.start().await?;
        } else {
            server.restart().await?;
        }
    }
    orders.are_booked_once().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_restarts_under_load_costs_no_booking() -> Result<()> {
    broker_restarts("restarts", &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_restarts_under_load_costs_no_booking_of_a_ledger_that_keeps_an_order() -> Result<()> {
    broker_restarts("orderly", IN_ORDER).await
}
