//! The reaper's options, and the configuration that they become.

use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use semel_core::database::DatabaseUrl;
use semel_core::derive::Namespace;
use semel_core::grants::Role;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, text};
use semel_payments::options::{ProviderConfig, ProviderOptions};
use semel_payments::problem::ProblemBase;
use uuid::Uuid;

/// How long after its publication an event may still be delivered once more: the age at which a dead letter is given up.
const LONGEST_REDELIVERY_HOURS: u64 = 7 * 24;

/// Deletes what is past its retention, drives payments on whose owner is gone, and reports how the database stands. One per
/// database; several do no harm.
#[derive(Parser)]
#[command(name = "semel-reaper", version)]
pub struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) database: DatabaseOptions,
    // Not above a minute: a loop that does not turn for two is taken for dead.
    /// Seconds between passes that find nothing.
    #[arg(long, env = "SEMEL_REAPER_PERIOD", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60), value_name = "SECONDS")]
    period: u64,
    /// Most rows that one pass deletes, of each kind.
    #[arg(long, env = "SEMEL_REAPER_BATCH", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000), value_name = "ROWS")]
    batch: u32,
    /// Hours for which an event is kept that was published, or discarded by a person.
    #[arg(long, env = "SEMEL_REAPER_EVENT_RETENTION_HOURS", default_value_t = 168, value_parser = clap::value_parser!(u64).range(1..=87_600), value_name = "HOURS")]
    event_retention_hours: u64,
    /// Hours for which a consumer remembers an event that took effect; must exceed the events' retention and the longest
    /// redelivery, of seven days, together.
    #[arg(long, env = "SEMEL_REAPER_PROCESSED_RETENTION_HOURS", default_value_t = 720, value_parser = clap::value_parser!(u64).range(1..=87_600), value_name = "HOURS")]
    processed_retention_hours: u64,
    /// Days for which the provider's answers about settled payments and refunds are kept.
    #[arg(long, env = "SEMEL_REAPER_EVIDENCE_RETENTION_DAYS", default_value_t = 400, value_parser = clap::value_parser!(u64).range(1..=36_500), value_name = "DAYS")]
    evidence_retention_days: u64,
    /// Days for which it is kept what people did by command.
    #[arg(long, env = "SEMEL_REAPER_ACTION_RETENTION_DAYS", default_value_t = 400, value_parser = clap::value_parser!(u64).range(1..=36_500), value_name = "DAYS")]
    action_retention_days: u64,
    #[command(flatten)]
    provider: ProviderOptions,
    /// The deployment's name, as the API has it; needed with a provider, and to settle a payment or refund by hand.
    #[arg(long, env = "SEMEL_NAMESPACE", value_name = "NAME")]
    namespace: Option<Namespace>,
    /// Hours for which a completed key is replayed, as the API has it.
    #[arg(long, env = "SEMEL_API_KEY_RETENTION_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=8760), value_name = "HOURS")]
    key_retention_hours: u64,
    /// What the `type` of a problem begins with, as the API has it.
    #[arg(long, env = "SEMEL_API_PROBLEM_BASE_URL", default_value = ProblemBase::DEFAULT, value_name = "URL")]
    problem_base_url: ProblemBase,
    /// Seconds between readings of the provider's lists of charges and refunds, which are compared with ours.
    #[arg(long, env = "SEMEL_REAPER_AUDIT_PERIOD", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    audit_period: u64,
    /// Hours that each reading goes back; 0 reads none, as it must be where others charge through the same account.
    #[arg(long, env = "SEMEL_REAPER_AUDIT_LOOK_BACK_HOURS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(0..=8760), value_name = "HOURS")]
    audit_look_back_hours: u64,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the engine's tables, and with a provider those of payments, and leave.
    Migrate,
    /// Grant a role of the database what this daemon needs, and leave; the owner of the tables does that.
    Grant {
        /// The role, which exists.
        role: Role,
        /// What it needs with a provider, too.
        #[arg(long)]
        with_payments: bool,
        /// What a person with the command `keys` needs, instead.
        #[arg(long, conflicts_with = "with_payments")]
        operator: bool,
    },
    /// Print the metrics that it emits, as rows of a table, and leave.
    Metrics,
    /// Payments and refunds that wait for a person.
    Keys(KeysCommand),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KeysCommand {
    #[command(subcommand)]
    pub(crate) action: KeysAction,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum KeysAction {
    /// List the keys that wait for a person, those that wait longest first.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Most keys to list.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000), value_name = "COUNT")]
        limit: i64,
    },
    /// Show a payment or refund, its key and what the provider said.
    Show {
        /// The payment's or refund's id.
        id: Uuid,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Settle a payment or refund that waits for a person, as was found out about it. Leaves an audit entry.
    Resolve(Resolve),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Resolve {
    /// The payment's or refund's id.
    pub(crate) id: Uuid,
    /// What became of it.
    #[arg(long = "as", value_name = "OUTCOME")]
    pub(crate) outcome: Outcome,
    /// The provider's own name for the charge or refund.
    #[arg(long, required_if_eq_any([("outcome", "charged"), ("outcome", "refunded")]), value_parser = text::<255>, value_name = "REFERENCE")]
    pub(crate) provider_reference: Option<String>,
    /// Why the provider declined the charge, or did not make the refund.
    #[arg(long, required_if_eq_any([("outcome", "declined"), ("outcome", "refund-failed")]), value_parser = text::<63>, value_name = "CODE")]
    pub(crate) code: Option<String>,
    /// Why you decide so: what you have found out, and where.
    #[arg(long, value_parser = text::<4096>, value_name = "TEXT")]
    pub(crate) reason: String,
    /// Who decides.
    #[arg(long, env = "USER", value_parser = text::<255>, value_name = "NAME")]
    pub(crate) actor: String,
    /// You have made sure at the provider that no charge or refund with this key can succeed any more. Nothing here can do
    /// or check that.
    #[arg(long)]
    pub(crate) i_have_fenced_it: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Outcome {
    /// The money has moved.
    Charged,
    /// The provider declined; no money has moved.
    Declined,
    /// No money has moved, and none can.
    NotCharged,
    /// Of a refund: the money was given back.
    Refunded,
    /// Of a refund: no money was given back, and none can be.
    RefundFailed,
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
pub struct Config {
    /// The database.
    pub database: DatabaseUrl,
    /// The wait between passes that find nothing.
    pub period: Duration,
    /// Most rows that one pass deletes.
    pub batch: u32,
    /// For how long published and discarded events are kept.
    pub events: Duration,
    /// For how long it is remembered which events took effect.
    pub processed: Duration,
    /// For how long the provider's answers are kept.
    pub evidence: Duration,
    /// For how long it is kept what people did.
    pub actions: Duration,
    /// What payments are recovered and audited with; without a provider they are not.
    pub payments: Option<Payments>,
}

/// What payments are recovered and audited with.
#[derive(Clone, Debug)]
pub struct Payments {
    /// The provider.
    pub provider: ProviderConfig,
    /// How they are settled.
    pub settling: Settling,
    /// The wait between two audits.
    pub audit_period: Duration,
    /// How far an audit goes back; none where there is no audit.
    pub audit_look_back: Option<Duration>,
}

/// How payments are settled.
#[derive(Clone, Debug)]
pub struct Settling {
    /// The deployment.
    pub namespace: Namespace,
    /// For how long a completed key is replayed.
    pub key_retention: Duration,
    /// What the `type` of a problem begins with.
    pub problems: ProblemBase,
}

impl Options {
    /// Returns the provider that is configured, if one is.
    pub(crate) fn provider_config(&self) -> Result<Option<ProviderConfig>, OptionError> {
        self.provider.config()
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The first option, or combination, that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        let longest = self.event_retention_hours + LONGEST_REDELIVERY_HOURS;
        if self.processed_retention_hours <= longest {
            return Err(OptionError::Combination(format!(
                "--processed-retention-hours {} must exceed --event-retention-hours {} and the longest redelivery, of \
                 {LONGEST_REDELIVERY_HOURS} hours, together: an event that is delivered later takes effect twice",
                self.processed_retention_hours, self.event_retention_hours
            )));
        }
        let payments = match self.provider.config()? {
            None => None,
            Some(provider) => Some(Payments {
                provider,
                settling: self.settling()?,
                audit_period: Duration::from_secs(self.audit_period),
                audit_look_back: Some(self.audit_look_back_hours)
                    .filter(|&hours| hours > 0)
                    .map(Duration::from_hours),
            }),
        };
        Ok(Config {
            database: self.database.url()?,
            period: Duration::from_secs(self.period),
            batch: self.batch,
            events: Duration::from_hours(self.event_retention_hours),
            processed: Duration::from_hours(self.processed_retention_hours),
            evidence: Duration::from_hours(self.evidence_retention_days * 24),
            actions: Duration::from_hours(self.action_retention_days * 24),
            payments,
        })
    }

    /// Checks what a payment is settled with.
    ///
    /// # Errors
    ///
    /// When the deployment has no name.
    pub(crate) fn settling(&self) -> Result<Settling, OptionError> {
        let unset = OptionError::Unset { option: "--namespace", env: "SEMEL_NAMESPACE" };
        Ok(Settling {
            namespace: self.namespace.clone().ok_or(unset)?,
            key_retention: Duration::from_hours(self.key_retention_hours),
            problems: self.problem_base_url.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(more: &str) -> Result<Options, clap::Error> {
        let given = ["semel-reaper", "--database-url", "postgres://u:s3cret@h/d"];
        Options::try_parse_from(given.into_iter().chain(more.split_whitespace()))
    }

    fn refused(more: &str) -> String {
        match parsed(more) {
            Ok(options) => options.config().expect_err(more).to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn without_a_provider_nothing_about_payments_is_needed() {
        assert!(parsed("").unwrap().config().unwrap().payments.is_none());
    }

    #[test]
    fn a_provider_needs_the_deployments_name() {
        assert!(refused("--provider-url http://p:1").contains("--namespace"));
        let config = parsed("--provider-url http://p:1 --namespace n").unwrap().config().unwrap();
        assert_eq!(config.payments.unwrap().audit_look_back, Some(Duration::from_hours(2)));
    }

    #[test]
    fn refuses_by_name_what_is_not_safe() {
        for (given, named) in [
            ("--event-retention-hours 0", "--event-retention-hours"),
            ("--key-retention-hours 0", "--key-retention-hours"),
            ("--period 61", "--period"),
            ("--provider-horizon-hours 1 --send-window-seconds 3600", "--send-window-seconds"),
        ] {
            assert!(refused(given).contains(named), "{given}");
        }
    }

    #[test]
    fn processed_events_outlive_every_redelivery() {
        // A week of events, and a week of dead letters.
        assert!(parsed("--processed-retention-hours 337").unwrap().config().is_ok());
        let error = refused("--processed-retention-hours 336");
        assert!(
            error.contains("--processed-retention-hours") && error.contains("--event-retention-hours"),
            "{error}"
        );
        assert!(refused("--event-retention-hours 552").contains("--event-retention-hours"));
    }

    #[test]
    fn an_outcome_needs_what_it_rests_on() {
        let resolve = |more: &str| parsed(&format!("keys resolve {} --actor a {more}", Uuid::nil()));
        assert!(resolve("--as charged --reason r --provider-reference ch_1").is_ok());
        for incomplete in [
            "--reason r",
            "--as charged --reason r",
            "--as declined --reason r",
            "--as declined --code no_money",
            "--as not-charged",
            "--as refunded --reason r",
            "--as refund-failed --reason r",
        ] {
            assert!(resolve(incomplete).is_err(), "{incomplete}");
        }
    }
}
