//! A whole Semel of real processes: databases, a virtual host, and every daemon, each as its users start it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sqlx::Row as _;

use crate::client::{Acknowledged, Client, ToldPayment, ToldRefund};
use crate::net::{free_port, unique_name};
use crate::process::{Daemon, binary};
use crate::provider::{Control, read_book};
use crate::reconcile::{Sources, read_ledger, read_orders, read_outbox, read_payments, read_refunds};
use crate::services::{Database, Services, Vhost};
use crate::stripe::API_KEY;
use crate::tap::Tap;
use crate::wait::eventually;

/// How long a daemon may take from its start to being ready.
pub const READY: Duration = Duration::from_secs(30);

/// The routing keys that this system's events have.
pub const KEYS: [&str; 8] = [
    "order.OrderPlaced",
    "payment.PaymentCreated",
    "payment.PaymentDeclined",
    "payment.PaymentCanceled",
    "payment.PaymentRefunded",
    "payment.PaymentRefundFailed",
    "shipment.ShipmentMoved",
    "ledger_transaction.LedgerPosted",
];

/// The deployment's name that every system has.
pub const NAMESPACE: &str = "demo";

/// The client whose token a place has.
pub const TENANT: &str = "acme";

/// What a daemon is started with beside its defaults.
pub type Env<'a> = &'a [(&'a str, &'a str)];

/// A daemon and its ports.
#[derive(Debug)]
pub struct Running {
    /// The process.
    pub daemon: Daemon,
    /// The port of its admin endpoint.
    pub admin: u16,
    /// The address it serves, if it serves one.
    pub address: Option<SocketAddr>,
}

/// Databases, virtual host and names that the daemons of one system share.
#[derive(Debug)]
pub struct Place {
    /// The database of api, relays and reaper.
    pub payments: Database,
    /// The ledger's own database.
    pub books: Database,
    /// The virtual host.
    pub vhost: Vhost,
    /// The exchange in it.
    pub exchange: String,
    /// The ledger's queue in it.
    pub queue: String,
    /// A client's token.
    pub token: String,
    /// Where the provider listens, or will.
    pub provider: SocketAddr,
    /// The provider's book.
    pub book: PathBuf,
    /// Where Stripe's API is, where payments are made by that.
    pub stripe: Option<String>,
    /// What every daemon is started with beside its defaults.
    pub env: Env<'static>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // It may never have come to be.
        let _ = std::fs::remove_file(&self.book);
    }
}

/// How many of the daemons that scale are started.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// API processes.
    pub apis: usize,
    /// Relay processes of the payments database.
    pub relays: usize,
    /// What every daemon is started with beside its defaults.
    pub env: Env<'static>,
}

/// A running system.
#[derive(Debug)]
pub struct System {
    /// What its daemons share.
    pub place: Place,
    /// The payment provider, simulated.
    pub provider: Running,
    /// The API processes.
    pub apis: Vec<Running>,
    /// The relays of the payments database.
    pub relays: Vec<Running>,
    /// The reaper of the payments database.
    pub reaper: Running,
    /// The ledger.
    pub ledger: Running,
    /// The relay of the ledger's database.
    pub ledger_relay: Running,
    /// Everything that the broker routed.
    pub tap: Tap,
}

impl Place {
    /// Makes the databases with their tables, the virtual host, and a credential.
    ///
    /// # Errors
    ///
    /// A service or a subcommand fails.
    pub async fn make(services: &Services) -> Result<Self> {
        let payments = services.create_database("payments").await?;
        let books = services.create_database("books").await?;
        let vhost = services.create_vhost("semel").await?;
        let (payments_url, books_url) = (payments.url(), books.url());
        call("semel-api", &["migrate"], &payments_url).await?;
        call("semel-ledger", &["migrate"], &books_url).await?;
        let said = call("semel-api", &["credentials", "create", TENANT], &payments_url).await?;
        let token = said.into_iter().find(|line| line.starts_with("sml_")).context("no token was printed")?;
        let (exchange, queue) = (vhost.scoped("semel.events"), vhost.scoped("ledger.orders"));
        let provider = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let book = std::env::temp_dir().join(format!("{}.jsonl", unique_name("semel_book")));
        Ok(Self { payments, books, vhost, exchange, queue, token, provider, book, stripe: None, env: &[] })
    }

    /// Starts the provider simulator and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn provider(&self, name: &str, env: Env<'_>) -> Result<Running> {
        let (listen, book) = (self.provider.to_string(), self.book.display().to_string());
        let mut all =
            vec![("SEMEL_PROVIDER_LISTEN", listen.as_str()), ("SEMEL_PROVIDER_BOOK", book.as_str())];
        all.extend_from_slice(env);
        self.start("semel-provider-sim", name, "", &all).await
    }

    /// The control of the provider simulator.
    ///
    /// # Errors
    ///
    /// Never, for an address that is one.
    pub fn control(&self) -> Result<Control> {
        Control::new(self.provider, &self.book)
    }

    /// Starts an API and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn api(&self, name: &str, env: Env<'_>) -> Result<Running> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let listen = address.to_string();
        let mut all = vec![("SEMEL_API_LISTEN", listen.as_str())];
        all.extend_from_slice(env);
        let mut api = self.start("semel-api", name, &self.payments.url(), &all).await?;
        api.address = Some(address);
        Ok(api)
    }

    /// A client of this API.
    ///
    /// # Errors
    ///
    /// It serves nothing.
    pub fn client(&self, api: &Running) -> Result<Client> {
        Client::new(api.address.context("no API")?, &self.token)
    }

    /// Starts a relay of the payments database and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn relay(&self, name: &str, env: Env<'_>) -> Result<Running> {
        self.start("semel-relay", name, &self.payments.url(), env).await
    }

    /// Starts a relay of the ledger's database and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn ledger_relay(&self, name: &str, env: Env<'_>) -> Result<Running> {
        self.start("semel-relay", name, &self.books.url(), env).await
    }

    /// Starts the reaper of the payments database and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn reaper(&self, name: &str, env: Env<'_>) -> Result<Running> {
        self.start("semel-reaper", name, &self.payments.url(), env).await
    }

    /// Starts a ledger and waits until it is ready.
    ///
    /// # Errors
    ///
    /// It is not ready in time.
    pub async fn ledger(&self, name: &str, env: Env<'_>) -> Result<Running> {
        self.start("semel-ledger", name, &self.books.url(), env).await
    }

    /// The environment of every daemon but for its database.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let mut all = vec![
            ("AMQP_URL", self.vhost.url()),
            ("SEMEL_NAMESPACE", NAMESPACE.to_owned()),
            ("SEMEL_EXCHANGE", self.exchange.clone()),
            ("SEMEL_LEDGER_QUEUE", self.queue.clone()),
            ("SEMEL_LOG_FORMAT", "text".to_owned()),
        ];
        all.extend(match &self.stripe {
            Some(base) => vec![
                ("SEMEL_PROVIDER", "stripe".to_owned()),
                ("SEMEL_STRIPE_API_KEY", API_KEY.to_owned()),
                ("SEMEL_STRIPE_API_BASE", base.clone()),
            ],
            None => vec![
                ("SEMEL_PROVIDER_URL", format!("http://{}", self.provider)),
                // The simulator remembers for ever.
                ("SEMEL_PROVIDER_HORIZON_HOURS", "0".to_owned()),
            ],
        });
        all
    }

    async fn start(&self, program: &str, name: &str, database: &str, env: Env<'_>) -> Result<Running> {
        let admin = free_port()?;
        let command = Daemon::command(name, binary(program)?)
            .envs(self.environment())
            .env("DATABASE_URL", database)
            .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
            .envs(self.env.iter().copied())
            .envs(env.iter().copied());
        let daemon = command.start().await?;
        daemon.wait_ready(admin, READY).await?;
        Ok(Running { daemon, admin, address: None })
    }

    /// Opens a tap on every key of this system.
    ///
    /// # Errors
    ///
    /// The broker refuses.
    pub async fn tap(&self) -> Result<Tap> {
        Tap::open(&self.vhost.url(), &self.exchange, &self.vhost.scoped("tap"), &KEYS).await
    }

    /// Reads the independent places, when its daemons are at rest.
    ///
    /// # Errors
    ///
    /// A database fails, the tap broke, or the provider's book cannot be read.
    pub async fn sources(
        &self,
        tap: &Tap,
        acknowledged: Vec<Acknowledged>,
        told: Vec<ToldPayment>,
        told_refunds: Vec<ToldRefund>,
    ) -> Result<Sources> {
        let mut payments = self.payments.connect().await?;
        let mut books = self.books.connect().await?;
        let mut outbox = read_outbox(&mut payments).await?;
        outbox.extend(read_outbox(&mut books).await?);
        // What is published has been routed, but its copy for the tap may still be on its way.
        let expected = outbox.iter().filter(|row| row.published).count();
        let arrived = || async {
            let messages = tap.messages().map_err(|error| error.to_string())?;
            let ids: std::collections::BTreeSet<_> =
                messages.iter().map(|message| message.event_id).collect();
            if ids.len() >= expected { Ok(messages) } else { Err(format!("{} of {expected}", ids.len())) }
        };
        let tap =
            match eventually("the tap to have what was published", Duration::from_secs(10), arrived).await {
                Ok(messages) => messages,
                // The difference is for the comparison to name.
                Err(_) => tap.messages()?,
            };
        Ok(Sources {
            acknowledged,
            told,
            told_refunds,
            orders: read_orders(&mut payments).await?,
            payments: read_payments(&mut payments).await?,
            refunds: read_refunds(&mut payments).await?,
            provider: read_book(&self.book)?,
            outbox,
            tap,
            ledger: read_ledger(&mut books).await?,
        })
    }

    /// Waits until no event is unpublished and the ledger has booked every order.
    ///
    /// # Errors
    ///
    /// It is not so at the deadline.
    pub async fn settled(&self, deadline: Duration) -> Result<()> {
        let mut payments = self.payments.connect().await?;
        let mut books = self.books.connect().await?;
        let began = Instant::now();
        loop {
            let unpublished = "SELECT count(*) FROM outbox WHERE published_at IS NULL";
            let left: i64 = sqlx::query(unpublished).fetch_one(&mut payments).await?.try_get(0)?;
            let left_in_books: i64 = sqlx::query(unpublished).fetch_one(&mut books).await?.try_get(0)?;
            let orders = "SELECT (SELECT count(*) FROM orders)
                + (SELECT count(*) FROM payments WHERE status = 'succeeded')";
            let orders: i64 = sqlx::query(orders).fetch_one(&mut payments).await?.try_get(0)?;
            let booked = "SELECT count(*) FROM ledger_transactions";
            let booked: i64 = sqlx::query(booked).fetch_one(&mut books).await?.try_get(0)?;
            if left == 0 && left_in_books == 0 && booked >= orders {
                return Ok(());
            }
            ensure!(
                began.elapsed() < deadline,
                "waited {} s for the system to settle: {left} + {left_in_books} events are unpublished, {booked} of \
                 {orders} orders are booked",
                deadline.as_secs()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl System {
    /// Starts all daemons and waits until each is ready.
    ///
    /// # Errors
    ///
    /// A service fails, or a daemon is not ready in time.
    pub async fn start(services: &Services, shape: Shape) -> Result<Self> {
        Self::start_in(Place::make(services).await?, shape).await
    }

    /// As [`System::start`], in a place that was made before.
    ///
    /// # Errors
    ///
    /// As [`System::start`].
    pub async fn start_in(mut place: Place, shape: Shape) -> Result<Self> {
        place.env = shape.env;
        // First, so that the queues are there before anything is published.
        let ledger = place.ledger("ledger", &[]).await?;
        let tap = place.tap().await?;
        let provider = place.provider("provider", &[]).await?;
        let mut apis = Vec::new();
        for number in 1..=shape.apis {
            apis.push(place.api(&format!("api-{number}"), &[]).await?);
        }
        let mut relays = Vec::new();
        for number in 1..=shape.relays {
            relays.push(place.relay(&format!("relay-{number}"), &[]).await?);
        }
        let reaper = place.reaper("reaper", &[]).await?;
        let ledger_relay = place.ledger_relay("ledger-relay", &[]).await?;
        Ok(Self { place, provider, apis, relays, reaper, ledger, ledger_relay, tap })
    }

    /// A client of one of the APIs.
    ///
    /// # Errors
    ///
    /// There is no such API.
    pub fn client(&self, api: usize) -> Result<Client> {
        let address = self.apis.get(api).and_then(|api| api.address).context("no such API")?;
        Client::new(address, &self.place.token)
    }

    /// Reads the independent places.
    ///
    /// # Errors
    ///
    /// A database fails, or the tap broke.
    pub async fn sources(&self, acknowledged: Vec<Acknowledged>) -> Result<Sources> {
        self.sources_with_payments(acknowledged, Vec::new()).await
    }

    /// Reads the independent places, where payments were made too.
    ///
    /// # Errors
    ///
    /// As [`System::sources`], or the provider's book cannot be read.
    pub async fn sources_with_payments(
        &self,
        acknowledged: Vec<Acknowledged>,
        told: Vec<ToldPayment>,
    ) -> Result<Sources> {
        self.sources_with_refunds(acknowledged, told, Vec::new()).await
    }

    /// Reads the independent places, where payments were made and refunded.
    ///
    /// # Errors
    ///
    /// As [`System::sources_with_payments`].
    pub async fn sources_with_refunds(
        &self,
        acknowledged: Vec<Acknowledged>,
        told: Vec<ToldPayment>,
        told_refunds: Vec<ToldRefund>,
    ) -> Result<Sources> {
        self.place.sources(&self.tap, acknowledged, told, told_refunds).await
    }

    /// Asks every daemon to stop, and checks that each leaves with exit code 0.
    ///
    /// # Errors
    ///
    /// One stays, or leaves otherwise.
    pub async fn stop(self) -> Result<()> {
        let mut all = self.apis;
        all.extend(self.relays);
        all.extend([self.reaper, self.ledger, self.ledger_relay, self.provider]);
        all.retain(|running| running.daemon.is_running());
        for running in &all {
            running.daemon.terminate()?;
        }
        for running in &all {
            let status = running.daemon.wait_exit(Duration::from_secs(30)).await?;
            ensure!(status.success(), "{} left with {status}", running.daemon.name());
        }
        Ok(())
    }
}

impl Running {
    /// Reads one of its metrics: the value of the first series of that name whose labels hold `label`; 0 if there is none.
    ///
    /// # Errors
    ///
    /// The admin endpoint does not answer.
    pub async fn metric(&self, name: &str, label: &str) -> Result<f64> {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.admin)).await?.text().await?;
        let series = text.lines().find(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(label)
        });
        Ok(series.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_default())
    }
}

/// Runs one of our programs to its end, and returns what it said.
///
/// # Errors
///
/// It fails, or takes longer than a minute.
pub async fn call(program: &str, args: &[&str], database: &str) -> Result<Vec<String>> {
    let name = format!("{program}-{}", args.join("-"));
    let daemon =
        Daemon::command(&name, binary(program)?).args(args).env("DATABASE_URL", database).start().await?;
    let status = daemon.wait_exit(Duration::from_mins(1)).await?;
    if !status.success() {
        bail!("{program} {} failed: {}", args.join(" "), daemon.lines().join("; "));
    }
    Ok(daemon.lines())
}
