//! The command `semel-bed`: the bed for those who are no test.
//!
//! `cargo xtask` builds and runs it, for it may use what xtask, which must be quick to build, may not.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

use crate::output::say;
use crate::progress::Progress;
use crate::services::Services;
use crate::{bench, demo, dev, fuzz, workspace};

/// Runs the test bed.
#[derive(Debug, Parser)]
#[command(name = "semel-bed", version)]
struct Arguments {
    /// The folder of the workspace; by default the one that the current folder lies in.
    #[arg(long, global = true)]
    root: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

/// The subcommands. Each has its variant here and its work in a module of its own.
#[derive(Debug, Subcommand)]
enum Command {
    /// Starts, ends and shows the Postgres and the RabbitMQ of this workspace.
    #[command(subcommand)]
    Services(ServicesCommand),
    /// Plays the demo; the exit code tells whether all places agree at its end.
    Demo,
    /// Measures, each figure beside a floor measured in the same run; the exit code tells whether all was correct.
    Bench(bench::Options),
    /// Sends the API what its own description says that it takes, and what it does not; the exit code tells whether all was as
    /// described.
    FuzzApi(fuzz::Options),
    /// Runs a whole system until Ctrl-C, and says how to try it.
    Dev,
    /// Compares the places that a demo has read, from the file that it wrote.
    Reconcile {
        /// The file.
        sources: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum ServicesCommand {
    /// Finds or starts both; a private one keeps running until `services down`.
    Up {
        /// Prints the variables that tell a test of them, as `NAME=value`, one a line.
        #[arg(long)]
        print_env: bool,
    },
    /// Ends the private ones and removes their data.
    Down,
    /// Says whether they run; starts nothing.
    Status,
}

/// Runs the command line.
///
/// # Errors
///
/// Those of the subcommand.
pub async fn run() -> Result<ExitCode> {
    let Arguments { root, command } = Arguments::parse();
    let root = match root {
        Some(root) => root,
        None => workspace::root()?,
    };
    match command {
        Command::Services(ServicesCommand::Up { print_env }) => {
            let services = Services::find_or_start(&root, Progress::Stderr).await?;
            if print_env {
                for (name, value) in services.environment() {
                    say(format_args!("{name}={value}"));
                }
            }
        }
        Command::Services(ServicesCommand::Down) => Services::stop(&root, Progress::Stderr).await?,
        Command::Services(ServicesCommand::Status) => {
            for line in Services::status(&root).await? {
                say(line);
            }
        }
        Command::Demo => return Box::pin(demo::run(&root)).await,
        Command::Bench(options) => return bench::run(&root, &options).await,
        Command::FuzzApi(options) => return fuzz::run(&root, &options).await,
        Command::Dev => return dev::run(&root).await,
        Command::Reconcile { sources } => {
            let text = std::fs::read(&sources).with_context(|| format!("reading {}", sources.display()))?;
            let sources =
                serde_json::from_slice(&text).with_context(|| format!("reading {}", sources.display()))?;
            return Ok(demo::verdict(&sources));
        }
    }
    Ok(ExitCode::SUCCESS)
}
