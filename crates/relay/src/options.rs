//! The relay's options, and the configuration that they become.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use semel_broker::BrokerUrl;
use semel_core::database::DatabaseUrl;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, secret};

/// Drains the outbox of one database to RabbitMQ: at least once, in order per aggregate, beside any number of others.
#[derive(Parser)]
#[command(name = "semel-relay", version)]
pub struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) database: DatabaseOptions,
    /// RabbitMQ URL: <amqp://user:password@host:5672/vhost>; several of one cluster, separated by commas, are tried in turn.
    #[arg(long, env = "AMQP_URL", hide_env_values = true, value_name = "URL")]
    amqp_url: Option<String>,
    /// File that holds the RabbitMQ URL.
    #[arg(long, env = "AMQP_URL_FILE", value_name = "PATH")]
    amqp_url_file: Option<PathBuf>,
    /// File with certificates (PEM) of authorities that an amqps:// broker may be certified by, beside the machine's.
    #[arg(long, env = "AMQP_CA_FILE", value_name = "PATH")]
    amqp_ca_file: Option<PathBuf>,
    /// Topic exchange that events are published to.
    #[arg(long, env = "SEMEL_EXCHANGE", default_value = "semel.events", value_name = "NAME")]
    exchange: String,
    /// Whether the exchange is made at start, or somebody else's business.
    #[arg(long, env = "SEMEL_TOPOLOGY", default_value = "declare", value_name = "MODE")]
    topology: TopologyMode,
    /// Name that messages carry as their source.
    #[arg(long, env = "SEMEL_SOURCE", default_value = "semel", value_name = "NAME")]
    source: String,
    /// Workers, each with a database and a broker connection of its own.
    #[arg(long, env = "SEMEL_RELAY_WORKERS", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "COUNT")]
    workers: u16,
    /// Most events of one batch.
    #[arg(long, env = "SEMEL_RELAY_BATCH", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=5000), value_name = "EVENTS")]
    batch: u32,
    /// Seconds after which a batch sends nothing more.
    #[arg(long, env = "SEMEL_RELAY_BATCH_SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=300), value_name = "SECONDS")]
    batch_seconds: u64,
    /// Seconds that the broker's confirms may take. Together with those of a batch well below the server's
    /// idle_in_transaction_session_timeout, which is 30 s.
    #[arg(long, env = "SEMEL_RELAY_CONFIRM_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=300), value_name = "SECONDS")]
    confirm_seconds: u64,
    /// Postgres URL to listen for hints at, where the other one leads through a pooler.
    #[arg(long, env = "SEMEL_RELAY_LISTEN_URL", hide_env_values = true, value_name = "URL")]
    listen_url: Option<String>,
    /// File that holds it.
    #[arg(long, env = "SEMEL_RELAY_LISTEN_URL_FILE", value_name = "PATH")]
    listen_url_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

/// What is left to a batch for marking, once it has published.
const MARK_TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the outbox's tables, and leave.
    Migrate,
}

/// What is done about the exchange at start.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum TopologyMode {
    /// Make it where it is missing.
    Declare,
    /// Make nothing, but check that it is there: publishing to one that is not costs the whole wave its confirms.
    #[value(alias = "off")]
    Verify,
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
pub struct Config {
    /// The database whose outbox is drained.
    pub database: DatabaseUrl,
    /// Where hints are listened for.
    pub listen: DatabaseUrl,
    /// The broker.
    pub broker: BrokerUrl,
    /// The exchange.
    pub exchange: String,
    /// What is done about it at start.
    pub topology: TopologyMode,
    /// What messages carry as their source.
    pub source: String,
    /// How many workers.
    pub workers: u16,
    /// Most events of one batch.
    pub batch: u32,
    /// Most bytes of payload of one batch, but for one event per lane.
    pub batch_bytes: u32,
    /// After this a batch sends nothing more.
    pub batch_time: Duration,
    /// How long a wave's confirms may take.
    pub confirm_limit: Duration,
}

impl Config {
    /// How long a batch may take from its last statement before it publishes to its commit.
    #[must_use]
    pub fn longest_batch(&self) -> Duration {
        self.batch_time + self.confirm_limit + MARK_TIME
    }
}

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        let option = "--amqp-url";
        let broker = secret(option, "AMQP_URL", self.amqp_url.as_deref(), self.amqp_url_file.as_ref())?;
        let mut broker: BrokerUrl =
            broker.parse().map_err(|error| OptionError::Combination(format!("{option}: {error}")))?;
        if self.amqp_ca_file.is_some() {
            let option = "--amqp-ca-file";
            let pem = secret(option, "AMQP_CA_FILE", None, self.amqp_ca_file.as_ref())?;
            broker = broker
                .with_authorities(&pem)
                .map_err(|error| OptionError::Combination(format!("{option}: {error}")))?;
        }
        if self.exchange.is_empty()
            || self.exchange.len() > 255
            || self.source.is_empty()
            || self.source.len() > 255
        {
            let message = "--exchange and --source: each is a name of 1 to 255 bytes".to_owned();
            return Err(OptionError::Combination(message));
        }
        let database = self.database.url()?;
        Ok(Config {
            listen: self.listen_url()?.unwrap_or_else(|| database.clone()),
            database,
            broker,
            exchange: self.exchange.clone(),
            topology: self.topology,
            source: self.source.clone(),
            workers: self.workers,
            batch: self.batch,
            batch_bytes: 8 * 1024 * 1024,
            batch_time: Duration::from_secs(self.batch_seconds),
            confirm_limit: Duration::from_secs(self.confirm_seconds),
        })
    }

    fn listen_url(&self) -> Result<Option<DatabaseUrl>, OptionError> {
        let (option, env) = ("--listen-url", "SEMEL_RELAY_LISTEN_URL");
        if self.listen_url.is_none() && self.listen_url_file.is_none() {
            return Ok(None);
        }
        let text = secret(option, env, self.listen_url.as_deref(), self.listen_url_file.as_ref())?;
        text.parse().map(Some).map_err(|source| OptionError::DatabaseUrl { option, source })
    }
}
