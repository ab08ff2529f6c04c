//! What the tests of this suite have in common.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Answer, Client, Payment, ToldPayment};
use semel_tests::payments::Ids;
use semel_tests::system::{Running, System};
use tokio::task::{JoinHandle, JoinSet};

/// How long a process that is to die may take.
pub(crate) const EXIT: Duration = Duration::from_secs(30);

/// Waits for a minute and a half: longer than anybody is frozen here.
const PATIENCE: Duration = Duration::from_secs(90);

/// A payment that was asked for, and whose answer is awaited.
pub(crate) struct Asked {
    pub(crate) payment: Payment,
    pub(crate) ids: Ids,
    answer: JoinHandle<Result<Answer>>,
}

impl Asked {
    /// Asks an API for a payment.
    pub(crate) fn of(system: &System, api: &Running, payment: Payment) -> Result<Self> {
        let address = api.address.context("no API")?;
        let client = Client::with_patience(address, &system.place.token, PATIENCE)?;
        let (ids, asked) = (Ids::of(&payment.key)?, payment.clone());
        Ok(Self { payment, ids, answer: tokio::spawn(async move { client.pay(&asked).await }) })
    }

    /// Waits for the answer, if there is one.
    pub(crate) async fn answer(self) -> Result<Answer> {
        self.answer.await?
    }
}

/// Whether the long rounds are wanted.
pub(crate) fn in_full() -> bool {
    std::env::var_os("SEMEL_TEST_FULL").is_some()
}

/// Asks until the answer is final, and checks that it tells of this very payment.
pub(crate) async fn told(client: &Client, payment: &Payment) -> Result<(ToldPayment, Answer)> {
    let answer = client.pay_until_final(payment).await?;
    let told = answer.told(&payment.key)?;
    ensure!(told.payment_id == Ids::of(&payment.key)?.payment, "{} became {told:?}", payment.reference);
    ensure!(told.amount == payment.amount, "{} became {told:?}", payment.reference);
    Ok((told, answer))
}

/// Asks an API for each payment until the answer is final.
pub(crate) async fn all_told(client: &Client, payments: &[Payment]) -> Result<Vec<ToldPayment>> {
    let mut all = Vec::new();
    for payment in payments {
        all.push(told(client, payment).await?.0);
    }
    Ok(all)
}

/// Waits until a task has ended for each of these payments, and returns what they came to.
pub(crate) async fn joined<T: 'static>(mut tasks: JoinSet<Result<T>>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        all.push(ended??);
    }
    Ok(all)
}
