//! The relay's options, and the configuration that they become.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use semel_broker::BrokerUrl;
use semel_core::database::DatabaseUrl;
use semel_core::grants::Role;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, secret, text};
use semel_core::outbox::held::Policy;
use semel_core::outbox::operator::{Filter, State};
use uuid::Uuid;

use crate::routing::RoutingKey;

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
    /// Routing key of an event: text, and in braces its `aggregate_type` and its `event_type`.
    #[arg(
        long,
        env = "SEMEL_ROUTING_KEY",
        default_value = "{aggregate_type}.{event_type}",
        value_name = "TEMPLATE"
    )]
    routing_key: RoutingKey,
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
    #[arg(long, env = "SEMEL_RELAY_BATCH", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=5000), value_name = "EVENTS")]
    batch: u32,
    /// Seconds after which a batch sends nothing more.
    #[arg(long, env = "SEMEL_RELAY_BATCH_SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=300), value_name = "SECONDS")]
    batch_seconds: u64,
    /// Seconds that the broker's confirms may take. Together with those of a batch well below the server's
    /// `idle_in_transaction_session_timeout`, which is 30 s.
    #[arg(long, env = "SEMEL_RELAY_CONFIRM_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=300), value_name = "SECONDS")]
    confirm_seconds: u64,
    /// Postgres URL to listen for hints at, where the other one leads through a pooler.
    #[arg(long, env = "SEMEL_RELAY_LISTEN_URL", hide_env_values = true, value_name = "URL")]
    listen_url: Option<String>,
    /// File that holds it.
    #[arg(long, env = "SEMEL_RELAY_LISTEN_URL_FILE", value_name = "PATH")]
    listen_url_file: Option<PathBuf>,
    /// Failed attempts after which an event is dead and waits for a person.
    #[arg(long, env = "SEMEL_RELAY_MAX_ATTEMPTS", default_value_t = 10, value_parser = clap::value_parser!(i32).range(1..=1000), value_name = "COUNT")]
    max_attempts: i32,
    /// Types of events, separated by commas, whose dead ones are skipped: later events of the aggregate go past them. By
    /// default they wait behind.
    #[arg(long, env = "SEMEL_RELAY_SKIP_DEAD", value_delimiter = ',', value_parser = text::<127>, value_name = "EVENT_TYPES")]
    skip_dead: Vec<String>,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

/// How long an event waits after its first failure; the wait doubles with each.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// How long it waits at most.
const LONGEST_RETRY: Duration = Duration::from_mins(5);

/// What a batch may take once it has waited for confirms: a look whether the broker still answers (3 s), and the mark.
const AFTERWARDS: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the outbox's tables, and leave.
    Migrate,
    /// Grant a role of the database what this daemon needs, and leave; the owner of the tables does that.
    Grant {
        /// The role, which exists.
        role: Role,
        /// What a person with the command `events` needs, instead.
        #[arg(long)]
        operator: bool,
    },
    /// Print the metrics that it emits, as rows of a table, and leave.
    Metrics,
    /// Events that could not be published: set aside, waiting behind such a one, or dead.
    Events(EventsCommand),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct EventsCommand {
    #[command(subcommand)]
    pub(crate) action: EventsAction,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum EventsAction {
    /// List events that are set aside, by aggregate and in their order.
    List {
        #[command(flatten)]
        filter: FilterOptions,
        /// Most events to list.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000), value_name = "COUNT")]
        limit: i64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show an event, but for its payload and headers.
    Show {
        /// The event's id.
        event_id: Uuid,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Try events again, at once and as if they had never failed. Leaves an audit entry for each.
    Retry(Decide),
    /// Never send events; their aggregates' later events go on. Leaves an audit entry for each.
    Discard(Decide),
}

/// Which events are meant. Unless states are named, or one event is, a decision is about those that failed, dead or not.
#[derive(Args, Clone, Debug)]
pub(crate) struct FilterOptions {
    /// Of aggregates of this type.
    #[arg(long, value_name = "NAME")]
    aggregate_type: Option<String>,
    /// Of the aggregate of this id.
    #[arg(long, value_name = "ID")]
    aggregate_id: Option<String>,
    /// Of this type.
    #[arg(long, value_name = "NAME")]
    event_type: Option<String>,
    /// In one of these states.
    #[arg(long, value_delimiter = ',', value_name = "STATES")]
    state: Vec<StateOption>,
    /// Set aside for longer than this, such as 90s, 15m, 6h or 2d.
    #[arg(long, value_parser = age, value_name = "AGE")]
    older_than: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum StateOption {
    /// Failed, and tried again.
    Held,
    /// Never failed, but behind one that did.
    Waiting,
    /// Given up on.
    Dead,
}

impl FilterOptions {
    /// Returns the filter, with these states where none is named.
    pub(crate) fn filter(&self, states: &[State]) -> Filter {
        let named = self.state.iter().map(|state| match state {
            StateOption::Held => State::Held,
            StateOption::Waiting => State::Waiting,
            StateOption::Dead => State::Dead,
        });
        Filter {
            states: if self.state.is_empty() { states.to_vec() } else { named.collect() },
            aggregate_type: self.aggregate_type.clone(),
            aggregate_id: self.aggregate_id.clone(),
            event_type: self.event_type.clone(),
            older_than: self.older_than,
        }
    }
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args([
    "event_id", "aggregate_type", "aggregate_id", "event_type", "state", "older_than", "all",
]))]
pub(crate) struct Decide {
    /// The event's id.
    #[arg(conflicts_with_all = ["aggregate_type", "aggregate_id", "event_type", "state", "older_than", "all"])]
    pub(crate) event_id: Option<Uuid>,
    #[command(flatten)]
    pub(crate) filter: FilterOptions,
    /// All events that failed.
    #[arg(long, conflicts_with_all = ["aggregate_type", "aggregate_id", "event_type", "state", "older_than"])]
    all: bool,
    /// Say which events it would be, and change nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Why you decide so.
    #[arg(long, value_parser = text::<4096>, required_unless_present = "dry_run", value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Who decides.
    #[arg(long, env = "USER", value_parser = text::<255>, required_unless_present = "dry_run", value_name = "NAME")]
    pub(crate) actor: Option<String>,
    /// Seconds to wait for a relay that is working on the events' lane.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600), value_name = "SECONDS")]
    pub(crate) wait: u64,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Reads a number with its unit.
fn age(text: &str) -> Result<Duration, String> {
    let seconds = ["s", "m", "h", "d"].iter().zip([1, 60, 3600, 86_400]).find_map(|(unit, seconds)| {
        text.strip_suffix(unit)?.parse::<u32>().ok().map(|count| u64::from(count) * seconds)
    });
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| "must be a number and s, m, h or d, such as 15m".to_owned())
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
    /// How an event's routing key is made.
    pub routing_key: RoutingKey,
    /// What is done about the exchange at start.
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
    /// What becomes of events that cannot be published.
    pub held: Policy,
}

impl Config {
    /// How long a batch may take from the moment it begins to publish to its commit.
    #[must_use]
    pub fn longest_batch(&self) -> Duration {
        self.batch_time + self.confirm_limit + AFTERWARDS
    }
}

/// The longest batch that may be asked for: liveness takes a loop that has not turned for two minutes for dead.
const LONGEST_BATCH: Duration = Duration::from_secs(100);

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
        let config = Config {
            listen: self.listen_url()?.unwrap_or_else(|| database.clone()),
            database,
            broker,
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            topology: self.topology,
            source: self.source.clone(),
            workers: self.workers,
            batch: self.batch,
            batch_bytes: 8 * 1024 * 1024,
            batch_time: Duration::from_secs(self.batch_seconds),
            confirm_limit: Duration::from_secs(self.confirm_seconds),
            held: Policy {
                shortest: FIRST_RETRY,
                longest: LONGEST_RETRY,
                max_attempts: self.max_attempts,
                skip_dead: self.skip_dead.clone(),
            },
        };
        if config.longest_batch() > LONGEST_BATCH {
            return Err(OptionError::Combination(format!(
                "--batch-seconds and --confirm-seconds: a batch might take {} s, and one of more than {} s would be taken for a \
                 loop that stands still",
                config.longest_batch().as_secs(),
                LONGEST_BATCH.as_secs()
            )));
        }
        Ok(config)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(more: &str) -> Result<Options, clap::Error> {
        let given =
            ["semel-relay", "--database-url", "postgres://u:s3cret@h/d", "--amqp-url", "amqp://g:g@h"];
        Options::try_parse_from(given.into_iter().chain(more.split_whitespace()))
    }

    #[test]
    fn the_types_that_are_skipped_are_listed_by_commas() {
        let config = parsed("--skip-dead OrderNoted,ThingHappened").unwrap().config().unwrap();
        assert_eq!(config.held.skip_dead, ["OrderNoted", "ThingHappened"]);
        assert!(parsed("").unwrap().config().unwrap().held.skip_dead.is_empty());
        assert!(parsed("--skip-dead OrderNoted,,ThingHappened").is_err());
        assert!(parsed("--max-attempts 0").is_err());
    }

    #[test]
    fn a_batch_that_liveness_would_take_for_dead_is_refused() {
        let checked = |more: &str| parsed(more).unwrap().config();
        assert!(checked("--batch-seconds 60 --confirm-seconds 35").is_ok());
        let error = checked("--batch-seconds 60 --confirm-seconds 60").unwrap_err().to_string();
        assert!(error.contains("--batch-seconds"), "{error}");
    }

    #[test]
    fn ages_have_units() {
        assert_eq!(age("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(age("2d"), Ok(Duration::from_hours(48)));
        for bad in ["", "s", "90", "-1s", "1.5h", "90 s"] {
            assert!(age(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_decision_names_its_events_and_its_reason() {
        let id = Uuid::nil();
        for good in [
            format!("events retry {id} --reason r --actor a"),
            "events discard --event-type A --older-than 1h --reason r --actor a".to_owned(),
            "events retry --all --reason r --actor a".to_owned(),
            "events retry --all --dry-run".to_owned(),
        ] {
            assert!(parsed(&good).is_ok(), "{good}");
        }
        for bad in [
            format!("events retry {id} --actor a"),
            format!("events retry {id} --all --reason r --actor a"),
            "events discard --reason r --actor a".to_owned(),
            "events discard --all --event-type A --reason r --actor a".to_owned(),
        ] {
            assert!(parsed(&bad).is_err(), "{bad}");
        }
    }
}
