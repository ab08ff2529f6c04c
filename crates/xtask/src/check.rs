//! `cargo xtask check`: form, from the cheapest step to the longest. All steps run, whatever fails.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Error, Result, bail};
use clap::ValueEnum;

use crate::workspace::{self, Workspace};
use crate::{generate, output, prepare};

mod alone;
mod dependencies;
mod graph;
mod hygiene;
mod licences;
mod links;
mod lockfile;
mod promises;

/// What to check.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The steps to run; all of them if none is named.
    steps: Vec<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Step {
    /// `cargo fmt --check`.
    Format,
    /// Rules for the files themselves: `mod.rs`, notes to self, registry hosts, length.
    Hygiene,
    /// The tests that the documents name are there, and each rule of the contract has some.
    Promises,
    /// Links of the documents lead somewhere, and each runbook that is named is there.
    Links,
    /// `Cargo.lock` is committed and in sync.
    Lockfile,
    /// Who may depend on whom, one TLS provider, licences.
    Dependencies,
    /// Lints, in the default features.
    Clippy,
    /// Lints, in all features.
    ClippyAllFeatures,
    /// Lints of what a user's service takes from us, without the features that only daemons ask for.
    ClippyLibraries,
    /// Documentation builds without warnings.
    Doc,
    /// `docs/reference` is what the daemons say of themselves.
    Reference,
    /// `.sqlx` is what the migrations and the queries say.
    Queries,
}

/// Runs the steps and sums up.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> ExitCode {
    let all = Step::value_variants();
    let steps = if options.steps.is_empty() { all } else { &options.steps };
    let start = Instant::now();
    let mut failed = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let label = format!("[{}/{}] {}", index + 1, steps.len(), step.name());
        if let Err(error) = output::step(&label, || step.run(workspace)) {
            output::failure(&error);
            failed.push(step.name());
        }
    }
    let time = output::seconds(start.elapsed());
    if failed.is_empty() {
        output::say(&format!("==> check: all {} steps passed in {time}", steps.len()));
        return ExitCode::SUCCESS;
    }
    output::say(&format!("==> check: {} of {} steps failed in {time}:", failed.len(), steps.len()));
    for name in failed {
        output::say(&format!("      {name}    (again: cargo xtask check {name})"));
    }
    ExitCode::FAILURE
}

impl Step {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn run(self, workspace: &Workspace) -> Result<()> {
        match self {
            Self::Format => format(workspace),
            Self::Hygiene => none(&hygiene::faults(workspace)?),
            Self::Promises => none(&promises::faults(workspace)?),
            Self::Links => none(&links::faults(workspace)?),
            Self::Lockfile => none(&lockfile::faults(workspace)?),
            Self::Dependencies => none(&dependencies::faults(workspace)?),
            Self::Clippy => clippy(workspace, &["--workspace"]),
            Self::ClippyAllFeatures => clippy(workspace, &["--workspace", "--all-features"]),
            Self::ClippyLibraries => {
                clippy(workspace, &["--package", "semel-consumer-kit", "--package", "semel-core"])
            }
            Self::Doc => doc(workspace),
            Self::Reference => none(&generate::stale(workspace)?),
            Self::Queries => none(&prepare::stale(workspace)?),
        }
    }
}

/// A step that found faults has failed, by their names.
fn none(faults: &[String]) -> Result<()> {
    match faults {
        [] => Ok(()),
        [fault] => Err(Error::msg(fault.clone())),
        faults => bail!("{} faults\n  {}", faults.len(), faults.join("\n  ")),
    }
}

fn format(workspace: &Workspace) -> Result<()> {
    workspace::run(workspace.cargo("fmt").args(["--all", "--check"]))
        .context("to put it right: `cargo fmt --all`")
}

fn clippy(workspace: &Workspace, selection: &[&str]) -> Result<()> {
    let mut command = workspace.cargo("clippy");
    command.args(selection).args(["--all-targets", "--keep-going", "--", "--deny", "warnings"]);
    workspace::run(&mut command)
}

fn doc(workspace: &Workspace) -> Result<()> {
    let mut command = workspace.cargo("doc");
    workspace::run(
        command.args(["--workspace", "--no-deps", "--keep-going"]).env("RUSTDOCFLAGS", "--deny warnings"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_every_fault() {
        assert!(none(&[]).is_ok());
        assert_eq!(none(&["one".into()]).unwrap_err().to_string(), "one");
        assert_eq!(none(&["one".into(), "two".into()]).unwrap_err().to_string(), "2 faults\n  one\n  two");
    }

    #[test]
    fn names_steps_as_they_are_typed() {
        assert_eq!(Step::ClippyAllFeatures.name(), "clippy-all-features");
    }
}
