//! A provider that is away for a while under load: it is spared, and every payment settles afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use semel_proto::provider::v1::{Call, CountCallsResponse, FaultKind};
use semel_tests::client::{Client, Payment};
use semel_tests::payments::{BOUND, all_agree, completed};
use semel_tests::provider::Fault;
use semel_tests::wait::eventually;
use sqlx::Row as _;
use tokio::task::JoinSet;

use crate::support::{all_told, in_full, joined, start};

/// Clients that make payments; half of them ask again for the same one until it is final, half go on to the next.
const CLIENTS: usize = 8;
/// Between two requests of a client.
const PACE: Duration = Duration::from_millis(100);

/// What the clients share.
#[derive(Default)]
struct Load {
    stop: AtomicBool,
    offered: AtomicU64,
    refused: AtomicU64,
    final_answers: AtomicU64,
}

impl Load {
    async fn client(self: Arc<Self>, client: Client, number: usize) -> Result<Vec<Payment>> {
        let (mut payments, mut pace) = (Vec::new(), tokio::time::interval(PACE));
        for round in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let payment = Payment::new(&format!("load-{number}-{round}"), 100 + i64::try_from(number)?);
            payments.push(payment.clone());
            loop {
                pace.tick().await;
                self.offered.fetch_add(1, Ordering::Relaxed);
                let answer = client.pay(&payment).await?;
                let is_final = !answer.headers.contains_key("retry-after");
                let counter = if is_final { &self.final_answers } else { &self.refused };
                counter.fetch_add(1, Ordering::Relaxed);
                if is_final || number.is_multiple_of(2) || self.stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        }
        Ok(payments)
    }

    async fn grows(&self, what: &str, counter: impl Fn(&Self) -> &AtomicU64, by: u64) -> Result<()> {
        let wanted = counter(self).load(Ordering::Relaxed) + by;
        let look = || async {
            let now = counter(self).load(Ordering::Relaxed);
            if now >= wanted { Ok(()) } else { Err(now) }
        };
        eventually(what, Duration::from_mins(1), look).await
    }
}

/// Calls about payments; the reading of the list is not for any of them.
fn calls(counted: CountCallsResponse) -> u64 {
    counted.charge + counted.get + counted.cancel
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_that_is_away_is_spared_and_every_payment_settles_afterwards() -> Result<()> {
    let outage = Duration::from_secs(if in_full() { 60 } else { 10 });
    let system = start(2, &[]).await?;
    let control = system.place.control()?;
    let load = Arc::<Load>::default();
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(Arc::clone(&load).client(system.client(number % 2)?, number));
    }
    load.grows("payments before the outage", |load| &load.final_answers, 20).await?;

    control.order(Fault::new(FaultKind::Outage, Call::Unspecified)).await?;
    let before = (calls(control.calls().await?), load.offered.load(Ordering::Relaxed));
    let began = tokio::time::Instant::now();
    let over = || async { (began.elapsed() >= outage).then_some(()) };
    eventually("the outage to last", outage * 2, over).await?;
    let called = calls(control.calls().await?) - before.0;
    let offered = load.offered.load(Ordering::Relaxed) - before.1;
    control.lift(0).await?;
    println!("an outage of {outage:?}: {offered} requests offered, {called} calls to the provider");
    ensure!(offered >= 10 * outage.as_secs(), "too little load: {offered} requests");
    ensure!(called * 10 <= offered * 12, "{called} calls to the provider for {offered} requests");
    ensure!(called > 0, "nobody looked whether it is back");
    ensure!(load.refused.load(Ordering::Relaxed) > 0, "nobody noticed the outage");

    load.grows("payments after the outage", |load| &load.final_answers, 20).await?;
    load.stop.store(true, Ordering::Relaxed);
    let payments: Vec<Payment> = joined(clients).await?.into_iter().flatten().collect();
    let mut connection = system.place.payments.connect().await?;
    let rows = sqlx::query("SELECT key FROM idempotency_keys").fetch_all(&mut connection).await?;
    let keys: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    // Before anybody asks again.
    completed(&system, &keys, BOUND).await?;
    let told = all_told(&system.client(0)?, &payments).await?;
    ensure!(told.iter().all(|told| told.status == "succeeded"), "not all succeeded");
    println!("{} payments, {} of them begun before the retries", told.len(), keys.len());
    all_agree(&system, told).await?;
    system.stop().await
}
