//! Links that die silently: no reset, no error, only nothing. A daemon notices by itself, and goes on over a new one.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Client, Intent};
use semel_tests::proxy::{Direction, Fault, Proxy, Rule, Rules, Verdict};
use semel_tests::services::Services;
use semel_tests::system::{Place, READY};
use semel_tests::wait::eventually;
use sqlx::Row as _;

/// The longest that a call to the database may take before its connection is given up, and a little.
const NOTICED: Duration = Duration::from_mins(1);

/// A proxy in front of the server in a URL, and the URL that leads through it.
struct Path {
    proxy: Proxy,
    url: String,
    /// How often all connections were forsaken.
    generation: Arc<AtomicU64>,
}

impl Path {
    async fn to(url: &str) -> Result<Self> {
        let generation = Arc::<AtomicU64>::default();
        let now = Arc::clone(&generation);
        let rules = move |_| {
            let rule = Mortal { born: now.load(Ordering::Relaxed), now: Arc::clone(&now) };
            Some(Box::new(rule) as Box<dyn Rule>)
        };
        Ok(Self { generation, ..Self::judged(url, rules).await? })
    }

    /// One whose connections are judged by these rules.
    async fn judged(url: &str, rules: impl Rules) -> Result<Self> {
        let mut url = reqwest::Url::parse(url)?;
        let target = format!("{}:{}", url.host_str().context("no host")?, url.port().context("no port")?);
        let target: SocketAddr = tokio::net::lookup_host(target).await?.next().context("no address")?;
        let proxy = Proxy::start_with(target, rules).await?;
        url.set_ip_host(proxy.addr().ip()).ok().context("no host in the URL")?;
        url.set_port(Some(proxy.addr().port())).ok().context("no port in the URL")?;
        Ok(Self { proxy, url: url.to_string(), generation: Arc::default() })
    }

    /// From now on nothing passes on the connections there are, and nothing says so; new ones are well.
    fn forsake(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    async fn something_vanished(&self) -> Result<()> {
        let look = || async { (self.proxy.counts().dropped > 0).then_some(()) };
        eventually("something to vanish", READY, look).await
    }
}

/// Lets bytes pass on a connection until it is forsaken.
struct Mortal {
    born: u64,
    now: Arc<AtomicU64>,
}

impl Rule for Mortal {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        if self.now.load(Ordering::Relaxed) == self.born {
            Verdict::Forward(pending.len())
        } else {
            Verdict::Drop(pending.len())
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_whose_database_connections_died_silently_answers_again() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let path = Path::to(&place.payments.url()).await?;
    let api = place.api("cut-off", &[("DATABASE_URL", &path.url), ("SEMEL_API_DB_CONNECTIONS", "3")]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    // Requests in flight on every connection there is, so that none is pinged before it is used.
    let intents: Vec<Intent> =
        (0..200).map(|number| Intent::new(&format!("lost-{number}"), 200 + number)).collect();
    let (told, mut answered) = tokio::sync::mpsc::unbounded_channel();
    let mut asking = tokio::task::JoinSet::new();
    for intent in intents.clone() {
        let (client, told) = (client.clone(), told.clone());
        asking.spawn(async move {
            let _ = told.send(client.place(&intent).await.is_ok());
        });
    }
    for _ in 0..20 {
        answered.recv().await.context("no answer")?;
    }
    path.forsake();
    path.something_vanished().await?;
    // Some are refused, some run into the client's own limit; none may stay for ever.
    asking.join_all().await;

    let after = Intent::new("after", 100);
    let placed = || async { client.place(&after).await.ok()?.acknowledged(&after.key).ok() };
    eventually("the API to answer again", NOTICED, placed).await?;
    for intent in &intents {
        client.place_until_final(intent).await?.acknowledged(&intent.key)?;
    }
    let mut connection = place.payments.connect().await?;
    let orders: i64 =
        sqlx::query("SELECT count(*) FROM orders").fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(orders, 201);
    Ok(())
}

/// Loses what a client says from its first bytes on that `deadly` is true of, on the first few connections that say them.
struct DiesOn {
    deadly: fn(&[u8]) -> bool,
    left: Arc<AtomicU64>,
    dead: bool,
}

impl Rule for DiesOn {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        if !self.dead && (self.deadly)(pending) {
            let less = |left: u64| left.checked_sub(1);
            self.dead = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        }
        if self.dead { Verdict::Drop(pending.len()) } else { Verdict::Forward(pending.len()) }
    }
}

/// An API with a single connection to the database goes on though that dies, time and again.
async fn the_only_connection_dies(times: u64, deadly: fn(&[u8]) -> bool) -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let left = Arc::new(AtomicU64::new(times));
    let rules = move |direction| {
        let rule = DiesOn { deadly, left: Arc::clone(&left), dead: false };
        (direction == Direction::ToServer).then(|| Box::new(rule) as Box<dyn Rule>)
    };
    let path = Path::judged(&place.payments.url(), rules).await?;
    let api = place.api("cut-off", &[("DATABASE_URL", &path.url), ("SEMEL_API_DB_CONNECTIONS", "1")]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    for number in 0..=times {
        let intent = Intent::new(&format!("after-{number}"), 100);
        let placed = || async { client.place(&intent).await.ok()?.acknowledged(&intent.key).ok() };
        eventually("the API to answer again", NOTICED, placed).await?;
    }
    path.something_vanished().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_dies_as_it_goes_back_to_the_pool_keeps_no_place_in_it() -> Result<()> {
    // A lone Sync is how a pool asks a connection that it takes back whether it is sound.
    the_only_connection_dies(3, |pending| pending == b"S\0\0\0\x04").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_dies_in_a_statement_is_given_up() -> Result<()> {
    the_only_connection_dies(1, |pending| {
        let statement = b"-- orders_place";
        pending.windows(statement.len()).any(|window| window == statement)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_whose_database_connections_died_silently_goes_on() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let tap = place.tap().await?;
    let path = Path::to(&place.payments.url()).await?;
    let _relay = place.relay("cut-off", &[("DATABASE_URL", &path.url)]).await?;
    let mut connection = place.payments.connect().await?;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                  SELECT 'shipment', 's' || n, 'ShipmentMoved', '{}' FROM generate_series(1, 500) AS n";
    for round in 1..=2 {
        sqlx::query(insert).execute(&mut connection).await?;
        if round == 1 {
            // Every worker has used its connection by then, and the prober uses its own all the time.
            let arrived = || async { (tap.count("shipment") >= 500).then_some(()) };
            eventually("the first events", READY, arrived).await?;
            path.forsake();
            path.something_vanished().await?;
        }
    }
    let arrived = || async {
        let ids: BTreeSet<_> = tap.messages().ok()?.iter().map(|message| message.event_id).collect();
        (ids.len() >= 1000).then_some(())
    };
    eventually("the relay to go on", NOTICED, arrived).await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_daemon_stops_within_its_grace_though_its_database_does_not_answer() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let (payments, books) = (Path::to(&place.payments.url()).await?, Path::to(&place.books.url()).await?);
    let grace = ("SEMEL_GRACE", "3");
    let api = place.api("api", &[("DATABASE_URL", &payments.url), grace]).await?;
    let relay = place.relay("relay", &[("DATABASE_URL", &payments.url), grace]).await?;
    let reaper = place.reaper("reaper", &[("DATABASE_URL", &payments.url), grace]).await?;
    let ledger = place.ledger("ledger", &[("DATABASE_URL", &books.url), grace]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    for path in [&payments, &books] {
        path.proxy.set_both(Fault::Stall);
    }
    let hanging = tokio::spawn(async move { client.place(&Intent::new("hanging", 100)).await });
    for running in [&api, &relay, &reaper, &ledger] {
        running.daemon.terminate()?;
    }
    for running in [&api, &relay, &reaper, &ledger] {
        let status = running.daemon.wait_exit(Duration::from_secs(10)).await?;
        ensure!(status.success(), "{} left with {status}", running.daemon.name());
    }
    hanging.abort();
    Ok(())
}

#[tokio::test]
async fn a_database_with_a_stricter_isolation_level_does_not_change_ours() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let mut admin = place.payments.connect().await?;
    let alter = format!(
        "ALTER DATABASE \"{}\" SET default_transaction_isolation = 'repeatable read'",
        place.payments.name()
    );
    sqlx::query(sqlx::AssertSqlSafe(alter)).execute(&mut admin).await?;
    let mut connection = semel_core::database::connect(&place.payments.url().parse()?, "test").await?;
    let level: String =
        sqlx::query("SHOW transaction_isolation").fetch_one(&mut connection).await?.try_get(0)?;
    assert_eq!(level, "read committed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_whose_database_goes_away_stays_ready_and_says_so_itself() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let path = Path::to(&place.payments.url()).await?;
    let api = place.api("left-alone", &[("DATABASE_URL", &path.url)]).await?;
    let client = Client::new(api.address.context("no address")?, &place.token)?;
    let before = Intent::new("before", 100);
    client.place(&before).await?.acknowledged(&before.key)?;
    path.proxy.refuse().await?;
    path.proxy.sever().await;
    // What was sent over a connection that is dead without knowing it may have been executed. The next requests find none.
    let mut told = Vec::new();
    for intent in [&before, &before, &Intent::new("meanwhile", 200), &Intent::new("later", 300)] {
        let answer = client.place(intent).await?;
        ensure!(answer.status == 503 && answer.headers.contains_key("retry-after"), "{answer:?}");
        told.push(answer.problem().context("no problem")?);
        let ready = reqwest::get(format!("http://127.0.0.1:{}/readyz", api.admin)).await?;
        ensure!(ready.status() == 200, "out of service when somebody has to answer");
    }
    let (first, later) = told.split_at(2);
    ensure!(
        first.iter().all(|kind| ["outcome-unknown", "temporarily-unavailable"].contains(&kind.as_str())),
        "{told:?}"
    );
    ensure!(later.iter().all(|kind| kind == "temporarily-unavailable"), "{told:?}");
    path.proxy.heal().await?;
    let again = client.place_until_final(&before).await?;
    ensure!(again.is_replay(), "{again:?}");
    Ok(())
}
