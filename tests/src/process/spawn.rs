//! Starting a child and waiting for its end.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::{OptionFuture, join};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::fs::File;
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};

use super::DaemonCommand;
use super::lines::Lines;
use crate::services::on_path;
use crate::workspace::{root, target_dir};

/// Names the folder of this run's logs below `target/logs`.
const RUN: &str = "SEMEL_TEST_RUN";
/// How many runs' logs are kept.
const RUNS_KEPT: usize = 20;
/// What a daemon inherits of our environment.
const INHERITED: [&str; 6] = ["PATH", "HOME", "LANG", "TMPDIR", "RUST_BACKTRACE", "LLVM_PROFILE_FILE"];
/// How long what a dead child's own children say is waited for.
const DRAIN: Duration = Duration::from_secs(1);

/// Starts the child.
pub(super) async fn spawn(what: &DaemonCommand) -> Result<Child> {
    ensure!(what.program.is_file(), "there is no program {}", what.program.display());
    // The kernel kills the child when the thread that started it ends.
    let mut command = match on_path("setpriv") {
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL", "--"]).arg(&what.program);
            command
        }
        None => Command::new(&what.program),
    };
    command.args(&what.args).env_clear();
    command.envs(INHERITED.iter().filter_map(|name| Some((name, env::var_os(name)?))));
    command.envs(what.env.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).kill_on_drop(true);
    on_lasting_thread(command).await
}

/// Reads what the child says and waits for its end, in the background. The end is told once all that
/// was said has been read, and what the child left in its process group has been killed.
pub(super) fn watch(
    mut child: Child,
    pid: Pid,
    lines: &Lines,
    log: Log,
) -> watch::Receiver<Option<ExitStatus>> {
    let (tell, exit) = watch::channel(None);
    let out = child.stdout.take().map(|stream| lines.clone().fill(stream, log.out));
    let err = child.stderr.take().map(|stream| lines.clone().fill(stream, log.err));
    let mut reading = tokio::spawn(join(OptionFuture::from(out), OptionFuture::from(err)));
    tokio::spawn(async move {
        let status = child.wait().await;
        let _ = kill_process_group(pid, Signal::KILL);
        if tokio::time::timeout(DRAIN, &mut reading).await.is_err() {
            reading.abort();
        }
        tell.send_replace(status.ok());
    });
    exit
}

/// The log file of a daemon, once for each stream.
pub(super) struct Log {
    pub(super) path: PathBuf,
    out: File,
    err: File,
}

impl Log {
    /// Begins `target/logs/<run>/<name>.log`, or adds to it when the run has a daemon of this name
    /// already, as after a restart.
    pub(super) fn open(name: &str) -> Result<Self> {
        static DIR: OnceLock<PathBuf> = OnceLock::new();
        if DIR.get().is_none() {
            let runs = target_dir(&root()?).join("logs");
            prune(&runs);
            let _ = DIR.set(runs.join(run()));
        }
        let dir = DIR.get().context("the folder of this run's logs was just set")?;
        let path = dir.join(format!("{name}.log"));
        let open = || -> io::Result<_> {
            fs::create_dir_all(dir)?;
            let out = fs::OpenOptions::new().create(true).append(true).open(&path)?;
            Ok((out.try_clone()?, out))
        };
        let (out, err) = open().with_context(|| format!("opening {}", path.display()))?;
        Ok(Self { path, out: File::from_std(out), err: File::from_std(err) })
    }
}

fn run() -> OsString {
    env::var_os(RUN).unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("{}-{}", now.as_secs(), std::process::id()).into()
    })
}

/// Removes the logs of old runs. That this may fail, or meet another run doing it too, is no matter.
fn prune(runs: &Path) {
    let entries = fs::read_dir(runs).into_iter().flatten().flatten();
    let mut entries: Vec<_> =
        entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    entries.sort();
    let old = entries.len().saturating_sub(RUNS_KEPT);
    for (_, path) in entries.into_iter().take(old) {
        let _ = fs::remove_dir_all(path);
    }
}

/// Starts a child from a thread that lasts as long as this process.
async fn on_lasting_thread(mut command: Command) -> Result<Child> {
    type Job = Box<dyn FnOnce() + Send>;
    static JOBS: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let jobs = JOBS.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || jobs.into_iter().for_each(|job| job()));
        Mutex::new(sender)
    });
    let (answer, child) = oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    let job = Box::new(move || {
        let _guard = runtime.enter();
        // Nobody waits any more: then the child is dropped, and with that killed.
        let _ = answer.send(command.spawn());
    });
    let sent = jobs.lock().unwrap_or_else(PoisonError::into_inner).send(job);
    sent.ok().context("the thread that starts children is gone")?;
    Ok(child.await.context("the thread that starts children is gone")??)
}
