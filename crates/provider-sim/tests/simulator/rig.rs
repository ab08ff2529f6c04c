//! A simulator on a port of its own, and what tests ask it.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use semel_core::lifecycle::{Drained, Lifecycle};
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::payment_provider_client::PaymentProviderClient;
use semel_proto::provider::v1::simulator_control_client::SimulatorControlClient;
use semel_proto::provider::v1::{
    Call, CancelChargeRequest, Charge, ChargeOrder, ChargeRequest, FaultKind, GetChargeRequest,
    GetRefundRequest, Happening, ListHappeningsRequest, OrderFaultRequest, Reason, Refund, RefundRequest,
    ReleaseRequest,
};
use semel_provider_sim::Simulator;
use semel_provider_sim::book::{Book, Entry, Storage};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Response, Status};

/// How long a test waits for anything.
const DEADLINE: Duration = Duration::from_secs(10);

pub(crate) type Answer<T> = Result<T, Status>;

pub(crate) struct Rig {
    pub(crate) client: Client,
    address: String,
    life: Lifecycle,
    served: JoinHandle<()>,
}

/// The clients of both services; clones share a connection.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) provider: PaymentProviderClient<Channel>,
    pub(crate) control: SimulatorControlClient<Channel>,
}

impl Rig {
    pub(crate) async fn start(book: &Path) -> Self {
        let (book, entries) = Book::open(book).unwrap();
        Self::over(Box::new(book), &entries).await
    }

    pub(crate) async fn over(storage: Box<dyn Storage>, entries: &[Entry]) -> Self {
        let life = Lifecycle::new();
        let simulator = Simulator::open(storage, entries, None, life.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let served = tokio::spawn(async move {
            simulator.serve(listener).await.unwrap();
            simulator.close().await;
        });
        Self { client: Client::connect(address.clone()).await, address, life, served }
    }

    /// A client with a connection of its own.
    pub(crate) async fn another(&self) -> Client {
        Client::connect(self.address.clone()).await
    }

    /// Stops it, and returns once the book is closed.
    pub(crate) async fn stop(self) {
        assert_eq!(self.life.drain(DEADLINE).await, Drained::Finished);
        drop(self.client);
        tokio::time::timeout(DEADLINE, self.served).await.expect("waited for the book to be closed").unwrap();
    }
}

impl Client {
    pub(crate) async fn connect(address: String) -> Self {
        let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
        Self {
            provider: PaymentProviderClient::new(channel.clone()),
            control: SimulatorControlClient::new(channel),
        }
    }

    pub(crate) async fn charge(&self, key: &str) -> Answer<Charge> {
        self.send(request(key)).await
    }

    pub(crate) async fn send(&self, request: ChargeRequest) -> Answer<Charge> {
        self.provider.clone().charge(request).await.map(Response::into_inner)
    }

    /// Sends a charge whose answer the test awaits later, or never.
    pub(crate) fn charging(&self, key: &str) -> JoinHandle<Answer<Charge>> {
        let (client, key) = (self.clone(), key.to_owned());
        tokio::spawn(async move { client.charge(&key).await })
    }

    pub(crate) async fn get(&self, key: &str) -> Answer<Charge> {
        let request = GetChargeRequest { key: key.to_owned() };
        self.provider.clone().get_charge(request).await.map(Response::into_inner)
    }

    pub(crate) async fn cancel(&self, key: &str) -> Answer<Charge> {
        let request = CancelChargeRequest { key: key.to_owned() };
        self.provider.clone().cancel_charge(request).await.map(Response::into_inner)
    }

    pub(crate) fn canceling(&self, key: &str) -> JoinHandle<Answer<Charge>> {
        let (client, key) = (self.clone(), key.to_owned());
        tokio::spawn(async move { client.cancel(&key).await })
    }

    pub(crate) async fn refund(&self, key: &str, charge_key: &str, amount: i64) -> Answer<Refund> {
        let (key, charge_key) = (key.to_owned(), charge_key.to_owned());
        let request = RefundRequest { key, charge_key, amount, not_after: None };
        self.provider.clone().refund(request).await.map(Response::into_inner)
    }

    pub(crate) async fn get_refund(&self, key: &str) -> Answer<Refund> {
        let request = GetRefundRequest { key: key.to_owned() };
        self.provider.clone().get_refund(request).await.map(Response::into_inner)
    }

    /// Orders a fault and returns its number.
    pub(crate) async fn order(&self, order: OrderFaultRequest) -> u64 {
        self.control.clone().order_fault(order).await.unwrap().into_inner().fault
    }

    pub(crate) async fn release(&self, hold: &str) -> u32 {
        let request = ReleaseRequest { hold: hold.to_owned() };
        self.control.clone().release(request).await.unwrap().into_inner().waiting
    }

    /// Everything that happened with a key, in order.
    pub(crate) async fn happenings(&self, key: &str) -> Vec<Happening> {
        let mut all: Vec<Happening> = Vec::new();
        loop {
            let after = all.last().map_or(0, |happening| happening.sequence);
            let request = ListHappeningsRequest { after, key: key.to_owned(), page_size: 0 };
            let page = self.control.clone().list_happenings(request).await.unwrap().into_inner().happenings;
            if page.is_empty() {
                return all;
            }
            all.extend(page);
        }
    }

    /// What happened with a key, in short, once the last of it is this.
    pub(crate) async fn once(&self, key: &str, what: What, call: Call) -> Vec<(What, Call)> {
        let described = format!("{key}: {what:?} {call:?}");
        eventually(&described, async || {
            let short: Vec<_> = self
                .happenings(key)
                .await
                .iter()
                .map(|happening| (happening.what(), happening.call()))
                .collect();
            (short.last() == Some(&(what, call))).then_some(short)
        })
        .await
    }
}

/// Waits until there is something, asking again and again.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "waited {} s for {what}", DEADLINE.as_secs());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) fn request(key: &str) -> ChargeRequest {
    let order = ChargeOrder {
        amount: 1000,
        currency: "EUR".to_owned(),
        source: "tok_visa".to_owned(),
        reference: "payment".to_owned(),
    };
    ChargeRequest { key: key.to_owned(), order: Some(order), not_after: None }
}

pub(crate) fn fault(kind: FaultKind, call: Call, key: &str) -> OrderFaultRequest {
    let (kind, call, key) = (kind.into(), call.into(), key.to_owned());
    OrderFaultRequest { kind, call, key, ..OrderFaultRequest::default() }
}

pub(crate) fn seconds(seconds: i64) -> prost_types::Duration {
    prost_types::Duration { seconds, nanos: 0 }
}

/// The reason of a refusal.
pub(crate) fn reason<T: std::fmt::Debug>(answer: Answer<T>) -> Reason {
    let status = answer.unwrap_err();
    let reason = Reason::of(&status).unwrap_or_else(|| panic!("{status:?} has no reason"));
    assert_eq!(status.code(), reason.code());
    reason
}

/// A path for a book, which is gone when the test is over.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("semel-provider-{}-{number}.jsonl", std::process::id())))
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        let text = fs::read_to_string(&self.0).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}
