//! Many requests with one key at two APIs at once, each repeated until its answer is final: one row, one effect, one answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Answer, Client, Intent, Payment};
use semel_tests::payments::{Ids, all_agree_on, charges};
use semel_tests::system::System;
use sqlx::Row as _;
use tokio::sync::Barrier;

use crate::support::{in_full, joined, start};

/// Requests with one key.
const REQUESTS: usize = 64;
/// How long a client goes on asking.
const PATIENCE: Duration = Duration::from_mins(1);

/// What is asked for.
#[derive(Clone, Debug)]
enum Asked {
    Order(Intent),
    Payment(Payment),
}

impl Asked {
    fn key(&self) -> &str {
        match self {
            Self::Order(order) => &order.key,
            Self::Payment(payment) => &payment.key,
        }
    }

    async fn send(&self, client: &Client) -> Result<Answer> {
        match self {
            Self::Order(order) => client.place(order).await,
            Self::Payment(payment) => client.pay(payment).await,
        }
    }

    /// Asks until the answer is final, and says how often it had to.
    async fn until_final(&self, client: &Client) -> Result<(Answer, usize)> {
        let (deadline, mut tries) = (Instant::now() + PATIENCE, 0);
        loop {
            let answer = self.send(client).await?;
            tries += 1;
            if !answer.headers.contains_key("retry-after") {
                return Ok((answer, tries));
            }
            ensure!(
                Instant::now() < deadline,
                "no final answer within {PATIENCE:?}; the last was {answer:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The headers that a replay repeats, and until when it does.
fn repeated(answer: &Answer) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let names = ["content-type", "location", "etag", "link", "idempotency-key-expires"];
    let lines = |name| answer.headers.get_all(name).iter().map(|value| value.as_bytes().to_vec()).collect();
    names.into_iter().map(|name| (name, lines(name))).collect()
}

/// Has all requests sent at once, half of them to each API, and checks that their final answers are one; returns it.
async fn ask_at_once(clients: &[Client; 2], asked: &Asked) -> Result<(Answer, usize)> {
    let barrier = Arc::new(Barrier::new(REQUESTS));
    let requests = (0..REQUESTS).map(|number| {
        let (client, asked, barrier) = (clients[number % 2].clone(), asked.clone(), Arc::clone(&barrier));
        async move {
            barrier.wait().await;
            asked.until_final(&client).await
        }
    });
    let answers = joined(requests.collect()).await?;
    ensure!(answers.len() == REQUESTS, "{} answers", answers.len());
    let sent = answers.iter().map(|(_, tries)| tries).sum();
    let fresh: Vec<&Answer> =
        answers.iter().map(|(answer, _)| answer).filter(|answer| !answer.is_replay()).collect();
    let [first] = fresh[..] else { anyhow::bail!("{} answers are fresh: {fresh:?}", fresh.len()) };
    ensure!(first.status == 201, "{first:?}");
    let id = first.headers.get("request-id").context("no request id")?;
    for (answer, _) in &answers {
        ensure!((answer.status, &answer.body) == (first.status, &first.body), "{answer:?} is not {first:?}");
        ensure!(repeated(answer) == repeated(first), "{answer:?} is not {first:?}");
        ensure!(!answer.is_replay() || answer.headers.get("original-request-id") == Some(id), "{answer:?}");
    }
    Ok((first.clone(), sent))
}

/// How many keys, orders or payments, and events there are of this key.
async fn rows(system: &System, key: &str) -> Result<(i64, i64, i64)> {
    let rows = "WITH made AS (
                    SELECT order_id AS id FROM orders WHERE idempotency_key = $1
                    UNION ALL SELECT payment_id FROM payments WHERE idempotency_key = $1
                )
                SELECT (SELECT count(*) FROM idempotency_keys WHERE key = $1), (SELECT count(*) FROM made),
                       (SELECT count(*) FROM outbox WHERE aggregate_id IN (SELECT id::TEXT FROM made))";
    let mut connection = system.place.payments.connect().await?;
    let row = sqlx::query(rows).bind(key).fetch_one(&mut connection).await?;
    Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_requests_with_one_key_at_two_apis_one_takes_effect_and_all_are_answered_alike() -> Result<()> {
    let rounds = if in_full() { 200 } else { 10 };
    let system = start(2, &[]).await?;
    let control = system.place.control()?;
    let clients = [system.client(0)?, system.client(1)?];
    let (mut acknowledged, mut told, mut requests) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        let amount = 1000 + round;
        let order = Intent::new(&format!("order-{round}"), amount);
        let payment = Payment::new(&format!("payment-{round}"), amount);
        for asked in [Asked::Order(order), Asked::Payment(payment)] {
            let (answer, sent) = ask_at_once(&clients, &asked).await.with_context(|| format!("{asked:?}"))?;
            requests += sent;
            let key = asked.key();
            ensure!(rows(&system, key).await? == (1, 1, 1), "{asked:?}: {:?}", rows(&system, key).await?);
            match &asked {
                Asked::Order(_) => acknowledged.push(answer.acknowledged(key)?),
                Asked::Payment(_) => {
                    ensure!(charges(&control, &Ids::of(key)?.provider_key)? == 1, "{asked:?}");
                    told.push(answer.told(key)?);
                }
            }
        }
    }
    println!("{rounds} rounds of an order and of a payment, {REQUESTS} clients, {requests} requests");
    ensure!(control.calls().await?.charge == u64::try_from(rounds)?, "somebody sent twice");
    all_agree_on(&system, acknowledged, told, Vec::new()).await?;
    system.stop().await
}
