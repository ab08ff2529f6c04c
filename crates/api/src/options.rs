//! The API's options, and the configuration that they become.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use semel_core::database::DatabaseUrl;
use semel_core::derive::Namespace;
use semel_core::idempotency::ClientId;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, text};
use semel_payments::options::{ProviderConfig, ProviderOptions};
use semel_payments::problem::ProblemBase;

use crate::state::Settings;

/// Takes orders and payments over HTTP and gRPC, each under an idempotency key: at most one effect per key, the same answer to every repeat.
#[derive(Parser)]
#[command(name = "semel-api", version)]
pub struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) database: DatabaseOptions,
    /// Connections to the database at most.
    #[arg(long, env = "SEMEL_API_DB_CONNECTIONS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=500), value_name = "COUNT")]
    max_connections: u32,
    /// Address of the public endpoint.
    #[arg(long, env = "SEMEL_API_LISTEN", default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// This deployment's name, part of every derived id; staging and production must differ, and it never changes.
    #[arg(long, env = "SEMEL_NAMESPACE", value_name = "NAME")]
    namespace: Option<Namespace>,
    /// Hours for which a completed key is replayed, counted from its completion.
    #[arg(long, env = "SEMEL_API_KEY_RETENTION_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=8760), value_name = "HOURS")]
    key_retention_hours: u64,
    /// What the `type` of a problem begins with; its last segment names the problem, and the page under docs/errors.
    #[arg(long, env = "SEMEL_API_PROBLEM_BASE_URL", default_value = ProblemBase::DEFAULT, value_name = "URL")]
    problem_base_url: ProblemBase,
    #[command(flatten)]
    provider: ProviderOptions,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the tables, and leave.
    Migrate,
    /// Who may call.
    Credentials(CredentialsCommand),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct CredentialsCommand {
    #[command(subcommand)]
    pub(crate) action: CredentialsAction,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum CredentialsAction {
    /// Make a credential for a client, and the client where it is new; prints the token, once.
    Create {
        /// The client's name.
        client: ClientId,
    },
    /// List them, without their secrets.
    List {
        /// Those of this client alone.
        #[arg(long, value_name = "NAME")]
        client: Option<ClientId>,
        /// As JSON, an array.
        #[arg(long)]
        json: bool,
        /// Most to list.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "COUNT")]
        limit: u32,
    },
    /// Make a new one for a client, and let its others end after a while; prints the token, once.
    Rotate {
        /// The client's name.
        client: ClientId,
        /// Hours for which the others are still taken.
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(0..=8760), value_name = "HOURS")]
        overlap_hours: u64,
        #[command(flatten)]
        by: Actor,
    },
    /// End one at once: it is refused everywhere within half a minute. When the last of a client ends, what the client has
    /// under way is not sent to the provider again.
    Revoke {
        /// The part of its token between the two `_`, or the whole token.
        credential: String,
        #[command(flatten)]
        by: Actor,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Actor {
    /// Why.
    #[arg(long, value_parser = text::<4096>, value_name = "TEXT")]
    pub(crate) reason: String,
    /// Who does it.
    #[arg(long, env = "USER", value_parser = text::<255>, value_name = "NAME")]
    pub(crate) actor: String,
}

/// A configuration that can be used.
#[derive(Clone, Debug)]
pub struct Config {
    /// The database.
    pub database: DatabaseUrl,
    /// Connections to it at most.
    pub database_connections: u32,
    /// Address of the public endpoint.
    pub listen: SocketAddr,
    /// The provider of payments; without one there are none.
    pub provider: Option<ProviderConfig>,
    /// How requests are answered.
    pub settings: Settings,
}

impl Options {
    /// Checks the options for serving.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        let missing = OptionError::Unset { option: "--namespace", env: "SEMEL_NAMESPACE" };
        Ok(Config {
            database: self.database.url()?,
            database_connections: self.max_connections,
            listen: self.listen,
            provider: self.provider.config()?,
            settings: Settings {
                namespace: self.namespace.clone().ok_or(missing)?,
                key_retention: Duration::from_hours(self.key_retention_hours),
                problem_base: self.problem_base_url.clone(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use semel_payments::provider::Dedup;

    const GIVEN: [&str; 5] =
        ["semel-api", "--database-url", "postgres://u:s3cret@h/d", "--namespace", "test"];

    fn parsed(more: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from(GIVEN.iter().chain(more))
    }

    fn config(more: &[&str]) -> Config {
        parsed(more).unwrap().config().unwrap()
    }

    #[test]
    fn without_a_provider_there_are_no_payments() {
        assert!(config(&[]).provider.is_none());
    }

    #[test]
    fn a_provider_remembers_keys_for_a_day_unless_said_otherwise() {
        let provider = |more: &[&str]| {
            let given = ["--provider-url", "http://provider:7070/"];
            config(&given.iter().chain(more).copied().collect::<Vec<_>>()).provider.unwrap()
        };
        let default = provider(&[]);
        assert_eq!(default.url, "http://provider:7070");
        assert_eq!(default.dedup, Dedup::For(Duration::from_hours(24)));
        assert_eq!(default.send_window, Duration::from_mins(5));
        assert_eq!(provider(&["--provider-horizon-hours", "0"]).dedup, Dedup::ForEver);
    }

    #[test]
    fn refuses_what_is_no_place_of_a_provider() {
        for url in [
            "provider:7070",
            "https://provider:7070",
            "http://provider",
            "http://u@p:1",
            "http://p:1/x",
            "http://:1",
        ] {
            assert!(parsed(&["--provider-url", url]).is_err(), "{url}");
        }
    }

    #[test]
    fn refuses_a_send_window_that_reaches_the_horizon() {
        // One hour less the deadline of 10 s and the margin of 60 s.
        let window = |seconds: &str| {
            parsed(&["--provider-horizon-hours", "1", "--send-window-seconds", seconds]).unwrap().config()
        };
        assert!(window("3529").is_ok());
        let error = window("3530").unwrap_err().to_string();
        assert!(
            error.contains("--send-window-seconds") && error.contains("--provider-horizon-hours"),
            "{error}"
        );
        let for_ever = ["--provider-horizon-hours", "0", "--send-window-seconds", "604800"];
        assert!(parsed(&for_ever).unwrap().config().is_ok());
    }
}
