//! The chart at work: migrations, roles and the first credential by its Jobs, every daemon as a pod, and all of them replaced and
//! scaled while clients go on.

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Acknowledged, Answer, Client, Intent, Payment, Refund, ToldPayment, ToldRefund};
use semel_tests::kubelet::{HELM, Kubelet, Secrets};
use semel_tests::net::{free_port, unique_name};
use semel_tests::reconcile::reconcile;
use semel_tests::services::Services;
use semel_tests::skip::skip;
use semel_tests::system::{NAMESPACE, Place, TENANT};
use semel_tests::wait::eventually;
use serde_json::json;

use super::roles::{PASSWORD, Roles};

const CLIENTS: usize = 4;
/// What a relay shows once it has marked a batch.
const PROGRESS: &str = "semel_relay_last_progress_timestamp_seconds";
/// What a client is told to come again for.
const RETRYABLE: [&str; 4] =
    ["request-in-progress", "temporarily-unavailable", "outcome-unknown", "rate-limited"];

/// What clients were told.
#[derive(Default)]
struct Told {
    orders: Vec<Acknowledged>,
    payments: Vec<ToldPayment>,
    refunds: Vec<ToldRefund>,
    /// First tries that were answered with 2xx.
    good: usize,
    /// The others, by what was told.
    others: BTreeMap<String, usize>,
}

impl Told {
    /// Notes what came of a first try.
    fn first(&mut self, answer: &Result<Answer>) {
        match answer {
            Ok(answer) if answer.status.is_success() => self.good += 1,
            Ok(answer) => {
                let problem = answer.problem().unwrap_or_else(|| answer.status.to_string());
                *self.others.entry(problem).or_default() += 1;
            }
            Err(error) => *self.others.entry(format!("no answer: {error:#}")).or_default() += 1,
        }
    }
}

/// A client behind the Service: each request goes to one of its endpoints.
struct Caller {
    kubelet: Arc<Kubelet>,
    service: String,
    token: String,
    clients: HashMap<String, Client>,
    turn: usize,
}

impl Caller {
    fn client(&mut self) -> Result<Client> {
        let endpoints = self.kubelet.endpoints(&self.service)?;
        ensure!(!endpoints.is_empty(), "the Service has no endpoints");
        self.turn += 1;
        let address = &endpoints[self.turn % endpoints.len()];
        if !self.clients.contains_key(address) {
            let client = Client::new(address.parse()?, &self.token)?;
            self.clients.insert(address.clone(), client);
        }
        Ok(self.clients[address].clone())
    }

    async fn call_until(mut self, stop: Arc<AtomicBool>) -> Result<Told> {
        let mut told = Told::default();
        while !stop.load(Ordering::Relaxed) {
            let intent = Intent::new("order", 100);
            told.first(&self.client()?.place(&intent).await);
            told.orders.push(self.client()?.place_until_final(&intent).await?.acknowledged(&intent.key)?);
            let payment = Payment::new("payment", 300);
            told.first(&self.client()?.pay(&payment).await);
            let paid = self.client()?.pay_until_final(&payment).await?.told(&payment.key)?;
            let refund = Refund::new(paid.payment_id, 100);
            told.first(&self.client()?.refund(&refund).await);
            told.refunds.push(self.client()?.refund_until_final(&refund).await?.told_refund(&refund.key)?);
            told.payments.push(paid);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(told)
    }
}

/// Waits until each of so many relays has had lanes, and published from them.
async fn all_publish(kubelet: &Kubelet, deployment: &str, count: usize) -> Result<()> {
    let relays = kubelet.addresses(deployment, "admin")?;
    ensure!(relays.len() == count, "{relays:?}");
    let probe = || async {
        for relay in &relays {
            let metrics = reqwest::get(format!("http://{relay}/metrics")).await.map_err(|e| e.to_string())?;
            let text = metrics.text().await.map_err(|e| e.to_string())?;
            if !text.lines().any(|line| line.starts_with(PROGRESS)) {
                return Err(format!("{relay} has marked no batch"));
            }
        }
        Ok(())
    };
    eventually("every relay to publish", Duration::from_mins(1), probe).await
}

#[tokio::test]
async fn every_deployment_is_replaced_and_relays_are_scaled_under_load() -> Result<()> {
    let test = "every_deployment_is_replaced_and_relays_are_scaled_under_load";
    let services = Services::from_env()?;
    if std::env::var_os(HELM).is_none() {
        return Ok(skip(test, &format!("{HELM} is not set, as `cargo xtask test` does"))?);
    }
    let vhost = services.create_vhost("semel").await?;
    let mut place = Place {
        payments: services.create_database("payments").await?,
        books: services.create_database("books").await?,
        exchange: vhost.scoped("semel.events"),
        queue: vhost.scoped("ledger.orders"),
        vhost,
        token: String::new(),
        provider: SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)),
        book: std::env::temp_dir().join(format!("{}.jsonl", unique_name("semel_book"))),
        stripe: None,
        env: &[],
    };
    // What somebody does beforehand: roles, secrets.
    let mut roles = Roles::new(&place.payments);
    let mut secrets = Secrets::new();
    let mut names = serde_json::Map::new();
    let (mut payments, mut books) = (BTreeMap::new(), BTreeMap::new());
    for daemon in ["api", "relay", "reaper", "ledger"] {
        let role = roles.make(daemon).await?;
        for (urls, database) in [(&mut payments, &place.payments), (&mut books, &place.books)] {
            urls.insert(format!("{daemon}-url"), database.url_as(&role, PASSWORD));
            urls.insert("owner-url".to_owned(), database.url());
        }
        names.insert(daemon.to_owned(), role.into());
    }
    secrets.insert("pg".to_owned(), payments);
    secrets.insert("pg-books".to_owned(), books);
    let broker = ["relay-url", "ledger-url"].map(|key| (key.to_owned(), place.vhost.url()));
    secrets.insert("mq".to_owned(), broker.into());

    let values = json!({
        "namespace": NAMESPACE,
        "broker": { "secret": "mq", "exchange": place.exchange },
        "groups": {
            "payments": { "secret": "pg", "relay": { "replicas": 1 } },
            "books": { "secret": "pg-books", "relay": { "replicas": 1 } },
        },
        "database": { "roles": names },
        "provider": { "kind": "grpc", "url": format!("http://{}", place.provider), "horizonHours": 0 },
        "ledger": { "enabled": true, "group": "books", "queue": place.queue },
        "firstClient": TENANT,
    });
    let kubelet = Arc::new(Kubelet::render(&values, secrets).await?.context("there was a Helm")?);
    kubelet.run_jobs("migrate").await?;
    let said = kubelet.run_jobs("credential").await?;
    place.token = said.into_iter().find(|line| line.starts_with("sml_")).context("no token was printed")?;
    let provider = place.provider("provider", &[]).await?;

    let all = kubelet.deployments();
    assert_eq!(all.len(), 6, "{all:?}");
    // The ledger first, so that its queue is there.
    kubelet.deploy("semel-ledger").await?;
    let tap = place.tap().await?;
    for deployment in all.iter().filter(|name| *name != "semel-ledger") {
        kubelet.deploy(deployment).await?;
    }
    assert_eq!(kubelet.endpoints("semel-api")?.len(), 2);

    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..CLIENTS)
        .map(|turn| {
            let (kubelet, token) = (Arc::clone(&kubelet), place.token.clone());
            let caller =
                Caller { kubelet, service: "semel-api".into(), token, clients: HashMap::new(), turn };
            tokio::spawn(caller.call_until(Arc::clone(&stop)))
        })
        .collect();

    for deployment in &all {
        kubelet.restart(deployment).await.with_context(|| format!("restarting {deployment}"))?;
    }
    kubelet.scale("semel-relay-payments", 4).await?;
    all_publish(&kubelet, "semel-relay-payments", 4).await?;
    kubelet.scale("semel-relay-payments", 1).await?;

    stop.store(true, Ordering::Relaxed);
    let mut told = Told::default();
    for caller in callers {
        let one = caller.await??;
        told.orders.extend(one.orders);
        told.payments.extend(one.payments);
        told.refunds.extend(one.refunds);
        told.good += one.good;
        one.others.into_iter().for_each(|(what, count)| *told.others.entry(what).or_default() += count);
    }
    let others: usize = told.others.values().sum();
    let tries = told.good + others;
    println!("{tries} first tries, {} answered with 2xx, others: {:?}", told.good, told.others);
    ensure!(tries > 100, "hardly anything was asked for");
    ensure!(told.good * 100 >= tries * 99, "{} of {tries}; {:?}", told.good, told.others);
    for problem in told.others.keys() {
        ensure!(RETRYABLE.contains(&problem.as_str()), "a client was told {problem}");
    }

    place.settled(Duration::from_mins(1)).await?;
    let ended = kubelet.end_all().await?;
    // Two each of api and ledger twice, the others once more than they are, and those that were scaled away.
    println!("{ended} pods ended by themselves");
    ensure!(ended >= 15, "{ended} pods");
    let sources = place.sources(&tap, told.orders, told.payments, told.refunds).await?;
    assert_eq!(reconcile(&sources), []);
    provider.daemon.terminate()?;
    roles.drop_in(&[&place.payments, &place.books]).await
}
