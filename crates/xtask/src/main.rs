//! The developer's commands: `cargo xtask --help` lists them.
//!
//! Light on purpose, since it is the first thing that a newcomer waits for: it builds and orchestrates. What needs a
//! database driver or a broker client lives in `tests`, whose program `semel-bed` is built and run from here.

use std::process::ExitCode;

mod bed;
mod check;
mod commands;
mod deploy;
mod generate;
mod output;
mod prepare;
mod sources;
mod test;
mod workspace;

fn main() -> ExitCode {
    commands::run().unwrap_or_else(|error| {
        output::failure(&error);
        ExitCode::FAILURE
    })
}
