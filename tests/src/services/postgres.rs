//! A Postgres: a private one, or one that the user gave.
//!
//! A private one listens on 127.0.0.1 only, with no Unix socket, so that no path is too long for one.
//! The superuser `postgres` is trusted; every other role needs its password (SCRAM), as in
//! production. It does not survive a crash of the machine (`fsync` is off), but it does survive a
//! crash of its own: what was committed is there after [`PrivatePostgres::kill`].

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use reqwest::Url;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

use super::database::Database;
use super::launch::{Launch, orphans, tail};
use super::place::{Place, StateFile, User, remove_dir};
use crate::net::{free_port, owner_of};
use crate::pid::ProcessId;
use crate::wait::eventually;

/// The role of a private Postgres that owns the databases made for a test, and needs a password.
pub const ROLE: &str = "semel";

const NAME: &str = "postgres";
const START_DEADLINE: Duration = Duration::from_mins(1);
const STOP_DEADLINE: Duration = Duration::from_secs(20);
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How often a start is tried with another port.
const START_TRIES: usize = 3;

/// A Postgres server to make databases in.
#[derive(Clone, Debug)]
pub struct Postgres {
    pub(super) admin: Url,
    /// The password of [`ROLE`]; none where the server was given.
    pub(super) password: Option<String>,
    pub(super) private: Option<PrivatePostgres>,
}

impl Postgres {
    /// The private server behind this, which may be stopped and killed.
    #[must_use]
    pub fn private(&self) -> Option<&PrivatePostgres> {
        self.private.as_ref()
    }

    /// The URL of a database for its owner: [`ROLE`] in a private server, else the given role.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        match &self.password {
            Some(password) => self.url_as(database, ROLE, password),
            None => self.admin_url(database),
        }
    }

    /// The URL of a database for the superuser of a private server, else for the given role.
    #[must_use]
    pub fn admin_url(&self, database: &str) -> String {
        let mut url = self.admin.clone();
        url.set_path(database);
        url.into()
    }

    /// The URL of a database for another role.
    #[must_use]
    pub fn url_as(&self, database: &str, role: &str, password: &str) -> String {
        let mut url = self.admin.clone();
        url.set_path(database);
        // Both fail only for a URL without a host, which has no user in this place either.
        let _ = url.set_username(role);
        let _ = url.set_password(Some(password));
        url.into()
    }

    /// Makes a database that is dropped with its value. The prefix is a word of at most 30 bytes.
    ///
    /// # Errors
    ///
    /// The server does not answer, or its role may not create databases.
    pub async fn create_database(&self, prefix: &str) -> Result<Database> {
        Database::create(self, prefix).await
    }

    /// Finds or makes a database of this very name, which stays.
    ///
    /// # Errors
    ///
    /// The server does not answer, or its role may not create databases.
    pub async fn lasting_database(&self, name: &str) -> Result<Database> {
        Database::lasting(self, name).await
    }

    /// Connects as the superuser, or as the given role, to a database that always exists.
    pub(super) async fn connect(&self) -> Result<PgConnection> {
        connect(self.admin.as_str()).await
    }

    /// Checks that the server answers.
    pub(super) async fn check(&self) -> Result<String> {
        let mut connection = self.connect().await?;
        let version = sqlx::query_scalar("SHOW server_version").fetch_one(&mut connection).await;
        version.context("asking Postgres for its version")
    }

    /// Drops the databases that processes which are gone left behind in a private server.
    pub(super) async fn sweep(&self) -> Result<()> {
        let mut connection = self.connect().await?;
        let names = sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE NOT datistemplate");
        let names: Vec<String> = names.fetch_all(&mut connection).await.context("listing databases")?;
        for name in names {
            if owner_of(&name).is_some_and(|owner| ProcessId::of(owner).is_none()) {
                let drop = format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)");
                connection.execute(AssertSqlSafe(drop)).await.with_context(|| format!("dropping {name}"))?;
            }
        }
        Ok(())
    }
}

/// What is remembered of a private Postgres that runs.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    process: ProcessId,
    port: u16,
    bin: PathBuf,
    password: String,
    /// Whether the role and all else is there. A start that was interrupted leaves this false.
    ready: bool,
}

/// A Postgres of our own.
///
/// [`stop`](Self::stop), [`kill`](Self::kill) and [`start`](Self::start) keep its data and its port.
#[derive(Clone, Debug)]
pub struct PrivatePostgres {
    dir: PathBuf,
    state: StateFile,
}

impl PrivatePostgres {
    pub(super) fn at(place: &Place) -> Self {
        Self { dir: place.server(NAME), state: place.state(NAME) }
    }

    /// The server as it is known to run, whether or not it answers.
    pub(super) fn known(&self) -> Option<Postgres> {
        let state: State = self.state.load()?;
        (state.ready && state.process.is_running()).then(|| self.server(&state))
    }

    /// The server of a state file, running or not.
    pub(super) fn remembered(&self) -> Result<Postgres> {
        Ok(self.server(&self.load()?))
    }

    fn server(&self, state: &State) -> Postgres {
        let admin = format!("postgres://postgres@127.0.0.1:{}/postgres", state.port);
        Postgres {
            admin: Url::parse(&admin).expect("a URL made of a number"),
            password: Some(state.password.clone()),
            private: Some(self.clone()),
        }
    }

    /// Sets up a new server with the programs of a folder, in place of whatever is left of an old one.
    pub(super) async fn create(&self, bin: &Path) -> Result<Postgres> {
        let mut tries = 1;
        loop {
            self.destroy().await?;
            match self.try_create(bin).await {
                Err(error) if tries < START_TRIES && is_taken_port(&error) => tries += 1,
                outcome => return outcome,
            }
        }
    }

    async fn try_create(&self, bin: &Path) -> Result<Postgres> {
        fs::create_dir_all(&self.dir).with_context(|| format!("creating {}", self.dir.display()))?;
        let user = User::for_postgres()?;
        if let Some(user) = user {
            let owned = chown(&self.dir, Some(user.uid), Some(user.gid));
            owned.with_context(|| format!("giving {} to user {}", self.dir.display(), user.uid))?;
        }
        let data = self.data();
        let mut args: Vec<OsString> = ["-U", "postgres", "-A", "trust", "-E", "UTF8"].map(Into::into).into();
        args.extend(["--locale=C", "--no-sync", "-D"].map(Into::into));
        args.push(data.clone().into());
        let (program, log) = (bin.join("initdb"), self.log());
        let initdb = Launch { program: &program, args, env: Vec::new(), user, log: &log };
        initdb.run()?;
        configure(&data)?;

        let port = free_port()?;
        let password = std::iter::repeat_with(fastrand::alphanumeric).take(24).collect();
        let process = self.launch(bin, port)?;
        let mut state = State { process, port, bin: bin.to_path_buf(), password, ready: false };
        self.state.save(&state)?;
        let server = self.server(&state);
        self.wait_ready(process, &server).await?;
        let role = format!("CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{}'", state.password);
        let mut connection = server.connect().await?;
        connection.execute(AssertSqlSafe(role)).await.with_context(|| format!("creating the role {ROLE}"))?;
        state.ready = true;
        self.state.save(&state)?;
        Ok(server)
    }

    fn launch(&self, bin: &Path, port: u16) -> Result<ProcessId> {
        let args = vec!["-D".into(), self.data().into(), "-p".into(), port.to_string().into()];
        let (program, log) = (bin.join("postgres"), self.log());
        Launch { program: &program, args, env: Vec::new(), user: User::for_postgres()?, log: &log }.detach()
    }

    async fn wait_ready(&self, process: ProcessId, server: &Postgres) -> Result<()> {
        let ready = eventually("Postgres to accept connections", START_DEADLINE, || async {
            if process.is_running() {
                server.check().await.map(Ok)
            } else {
                Ok(Err(anyhow!("Postgres ended while starting")))
            }
        });
        ready
            .await
            .and_then(|outcome| outcome.map(drop))
            .with_context(|| format!("starting Postgres{}", tail(&self.log())))
    }

    /// Ends the server like a shutdown of the machine: sessions are terminated, then a checkpoint.
    ///
    /// # Errors
    ///
    /// It was still there at the deadline, and was killed.
    pub async fn stop(&self) -> Result<()> {
        self.end(Signal::INT).await
    }

    /// Ends the server at once without a checkpoint: the next start recovers from the log.
    ///
    /// # Errors
    ///
    /// It was still there at the deadline, and was killed.
    pub async fn stop_immediately(&self) -> Result<()> {
        self.end(Signal::QUIT).await
    }

    /// Kills the server and all its sessions, as the loss of power would.
    ///
    /// # Errors
    ///
    /// It was still there at the deadline.
    pub async fn kill(&self) -> Result<()> {
        let state = self.load()?;
        state.process.kill_tree("Postgres", STOP_DEADLINE).await?;
        // All are gone, but a process that nobody waited for looks to Postgres as if it still ran.
        match fs::remove_file(self.data().join("postmaster.pid")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("removing the lock of the Postgres that was killed")
            }
            _ => Ok(()),
        }
    }

    /// Starts the server again, on its data and its port; does nothing if it runs.
    ///
    /// # Errors
    ///
    /// It did not accept connections within the deadline.
    pub async fn start(&self) -> Result<()> {
        let mut state = self.load()?;
        if !state.process.is_running() {
            state.process = self.launch(&state.bin, state.port)?;
            self.state.save(&state)?;
        }
        self.wait_ready(state.process, &self.server(&state)).await
    }

    /// Stops the server and starts it again.
    ///
    /// # Errors
    ///
    /// Those of [`stop`](Self::stop) and [`start`](Self::start).
    pub async fn restart(&self) -> Result<()> {
        self.stop().await?;
        self.start().await
    }

    /// The server's process.
    ///
    /// # Errors
    ///
    /// The server was never started or has been removed.
    pub fn process(&self) -> Result<ProcessId> {
        Ok(self.load()?.process)
    }

    /// The server's log file.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        // Beside the folder, which belongs to another user.
        self.dir.with_extension("log")
    }

    fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn load(&self) -> Result<State> {
        self.state.load().context("no private Postgres was started here")
    }

    async fn end(&self, signal: Signal) -> Result<()> {
        let process = self.load()?.process;
        process.signal(signal)?;
        let gone = process.wait_gone("Postgres", STOP_DEADLINE).await;
        if gone.is_err() {
            process.kill_tree("Postgres", STOP_DEADLINE).await?;
        }
        gone
    }

    /// Whether a server runs here, or ever did since the last [`destroy`](Self::destroy).
    pub(super) fn left_anything(&self) -> bool {
        self.state.exists() || self.dir.exists() || !orphans("postgres", &self.data()).is_empty()
    }

    /// Ends the server, if one runs, and removes all that it left. The log stays.
    pub(super) async fn destroy(&self) -> Result<()> {
        let known = self.state.load::<State>().map(|state| state.process);
        for process in known.into_iter().chain(orphans("postgres", &self.data())) {
            process.signal(Signal::INT)?;
            if process.wait_gone("Postgres", STOP_DEADLINE).await.is_err() {
                process.kill_tree("Postgres", STOP_DEADLINE).await?;
            }
        }
        self.state.remove()?;
        remove_dir(&self.dir)
    }
}

/// Connects within a deadline.
pub(super) async fn connect(url: &str) -> Result<PgConnection> {
    let connection = tokio::time::timeout(CONNECT_DEADLINE, PgConnection::connect(url)).await;
    connection.context("Postgres did not answer in time")?.context("connecting to Postgres")
}

fn is_taken_port(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("Address already in use")
}

/// Writes the settings that differ from the defaults, and who may enter.
fn configure(data: &Path) -> Result<()> {
    let conf = data.join("postgresql.conf");
    let append = || fs::OpenOptions::new().append(true).open(&conf)?.write_all(SETTINGS.as_bytes());
    append().with_context(|| format!("writing {}", conf.display()))?;
    let hba = data.join("pg_hba.conf");
    fs::write(&hba, ACCESS).with_context(|| format!("writing {}", hba.display()))
}

const SETTINGS: &str = "
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 300

# Only processes die here, not the machine. A commit still waits for its record to be written:
# without that, a killed server would lose commits that it had acknowledged.
fsync = off
synchronous_commit = on

# Logical decoding works without a restart.
wal_level = logical

timezone = 'UTC'
lc_messages = 'C'
log_line_prefix = '%m [%p] %q%u@%d %a '
log_checkpoints = off
";

const ACCESS: &str = "
host all         postgres 127.0.0.1/32 trust
host replication postgres 127.0.0.1/32 trust
host all         all      127.0.0.1/32 scram-sha-256
";
