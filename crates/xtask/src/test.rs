//! `cargo xtask test`: every test, against real services and real daemons.
//!
//! The daemons are built twice: plain, and with failpoints into a folder of their own, which is where the tests find
//! them. `cargo test` itself builds the workspace's default features, so that no failpoint leaks into what is linted,
//! documented or released; that the plain daemons hold none is looked up in the binaries.

use std::io::{BufRead as _, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result};

use crate::workspace::Workspace;
use crate::{bed, deploy, output};

mod failpoints;
mod totals;

use totals::Totals;

/// What to test.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Runs the long fault and load tests too.
    #[arg(long)]
    full: bool,
    /// Runs one integration test only, by the name of its file.
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// Passed to the test programs: names to filter by, `--nocapture`.
    #[arg(last = true)]
    filters: Vec<String>,
}

/// Builds, starts the services, tests, and sums up.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    bed::build_all(workspace)?;
    bed::build_daemons_with_failpoints(workspace)?;
    let leaks = output::step("looking for failpoints in the plain daemons", || failpoints::leaks(workspace))?;
    let services = bed::start_services(workspace)?;

    let mut command = workspace.cargo("test");
    command.args(["--workspace", "--no-fail-fast"]).env_remove("CARGO_TERM_QUIET");
    if let Some(suite) = &options.suite {
        command.args(["--test", suite]);
    }
    command.arg("--").args(&options.filters);
    environment(&mut command, workspace, &services, options.full);

    let mut stdout = std::io::stdout().lock();
    let (totals, code) = output::step("cargo test", || stream(&mut command, &mut stdout))?;
    if code != ExitCode::SUCCESS && totals.failed == 0 {
        output::say("error: a test program did not build, or died before it could report: see above");
    }
    for leak in &leaks {
        output::say(&format!("error: {leak}"));
    }
    writeln!(stdout, "{totals}")?;
    Ok(if leaks.is_empty() { code } else { ExitCode::FAILURE })
}

fn environment(command: &mut Command, workspace: &Workspace, services: &[(String, String)], full: bool) {
    command.envs(services.iter().map(|(name, value)| (name, value)));
    if let Some((_, url)) = services.iter().find(|(name, _)| name == "SEMEL_TEST_AMQP_URL") {
        command.env("AMQP_URL", url);
    }
    command.env("SEMEL_BIN_DIR", workspace.programs_with_failpoints()).env("RUST_BACKTRACE", "1");
    // A test that returns an error says what was wrong; where is in the line that it names.
    command.env("RUST_LIB_BACKTRACE", "0");
    match deploy::helm() {
        Ok(helm) => {
            command.env("SEMEL_HELM", helm);
        }
        Err(error) => output::say(&format!("no chart is run: {error:#}")),
    }
    if full {
        command.env("SEMEL_TEST_FULL", "1");
    }
}

/// Runs the tests, passing their output on as it comes.
fn stream(command: &mut Command, out: &mut impl Write) -> Result<(Totals, ExitCode)> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("starting cargo test")?;
    let mut lines = BufReader::new(child.stdout.take().context("cargo test has no output")?);
    let mut totals = Totals::default();
    let mut line = Vec::new();
    // Bytes, since a test may print anything.
    while lines.read_until(b'\n', &mut line).context("reading from cargo test")? > 0 {
        out.write_all(&line).and_then(|()| out.flush()).context("passing the tests' output on")?;
        totals.add(&String::from_utf8_lossy(&line));
        line.clear();
    }
    let status = child.wait().context("waiting for cargo test")?;
    Ok((totals, bed::exit_code(status)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_output_on_and_sums_it_up() {
        let mut command = Command::new("sh");
        let mut out = Vec::new();
        command
            .args(["-c", "echo 'test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured'; exit 101"]);
        let (totals, code) = stream(&mut command, &mut out).unwrap();
        assert_eq!(totals, Totals { passed: 3, failed: 1, skipped: 2, told: 0 });
        assert_eq!(code, ExitCode::from(101));
        assert!(out.starts_with(b"test result: FAILED."));
    }
}
