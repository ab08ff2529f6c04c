//! The reaper's process.

use clap::Parser as _;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    semel_core::daemon::exit(semel_reaper::run(semel_reaper::Options::parse()).await)
}
