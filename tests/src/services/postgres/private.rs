//! A Postgres of our own.
//!
//! It listens on 127.0.0.1 only, with no Unix socket, so that no path is too long for one. The
//! superuser `postgres` is trusted; every other role needs its password (SCRAM), as in production. It
//! does not survive a crash of the machine (`fsync` is off), but it does survive a crash of its own:
//! what was committed is there after [`PrivatePostgres::kill`].

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
use sqlx::{AssertSqlSafe, Executor as _};

use super::{Postgres, ROLE};
use crate::net::free_port;
use crate::pid::ProcessId;
use crate::services::launch::{Launch, orphans, tail};
use crate::services::place::{Place, StateFile, User, remove_dir};
use crate::wait::eventually;

const NAME: &str = "postgres";
const START_DEADLINE: Duration = Duration::from_mins(1);
const STOP_DEADLINE: Duration = Duration::from_secs(20);
/// How long one look at a starting server may take.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);
/// How often a start is tried with another port.
const START_TRIES: usize = 3;

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
    pub(in crate::services) fn at(place: &Place) -> Self {
        Self { dir: place.server(NAME), state: place.state(NAME) }
    }

    /// The server as it is known to run, whether or not it answers.
    pub(in crate::services) fn known(&self) -> Option<Postgres> {
        let state: State = self.state.load()?;
        (state.ready && state.process.is_running()).then(|| self.server(&state))
    }

    /// The server of a state file, running or not.
    pub(in crate::services) fn remembered(&self) -> Result<Postgres> {
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
    pub(in crate::services) async fn create(&self, bin: &Path) -> Result<Postgres> {
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
                // Whoever else has the port may accept and say nothing.
                let check = tokio::time::timeout(LOOK_DEADLINE, server.check()).await;
                check.context("no answer to a look")?.map(Ok)
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
    pub(in crate::services) fn left_anything(&self) -> bool {
        self.state.exists() || self.dir.exists() || !orphans("postgres", &self.data()).is_empty()
    }

    /// Ends the server, if one runs, and removes all that it left. The log stays.
    pub(in crate::services) async fn destroy(&self) -> Result<()> {
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
