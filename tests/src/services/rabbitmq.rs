//! A RabbitMQ: a private one, or one that the user gave.
//!
//! A private one listens on 127.0.0.1 only, with a node name, a cookie and folders of its own, beside
//! whatever else runs on the machine. Only the port mapper of Erlang, epmd, is shared: it is started
//! if none runs, and stays.

use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use reqwest::Url;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::launch::{Launch, orphans, tail};
use super::management::Management;
use super::place::{Place, StateFile, remove_dir};
use super::vhost::Vhost;
use crate::net::{free_port, owner_of};
use crate::pid::ProcessId;
use crate::progress::Progress;
use crate::wait::eventually;

const NAME: &str = "rabbitmq";
const START_DEADLINE: Duration = Duration::from_mins(2);
const STOP_DEADLINE: Duration = Duration::from_secs(30);
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How often a start is tried with other ports.
const START_TRIES: usize = 3;
/// Where the management API is looked for beside a given broker.
const MANAGEMENT_PORT: u16 = 15_672;

/// A RabbitMQ server to make virtual hosts in.
#[derive(Clone, Debug)]
pub struct RabbitMq {
    pub(super) url: Url,
    pub(super) management: Option<Management>,
    pub(super) private: Option<PrivateRabbitMq>,
}

impl RabbitMq {
    /// The private server behind this, which may be stopped and killed.
    #[must_use]
    pub fn private(&self) -> Option<&PrivateRabbitMq> {
        self.private.as_ref()
    }

    /// The management API; none where a broker was given without one that we may administrate.
    #[must_use]
    pub fn management(&self) -> Option<&Management> {
        self.management.as_ref()
    }

    /// The URL of a virtual host for the server's user.
    #[must_use]
    pub fn url(&self, vhost: &str) -> String {
        vhost_url(&self.url, vhost).into()
    }

    /// Makes a virtual host that is deleted with its value. The prefix is a word of at most 30 bytes.
    ///
    /// # Errors
    ///
    /// The management API does not answer.
    pub async fn create_vhost(&self, prefix: &str) -> Result<Vhost> {
        Vhost::create(self, prefix).await
    }

    /// Finds or makes a virtual host of this very name, which stays.
    ///
    /// # Errors
    ///
    /// The management API does not answer.
    pub async fn lasting_vhost(&self, name: &str) -> Result<Vhost> {
        Vhost::lasting(self, name).await
    }

    /// Takes the broker that the user gave, and looks for its management API.
    pub(super) async fn given(url: &str, management: Option<String>, progress: Progress) -> Result<Self> {
        let url = Url::parse(url).context("AMQP_URL cannot be parsed")?;
        ensure!(url.host_str().is_some(), "AMQP_URL names no host");
        let connecting = lapin::Connection::connect(url.as_str(), lapin::ConnectionProperties::default());
        let connected = tokio::time::timeout(CONNECT_DEADLINE, connecting).await;
        connected
            .context("the broker of AMQP_URL did not answer in time")?
            .context("connecting to AMQP_URL")?;
        let found = find_management(&url, management).await;
        if let Err(reason) = &found {
            progress.say(format_args!(
                "no virtual hosts can be made in the RabbitMQ of AMQP_URL, so unique names in its own are used; \
                 set AMQP_MANAGEMENT_URL to the management API of an administrator ({reason:#})"
            ));
        }
        Ok(Self { url, management: found.ok(), private: None })
    }

    /// The virtual host of the URL; `/` if it names none.
    pub(super) fn given_vhost(&self) -> String {
        let path = self.url.path().trim_start_matches('/');
        match path {
            "" | "%2f" | "%2F" => "/".to_owned(),
            name => name.to_owned(),
        }
    }

    /// Checks that the server answers.
    pub(super) async fn check(&self) -> Result<String> {
        let version = match &self.management {
            Some(management) => management.version().await?,
            None => "of unknown version".to_owned(),
        };
        if self.url.scheme() == "amqp" {
            greet(self.url.host_str().unwrap_or_default(), self.url.port().unwrap_or(5672)).await?;
        }
        Ok(version)
    }

    /// Deletes the virtual hosts that processes which are gone left behind in a private server.
    pub(super) async fn sweep(&self) -> Result<()> {
        let Some(management) = &self.management else { return Ok(()) };
        for name in management.vhosts().await? {
            if owner_of(&name).is_some_and(|owner| ProcessId::of(owner).is_none()) {
                management.delete_vhost(&name).await?;
            }
        }
        Ok(())
    }
}

/// The URL of another virtual host of the same broker.
pub(super) fn vhost_url(base: &Url, vhost: &str) -> Url {
    let mut url = base.clone();
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.clear().push(vhost);
    }
    url
}

async fn find_management(amqp: &Url, given: Option<String>) -> Result<Management> {
    let management = match given {
        Some(url) => Management::new(&url)?,
        None => Management::new(beside(amqp)?.as_str())?,
    };
    let asking = tokio::time::timeout(CONNECT_DEADLINE, management.is_administrator()).await;
    ensure!(asking.context("no answer in time")??, "its user is no administrator");
    Ok(management)
}

/// The URL at which a broker's management API is by default, for the same user.
fn beside(amqp: &Url) -> Result<Url> {
    ensure!(amqp.scheme() == "amqp", "the broker is reached over TLS");
    let mut url = Url::parse("http://localhost/").context("a constant URL")?;
    let user = if amqp.username().is_empty() { "guest" } else { amqp.username() };
    let password = amqp.password().unwrap_or("guest");
    url.set_host(amqp.host_str()).context("the host of AMQP_URL")?;
    let set = [url.set_port(Some(MANAGEMENT_PORT)), url.set_username(user), url.set_password(Some(password))];
    ensure!(set.iter().all(Result::is_ok), "AMQP_URL is unlike an HTTP URL");
    Ok(url)
}

/// Opens a connection as far as the broker's greeting: the method Connection.Start in channel 0.
async fn greet(host: &str, port: u16) -> Result<()> {
    let greeting = async {
        let mut stream = TcpStream::connect((host, port)).await?;
        stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        stream.read_u8().await
    };
    let greeting = tokio::time::timeout(CONNECT_DEADLINE, greeting).await;
    let first = greeting.context("no AMQP greeting in time")?.context("waiting for the AMQP greeting")?;
    ensure!(first == 1, "no AMQP broker listens on port {port}");
    Ok(())
}

/// What is remembered of a private RabbitMQ that runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    process: ProcessId,
    script: PathBuf,
    amqp_port: u16,
    management_port: u16,
    distribution_port: u16,
    /// Whether it was ever ready. A start that was interrupted leaves this false.
    ready: bool,
}

/// A RabbitMQ of our own.
///
/// [`stop`](Self::stop), [`kill`](Self::kill) and [`start`](Self::start) keep its data and its ports.
#[derive(Clone, Debug)]
pub struct PrivateRabbitMq {
    dir: PathBuf,
    state: StateFile,
}

impl PrivateRabbitMq {
    pub(super) fn at(place: &Place) -> Self {
        Self { dir: place.server(NAME), state: place.state(NAME) }
    }

    /// The server as it is known to run, whether or not it answers.
    pub(super) fn known(&self) -> Option<RabbitMq> {
        let state: State = self.state.load()?;
        (state.ready && state.process.is_running()).then(|| self.server(&state)).transpose().ok()?
    }

    /// The server of a state file, running or not.
    pub(super) fn remembered(&self) -> Result<RabbitMq> {
        self.server(&self.load()?)
    }

    fn server(&self, state: &State) -> Result<RabbitMq> {
        let url = format!("amqp://guest:guest@127.0.0.1:{}/%2F", state.amqp_port);
        let management = format!("http://guest:guest@127.0.0.1:{}/", state.management_port);
        Ok(RabbitMq {
            url: Url::parse(&url).context("a URL made of a number")?,
            management: Some(Management::new(&management)?),
            private: Some(self.clone()),
        })
    }

    /// Starts a new server with a start script, in place of whatever is left of an old one.
    pub(super) async fn create(&self, script: &Path) -> Result<RabbitMq> {
        let mut tries = 1;
        loop {
            self.destroy().await?;
            match self.try_create(script).await {
                Err(error) if tries < START_TRIES && is_taken_port(&error) => tries += 1,
                outcome => return outcome,
            }
        }
    }

    async fn try_create(&self, script: &Path) -> Result<RabbitMq> {
        fs::create_dir_all(&self.dir).with_context(|| format!("creating {}", self.dir.display()))?;
        let ports = (free_port()?, free_port()?, free_port()?);
        let (amqp_port, management_port, distribution_port) = ports;
        let me = std::process::id().try_into().context("a process id is 31 bits")?;
        let process = ProcessId::of(me).context("this process is not in /proc")?;
        let script = script.to_path_buf();
        let mut state =
            State { process, script, amqp_port, management_port, distribution_port, ready: false };
        state.process = self.launch(&state)?;
        self.state.save(&state)?;
        let server = self.server(&state)?;
        self.wait_ready(state.process, &server).await?;
        state.ready = true;
        self.state.save(&state)?;
        Ok(server)
    }

    fn launch(&self, state: &State) -> Result<ProcessId> {
        let write = |file: &str, text: &str| {
            let path = self.dir.join(file);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
        };
        write("enabled_plugins", "[rabbitmq_management].\n")?;
        write("environment", "")?;
        write("rabbitmq.conf", &settings(state))?;
        let folder = |name: &str| OsString::from(self.dir.join(name));
        let env = vec![
            ("HOME", self.dir.clone().into()),
            (FOLDER, self.dir.clone().into()),
            ("RABBITMQ_NODENAME", format!("semel{}@localhost", state.amqp_port).into()),
            ("RABBITMQ_DIST_PORT", state.distribution_port.to_string().into()),
            ("RABBITMQ_MNESIA_BASE", folder("data")),
            ("RABBITMQ_LOG_BASE", folder("log")),
            ("RABBITMQ_LOGS", "-".into()),
            ("RABBITMQ_PID_FILE", folder("pid")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", folder("enabled_plugins")),
            ("RABBITMQ_CONFIG_FILE", folder("rabbitmq")),
            ("RABBITMQ_ADVANCED_CONFIG_FILE", folder("none")),
            // Empty, so that the system's settings are not read.
            ("RABBITMQ_CONF_ENV_FILE", folder("environment")),
            // The nodes' own protocol, and epmd if it is us who start it, on loopback only.
            ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}".into()),
            ("ERL_EPMD_ADDRESS", Ipv4Addr::LOCALHOST.to_string().into()),
            // The script then becomes the server, instead of waiting for it: the process id is the
            // server's, and a signal reaches it.
            ("RUNNING_UNDER_SYSTEMD", "true".into()),
        ];
        Launch { program: &state.script, args: Vec::new(), env, user: None, log: &self.log() }.detach()
    }

    async fn wait_ready(&self, process: ProcessId, server: &RabbitMq) -> Result<()> {
        let ready = eventually("RabbitMQ to accept connections", START_DEADLINE, || async {
            if process.is_running() {
                server.check().await.map(Ok)
            } else {
                Ok(Err(anyhow!("RabbitMQ ended while starting")))
            }
        });
        ready
            .await
            .and_then(|outcome| outcome.map(drop))
            .with_context(|| format!("starting RabbitMQ{}", tail(&self.log())))
    }

    /// Ends the server in order.
    ///
    /// # Errors
    ///
    /// It was still there at the deadline, and was killed.
    pub async fn stop(&self) -> Result<()> {
        let process = self.load()?.process;
        process.signal(Signal::TERM)?;
        let gone = process.wait_gone("RabbitMQ", STOP_DEADLINE).await;
        if gone.is_err() {
            process.kill_tree("RabbitMQ", STOP_DEADLINE).await?;
        }
        gone
    }

    /// Kills the server, as the loss of power would.
    ///
    /// # Errors
    ///
    /// It was still there at the deadline.
    pub async fn kill(&self) -> Result<()> {
        self.load()?.process.kill_tree("RabbitMQ", STOP_DEADLINE).await
    }

    /// Starts the server again, on its data and its ports; does nothing if it runs.
    ///
    /// # Errors
    ///
    /// It did not accept connections within the deadline.
    pub async fn start(&self) -> Result<()> {
        let mut state = self.load()?;
        if !state.process.is_running() {
            state.process = self.launch(&state)?;
            self.state.save(&state)?;
        }
        self.wait_ready(state.process, &self.server(&state)?).await
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
        self.dir.with_extension("log")
    }

    fn load(&self) -> Result<State> {
        self.state.load().context("no private RabbitMQ was started here")
    }

    /// Whether a server runs here, or ever did since the last [`destroy`](Self::destroy).
    pub(super) fn left_anything(&self) -> bool {
        self.state.exists() || self.dir.exists() || !orphans("beam.smp", &self.dir).is_empty()
    }

    /// Ends the server, if one runs, and removes all that it left. The log stays.
    ///
    /// It is killed: to end in order takes it up to half a minute, for the sake of data that goes.
    pub(super) async fn destroy(&self) -> Result<()> {
        let known = self.state.load::<State>().map(|state| state.process);
        for process in known.into_iter().chain(orphans("beam.smp", &self.dir)) {
            process.kill_tree("RabbitMQ", STOP_DEADLINE).await?;
        }
        self.state.remove()?;
        remove_dir(&self.dir)
    }
}

/// Marks the server's processes in their environment, so that they are found without a state file.
const FOLDER: &str = "SEMEL_SERVICE_FOLDER";

fn is_taken_port(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("eaddrinuse")
}

/// The settings that differ from the defaults.
///
/// The alarms are out of the way: a full disk or a busy machine is no subject of a test by accident.
/// Counts are reported every half second instead of every five, so that tests see them soon.
fn settings(state: &State) -> String {
    let (amqp_port, management_port) = (state.amqp_port, state.management_port);
    format!(
        "\
listeners.tcp.1 = 127.0.0.1:{amqp_port}
management.tcp.ip = 127.0.0.1
management.tcp.port = {management_port}
disk_free_limit.absolute = 1MB
vm_memory_high_watermark.relative = 0.8
collect_statistics_interval = 500
log.console = true
log.console.level = info
"
    )
}
