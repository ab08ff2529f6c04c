//! The command line, and what each command does.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;
use crate::{bed, check, deploy, generate, prepare, test};

/// The developer's commands of Semel.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Xtask {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Builds everything and shows it at work, on private Postgres and RabbitMQ.
    Demo {
        /// Passed on to `semel-bed demo`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Builds everything and keeps it running until Ctrl-C.
    Dev {
        /// Passed on to `semel-bed dev`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Runs every test, against private Postgres and RabbitMQ and daemons that can be made to fail.
    Test(test::Options),
    /// Measures, each figure beside a floor measured in the same run: all parts, or `relay`; `--quick` measures less.
    Bench {
        /// Passed on to `semel-bed bench`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Sends the API thousands of requests made from its own description, good and bad ones, and judges its answers.
    FuzzApi {
        /// Passed on to `semel-bed fuzz-api`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Checks form: formatting, lints, dependency rules, documentation, generated files.
    Check(check::Options),
    /// Checks what is in `deploy`: renders the chart, validates it, tests the alerts, compares names with what daemons have.
    DeployCheck,
    /// Writes `docs/reference` from what the daemons say of themselves, and the dashboards.
    Generate,
    /// Renews `.sqlx`, the committed facts about each SQL query, from the migrations.
    Prepare,
    /// Stops the private Postgres and RabbitMQ.
    Down,
}

/// Runs the command that the command line names.
///
/// # Errors
///
/// When the command could not do its work; one that did it and found faults returns a failing exit code.
pub(crate) fn run() -> Result<ExitCode> {
    let command = Xtask::parse().command;
    let workspace = Workspace::locate()?;
    match command {
        Command::Demo { arguments } => bed::become_bed(&workspace, "demo", &arguments),
        Command::Dev { arguments } => bed::become_bed(&workspace, "dev", &arguments),
        Command::Bench { arguments } => bed::become_bench(&workspace, &arguments),
        Command::FuzzApi { arguments } => bed::become_bed(&workspace, "fuzz-api", &arguments),
        Command::Test(options) => test::run(&workspace, &options),
        Command::Check(options) => Ok(check::run(&workspace, &options)),
        Command::DeployCheck => deploy::run(&workspace),
        Command::Generate => generate::write(&workspace).map(|()| ExitCode::SUCCESS),
        Command::Prepare => prepare::write(&workspace).map(|()| ExitCode::SUCCESS),
        Command::Down => bed::down(&workspace),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Xtask::command().debug_assert();
    }

    #[test]
    fn passes_options_of_the_demo_and_the_bench_on() {
        let parsed = Xtask::parse_from(["xtask", "demo", "--seconds", "5", "relay"]);
        let Command::Demo { arguments } = parsed.command else { panic!("not the demo") };
        assert_eq!(arguments, ["--seconds", "5", "relay"]);
        let parsed = Xtask::parse_from(["xtask", "bench", "relay", "--quick"]);
        let Command::Bench { arguments } = parsed.command else { panic!("not the bench") };
        assert_eq!(arguments, ["relay", "--quick"]);
    }
}
