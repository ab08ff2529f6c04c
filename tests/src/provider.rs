//! The provider simulator as a test orders it about: faults, holds, and the book that it keeps on disk.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use semel_proto::provider::v1::simulator_control_client::SimulatorControlClient;
use semel_proto::provider::v1::{
    Call, CountCallsRequest, CountCallsResponse, FaultKind, Happening, LiftFaultsRequest,
    ListHappeningsRequest, MoveClockRequest, OrderFaultRequest, ReleaseRequest,
};
use serde::{Deserialize, Serialize};
use tonic::transport::{Channel, Endpoint};

use crate::wait::eventually;

/// A line of the provider's book.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct BookLine {
    /// `charge`, `decline`, `fence`, `refund` …
    pub kind: String,
    /// The key towards the provider.
    pub key: String,
    /// The provider's own name for it.
    #[serde(default)]
    pub reference: String,
    /// In minor units; 0 for a fence.
    #[serde(default)]
    pub amount: i64,
    /// ISO 4217 code; empty for a fence.
    #[serde(default)]
    pub currency: String,
    /// Of a refund: the key of its charge.
    #[serde(default)]
    pub charge_key: String,
}

/// Reads the provider's book: what it has really done.
///
/// # Errors
///
/// The book cannot be read.
pub fn read_book(path: &Path) -> Result<Vec<BookLine>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.with_context(|| format!("reading the provider's book {}", path.display()))?,
    };
    // A last line without its end is being written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("a line of the book: {line}")))
        .collect()
}

/// The control of a running simulator.
#[derive(Clone, Debug)]
pub struct Control {
    client: SimulatorControlClient<Channel>,
    book: PathBuf,
}

/// A fault to order; [`Control::order`] does.
#[derive(Clone, Debug)]
pub struct Fault {
    request: OrderFaultRequest,
}

impl Fault {
    /// A fault of every call of this kind with any key, until it is lifted.
    #[must_use]
    pub fn new(kind: FaultKind, call: Call) -> Self {
        Self {
            request: OrderFaultRequest {
                kind: kind.into(),
                call: call.into(),
                ..OrderFaultRequest::default()
            },
        }
    }

    /// So often and no more.
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.request.times = times;
        self
    }

    /// With this key only.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        key.clone_into(&mut self.request.key);
        self
    }

    /// At a hold of this name.
    #[must_use]
    pub fn hold(mut self, hold: &str) -> Self {
        hold.clone_into(&mut self.request.hold);
        self
    }

    /// With this decline code.
    #[must_use]
    pub fn code(mut self, code: &str) -> Self {
        code.clone_into(&mut self.request.code);
        self
    }

    /// Whether the first hit applies.
    #[must_use]
    pub fn applied(mut self, applied: bool) -> Self {
        self.request.applied = applied;
        self
    }
}

impl Control {
    /// Controls the simulator at this address, which keeps this book.
    ///
    /// # Errors
    ///
    /// The address is none.
    pub fn new(address: SocketAddr, book: &Path) -> Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect_lazy();
        Ok(Self { client: SimulatorControlClient::new(channel), book: book.to_owned() })
    }

    /// Orders a fault, and returns its number.
    ///
    /// # Errors
    ///
    /// The simulator refuses it.
    pub async fn order(&self, fault: Fault) -> Result<u64> {
        Ok(self.client.clone().order_fault(fault.request).await?.into_inner().fault)
    }

    /// Takes one fault back, or all of them for 0.
    ///
    /// # Errors
    ///
    /// The simulator does not answer.
    pub async fn lift(&self, fault: u64) -> Result<()> {
        self.client.clone().lift_faults(LiftFaultsRequest { fault }).await?;
        Ok(())
    }

    /// Opens a hold, and says how many calls waited at it.
    ///
    /// # Errors
    ///
    /// The simulator does not answer.
    pub async fn release(&self, hold: &str) -> Result<u32> {
        Ok(self.client.clone().release(ReleaseRequest { hold: hold.to_owned() }).await?.into_inner().waiting)
    }

    /// Moves the provider's clock ahead.
    ///
    /// # Errors
    ///
    /// The simulator refuses.
    pub async fn move_clock(&self, by: Duration) -> Result<()> {
        let by = Some(prost_types::Duration::try_from(by)?);
        self.client.clone().move_clock(MoveClockRequest { by }).await?;
        Ok(())
    }

    /// Counts the calls that came in.
    ///
    /// # Errors
    ///
    /// The simulator does not answer.
    pub async fn calls(&self) -> Result<CountCallsResponse> {
        Ok(self.client.clone().count_calls(CountCallsRequest {}).await?.into_inner())
    }

    /// Returns what happened to a key, or to all for an empty one, in order.
    ///
    /// # Errors
    ///
    /// The simulator does not answer.
    pub async fn happenings(&self, key: &str) -> Result<Vec<Happening>> {
        self.happenings_after(0, key).await
    }

    /// Returns what happened to a key, or to all for an empty one, after this sequence, in order.
    ///
    /// # Errors
    ///
    /// The simulator does not answer.
    pub async fn happenings_after(&self, mut after: u64, key: &str) -> Result<Vec<Happening>> {
        let mut all = Vec::new();
        loop {
            let request = ListHappeningsRequest { after, key: key.to_owned(), page_size: 100 };
            let page = self.client.clone().list_happenings(request).await?.into_inner().happenings;
            let Some(last) = page.last() else { return Ok(all) };
            after = last.sequence;
            all.extend(page);
        }
    }

    /// Waits until a fault has been met so often.
    ///
    /// # Errors
    ///
    /// It was not, within half a minute.
    pub async fn wait_for_hits(&self, fault: u64, hits: usize) -> Result<()> {
        let look = || async move {
            let happenings = self.happenings("").await.map_err(|error| error.to_string())?;
            let met = happenings
                .iter()
                .filter(|happening| {
                    happening.fault == fault
                        && happening.what == i32::from(semel_proto::provider::v1::happening::What::Fault)
                })
                .count();
            if met >= hits { Ok(()) } else { Err(format!("{met} of {hits}")) }
        };
        eventually("the provider's fault to be met", Duration::from_secs(30), look).await
    }

    /// Waits until something happened to a key, and returns all that did until then.
    ///
    /// `what` completes the sentence "waited 60 s for …".
    ///
    /// # Errors
    ///
    /// It did not, within a minute.
    pub async fn wait_for(
        &self,
        what: &str,
        key: &str,
        happened: impl Fn(&Happening) -> bool,
    ) -> Result<Vec<Happening>> {
        let look = || async {
            let happenings = self.happenings(key).await.map_err(|error| error.to_string())?;
            if happenings.iter().any(&happened) { Ok(happenings) } else { Err(format!("{happenings:?}")) }
        };
        eventually(what, Duration::from_mins(1), look).await
    }

    /// Reads the book.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn book(&self) -> Result<Vec<BookLine>> {
        read_book(&self.book)
    }
}
