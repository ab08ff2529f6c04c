//! The ledger's process.

use clap::Parser as _;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    semel_core::daemon::exit(semel_ledger::run(semel_ledger::Options::parse()).await)
}
