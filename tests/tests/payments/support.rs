//! What the tests of this suite have in common.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use semel_proto::provider::v1::Happening;
use semel_proto::provider::v1::happening::What;
use semel_tests::client::{Answer, Client, Payment, ToldPayment};
use semel_tests::payments::Ids;
use semel_tests::provider::Control;
use semel_tests::services::Services;
use semel_tests::system::{Env, Running, Shape, System};
use semel_tests::wait::eventually;
use sqlx::Row as _;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::{JoinHandle, JoinSet};
use uuid::Uuid;

/// How long a process that is to die may take.
pub(crate) const EXIT: Duration = Duration::from_secs(30);

/// Waits for a minute and a half: longer than anybody is frozen here.
const PATIENCE: Duration = Duration::from_secs(90);

/// A send window that is over when an API gives up waiting for the provider, and a reaper that looks often. Few connections,
/// since opening many at once takes a busy machine longer than a request waits for one.
pub(crate) const STUCK_SOON: Env<'static> =
    &[("SEMEL_SEND_WINDOW", "8"), ("SEMEL_REAPER_PERIOD", "1"), ("SEMEL_API_DB_CONNECTIONS", "4")];

/// How many payments are asked for at a time.
const AT_A_TIME: usize = 4;

/// Bounds how much of this suite starts at a time: a process whose first connections to the database take too long goes
/// another way than the one that a test wants to see it go.
static STARTS: Semaphore = Semaphore::const_new(2);

/// Waits for a place to start something. Whoever has one asks for no other.
pub(crate) async fn place_to_start() -> Result<SemaphorePermit<'static>> {
    Ok(STARTS.acquire().await?)
}

/// Starts a system.
pub(crate) async fn start(apis: usize, env: Env<'static>) -> Result<System> {
    let _place = place_to_start().await?;
    System::start(&Services::from_env()?, Shape { apis, relays: 1, env }).await
}

/// Waits until an API has connected to its database.
pub(crate) async fn connected(system: &System, api: &Running) -> Result<()> {
    let client = system.place.client(api)?;
    let look = || async {
        let answer = client.payment(Uuid::nil()).await.map_err(|error| error.to_string())?;
        if answer.status == 404 { Ok(()) } else { Err(answer.status.to_string()) }
    };
    eventually("the API to connect to its database", EXIT, look).await
}

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

/// Asks an API for each payment until the answer is final, and returns the answers in the same order.
pub(crate) async fn all_told(client: &Client, payments: &[Payment]) -> Result<Vec<ToldPayment>> {
    let asking = payments.iter().map(|payment| async move { Ok(told(client, payment).await?.0) });
    stream::iter(asking).buffered(AT_A_TIME).try_collect().await
}

/// Waits until a task has ended for each of these payments, and returns what they came to.
pub(crate) async fn joined<T: 'static>(mut tasks: JoinSet<Result<T>>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        all.push(ended??);
    }
    Ok(all)
}

/// Asks for payments whose charges a fault holds on their way, and waits until their APIs have given them up and they are due
/// for a reaper.
pub(crate) async fn given_up(system: &System, control: &Control, payments: &[Payment]) -> Result<()> {
    let (mut asked, mut apis) = (Vec::new(), system.apis.iter().cycle());
    for api in &system.apis {
        connected(system, api).await?;
    }
    for some in payments.chunks(AT_A_TIME) {
        let _place = place_to_start().await?;
        let first = asked.len();
        for payment in some {
            asked.push(Asked::of(system, apis.next().context("no API")?, payment.clone())?);
        }
        for asked in &asked[first..] {
            let is_held = |seen: &Happening| seen.what() == What::Held;
            control.wait_for("a charge to be held on its way", &asked.ids.provider_key, is_held).await?;
        }
    }
    for asked in asked {
        let reference = asked.payment.reference.clone();
        let answer = asked.answer().await?;
        ensure!(answer.problem().as_deref() == Some("outcome-unknown"), "{reference}: {answer:?}");
    }
    let keys: Vec<String> = payments.iter().map(|payment| payment.key.clone()).collect();
    let due = || async {
        let count = "SELECT count(*) FROM idempotency_keys WHERE key = ANY($1) AND
                     (status = 'completed' OR next_check_at <= clock_timestamp())";
        let mut connection = system.place.payments.connect().await.map_err(|error| error.to_string())?;
        let row = sqlx::query(count).bind(&keys).fetch_one(&mut connection).await;
        let due: i64 = row.and_then(|row| row.try_get(0)).map_err(|error| error.to_string())?;
        if usize::try_from(due) == Ok(keys.len()) { Ok(()) } else { Err(format!("{due} of {}", keys.len())) }
    };
    eventually("all payments to be due for a reaper", EXIT, due).await
}
