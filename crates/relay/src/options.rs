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
    /// RabbitMQ URL: <amqp://user:password@host:5672/vhost>.
    #[arg(long, env = "AMQP_URL", hide_env_values = true, value_name = "URL")]
    amqp_url: Option<String>,
    /// File that holds the RabbitMQ URL.
    #[arg(long, env = "AMQP_URL_FILE", value_name = "PATH")]
    amqp_url_file: Option<PathBuf>,
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
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

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

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        let option = "--amqp-url";
        let broker = secret(option, "AMQP_URL", self.amqp_url.as_deref(), self.amqp_url_file.as_ref())?;
        if self.exchange.is_empty()
            || self.exchange.len() > 255
            || self.source.is_empty()
            || self.source.len() > 255
        {
            let message = "--exchange and --source: each is a name of 1 to 255 bytes".to_owned();
            return Err(OptionError::Combination(message));
        }
        Ok(Config {
            database: self.database.url()?,
            broker: broker.parse().map_err(|error| OptionError::Combination(format!("{option}: {error}")))?,
            exchange: self.exchange.clone(),
            topology: self.topology,
            source: self.source.clone(),
            workers: self.workers,
            batch: self.batch,
            batch_bytes: 8 * 1024 * 1024,
            // Together with the mark, well below the server's idle_in_transaction_session_timeout of 30 s: a batch that
            // outlived it would be rolled back and repeated for ever.
            batch_time: Duration::from_secs(5),
            confirm_limit: Duration::from_secs(15),
        })
    }
}
