//! Our daemons as child processes.
//!
//! A [`Daemon`] is a program with what it says, captured line by line, and with the signals that a
//! test sends it. It never outlives its value: dropping it kills it with all that it started. It does
//! not outlive this process either, however that ends, where `setpriv` is on the path to ask the
//! kernel for it; elsewhere a killed test leaks its daemons.
//!
//! It gets a bare environment: nothing that the user has set configures a daemon under test.

mod lines;
mod spawn;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::sync::watch;

use self::lines::Lines;
use crate::pid::ProcessId;
use crate::wait::eventually;
pub use crate::workspace::binary;

/// How many of the last lines stand in an error.
const TAIL: usize = 20;
/// How long a signal may take to show.
const SIGNAL_DEADLINE: Duration = Duration::from_secs(10);

/// What is to be started.
#[derive(Clone, Debug)]
pub struct DaemonCommand {
    name: String,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl DaemonCommand {
    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets variables of its environment.
    #[must_use]
    pub fn envs<N: AsRef<OsStr>, V: AsRef<OsStr>>(self, variables: impl IntoIterator<Item = (N, V)>) -> Self {
        variables.into_iter().fold(self, |command, (name, value)| command.env(name, value))
    }

    /// Starts it. Whether it is ready is another question: [`Daemon::wait_ready`].
    ///
    /// # Errors
    ///
    /// The program is missing, or its log file cannot be written.
    pub async fn start(self) -> Result<Daemon> {
        let log = spawn::Log::open(&self.name)?;
        let lines = Lines::new(log.path.clone());
        let child = spawn::spawn(&self).await.with_context(|| format!("starting {}", self.name))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).context("a child that just started has a process id")?;
        let id = ProcessId::of(pid.as_raw_pid()).context("a child is in /proc until it is waited for")?;
        let exit = spawn::watch(child, pid, &lines, log);
        Ok(Daemon { name: self.name, pid, id, lines, exit })
    }
}

/// A program that runs as our child.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    pid: Pid,
    id: ProcessId,
    lines: Lines,
    exit: watch::Receiver<Option<ExitStatus>>,
}

impl Daemon {
    /// Describes a program to start; the name is for messages and for the log file.
    #[must_use]
    pub fn command(name: &str, program: impl AsRef<Path>) -> DaemonCommand {
        let program = program.as_ref().to_path_buf();
        DaemonCommand { name: name.to_owned(), program, args: Vec::new(), env: Vec::new() }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process.
    #[must_use]
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// The file with everything that it said.
    #[must_use]
    pub fn log(&self) -> &Path {
        self.lines.path()
    }

    /// What it said on both streams, in the order of arrival; of a great deal only the end.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.lines.all()
    }

    /// Whether it runs, be it frozen or not.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.exit.borrow().is_none() && self.id.is_running()
    }

    /// Waits until `GET /readyz` on its admin port answers 200.
    ///
    /// # Errors
    ///
    /// It ended, or was not ready at the deadline; the message has its last lines.
    pub async fn wait_ready(&self, admin_port: u16, deadline: Duration) -> Result<()> {
        let client = reqwest::Client::builder().no_proxy().build().context("making an HTTP client")?;
        let url = format!("http://127.0.0.1:{admin_port}/readyz");
        let what = format!("{} to be ready", self.name);
        let ready = eventually(&what, deadline, || async {
            if let Some(status) = *self.exit.borrow() {
                return Ok(Err(anyhow!("{} ended while starting ({status})", self.name)));
            }
            match client.get(&url).send().await {
                Ok(answer) if answer.status().is_success() => Ok(Ok(())),
                Ok(answer) => Err(answer.status().to_string()),
                Err(error) => Err(error.without_url().to_string()),
            }
        });
        ready.await.flatten().with_context(|| self.tail())
    }

    /// Waits for a line, among those that were kept and those to come, and returns the first.
    ///
    /// `what` completes the sentence "waited 5 s for …".
    ///
    /// # Errors
    ///
    /// It ended, or the deadline passed, without such a line; the message has its last lines.
    pub async fn wait_for_line(
        &self,
        what: &str,
        deadline: Duration,
        pred: impl FnMut(&str) -> bool,
    ) -> Result<String> {
        let mut exit = self.exit.clone();
        let ended = async {
            // The sender is gone only together with the runtime.
            exit.wait_for(Option::is_some).await.ok().and_then(|status| *status)
        };
        match tokio::time::timeout(deadline, self.lines.find(pred, ended)).await {
            Ok(Ok(line)) => Ok(line),
            Ok(Err(Some(status))) => bail!("{} ended ({status}) without {what}{}", self.name, self.tail()),
            Ok(Err(None)) => bail!("{} was given up without {what}{}", self.name, self.tail()),
            Err(_) => bail!("waited {} s for {what} of {}{}", deadline.as_secs_f64(), self.name, self.tail()),
        }
    }

    /// Waits for its end. All that it said is in [`lines`](Self::lines) then.
    ///
    /// # Errors
    ///
    /// It runs at the deadline; the message has its last lines.
    pub async fn wait_exit(&self, deadline: Duration) -> Result<ExitStatus> {
        let mut exit = self.exit.clone();
        let exited = tokio::time::timeout(deadline, exit.wait_for(Option::is_some)).await;
        let Ok(exited) = exited else {
            bail!("waited {} s for {} to end{}", deadline.as_secs_f64(), self.name, self.tail());
        };
        exited.ok().and_then(|status| *status).with_context(|| format!("{} was given up", self.name))
    }

    /// Kills it and all that it started in its process group (SIGKILL), and waits for its end.
    ///
    /// # Errors
    ///
    /// It is still there after a while.
    pub async fn kill(&self) -> Result<ExitStatus> {
        self.signal_group(Signal::KILL)?;
        self.wait_exit(SIGNAL_DEADLINE).await
    }

    /// Asks it to end (SIGTERM). One that is frozen hears of it when it continues.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn terminate(&self) -> Result<()> {
        self.check_running()?;
        kill_process(self.pid, Signal::TERM).with_context(|| format!("sending SIGTERM to {}", self.name))
    }

    /// Freezes it (SIGSTOP), and waits until it stands still.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub async fn freeze(&self) -> Result<()> {
        self.signal_group(Signal::STOP)?;
        let what = format!("{} to freeze", self.name);
        eventually(&what, SIGNAL_DEADLINE, || async { self.id.is_frozen().then_some(()) }).await
    }

    /// Lets it continue (SIGCONT).
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn cont(&self) -> Result<()> {
        self.signal_group(Signal::CONT)
    }

    fn signal_group(&self, signal: Signal) -> Result<()> {
        self.check_running()?;
        kill_process_group(self.pid, signal).with_context(|| format!("sending {signal:?} to {}", self.name))
    }

    fn check_running(&self) -> Result<()> {
        match *self.exit.borrow() {
            None => Ok(()),
            Some(status) => bail!("{} has ended ({status}){}", self.name, self.tail()),
        }
    }

    fn tail(&self) -> String {
        let lines = self.lines.all();
        let last = &lines[lines.len().saturating_sub(TAIL)..];
        let path = self.lines.path().display();
        if last.is_empty() {
            return format!("; {} said nothing", self.name);
        }
        format!("; {} said last (all is in {path}):\n  {}", self.name, last.join("\n  "))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Once it has ended its number may be another's, and its group was killed with it.
        if self.exit.borrow().is_none() {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }
}
