//! Where the workspace is, and how its tools are run.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use cargo_metadata::MetadataCommand;

/// The folders of this checkout.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Where the workspace's `Cargo.toml` is.
    pub(crate) root: PathBuf,
    /// Where Cargo puts what it builds.
    pub(crate) target: PathBuf,
    /// Where Cargo keeps what it builds on the way; the same as `target` unless the user has it elsewhere.
    pub(crate) intermediate: PathBuf,
}

impl Workspace {
    /// Asks Cargo where things are.
    pub(crate) fn locate() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
        let found = MetadataCommand::new()
            .manifest_path(manifest)
            .no_deps()
            .exec()
            .context("asking cargo where the workspace is")?;
        let target = found.target_directory.into_std_path_buf();
        Ok(Self {
            root: found.workspace_root.into_std_path_buf(),
            intermediate: found.build_directory.map_or_else(|| target.clone(), Into::into),
            target,
        })
    }

    /// A cargo command, run at the root.
    pub(crate) fn cargo(&self, subcommand: &str) -> Command {
        let mut command = self.bare_cargo();
        command.arg(subcommand);
        command
    }

    /// A cargo command that still lacks its subcommand, for options that go before it.
    pub(crate) fn bare_cargo(&self) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root).stdin(Stdio::null());
        // `cargo xtask` hands these down, and build scripts (ring's, for one) ask to be run again when they change:
        // without this, going back and forth between `cargo build` and `cargo xtask` would rebuild half the graph.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        if !std::io::stderr().is_terminal() {
            // Nobody watches: no line per dependency. Warnings and errors are still told.
            command.env("CARGO_TERM_QUIET", "true");
        }
        command
    }

    /// Where a program of the dev profile is built to.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.programs().join(name)
    }

    /// The folder of the programs of the dev profile.
    pub(crate) fn programs(&self) -> PathBuf {
        self.target.join("debug")
    }

    /// The folder of the programs of the release profile.
    pub(crate) fn programs_released(&self) -> PathBuf {
        self.target.join("release")
    }

    /// The folder of the daemons that were built with failpoints.
    pub(crate) fn programs_with_failpoints(&self) -> PathBuf {
        self.target.join("failpoints/debug")
    }

    /// A path as the user would type it, from the root.
    pub(crate) fn relative(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }
}

/// Runs a command to its end, its output going where ours goes.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    let status = command.status().with_context(|| format!("starting `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed; its stderr goes where ours goes.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("reading the output of `{line}`"))
}

/// A command as the user would type it.
pub(crate) fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    command.get_args().fold(program, |line, argument| line + " " + &argument.to_string_lossy())
}
