//! Where the private servers of a workspace live, and who may touch them.
//!
//! One folder per workspace holds a lock, and per server a folder and a state file. The lock is held
//! by whoever starts or ends a server, so two commands in parallel do not both start one.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::progress::Progress;
use crate::wait::eventually;

/// How long another command may hold the lock: it may be installing packages.
const LOCK_DEADLINE: Duration = Duration::from_mins(10);

/// Holds the places within a place.
const OWN: &str = "own";

/// A user that a server runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl User {
    /// The user that Postgres runs as when we are root, which it refuses to be.
    pub(super) fn for_postgres() -> Result<Option<Self>> {
        if !is_root() {
            return Ok(None);
        }
        let users = fs::read_to_string("/etc/passwd").context("reading /etc/passwd")?;
        let find = |name: &str| {
            let fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
            let fields = fields.into_iter().find(|fields| fields.len() > 3 && fields[0] == name)?;
            Some(Self { uid: fields[2].parse().ok()?, gid: fields[3].parse().ok()? })
        };
        let user = find("postgres").or_else(|| find("nobody"));
        user.map(Some)
            .context("Postgres does not run as root, and there is no user postgres or nobody to run it as")
    }
}

/// The folder of a workspace's private servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    dir: PathBuf,
}

impl Place {
    /// Chooses the place for a workspace.
    ///
    /// It is `target/services`; or, when we are root and the user that Postgres runs as could not
    /// reach that, `/var/tmp/semel-<uid>-<hash of the workspace's path>`.
    ///
    /// # Errors
    ///
    /// The workspace's folder does not exist.
    pub fn of(root: &Path) -> Result<Self> {
        let root = root.canonicalize().with_context(|| format!("no workspace at {}", root.display()))?;
        let dir = crate::workspace::target_dir(&root).join("services");
        if is_root() && !open_to_others(&dir) {
            let dir = format!("/var/tmp/semel-{}-{:016x}", uid(), hash(&root));
            return Ok(Self { dir: PathBuf::from(dir) });
        }
        Ok(Self { dir })
    }

    /// Takes the place that [`of`](Self::of) chose, in another process.
    pub(super) fn at(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    /// A place within this one, for servers that only one test uses, and may therefore kill.
    #[must_use]
    pub fn own(&self, name: &str) -> Self {
        Self { dir: self.dir.join(OWN).join(name) }
    }

    /// This place and all that were made within it.
    pub(super) fn with_own(&self) -> Vec<Self> {
        let own = fs::read_dir(self.dir.join(OWN)).into_iter().flatten().flatten();
        std::iter::once(self.clone()).chain(own.map(|entry| Self { dir: entry.path() })).collect()
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of one server; it exists only once the server was set up.
    pub(super) fn server(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The state file of one server.
    pub(super) fn state(&self, name: &str) -> StateFile {
        StateFile { path: self.dir.join(format!("{name}.json")) }
    }

    /// Makes the folder and waits for the lock. The lock is given up with the value.
    pub(super) async fn lock(&self, progress: Progress) -> Result<File> {
        let dir = &self.dir;
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let owner = fs::metadata(dir).with_context(|| format!("looking at {}", dir.display()))?.uid();
        ensure!(owner == uid(), "{} belongs to user {owner}, not to us; remove it", dir.display());
        // Others may pass through, as Postgres must when it runs as another user, but not look.
        let closed = fs::set_permissions(dir, fs::Permissions::from_mode(0o711));
        closed.with_context(|| format!("closing {} to others", dir.display()))?;
        let path = dir.join("lock");
        let lock = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        let mut told = false;
        let what = format!("another command to release {}", path.display());
        eventually(&what, LOCK_DEADLINE, || {
            let outcome = match lock.try_lock() {
                Ok(()) => Ok(Ok(())),
                Err(TryLockError::WouldBlock) => Err("it is held"),
                Err(TryLockError::Error(error)) => Ok(Err(error)),
            };
            if outcome.is_err() && !told {
                progress.say(format_args!("waiting for {what} …"));
                told = true;
            }
            async { outcome }
        })
        .await?
        .with_context(|| format!("locking {}", path.display()))?;
        Ok(lock)
    }
}

/// What is remembered of a running server.
#[derive(Clone, Debug)]
pub(super) struct StateFile {
    path: PathBuf,
}

impl StateFile {
    pub(super) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Reads it. One that is missing or of another version says that nothing is known to run.
    pub(super) fn load<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&fs::read(&self.path).ok()?).ok()
    }

    /// Replaces it in one step: a reader sees the old one or the new one.
    pub(super) fn save<T: Serialize>(&self, state: &T) -> Result<()> {
        let write = || {
            let new = self.path.with_extension("json.new");
            fs::write(&new, serde_json::to_vec_pretty(state)?)?;
            // It holds the password of a server on loopback.
            fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
            anyhow::Ok(fs::rename(&new, &self.path)?)
        };
        write().with_context(|| format!("writing {}", self.path.display()))
    }

    /// Forgets it.
    pub(super) fn remove(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("removing {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Removes a folder with all that is in it, if it is there.
pub(super) fn remove_dir(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

pub(super) fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether every existing folder on the way to this one lets everybody pass.
fn open_to_others(dir: &Path) -> bool {
    dir.ancestors().filter_map(|parent| fs::metadata(parent).ok()).all(|parent| parent.mode() & 0o001 != 0)
}

/// FNV-1a. The standard library's hashes may change from one compiler to the next, this must not.
fn hash(path: &Path) -> u64 {
    path.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
