//! A RabbitMQ of our own.
//!
//! It listens on 127.0.0.1 only, with a node name, a cookie and folders of its own, beside whatever
//! else runs on the machine. Only the port mapper of Erlang, epmd, is shared: it is started if none
//! runs, and stays.

use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use reqwest::Url;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::RabbitMq;
use crate::net::free_port;
use crate::pid::ProcessId;
use crate::services::launch::{Launch, orphans, tail};
use crate::services::management::Management;
use crate::services::place::{Place, StateFile, remove_dir};
use crate::wait::eventually;

const NAME: &str = "rabbitmq";
const START_DEADLINE: Duration = Duration::from_mins(2);
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// How long the control program may take.
const CONTROL_DEADLINE: Duration = Duration::from_mins(1);
/// How long one look at a starting server may take.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);
/// How often a start is tried with other ports.
const START_TRIES: usize = 3;
/// Marks the server's processes in their environment, so that they are found without a state file.
const FOLDER: &str = "SEMEL_SERVICE_FOLDER";

/// What is remembered of a private RabbitMQ that runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    process: ProcessId,
    script: PathBuf,
    amqp_port: u16,
    tls_port: u16,
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
    pub(in crate::services) fn at(place: &Place) -> Self {
        Self { dir: place.server(NAME), state: place.state(NAME) }
    }

    /// The server as it is known to run, whether or not it answers.
    pub(in crate::services) fn known(&self) -> Option<RabbitMq> {
        let state: State = self.state.load()?;
        (state.ready && state.process.is_running()).then(|| self.server(&state)).transpose().ok()?
    }

    /// The server of a state file, running or not.
    pub(in crate::services) fn remembered(&self) -> Result<RabbitMq> {
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
    pub(in crate::services) async fn create(&self, script: &Path) -> Result<RabbitMq> {
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
        let ports = (free_port()?, free_port()?, free_port()?, free_port()?);
        let (amqp_port, tls_port, management_port, distribution_port) = ports;
        certify(&self.dir)?;
        let me = std::process::id().try_into().context("a process id is 31 bits")?;
        let process = ProcessId::of(me).context("this process is not in /proc")?;
        let script = script.to_path_buf();
        let mut state =
            State { process, script, amqp_port, tls_port, management_port, distribution_port, ready: false };
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
        write("rabbitmq.conf", &settings(state, &self.dir))?;
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
                // Whoever else has the port may accept and say nothing.
                let check = tokio::time::timeout(LOOK_DEADLINE, server.check()).await;
                check.context("no answer to a look")?.map(Ok)
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

    /// Runs the server's own control program, `rabbitmqctl`, and returns what it says.
    ///
    /// # Errors
    ///
    /// It is not there, fails, or does not end in time.
    pub async fn control(&self, args: &[&str]) -> Result<String> {
        let state = self.load()?;
        let mut command = tokio::process::Command::new(state.script.with_file_name("rabbitmqctl"));
        command
            .env("HOME", &self.dir)
            .env("RABBITMQ_CONF_ENV_FILE", self.dir.join("environment"))
            .env("RABBITMQ_NODENAME", format!("semel{}@localhost", state.amqp_port))
            .args(args)
            .kill_on_drop(true);
        let output = tokio::time::timeout(CONTROL_DEADLINE, command.output());
        let output = output.await.context("rabbitmqctl does not end")?.context("running rabbitmqctl")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        anyhow::ensure!(
            output.status.success(),
            "rabbitmqctl {args:?}: {}{said}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(said)
    }

    /// The server's process.
    ///
    /// # Errors
    ///
    /// The server was never started or has been removed.
    pub fn process(&self) -> Result<ProcessId> {
        Ok(self.load()?.process)
    }

    /// A URL like that of a virtual host, over TLS.
    ///
    /// # Errors
    ///
    /// The server was never started or has been removed.
    pub fn over_tls(&self, url: &str) -> Result<String> {
        let mut url = Url::parse(&url.replacen("amqp://", "amqps://", 1))?;
        // The name that its certificate is for.
        url.set_host(Some("localhost")).context("a constant host")?;
        url.set_port(Some(self.load()?.tls_port)).ok().context("a port in the URL")?;
        Ok(url.into())
    }

    /// The file with the certificate of the authority that certifies it.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.dir.join("authority.pem")
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
    pub(in crate::services) fn left_anything(&self) -> bool {
        self.state.exists() || self.dir.exists() || !orphans("beam.smp", &self.dir).is_empty()
    }

    /// Ends the server, if one runs, and removes all that it left. The log stays.
    ///
    /// It is killed: to end in order takes it up to half a minute, for the sake of data that goes.
    pub(in crate::services) async fn destroy(&self) -> Result<()> {
        let known = self.state.load::<State>().map(|state| state.process);
        for process in known.into_iter().chain(orphans("beam.smp", &self.dir)) {
            process.kill_tree("RabbitMQ", STOP_DEADLINE).await?;
        }
        self.state.remove()?;
        remove_dir(&self.dir)
    }
}

/// Makes an authority, and a certificate of it for the server as `localhost`.
fn certify(dir: &Path) -> Result<()> {
    let key = rcgen::KeyPair::generate()?;
    let mut about = rcgen::CertificateParams::new(Vec::new())?;
    about.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = about.self_signed(&key)?;
    let issuer = rcgen::Issuer::new(about, key);
    let server_key = rcgen::KeyPair::generate()?;
    let server =
        rcgen::CertificateParams::new(vec!["localhost".to_owned()])?.signed_by(&server_key, &issuer)?;
    for (file, pem) in [
        ("authority.pem", authority.pem()),
        ("server.pem", server.pem()),
        ("server.key", server_key.serialize_pem()),
    ] {
        let path = dir.join(file);
        fs::write(&path, pem).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn is_taken_port(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("eaddrinuse")
}

/// The settings that differ from the defaults.
///
/// The alarms are out of the way: a full disk or a busy machine is no subject of a test by accident.
/// Counts are reported every half second instead of every five, so that tests see them soon.
fn settings(state: &State, dir: &Path) -> String {
    let (amqp_port, tls_port, management_port) = (state.amqp_port, state.tls_port, state.management_port);
    let dir = dir.display();
    format!(
        "\
listeners.tcp.1 = 127.0.0.1:{amqp_port}
listeners.ssl.1 = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {dir}/authority.pem
ssl_options.certfile = {dir}/server.pem
ssl_options.keyfile = {dir}/server.key
ssl_options.verify = verify_none
ssl_options.fail_if_no_peer_cert = false
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
