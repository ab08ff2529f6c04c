//! The API's options, and the configuration that they become.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use semel_core::database::DatabaseUrl;
use semel_core::derive::Namespace;
use semel_core::grants::Role;
use semel_core::idempotency::ClientId;
use semel_core::idempotency::admission::Rate;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions, secret, text};
use semel_payments::options::{Choice, ProviderConfig, ProviderOptions};
use semel_payments::problem::ProblemBase;

use crate::access::Access;
use crate::state::Settings;
use crate::tls::{Tls, TlsFiles};
use crate::webhooks::Webhooks;

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
    /// File with the certificate of the public endpoint and those of the authorities in between (PEM); with it, only TLS is taken.
    #[arg(long, env = "SEMEL_API_TLS_CERT_FILE", value_name = "PATH")]
    tls_cert_file: Option<PathBuf>,
    /// File with the private key of that certificate (PEM). Both are looked at every minute.
    #[arg(long, env = "SEMEL_API_TLS_KEY_FILE", value_name = "PATH")]
    tls_key_file: Option<PathBuf>,
    /// This deployment's name, part of every derived id; staging and production must differ, and it never changes.
    #[arg(long, env = "SEMEL_NAMESPACE", value_name = "NAME")]
    namespace: Option<Namespace>,
    /// Hours for which a completed key is replayed, counted from its completion.
    #[arg(long, env = "SEMEL_API_KEY_RETENTION_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=8760), value_name = "HOURS")]
    key_retention_hours: u64,
    /// New requests that one client may begin a second, in each process; 0 bounds nothing. Known keys are never counted.
    #[arg(long, env = "SEMEL_API_CLIENT_CLAIMS_PER_SECOND", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=1_000_000), value_name = "COUNT")]
    client_claims_per_second: u32,
    /// New requests that one client may begin at once, after a pause.
    #[arg(long, env = "SEMEL_API_CLIENT_CLAIMS_BURST", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000), value_name = "COUNT")]
    client_claims_burst: u32,
    /// Keys that one client may have in progress, in all processes together; 0 bounds nothing.
    #[arg(long, env = "SEMEL_API_CLIENT_KEYS_IN_PROGRESS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=100_000), value_name = "COUNT")]
    client_keys_in_progress: u32,
    /// What the `type` of a problem begins with; its last segment names the problem, and the page under docs/errors.
    #[arg(long, env = "SEMEL_API_PROBLEM_BASE_URL", default_value = ProblemBase::DEFAULT, value_name = "URL")]
    problem_base_url: ProblemBase,
    #[command(flatten)]
    provider: ProviderOptions,
    /// Signing secret of our webhook endpoint at Stripe, or two separated by a blank while one replaces the other; with it,
    /// Stripe's events are taken at /v1/webhooks/stripe.
    #[arg(long, env = "SEMEL_STRIPE_WEBHOOK_SECRET", hide_env_values = true, value_name = "SECRET")]
    stripe_webhook_secret: Option<String>,
    /// File that holds it, or both, a line each.
    #[arg(long, env = "SEMEL_STRIPE_WEBHOOK_SECRET_FILE", value_name = "PATH")]
    stripe_webhook_secret_file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the tables, and leave.
    Migrate,
    /// Grant a role of the database what this daemon needs, and leave; the owner of the tables does that.
    Grant {
        /// The role, which exists.
        role: Role,
    },
    /// Print what the API takes and answers, as OpenAPI 3.1, and leave.
    Openapi,
    /// Print the metrics that it emits, as rows of a table, and leave.
    Metrics,
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
        /// What it may be used for, and nothing else; may be given several times. Everything where it is not given.
        #[arg(long = "scope", value_enum, value_name = "SCOPE")]
        scopes: Vec<Access>,
        /// Make none, and print none, where the client has one that is in force.
        #[arg(long)]
        unless_any: bool,
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
        /// What the new one may be used for; may be given several times. Where it is not given, what the others may, if that
        /// is the same for all of them.
        #[arg(long = "scope", value_enum, value_name = "SCOPE")]
        scopes: Vec<Access>,
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
    /// The certificate of the public endpoint; without one it takes plain text.
    pub tls: Option<Tls>,
    /// The provider of payments; without one there are none.
    pub provider: Option<ProviderConfig>,
    /// What is needed to believe the provider's events; without it none is taken.
    pub webhooks: Option<Webhooks>,
    /// How many new requests a client may begin; none bounds nothing.
    pub rate: Option<Rate>,
    /// How many keys of a client may be in progress; none bounds nothing.
    pub keys_in_progress: Option<NonZeroU32>,
    /// How requests are answered.
    pub settings: Settings,
}

impl Options {
    /// Returns what the `type` of a problem begins with.
    pub(crate) fn problem_base(&self) -> &ProblemBase {
        &self.problem_base_url
    }

    /// Checks the options for serving.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        let missing = OptionError::Unset { option: "--namespace", env: "SEMEL_NAMESPACE" };
        let provider = self.provider.config()?;
        Ok(Config {
            database: self.database.url()?,
            database_connections: self.max_connections,
            listen: self.listen,
            tls: self.tls()?,
            webhooks: self.webhooks(provider.as_ref())?,
            provider,
            rate: NonZeroU32::new(self.client_claims_per_second)
                .zip(NonZeroU32::new(self.client_claims_burst))
                .map(|(count, burst)| Rate { every: Duration::from_secs(1) / count.get(), burst }),
            keys_in_progress: NonZeroU32::new(self.client_keys_in_progress),
            settings: Settings {
                namespace: self.namespace.clone().ok_or(missing)?,
                key_retention: Duration::from_hours(self.key_retention_hours),
                problem_base: self.problem_base_url.clone(),
            },
        })
    }

    fn webhooks(&self, provider: Option<&ProviderConfig>) -> Result<Option<Webhooks>, OptionError> {
        let (option, env) = ("--stripe-webhook-secret", "SEMEL_STRIPE_WEBHOOK_SECRET");
        let text = match secret(
            option,
            env,
            self.stripe_webhook_secret.as_deref(),
            self.stripe_webhook_secret_file.as_ref(),
        ) {
            Err(OptionError::Missing { .. }) => return Ok(None),
            text => text?,
        };
        let Some(Choice::Stripe { key, .. }) = provider.map(|provider| &provider.choice) else {
            return Err(OptionError::Combination(format!("{option} is for --provider stripe")));
        };
        let secrets = text.parse().map_err(|error| OptionError::Combination(format!("{option}: {error}")))?;
        Ok(Some(Webhooks { secrets, livemode: key.is_live() }))
    }

    fn tls(&self) -> Result<Option<Tls>, OptionError> {
        match (self.tls_cert_file.clone(), self.tls_key_file.clone()) {
            (Some(certificate), Some(key)) => Tls::load(TlsFiles { certificate, key }).map(Some),
            (None, None) => Ok(None),
            _ => Err(OptionError::Combination(
                "--tls-cert-file and --tls-key-file go together: give both or neither".to_owned(),
            )),
        }
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
    fn a_certificate_and_its_key_go_together() {
        for option in ["--tls-cert-file", "--tls-key-file"] {
            let error = parsed(&[option, "/nowhere"]).unwrap().config().unwrap_err().to_string();
            assert!(error.contains("--tls-cert-file") && error.contains("--tls-key-file"), "{error}");
        }
        assert!(config(&[]).tls.is_none());
        let unusable = ["--tls-cert-file", "/nowhere", "--tls-key-file", "/nowhere"];
        let error = parsed(&unusable).unwrap().config().unwrap_err().to_string();
        assert!(error.starts_with("--tls-cert-file"), "{error}");
    }

    #[test]
    fn a_client_may_begin_so_much_unless_nothing_bounds_it() {
        let given = config(&[]);
        let rate = given.rate.unwrap();
        assert_eq!((rate.every, rate.burst.get()), (Duration::from_millis(1), 2000));
        assert_eq!(given.keys_in_progress.map(NonZeroU32::get), Some(1000));
        let unbounded = config(&["--client-claims-per-second", "0", "--client-keys-in-progress", "0"]);
        assert_eq!((unbounded.rate, unbounded.keys_in_progress), (None, None));
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
        assert_eq!(default.place(), "http://provider:7070");
        assert_eq!(default.send_window, Duration::from_mins(5));
        let dedup = |config: &ProviderConfig| match config.choice {
            Choice::Grpc { dedup, .. } => dedup,
            Choice::Stripe { .. } => panic!("{config:?}"),
        };
        assert_eq!(dedup(&default), Dedup::For(Duration::from_hours(24)));
        assert_eq!(dedup(&provider(&["--provider-horizon-hours", "0"])), Dedup::ForEver);
    }

    #[test]
    fn refuses_what_is_no_place_of_a_provider() {
        for url in [
            "provider:7070",
            "ftp://provider:7070",
            "http://provider",
            "http://u@p:1",
            "http://p:1/x",
            "http://:1",
        ] {
            assert!(parsed(&["--provider-url", url]).is_err(), "{url}");
        }
    }

    #[test]
    fn events_are_believed_by_a_secret_beside_a_key_of_their_mode() {
        const SECRET: &str = "whsec_0123456789s3cret";
        let given = |more: &[&str]| {
            let stripe =
                ["--provider", "stripe", "--stripe-api-key", "rk_live_1", "--stripe-livemode", "true"];
            parsed(&[&stripe[..], more].concat()).unwrap().config()
        };
        assert!(given(&[]).unwrap().webhooks.is_none());
        let one = given(&["--stripe-webhook-secret", SECRET]).unwrap();
        assert!(one.webhooks.as_ref().is_some_and(|webhooks| webhooks.livemode));
        assert!(!format!("{one:?}").contains("s3cret"));
        let both = format!("{SECRET} {SECRET}2");
        assert!(given(&["--stripe-webhook-secret", &both]).is_ok());
        for text in ["s3cret", "whsec_s3cret", &format!("{both} {SECRET}3")] {
            let error = given(&["--stripe-webhook-secret", text]).unwrap_err().to_string();
            assert!(error.contains("--stripe-webhook-secret") && !error.contains("s3cret"), "{error}");
        }
        let error = given(&["--stripe-webhook-secret-file", "/nowhere"]).unwrap_err().to_string();
        assert!(error.contains("/nowhere"), "{error}");
        let without = parsed(&["--provider-url", "http://p:1", "--stripe-webhook-secret", SECRET]).unwrap();
        assert!(without.config().unwrap_err().to_string().contains("--provider stripe"));
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
