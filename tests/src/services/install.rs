//! Finding the servers' programs, and those of other languages, and installing them where they are missing.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::process::Command;

use super::place::is_root;
use crate::progress::Progress;

/// Names a folder with `initdb` and `postgres`, instead of those that are looked up.
pub const POSTGRES_BIN: &str = "SEMEL_POSTGRES_BIN";

/// Names RabbitMQ's start script, instead of the one that is looked up.
pub const RABBITMQ_SERVER: &str = "SEMEL_RABBITMQ_SERVER";

/// Where things are on this machine. A value, so that a test can describe another machine.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// The search path of programs.
    path: OsString,
    /// Holds one folder per version of Postgres, each with a `bin`.
    postgres_versions: PathBuf,
    /// RabbitMQ's start script as Debian installs it. The one on the path there is a wrapper that
    /// insists on the system's user and folders.
    rabbitmq_script: PathBuf,
    /// Tells Debian's packages whether they may start services.
    service_policy: PathBuf,
    root: bool,
    /// The values of [`POSTGRES_BIN`] and [`RABBITMQ_SERVER`].
    given: [Option<PathBuf>; 2],
}

/// A program that we start, by the package that brings it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    /// The server; found as the folder of its programs.
    Postgres,
    /// The server; found as its start script.
    RabbitMq,
    /// The client `psql`.
    Psql,
    /// A Python that can make virtual environments.
    Python,
    /// Node.js, with npm beside it.
    Node,
    /// The server that scrapes and alerts.
    Prometheus,
}

impl Package {
    fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgresql",
            Self::RabbitMq => "rabbitmq-server",
            Self::Psql => "postgresql-client",
            // Either brings the interpreter itself along.
            Self::Python => "python3-venv",
            Self::Node => "npm",
            Self::Prometheus => "prometheus",
        }
    }

    /// What to do on a machine without apt-get.
    fn otherwise(self) -> String {
        match self {
            Self::Postgres => format!("install it, or set {POSTGRES_BIN} or DATABASE_URL"),
            Self::RabbitMq => format!("install it, or set {RABBITMQ_SERVER} or AMQP_URL"),
            Self::Psql => "install psql".to_owned(),
            Self::Python => "install Python 3.10 or later with its modules venv and ensurepip".to_owned(),
            Self::Node => "install Node.js 18 or later with npm".to_owned(),
            Self::Prometheus => "install prometheus".to_owned(),
        }
    }

    /// Finds the program on this machine, or installs the package.
    ///
    /// # Errors
    ///
    /// The program is missing and could not be installed; the message has the command to type.
    pub async fn find_or_install(self, progress: Progress) -> Result<PathBuf> {
        Machine::this().find_or_install(self, progress).await
    }
}

impl Machine {
    /// This machine.
    pub(super) fn this() -> Self {
        let given = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            path: env::var_os("PATH").unwrap_or_default(),
            postgres_versions: "/usr/lib/postgresql".into(),
            rabbitmq_script: "/usr/lib/rabbitmq/bin/rabbitmq-server".into(),
            service_policy: "/usr/sbin/policy-rc.d".into(),
            root: is_root(),
            given: [given(POSTGRES_BIN), given(RABBITMQ_SERVER)],
        }
    }

    /// Finds the folder of Postgres's programs, the start script of RabbitMQ, or the program; installs
    /// the package if there is none.
    ///
    /// # Errors
    ///
    /// The program is missing and could not be installed; the message has the command to type.
    pub(super) async fn find_or_install(&self, package: Package, progress: Progress) -> Result<PathBuf> {
        if let Some(found) = self.find(package)? {
            return Ok(found);
        }
        let name = package.name();
        progress.step(&format!("installing the package {name}"), self.install(package)).await?;
        self.find(package)?
            .with_context(|| format!("the package {name} is installed, but its programs were not found"))
    }

    fn find(&self, package: Package) -> Result<Option<PathBuf>> {
        match package {
            Package::Postgres => self.find_postgres(),
            Package::RabbitMq => self.find_rabbitmq(),
            Package::Psql => Ok(search(&self.path, "psql")),
            Package::Python => Ok(search(&self.path, "python3").filter(|python| makes_environments(python))),
            Package::Prometheus => Ok(search(&self.path, "prometheus")),
            Package::Node => Ok(search(&self.path, "npm").and_then(|_| search(&self.path, "node"))),
        }
    }

    fn find_postgres(&self) -> Result<Option<PathBuf>> {
        let complete = |bin: &Path| is_program(&bin.join("initdb")) && is_program(&bin.join("postgres"));
        if let Some(bin) = &self.given[0] {
            ensure!(complete(bin), "{POSTGRES_BIN}={} does not hold initdb and postgres", bin.display());
            return Ok(Some(bin.clone()));
        }
        let versions = fs::read_dir(&self.postgres_versions).into_iter().flatten().flatten();
        let mut bins: Vec<(u32, PathBuf)> = versions
            .filter_map(|version| {
                Some((version.file_name().to_str()?.parse().ok()?, version.path().join("bin")))
            })
            .filter(|(_, bin)| complete(bin))
            .collect();
        bins.sort();
        let newest = bins.pop().map(|(_, bin)| bin);
        Ok(newest.or_else(|| {
            search(&self.path, "initdb")?.parent().filter(|bin| complete(bin)).map(Path::to_path_buf)
        }))
    }

    fn find_rabbitmq(&self) -> Result<Option<PathBuf>> {
        if let Some(script) = &self.given[1] {
            ensure!(is_program(script), "{RABBITMQ_SERVER}={} is no program", script.display());
            return Ok(Some(script.clone()));
        }
        if is_program(&self.rabbitmq_script) {
            return Ok(Some(self.rabbitmq_script.clone()));
        }
        let script = search(&self.path, "rabbitmq-server").and_then(|script| script.canonicalize().ok());
        Ok(script.filter(|script| script.file_name() != Some(OsStr::new("rabbitmq-script-wrapper"))))
    }

    /// Installs a package with apt-get, as root or through a `sudo` that asks for no password.
    async fn install(&self, package: Package) -> Result<()> {
        let name = package.name();
        let find = |program| search(&self.path, program);
        let by_hand = format!("apt-get update && apt-get install --no-install-recommends {name}");
        if find("apt-get").is_none() {
            bail!(
                "{name} is not installed, and there is no apt-get to install it with; {}",
                package.otherwise()
            );
        }
        let shell = find("sh").unwrap_or_else(|| "/bin/sh".into());
        let mut command = if self.root {
            Command::new(shell)
        } else {
            let sudo = find("sudo");
            let sudo = sudo.with_context(|| format!("{name} is not installed; as root, type: {by_hand}"))?;
            let mut command = Command::new(sudo);
            command.arg("-n").arg(shell);
            command
        };
        command.args(["-c", INSTALL, "install"]).arg(&self.service_policy).arg(name);
        command.env("PATH", &self.path).stdin(std::process::Stdio::null()).kill_on_drop(true);
        let output = command.output().await.with_context(|| format!("running apt-get to install {name}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
            let by_hand = if self.root { by_hand } else { format!("sudo sh -c '{by_hand}'") };
            bail!(
                "{name} is not installed, and installing it failed ({}; it said: {said}); type: {by_hand}",
                output.status
            );
        }
        Ok(())
    }
}

/// Installs the package `$2` while the policy file `$1` forbids packages to start their services.
const INSTALL: &str = r#"
set -e
if [ ! -e "$1" ]; then
    trap 'rm -f "$1"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' > "$1"
    chmod 755 "$1"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 update
apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$2"
"#;

/// Finds a program on the search path of this process.
#[must_use]
pub fn on_path(program: &str) -> Option<PathBuf> {
    search(&env::var_os("PATH")?, program)
}

fn search(path: &OsStr, program: &str) -> Option<PathBuf> {
    env::split_paths(path).map(|folder| folder.join(program)).find(|candidate| is_program(candidate))
}

/// Debian has a Python without the modules that its package `python3-venv` brings.
fn makes_environments(python: &Path) -> bool {
    let mut command = std::process::Command::new(python);
    command.args(["-c", "import venv, ensurepip"]).stdin(std::process::Stdio::null());
    command.output().is_ok_and(|output| output.status.success())
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests;
