//! Building the programs, and running `semel-bed`, which keeps the services and plays the scenes.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context as _, Error, Result, bail};

use crate::output;
use crate::workspace::{self, Workspace};

/// The programs that make up a running system.
pub(crate) const DAEMONS: [&str; 4] = ["semel-api", "semel-relay", "semel-reaper", "semel-ledger"];

/// The daemons, and the provider that they are developed and tested against. It is ordered its faults over gRPC and has no
/// failpoints, so it is the same program with them and without.
pub(crate) const PROGRAMS: [&str; 5] = [DAEMONS[0], DAEMONS[1], DAEMONS[2], DAEMONS[3], "semel-provider-sim"];

/// The daemons that are measured. Each takes its time to be built in release mode, so it is these only.
const MEASURED: [&str; 4] = ["semel-api", "semel-ledger", "semel-provider-sim", "semel-relay"];

const BED: &str = "semel-bed";

/// Builds the daemons, and what runs them.
pub(crate) fn build_all(workspace: &Workspace) -> Result<()> {
    output::step("building the daemons and the test bed", || {
        workspace::run(build(workspace).args(bins(&PROGRAMS)).args(["--bin", BED]))
    })
}

/// Builds the daemons.
pub(crate) fn build_daemons(workspace: &Workspace) -> Result<()> {
    output::step("building the daemons", || workspace::run(build(workspace).args(bins(&PROGRAMS))))
}

/// Builds the daemons with failpoints, into a folder of their own.
///
/// The intermediate files stay in the common folder: they differ by their features' hash, and the dependencies, which
/// are most of the work, are built once.
pub(crate) fn build_daemons_with_failpoints(workspace: &Workspace) -> Result<()> {
    let features = DAEMONS.map(|daemon| format!("{daemon}/failpoints")).join(",");
    output::step("building the daemons with failpoints", || {
        let mut command = workspace.bare_cargo();
        command.arg("--config").arg(format!("build.build-dir='{}'", workspace.intermediate.display()));
        command.args(["build", "--workspace", "--features", &features]).args(bins(&PROGRAMS));
        command.arg("--target-dir").arg(workspace.target.join("failpoints"));
        workspace::run(&mut command)
    })
}

/// `--workspace` even for a few programs: the features of the dependencies follow from the packages selected, and with
/// one selection everywhere each dependency is built once.
fn build(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo("build");
    command.arg("--workspace");
    command
}

fn bins(names: &[&'static str]) -> impl Iterator<Item = &'static str> {
    names.iter().flat_map(|name| ["--bin", name]).collect::<Vec<_>>().into_iter()
}

fn bed(workspace: &Workspace, arguments: &[&str]) -> Command {
    let mut command = Command::new(workspace.program(BED));
    command.args(arguments).current_dir(&workspace.root).env("SEMEL_BIN_DIR", workspace.programs());
    command
}

/// Builds everything and becomes `semel-bed`, so that Ctrl-C and the exit code are its own.
pub(crate) fn become_bed(
    workspace: &Workspace,
    subcommand: &str,
    arguments: &[OsString],
) -> Result<ExitCode> {
    build_all(workspace)?;
    become_this(bed(workspace, &[subcommand]).args(arguments)).map(|never| match never {})
}

/// Builds what is measured as it is released, the bed too since the floors are its own, and becomes `semel-bed bench`.
pub(crate) fn become_bench(workspace: &Workspace, arguments: &[OsString]) -> Result<ExitCode> {
    output::step("building what is measured and the test bed, in release mode", || {
        workspace::run(build(workspace).arg("--release").args(bins(&MEASURED)).args(["--bin", BED]))
    })?;
    let folder = workspace.programs_released();
    let mut command = Command::new(folder.join(BED));
    command.arg("bench").args(arguments).current_dir(&workspace.root).env("SEMEL_BIN_DIR", folder);
    become_this(&mut command).map(|never| match never {})
}

/// Stops the services, building `semel-bed` only when it is not there.
pub(crate) fn down(workspace: &Workspace) -> Result<ExitCode> {
    if !workspace.program(BED).exists() {
        output::step("building the test bed", || workspace::run(build(workspace).args(["--bin", BED])))?;
    }
    become_this(&mut bed(workspace, &["services", "down"])).map(|never| match never {})
}

fn become_this(command: &mut Command) -> Result<Infallible> {
    let error = command.exec();
    Err(Error::new(error).context(format!("starting `{}`", workspace::describe(command))))
}

/// Starts the services, unless they run, and returns the environment that leads to them.
pub(crate) fn start_services(workspace: &Workspace) -> Result<Vec<(String, String)>> {
    output::step("starting Postgres and RabbitMQ", || {
        let mut command = bed(workspace, &["services", "up", "--print-env"]);
        parse_environment(&workspace::read(command.stdin(Stdio::null()))?)
    })
}

fn parse_environment(text: &str) -> Result<Vec<(String, String)>> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, value) = line
                .split_once('=')
                .with_context(|| format!("semel-bed printed {line:?}, not NAME=value"))?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

/// A child's exit status as ours: its code, or 128 and the signal, as shells say it.
pub(crate) fn exit_code(status: ExitStatus) -> Result<ExitCode> {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    let Some(code) = code.and_then(|code| u8::try_from(code).ok()) else {
        bail!("the child ended in a way that has no exit code: {status}")
    };
    Ok(ExitCode::from(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_environment_that_the_bed_prints() {
        let read = parse_environment("A=postgres://x?host=/tmp\n\nB=\n").unwrap();
        assert_eq!(read, [("A".into(), "postgres://x?host=/tmp".into()), ("B".into(), String::new())]);
        assert!(parse_environment("ready\n").is_err());
    }

    #[test]
    fn names_a_program_per_daemon() {
        assert_eq!(bins(&["a", "b"]).collect::<Vec<_>>(), ["--bin", "a", "--bin", "b"]);
    }
}
