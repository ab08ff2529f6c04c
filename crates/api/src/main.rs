//! The API's process.

use clap::Parser as _;
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    semel_core::daemon::exit(semel_api::run(semel_api::Options::parse()).await)
}
