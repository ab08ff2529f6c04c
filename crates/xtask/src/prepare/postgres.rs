//! A Postgres that lives as long as the value: its own folder, reached by a socket in it, no port.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::workspace;

const START_DEADLINE: Duration = Duration::from_secs(30);

/// A running server.
#[derive(Debug)]
pub(crate) struct Postgres {
    tools: PathBuf,
    folder: PathBuf,
    owner: Option<(u32, u32)>,
    server: Option<Child>,
}

impl Postgres {
    /// Makes a server from the programs in a folder, and waits until it takes connections.
    pub(crate) fn start(tools: PathBuf) -> Result<Self> {
        // Short, since the path of a socket is limited to 107 bytes.
        let folder = std::env::temp_dir().join(format!("semel-prepare-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("making {}", folder.display()))?;
        let mut postgres = Self { tools, folder, owner: owner()?, server: None };
        if let Some((user, group)) = postgres.owner {
            chown(&postgres.folder, Some(user), Some(group))
                .with_context(|| format!("giving {} to another user", postgres.folder.display()))?;
        }
        let options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"];
        let mut initdb = postgres.tool("initdb");
        initdb.args(options).arg("--pgdata").arg(postgres.data());
        workspace::read(&mut initdb)?;

        let log = fs::File::create(postgres.folder.join("log"))?;
        let mut server = postgres.tool("postgres");
        server.arg("-D").arg(postgres.data()).arg("-k").arg(&postgres.folder);
        server.args(["-c", "listen_addresses=", "-c", "fsync=off"]);
        // In our process group: Ctrl-C stops it too.
        postgres.server =
            Some(server.stdout(log.try_clone()?).stderr(log).spawn().context("starting postgres")?);
        postgres.wait_until_ready()?;
        Ok(postgres)
    }

    /// Runs a file of SQL.
    pub(crate) fn apply(&self, file: &Path) -> Result<()> {
        let sql = fs::File::open(file).with_context(|| format!("opening {}", file.display()))?;
        // By standard input, since the user that we run as may not be allowed to read the checkout.
        workspace::read(self.psql().stdin(sql)).with_context(|| format!("applying {}", file.display()))?;
        Ok(())
    }

    /// The address of its database.
    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@localhost/postgres?host={}", self.folder.display())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_DEADLINE;
        let mut ask = self.psql();
        ask.args(["--command", "SELECT 1"]).stdout(Stdio::null()).stderr(Stdio::null());
        while !ask.status().context("starting psql")?.success() {
            let ended = self.server.as_mut().map(Child::try_wait).transpose()?.flatten();
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                bail!("Postgres does not start; it says:\n{}", log.trim());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn psql(&self) -> Command {
        let mut psql = self.tool("psql");
        psql.args([
            "--no-psqlrc",
            "--quiet",
            "--set=ON_ERROR_STOP=1",
            "--username=postgres",
            "--dbname=postgres",
        ]);
        psql.arg("--host").arg(&self.folder).env("PGOPTIONS", "-c client_min_messages=warning");
        psql
    }

    fn tool(&self, name: &str) -> Command {
        let beside = self.tools.join(name);
        // The client's tools may be packaged apart from the server's.
        let mut command = Command::new(if beside.exists() { beside } else { name.into() });
        command.current_dir(&self.folder).stdin(Stdio::null());
        if let Some((user, group)) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Best effort: there is nobody left to tell, and the folder is a temporary one.
        if let Some(mut server) = self.server.take() {
            let mut stop = self.tool("pg_ctl");
            stop.arg("stop").arg("--pgdata").arg(self.data()).args(["--mode=fast", "--silent"]);
            stop.stderr(Stdio::null());
            if !stop.status().is_ok_and(|status| status.success()) {
                let _ = server.kill();
            }
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Where `initdb` and its fellows are, looked for as the test bed does: where the user says, else where Debian keeps
/// its versions, the newest first, else on the path.
pub(crate) fn tools() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("SEMEL_POSTGRES_BIN").filter(|value| !value.is_empty()) {
        return Some(given.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        newest_first(versions(Path::new("/usr/lib/postgresql"))).chain(std::env::split_paths(&path));
    // A link on the path may stand alone, without the other tools.
    let mut programs = folders.filter_map(|folder| folder.join("initdb").canonicalize().ok());
    programs.next()?.parent().map(Path::to_owned)
}

fn versions(base: &Path) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(base).into_iter().flatten().filter_map(Result::ok);
    let versions = entries.filter_map(|entry| {
        let version = entry.file_name().to_string_lossy().parse().ok()?;
        Some((version, entry.path().join("bin")))
    });
    versions.collect()
}

fn newest_first(mut versions: Vec<(u32, PathBuf)>) -> impl Iterator<Item = PathBuf> {
    versions.sort_by(|a, b| b.cmp(a));
    versions.into_iter().map(|(_, folder)| folder)
}

/// Whom to run as, when we are root: Postgres refuses to.
fn owner() -> Result<Option<(u32, u32)>> {
    // The folder of a process belongs to the user that it runs as; the standard library knows no other way to ask.
    let root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !root {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd").context("reading /etc/passwd")?;
    let user = user(&users, "postgres").or_else(|| user(&users, "nobody"));
    user.map(Some).context("Postgres does not run as root, and there is neither a user postgres nor nobody")
}

fn user(users: &str, name: &str) -> Option<(u32, u32)> {
    let line = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let mut fields = line.split(':').skip(1);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_user_by_its_whole_name() {
        let users = "postgres2:x:7:7::/:/bin/sh\npostgres:x:101:104:,,,:/var/lib/postgresql:/bin/bash\n";
        assert_eq!(user(users, "postgres"), Some((101, 104)));
        assert_eq!(user(users, "nobody"), None);
    }

    #[test]
    fn prefers_the_newest_version() {
        let versions = vec![(9, "/p/9/bin".into()), (18, "/p/18/bin".into()), (15, "/p/15/bin".into())];
        let order: Vec<_> = newest_first(versions).collect();
        assert_eq!(order, [Path::new("/p/18/bin"), Path::new("/p/15/bin"), Path::new("/p/9/bin")]);
    }
}
