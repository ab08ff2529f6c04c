//! Starting a server that outlives us.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::install::on_path;
use super::place::User;
use crate::pid::ProcessId;

/// A log of this size is begun anew at the next start.
const LOG_LIMIT: u64 = 64 << 20;

/// A program with nothing in its environment but what is said here.
///
/// The user's own settings (`PGDATA`, `RABBITMQ_*`, `ERL_FLAGS`) are not for a private server.
pub(super) struct Launch<'a> {
    pub(super) program: &'a Path,
    pub(super) args: Vec<OsString>,
    pub(super) env: Vec<(&'static str, OsString)>,
    pub(super) user: Option<User>,
    /// Takes the standard output and error streams.
    pub(super) log: &'a Path,
}

impl Launch<'_> {
    /// Runs the program to its end.
    pub(super) fn run(&self) -> Result<()> {
        let mut command = self.command(self.program.as_os_str(), &self.args)?;
        let status = command.status().with_context(|| format!("running {}", self.program.display()))?;
        ensure!(status.success(), "{} failed ({status}){}", self.program.display(), tail(self.log));
        Ok(())
    }

    /// Starts the program in a session of its own, so that neither our end nor Ctrl-C ends it.
    ///
    /// `setsid` becomes the program, so the process id is the program's.
    pub(super) fn detach(&self) -> Result<ProcessId> {
        let mut command = if let Some(setsid) = on_path("setsid") {
            let mut args = vec![self.program.into()];
            args.extend_from_slice(&self.args);
            self.command(setsid.as_os_str(), &args)?
        } else {
            let mut command = self.command(self.program.as_os_str(), &self.args)?;
            command.process_group(0);
            command
        };
        let mut child = command.spawn().with_context(|| format!("starting {}", self.program.display()))?;
        let pid = i32::try_from(child.id()).context("a process id is 31 bits")?;
        let process = ProcessId::of(pid);
        // Once it has ended, the kernel keeps its number until its parent has asked how.
        std::thread::spawn(move || child.wait());
        process.with_context(|| format!("{} ended at once{}", self.program.display(), tail(self.log)))
    }

    fn command(&self, program: &OsStr, args: &[OsString]) -> Result<Command> {
        let begin_anew = fs::metadata(self.log).is_ok_and(|log| log.len() > LOG_LIMIT);
        let log = if begin_anew {
            File::create(self.log)
        } else {
            OpenOptions::new().create(true).append(true).open(self.log)
        };
        let log = log.with_context(|| format!("opening {}", self.log.display()))?;
        let mut command = Command::new(program);
        command.args(args).env_clear().current_dir("/").stdin(Stdio::null());
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("LANG", "C.UTF-8");
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdout(log.try_clone().context("sharing the log")?).stderr(log);
        if let Some(user) = self.user {
            // As root this also gives up our supplementary groups.
            command.uid(user.uid).gid(user.gid);
        }
        Ok(command)
    }
}

/// The last lines of a log, ready to be appended to an error.
pub(super) fn tail(log: &Path) -> String {
    const BYTES: u64 = 4096;
    const LINES: usize = 15;
    let read = || {
        let mut file = File::open(log).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(BYTES))).ok()?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    if lines.is_empty() {
        return format!("; {} is empty", log.display());
    }
    let last = &lines[lines.len().saturating_sub(LINES)..];
    format!("; {} ends with:\n  {}", log.display(), last.join("\n  "))
}

/// Finds processes that run in a folder of ours although no state file tells of them.
///
/// The file goes with `cargo clean`; its servers do not. Which processes those are is told by the
/// name of the program together with the folder, in the command line or in the environment: the
/// port mapper that RabbitMQ starts has the folder in its environment too, but others use it.
pub(super) fn orphans(program: &str, dir: &Path) -> Vec<ProcessId> {
    let dir = dir.as_os_str().as_encoded_bytes();
    let names =
        |word: &[u8]| word.strip_suffix(dir).is_some_and(|rest| rest.is_empty() || rest.ends_with(b"="));
    let mentions = |path: PathBuf| fs::read(path).is_ok_and(|text| text.split(|&byte| byte == 0).any(names));
    crate::pid::all()
        .filter(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let file = |file| PathBuf::from(format!("/proc/{pid}/{file}"));
            name.trim_end() == program && (mentions(file("cmdline")) || mentions(file("environ")))
        })
        .filter_map(ProcessId::of)
        .collect()
}
