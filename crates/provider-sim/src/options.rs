//! The simulator's options, and the configuration that they become.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use semel_core::options::ProcessOptions;

/// A payment provider to develop and test against: idempotent, with faults to order. It moves no money.
#[derive(Debug, Parser)]
#[command(name = "semel-provider-sim", version)]
pub struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Address of the gRPC services, the provider's and the simulator's control. Without TLS, without authentication.
    #[arg(long, env = "SEMEL_PROVIDER_LISTEN", default_value = "127.0.0.1:7070", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// The book: a file to which a line is appended for whatever is applied, and from which a restart knows it.
    #[arg(long, env = "SEMEL_PROVIDER_BOOK", default_value = "./provider-book.jsonl", value_name = "PATH")]
    book: PathBuf,
    /// Hours for which a key is remembered after its first use; 0: for ever.
    #[arg(long, env = "SEMEL_PROVIDER_HORIZON_HOURS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=87_600), value_name = "HOURS")]
    horizon_hours: u32,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the metrics that it emits, as rows of a table, and leave.
    Metrics,
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the services listen.
    pub listen: SocketAddr,
    /// The book.
    pub book: PathBuf,
    /// How long a key is remembered; `None`: for ever.
    pub horizon: Option<Duration>,
}

impl Options {
    /// Returns what they mean. Every option has been checked on its own, and all of them go together.
    #[must_use]
    pub fn config(&self) -> Config {
        let hours = u64::from(self.horizon_hours);
        let horizon = (hours > 0).then(|| Duration::from_secs(hours * 3600));
        Config { listen: self.listen, book: self.book.clone(), horizon }
    }
}
