//! A pod: one process at an address of its own, with its probes.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::Secrets;
use super::manifest::{Container, Probe, Template};
use crate::process::{Daemon, DaemonCommand, binary};

/// The user of the images.
const USER: u32 = 65532;
/// How long a Job's program may take.
const JOB: Duration = Duration::from_mins(1);

/// How a pod ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum End {
    /// By itself, within its grace, with exit code 0.
    Clean,
    /// With another exit code, or before it was asked to.
    Failed,
    /// It had to be killed.
    Killed,
    /// It was alive and a probe said otherwise.
    FoundDead,
}

/// A running pod.
#[derive(Debug)]
pub struct Pod {
    name: String,
    address: String,
    daemon: Daemon,
    ready: watch::Receiver<bool>,
    dead: watch::Receiver<bool>,
    probes: Vec<AbortHandle>,
    left: OnceLock<Instant>,
    sleep: Duration,
    grace: Duration,
}

impl Pod {
    pub(super) async fn start(
        deployment: &str,
        template: &Template,
        secrets: &Secrets,
        folder: &Path,
    ) -> Result<Self> {
        ensure!(template.init.is_empty(), "a Deployment's pod with containers that run before it");
        let sandbox = Sandbox::make(deployment, template, secrets, folder)?;
        let daemon = sandbox.command(&template.container)?.start().await?;
        let probe = |probe: Option<&Probe>| {
            let probe = probe.context("no probe")?;
            let port = template.port(&probe.http_get.port)?;
            Ok::<_, anyhow::Error>((
                format!("http://{}:{port}{}", sandbox.address, probe.http_get.path),
                probe.clone(),
            ))
        };
        let (url, readiness) = probe(template.container.readiness_probe.as_ref())?;
        let (tell_ready, ready) = watch::channel(false);
        let watching = tokio::spawn(watch_probe(url, readiness, tell_ready, 1)).abort_handle();
        let (url, liveness) = probe(template.container.liveness_probe.as_ref())?;
        let (tell_alive, mut alive) = watch::channel(true);
        let living = tokio::spawn(watch_probe(url, liveness, tell_alive, 1)).abort_handle();
        let (tell_dead, dead) = watch::channel(false);
        tokio::spawn(async move {
            if alive.wait_for(|alive| !alive).await.is_ok() {
                tell_dead.send_replace(true);
            }
        });
        Ok(Self {
            name: sandbox.name,
            address: sandbox.address,
            daemon,
            ready,
            dead,
            probes: vec![watching, living],
            left: OnceLock::new(),
            sleep: template.sleep_before_stop(),
            grace: template.grace,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether somebody is sent to it: it is ready, and does not end, or not for so long that everybody knows.
    pub(super) fn is_served(&self, lag: Duration) -> bool {
        *self.ready.borrow() && self.left.get().is_none_or(|since| since.elapsed() < lag)
    }

    /// Whether it is to end.
    pub(super) fn leaves(&self) -> bool {
        self.left.get().is_some()
    }

    /// Says that it is to end.
    pub(super) fn leave(&self) {
        let _ = self.left.set(Instant::now());
    }

    pub(super) async fn ready(&self, deadline: Duration) -> Result<()> {
        let mut ready = self.ready.clone();
        match tokio::time::timeout(deadline, ready.wait_for(|ready| *ready)).await {
            Ok(Ok(_)) => Ok(()),
            _ => bail!("{} is not ready: {}", self.name, self.daemon.lines().join("\n")),
        }
    }

    /// Ends it as a kubelet does.
    pub(super) async fn end(&self) -> Result<End> {
        if !self.daemon.is_running() {
            return Ok(End::Failed);
        }
        if *self.dead.borrow() {
            return Ok(End::FoundDead);
        }
        // A cluster does this by the clock, too.
        tokio::time::sleep(self.sleep).await;
        self.daemon.terminate()?;
        let end = match self.daemon.wait_exit(self.grace.saturating_sub(self.sleep)).await {
            Ok(status) if status.success() => End::Clean,
            Ok(_) => End::Failed,
            Err(_) => {
                self.daemon.kill().await?;
                End::Killed
            }
        };
        self.probes.iter().for_each(AbortHandle::abort);
        Ok(end)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.probes.iter().for_each(AbortHandle::abort);
    }
}

/// Asks again and again; tells what is so once enough answers in a row say it.
async fn watch_probe(url: String, probe: Probe, tell: watch::Sender<bool>, successes: u32) {
    let timeout = Duration::from_secs(probe.timeout_seconds);
    let Ok(client) = reqwest::Client::builder().no_proxy().timeout(timeout).build() else { return };
    tokio::time::sleep(Duration::from_secs(probe.initial_delay_seconds)).await;
    let mut tick = tokio::time::interval(Duration::from_secs(probe.period_seconds));
    let (mut good, mut bad) = (0, 0);
    loop {
        tick.tick().await;
        let fine = client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success());
        (good, bad) = if fine { (good + 1, 0) } else { (0, bad + 1) };
        if good >= successes {
            tell.send_replace(true);
        } else if bad >= probe.failure_threshold {
            tell.send_replace(false);
        }
    }
}

/// Runs the containers of a Job's pod one after the other; returns what they said.
pub(super) async fn run_to_end(
    job: &str,
    template: &Template,
    secrets: &Secrets,
    folder: &Path,
) -> Result<Vec<String>> {
    let sandbox = Sandbox::make(job, template, secrets, folder)?;
    let mut said = Vec::new();
    for container in template.init.iter().chain([&template.container]) {
        let daemon = sandbox.command(container)?.start().await?;
        let status = daemon.wait_exit(JOB).await?;
        ensure!(status.success(), "{} {status}: {}", container.name, daemon.lines().join("\n"));
        said.extend(daemon.lines());
    }
    Ok(said)
}

/// What a pod's programs see: a folder and an address.
struct Sandbox {
    name: String,
    address: String,
    folder: PathBuf,
    as_image_user: bool,
}

impl Sandbox {
    fn make(of: &str, template: &Template, secrets: &Secrets, folder: &Path) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{of}-{number}");
        let folder = folder.join(&name);
        fs::create_dir_all(&folder)?;
        // Of this process, so that test programs side by side do not meet.
        let process = std::process::id() % 250 + 2;
        let address = format!("127.{process}.{}.{}", number / 250, number % 250 + 2);
        for mount in &template.container.volume_mounts {
            let volume = template.volumes.iter().find(|volume| volume.name == mount.name);
            let source = &volume.with_context(|| format!("no volume {}", mount.name))?.secret;
            let secret = secrets.get(&source.secret_name);
            let secret =
                secret.with_context(|| format!("{of}: there is no secret {}", source.secret_name))?;
            let target = inside(&folder, &mount.mount_path);
            fs::create_dir_all(&target)?;
            let all = || secret.keys().map(|key| (key.clone(), key.clone())).collect();
            let items: Vec<(String, String)> = match &source.items[..] {
                [] => all(),
                items => items.iter().map(|item| (item.key.clone(), item.path.clone())).collect(),
            };
            for (key, path) in items {
                let value =
                    secret.get(&key).with_context(|| format!("{}: no entry {key}", source.secret_name))?;
                fs::write(target.join(path), value)?;
            }
        }
        Ok(Self { name, address, folder, as_image_user: rustix::process::geteuid().is_root() })
    }

    fn command(&self, container: &Container) -> Result<DaemonCommand> {
        let name = container.program()?;
        let program = binary(name)?;
        let command = if self.as_image_user {
            self.bring(name, &program)?;
            Daemon::command(&self.name, "/usr/sbin/chroot")
                .arg(format!("--userspec={USER}:{USER}"))
                .arg("--groups=")
                .arg(&self.folder)
                .arg(format!("/{name}"))
        } else {
            Daemon::command(&self.name, program)
        };
        let value = |value: &str| {
            // The pod's own network: all its addresses are the one that it has.
            let value = value
                .strip_prefix("0.0.0.0:")
                .map_or(value.to_owned(), |port| format!("{}:{port}", self.address));
            if value.starts_with("/etc/semel/") && !self.as_image_user {
                inside(&self.folder, &value).display().to_string()
            } else {
                value
            }
        };
        let env = container.env.iter().map(|variable| (variable.name.clone(), value(&variable.value)));
        Ok(command.args(&container.args).envs(env))
    }

    /// Puts a program where the image has it, with the libraries that a static one would not need.
    fn bring(&self, name: &str, program: &Path) -> Result<()> {
        if self.folder.join(name).exists() {
            return Ok(());
        }
        place(program, &self.folder.join(name))?;
        let needed = std::process::Command::new("ldd").arg(program).output().context("starting ldd")?;
        for line in String::from_utf8_lossy(&needed.stdout).lines() {
            if let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) {
                let target = inside(&self.folder, path);
                fs::create_dir_all(target.parent().context("a library in no folder")?)?;
                if !target.exists() {
                    place(&fs::canonicalize(path)?, &target)?;
                }
            }
        }
        // Looked for under either name.
        let lib64 = self.folder.join("lib64");
        if !lib64.exists() && self.folder.join("usr/lib64").exists() {
            symlink("usr/lib64", lib64)?;
        }
        Ok(())
    }
}

/// Links a file, or copies it where it cannot be linked; for everybody to read and run.
fn place(from: &Path, to: &Path) -> Result<()> {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// An absolute path as it is below a folder.
fn inside(folder: &Path, path: &str) -> PathBuf {
    folder.join(path.trim_start_matches('/'))
}
