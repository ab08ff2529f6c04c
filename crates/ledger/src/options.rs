//! The ledger's options, and the configuration that they become.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use semel_consumer_kit::BrokerUrl;
use semel_consumer_kit::command::{DeadCommand, ParkedCommand};
use semel_core::database::DatabaseUrl;
use semel_core::derive::Namespace;
use semel_core::grants::Role;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, secret};

/// Books every placed order and every payment in a double-entry ledger, in a database of its own, exactly once.
#[derive(Parser)]
#[command(name = "semel-ledger", version, subcommand_negates_reqs = true)]
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
    /// Name of this deployment, part of every derived id: staging and production must differ.
    #[arg(long, env = "SEMEL_NAMESPACE", required = true, value_name = "NAME")]
    namespace: Option<Namespace>,
    /// Topic exchange that events come from.
    #[arg(long, env = "SEMEL_EXCHANGE", default_value = "semel.events", value_name = "NAME")]
    exchange: String,
    /// Queue to consume; its dead letters are in the queue of that name with ".dead" appended.
    #[arg(long, env = "SEMEL_LEDGER_QUEUE", default_value = "ledger.bookings", value_name = "NAME")]
    pub(crate) queue: String,
    /// What is done about exchange and queues at start.
    #[arg(long, env = "SEMEL_TOPOLOGY", default_value = "declare", value_name = "MODE")]
    topology: TopologyMode,
    /// Messages that the broker sends ahead.
    #[arg(long, env = "SEMEL_LEDGER_PREFETCH", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "COUNT")]
    prefetch: u16,
    /// Transactions at once, each with a database connection.
    #[arg(long, env = "SEMEL_LEDGER_CONCURRENCY", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=200), value_name = "COUNT")]
    concurrency: u16,
    /// Messages booked in one transaction at most, of those that have arrived; 1 commits each by itself.
    #[arg(long, env = "SEMEL_LEDGER_BATCH", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=96), value_name = "COUNT")]
    batch: u16,
    /// In which order events are booked. It is a setting of the queue, which has to be made anew to change it.
    #[arg(long, env = "SEMEL_LEDGER_ORDERING", default_value = "none", value_name = "ORDER")]
    ordering: Ordering,
    /// Address of GET /balances, which shows every client's balances to anybody who asks; none unless given. Never expose it
    /// publicly.
    #[arg(long, env = "SEMEL_LEDGER_BALANCES_LISTEN", value_name = "ADDRESS")]
    pub(crate) balances_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the ledger's tables, and leave.
    Migrate,
    /// Grant a role of the database what this daemon needs, and leave; the owner of the tables does that.
    Grant {
        /// The role, which exists.
        role: Role,
        /// What a person with the commands `dead` and `parked` needs, instead.
        #[arg(long)]
        operator: bool,
    },
    /// Print the metrics that it emits, as rows of a table, and leave.
    Metrics,
    /// Dead letters: events that were given up on, and what a person decides about them.
    Dead(DeadCommand),
    /// Events that wait in the order of their aggregate, and what a person decides about them.
    Parked(ParkedCommand),
}

/// What is done about exchange and queues at start.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum TopologyMode {
    /// Make what is missing.
    Declare,
    /// Check that all is there with the right settings.
    Verify,
    /// Nothing.
    Off,
}

/// In which order events are booked. The books are the same in any.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Ordering {
    /// In none, by any number of processes at once.
    None,
    /// Those of an order or of a payment one after another, by one process at a time.
    Aggregate,
}

impl From<Ordering> for semel_consumer_kit::Ordering {
    fn from(ordering: Ordering) -> Self {
        match ordering {
            Ordering::None => Self::None,
            Ordering::Aggregate => Self::Aggregate,
        }
    }
}

impl From<TopologyMode> for semel_consumer_kit::TopologyMode {
    fn from(mode: TopologyMode) -> Self {
        match mode {
            TopologyMode::Declare => Self::Declare,
            TopologyMode::Verify => Self::Verify,
            TopologyMode::Off => Self::Off,
        }
    }
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
pub struct Config {
    /// The ledger's database.
    pub database: DatabaseUrl,
    /// The broker.
    pub broker: BrokerUrl,
    /// The deployment's name.
    pub namespace: Namespace,
    /// The exchange that events come from.
    pub exchange: String,
    /// The queue to consume.
    pub queue: String,
    /// What is done about them at start.
    pub topology: TopologyMode,
    /// Messages that the broker sends ahead.
    pub prefetch: u16,
    /// Transactions at once.
    pub concurrency: u16,
    /// Messages booked in one transaction at most.
    pub batch: u16,
    /// In which order events are booked.
    pub ordering: Ordering,
}

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        if self.concurrency > self.prefetch {
            return Err(unusable("--concurrency is more than --prefetch sends ahead"));
        }
        if self.batch > self.prefetch {
            return Err(unusable("--batch is more than --prefetch sends ahead"));
        }
        if self.batch > 1 && self.ordering == Ordering::Aggregate {
            return Err(unusable("--batch does not go together with --ordering aggregate"));
        }
        Ok(Config {
            database: self.database.url()?,
            broker: self.broker()?,
            namespace: self.namespace.clone().ok_or_else(|| unusable("--namespace is not set"))?,
            exchange: self.exchange.clone(),
            queue: self.queue.clone(),
            topology: self.topology,
            prefetch: self.prefetch,
            concurrency: self.concurrency,
            batch: self.batch,
            ordering: self.ordering,
        })
    }

    /// Checks where the broker is.
    ///
    /// # Errors
    ///
    /// It is not told, or not as it can be used.
    pub(crate) fn broker(&self) -> Result<BrokerUrl, OptionError> {
        let option = "--amqp-url";
        let broker = secret(option, "AMQP_URL", self.amqp_url.as_deref(), self.amqp_url_file.as_ref())?;
        let broker: BrokerUrl = broker.parse().map_err(|error| unusable(&format!("{option}: {error}")))?;
        if self.amqp_ca_file.is_none() {
            return Ok(broker);
        }
        let option = "--amqp-ca-file";
        let pem = secret(option, "AMQP_CA_FILE", None, self.amqp_ca_file.as_ref())?;
        broker.with_authorities(&pem).map_err(|error| unusable(&format!("{option}: {error}")))
    }
}

fn unusable(message: &str) -> OptionError {
    OptionError::Combination(message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: [&str; 7] = [
        "semel-ledger",
        "--database-url",
        "postgres://u:s3cret@h/d",
        "--amqp-url",
        "amqp://u:s3cret@h",
        "--namespace",
        "test",
    ];

    fn parsed(more: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from(GIVEN.iter().chain(more))
    }

    #[test]
    fn the_defaults_name_exchange_and_queue() {
        let config = parsed(&[]).unwrap().config().unwrap();
        assert_eq!((config.exchange.as_str(), config.queue.as_str()), ("semel.events", "ledger.bookings"));
        assert!(!format!("{config:?}").contains("s3cret"));
    }

    #[test]
    fn a_namespace_is_needed_to_run_and_not_to_migrate() {
        assert!(Options::try_parse_from(&GIVEN[..5]).is_err());
        assert!(Options::try_parse_from(GIVEN[..3].iter().chain(&["migrate"])).is_ok());
        assert!(Options::try_parse_from(GIVEN[..6].iter().chain(&["Not A Name"])).is_err());
    }

    #[test]
    fn refuses_values_that_do_not_go_together() {
        let error = parsed(&["--prefetch", "4"]).unwrap().config().unwrap_err();
        assert!(error.to_string().contains("--prefetch"), "{error}");
        let error = parsed(&["--batch", "33"]).unwrap().config().unwrap_err();
        assert!(error.to_string().contains("--batch"), "{error}");
        let ordered = ["--batch", "2", "--ordering", "aggregate"];
        let error = parsed(&ordered).unwrap().config().unwrap_err();
        assert!(error.to_string().contains("--ordering aggregate"), "{error}");
        assert!(parsed(&ordered[2..]).unwrap().config().is_ok());
        assert!(parsed(&["--prefetch", "0"]).is_err());
    }
}
