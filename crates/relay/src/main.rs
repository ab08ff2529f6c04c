//! The relay's process.

use clap::Parser as _;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    semel_core::daemon::exit(semel_relay::run(semel_relay::Options::parse()).await)
}
