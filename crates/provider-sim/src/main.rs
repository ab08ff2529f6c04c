//! The provider simulator's process.

use clap::Parser as _;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    semel_core::daemon::exit(semel_provider_sim::run(semel_provider_sim::Options::parse()).await)
}
