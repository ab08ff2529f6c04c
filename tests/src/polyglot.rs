//! Other languages' view of the contract: their interpreters, and the packages that the scripts in `tests/polyglot` need.
//!
//! Both are taken from the machine or installed, the interpreters as Postgres and RabbitMQ are, the packages by each
//! language's own client, in the versions and with the hashes of the lock files beside the scripts. They are put into a
//! folder below `target`, named after what the lock file says: a changed one is installed anew. An installation counts
//! once its last file is there, so one that was cut off is begun again; two at a time wait for each other.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::process::{Daemon, DaemonCommand};
use crate::progress::Progress;
use crate::services::{Package, on_path};
use crate::wait::eventually;
use crate::workspace::{root, target_dir};

/// How long another command may be installing.
const LOCK_DEADLINE: Duration = Duration::from_mins(10);
/// How long one installation may take.
const INSTALL_DEADLINE: Duration = Duration::from_mins(8);
/// Marks a folder whose installation was finished.
const FINISHED: &str = "finished";

/// A language of producers, consumers and callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// psycopg, pika and grpcio.
    Python,
    /// pg and amqplib.
    Node,
}

/// A language that is installed with all that the scripts need.
#[derive(Clone, Debug)]
pub struct Installed {
    language: Language,
    interpreter: PathBuf,
    /// Where the scripts are run.
    folder: PathBuf,
}

impl Language {
    /// Finds or installs the interpreter, and the packages.
    ///
    /// # Errors
    ///
    /// Something is missing and cannot be had; the message says what to type.
    pub async fn install(self) -> Result<Installed> {
        let installed = self.install_for("polyglot").await?;
        installed.copy_scripts(&root()?.join("tests/polyglot"))?;
        Ok(installed)
    }

    async fn install_for(self, scripts: &str) -> Result<Installed> {
        let root = root()?;
        let scripts = root.join("tests").join(scripts);
        let interpreter = self.package().find_or_install(Progress::Stderr).await?;
        let lock_file = scripts.join(self.lock_file());
        let locked = fs::read(&lock_file).with_context(|| format!("reading {}", lock_file.display()))?;
        let place = target_dir(&root).join("polyglot");
        fs::create_dir_all(&place).with_context(|| format!("creating {}", place.display()))?;
        let _lock = lock(&place.join(format!("{}.lock", self.name()))).await?;
        let folder = place.join(format!("{}-{:016x}", self.name(), fingerprint(&locked)));
        let installed = Installed { language: self, interpreter, folder };
        if !installed.folder.join(FINISHED).exists() {
            let what = format!("installing the packages of {lock_file}", lock_file = self.lock_file());
            Progress::Stderr.step(&what, installed.make(&scripts)).await?;
        }
        Ok(installed)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
        }
    }

    fn lock_file(self) -> &'static str {
        match self {
            Self::Python => "requirements.txt",
            Self::Node => "package-lock.json",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::Python => "py",
            Self::Node => "js",
        }
    }

    fn scripts(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["produce", "consume", "call"],
            Self::Node => &["produce", "consume"],
        }
    }

    fn package(self) -> Package {
        match self {
            Self::Python => Package::Python,
            Self::Node => Package::Node,
        }
    }
}

/// Finds or installs Python, and the packages of `tests/<scripts>/requirements.txt`; returns the folder that holds both.
///
/// # Errors
///
/// As [`Language::install`].
pub async fn python_packages(scripts: &str) -> Result<PathBuf> {
    Ok(Language::Python.install_for(scripts).await?.folder)
}

impl Installed {
    /// Describes one of the scripts to start, `produce`, `consume` or, in Python, `call`; the name is for messages.
    #[must_use]
    pub fn script(&self, name: &str, script: &str) -> DaemonCommand {
        let program = match self.language {
            Language::Python => self.folder.join("bin/python"),
            Language::Node => self.interpreter.clone(),
        };
        let script = self.folder.join(script).with_extension(self.language.extension());
        Daemon::command(name, program).arg(script).env("PYTHONUTF8", "1")
    }

    /// Writes a script beside the others, for [`script`](Self::script) to describe.
    ///
    /// # Errors
    ///
    /// It cannot be written.
    pub fn write_script(&self, script: &str, text: &str) -> Result<()> {
        let file = self.folder.join(script).with_extension(self.language.extension());
        fs::write(&file, text).with_context(|| format!("writing {}", file.display()))
    }

    async fn make(&self, scripts: &Path) -> Result<()> {
        // What was cut off.
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder)
                .with_context(|| format!("removing {}", self.folder.display()))?;
        }
        fs::create_dir_all(&self.folder).with_context(|| format!("creating {}", self.folder.display()))?;
        match self.language {
            Language::Python => {
                self.run(&self.interpreter, &["-m", "venv", "."]).await?;
                let requirements = scripts.join("requirements.txt").display().to_string();
                let install =
                    ["-m", "pip", "install", "--quiet", "--require-hashes", "--only-binary", ":all:", "-r"];
                let arguments = [install.as_slice(), &[requirements.as_str()]].concat();
                self.run(&self.folder.join("bin/python"), &arguments).await?;
            }
            Language::Node => {
                for file in ["package.json", "package-lock.json"] {
                    copy(&scripts.join(file), &self.folder.join(file))?;
                }
                let npm = on_path("npm").context("npm was found a moment ago")?;
                self.run(&npm, &["ci", "--ignore-scripts", "--no-audit", "--no-fund"]).await?;
            }
        }
        fs::write(self.folder.join(FINISHED), "").context("noting that the installation is finished")
    }

    /// Runs one of the language's own clients, with the user's settings for it.
    async fn run(&self, program: &Path, arguments: &[&str]) -> Result<()> {
        let mut command = tokio::process::Command::new(program);
        command
            .args(arguments)
            .current_dir(&self.folder)
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        let line = format!("{} {}", program.display(), arguments.join(" "));
        let output = tokio::time::timeout(INSTALL_DEADLINE, command.output()).await;
        let output = output
            .with_context(|| format!("waited {} s for `{line}`", INSTALL_DEADLINE.as_secs()))?
            .with_context(|| format!("starting `{line}`"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{line}` failed ({}); it said: {}", output.status, said.trim());
        Ok(())
    }

    /// The scripts stand beside their packages, where Node.js looks for them.
    fn copy_scripts(&self, scripts: &Path) -> Result<()> {
        for script in self.language.scripts() {
            let file = Path::new(script).with_extension(self.language.extension());
            copy(&scripts.join(&file), &self.folder.join(&file))?;
        }
        Ok(())
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // In one step, for another test may be starting it.
    let new = to.with_extension(format!("new-{}", crate::net::unique_name("copy")));
    fs::copy(from, &new)
        .and_then(|_| fs::rename(&new, to))
        .with_context(|| format!("copying {}", from.display()))
}

async fn lock(path: &Path) -> Result<File> {
    let lock = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let what = format!("another command to release {}", path.display());
    eventually(&what, LOCK_DEADLINE, || {
        let outcome = match lock.try_lock() {
            Ok(()) => Ok(Ok(())),
            Err(TryLockError::WouldBlock) => Err("it is held"),
            Err(TryLockError::Error(error)) => Ok(Err(error)),
        };
        async { outcome }
    })
    .await?
    .with_context(|| format!("locking {}", path.display()))?;
    Ok(lock)
}

/// FNV-1a, which no compiler changes.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
