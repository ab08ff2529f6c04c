//! Command line options about the provider, for every daemon that drives payments on, and what they become once checked.
//!
//! One set of names for all of them: a front door that sends for five minutes and a reaper that believes in ten would
//! contradict each other.

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, io};

use clap::{Args, ValueEnum};
use secrecy::{ExposeSecret, SecretString};
use semel_core::options::{OptionError, secret};
use tonic::transport::Uri;

use crate::payments::create::SEND_WINDOW;
use crate::provider::chosen::Chosen;
use crate::provider::grpc::{GrpcProvider, InvalidEndpoint};
use crate::provider::stripe::account::{ApiBase, ApiKey};
use crate::provider::stripe::{HORIZON, NoAuthorities, StripeProvider};
use crate::provider::{DEADLINE, Dedup, MARGIN};

/// What a provider speaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Kind {
    /// semel.provider.v1 over gRPC, at --provider-url.
    Grpc,
    /// Stripe's API, as whoever has --stripe-api-key.
    Stripe,
}

/// Where the provider is, and how it is used.
#[derive(Args, Clone, Debug)]
pub struct ProviderOptions {
    /// What the provider of payments speaks.
    #[arg(long, env = "SEMEL_PROVIDER", default_value = "grpc", value_name = "KIND")]
    provider: Kind,
    /// Provider of payments that speaks semel.provider.v1: <https://provider:7070>, or http:// without TLS. Without one there
    /// are no payments.
    #[arg(long, env = "SEMEL_PROVIDER_URL", value_parser = provider_url, value_name = "URL")]
    provider_url: Option<String>,
    /// File with certificates (PEM) of authorities that an https:// provider may be certified by, beside the machine's.
    #[arg(long, env = "SEMEL_PROVIDER_CA_FILE", value_name = "PATH")]
    provider_ca_file: Option<PathBuf>,
    /// Hours for which a provider at --provider-url recognises a key, counted from its first use; 0 is for ever.
    #[arg(long, env = "SEMEL_PROVIDER_HORIZON_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u64).range(0..=87_600), value_name = "HOURS")]
    provider_horizon_hours: u64,
    /// Seconds after its first send for which a charge without an answer is sent again; later the provider is asked what
    /// happened, and the charge fenced.
    #[arg(long, env = "SEMEL_SEND_WINDOW", default_value_t = SEND_WINDOW.as_secs(), value_parser = clap::value_parser!(u64).range(1..=604_800), value_name = "SECONDS")]
    send_window_seconds: u64,
    /// Secret or restricted API key of the account at Stripe.
    #[arg(long, env = "SEMEL_STRIPE_API_KEY", hide_env_values = true, value_parser = unread, value_name = "KEY")]
    stripe_api_key: Option<SecretString>,
    /// File that holds the API key.
    #[arg(long, env = "SEMEL_STRIPE_API_KEY_FILE", value_name = "PATH")]
    stripe_api_key_file: Option<PathBuf>,
    /// Whether real money is to be moved: true needs a live API key, and false one for tests.
    #[arg(long, env = "SEMEL_STRIPE_LIVEMODE", default_value_t = false, action = clap::ArgAction::Set, value_name = "BOOL")]
    stripe_livemode: bool,
    /// Where Stripe's API is; another place is for tests, and without TLS on this machine alone.
    #[arg(long, env = "SEMEL_STRIPE_API_BASE", default_value = ApiBase::DEFAULT, value_name = "URL")]
    stripe_api_base: ApiBase,
}

/// The provider of payments, and how it is used.
#[derive(Clone, Debug)]
pub struct ProviderConfig {
    /// Which it is.
    pub choice: Choice,
    /// For how long after the first send a charge is sent again.
    pub send_window: Duration,
}

/// Which provider it is.
#[derive(Clone, Debug)]
pub enum Choice {
    /// One that speaks semel.provider.v1.
    Grpc {
        /// Where it is.
        url: String,
        /// Authorities that it may be certified by, beside the machine's: PEM.
        authorities: Option<String>,
        /// For how long it recognises a key.
        dedup: Dedup,
    },
    /// Stripe.
    Stripe {
        /// Where its API is.
        base: ApiBase,
        /// Whose account it is.
        key: ApiKey,
    },
}

/// A provider that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UnusableProvider {
    /// Its place is none.
    #[error("--provider-url")]
    Endpoint(#[from] InvalidEndpoint),
    /// Nobody could certify it.
    #[error("--provider stripe")]
    Authorities(#[from] NoAuthorities),
}

impl ProviderConfig {
    /// Makes what calls it; it connects when it is first called.
    ///
    /// # Errors
    ///
    /// When it cannot be used from here.
    pub fn open(&self) -> Result<Chosen, UnusableProvider> {
        Ok(match &self.choice {
            Choice::Grpc { url, authorities, dedup } => {
                GrpcProvider::certified_by(url, authorities.as_deref(), *dedup)?.into()
            }
            Choice::Stripe { base, key } => StripeProvider::new(base.clone(), key)?.into(),
        })
    }

    /// Returns where it is, for people.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.choice {
            Choice::Grpc { url, .. } => url.clone(),
            Choice::Stripe { base, .. } => base.to_string(),
        }
    }
}

impl ProviderOptions {
    /// Checks the options; none when no provider is given.
    ///
    /// # Errors
    ///
    /// When an option cannot be used, or two not together.
    pub fn config(&self) -> Result<Option<ProviderConfig>, OptionError> {
        let (choice, dedup) = match self.provider {
            Kind::Grpc => self.grpc()?,
            Kind::Stripe => self.stripe().map(|stripe| (Some(stripe), Dedup::For(HORIZON)))?,
        };
        let send_window = Duration::from_secs(self.send_window_seconds);
        if !dedup.is_clear_of_horizon(send_window) {
            return Err(OptionError::Combination(format!(
                "--send-window-seconds: {} s, the provider's deadline of {} s and a margin of {} s do not end before {}: a \
                 charge could be sent again to a provider that has forgotten its key",
                send_window.as_secs(),
                DEADLINE.as_secs(),
                MARGIN.as_secs(),
                match self.provider {
                    Kind::Grpc => "--provider-horizon-hours",
                    Kind::Stripe => "the day for which Stripe recognises a key",
                }
            )));
        }
        Ok(choice.map(|choice| ProviderConfig { choice, send_window }))
    }

    fn grpc(&self) -> Result<(Option<Choice>, Dedup), OptionError> {
        if self.stripe_api_key.is_some() || self.stripe_api_key_file.is_some() {
            return Err(OptionError::Combination("--stripe-api-key is for --provider stripe".to_owned()));
        }
        let dedup = match self.provider_horizon_hours {
            0 => Dedup::ForEver,
            hours => Dedup::For(Duration::from_hours(hours)),
        };
        let authorities = self.authorities()?;
        let choice = self.provider_url.clone().map(|url| Choice::Grpc { url, authorities, dedup });
        Ok((choice, dedup))
    }

    fn stripe(&self) -> Result<Choice, OptionError> {
        if self.provider_url.is_some() || self.provider_ca_file.is_some() {
            return Err(OptionError::Combination(
                "--provider-url and --provider-ca-file are for --provider grpc".to_owned(),
            ));
        }
        let option = "--stripe-api-key";
        let value = self.stripe_api_key.as_ref().map(ExposeSecret::expose_secret);
        let text = secret(option, "SEMEL_STRIPE_API_KEY", value, self.stripe_api_key_file.as_ref())?;
        let key: ApiKey =
            text.parse().map_err(|error| OptionError::Combination(format!("{option}: {error}")))?;
        if key.is_live() != self.stripe_livemode {
            let (is, says) = if key.is_live() { ("live", "false") } else { ("for tests", "true") };
            return Err(OptionError::Combination(format!(
                "{option} is {is}, and --stripe-livemode says {says}: whether real money is moved is said by both"
            )));
        }
        if key.is_live() && !self.stripe_api_base.is_stripes_own() {
            return Err(OptionError::Combination(format!(
                "--stripe-api-base is for tests, and {option} is live: it is sent to Stripe alone"
            )));
        }
        Ok(Choice::Stripe { base: self.stripe_api_base.clone(), key })
    }

    fn authorities(&self) -> Result<Option<String>, OptionError> {
        let option = "--provider-ca-file";
        let Some(path) = &self.provider_ca_file else { return Ok(None) };
        if !self.provider_url.as_ref().is_some_and(|url| url.starts_with("https://")) {
            return Err(OptionError::Combination(format!(
                "{option} is for a --provider-url that begins with https://"
            )));
        }
        let unusable = |source| OptionError::File { option, path: path.clone(), source };
        let pem = fs::read_to_string(path).map_err(unusable)?;
        if !pem.contains("-----BEGIN CERTIFICATE-----") {
            let why = io::Error::new(io::ErrorKind::InvalidData, "there is no certificate in it");
            return Err(unusable(why));
        }
        Ok(Some(pem))
    }
}

/// Takes a secret as it is: a refusal of the command line's would repeat it.
#[expect(clippy::unnecessary_wraps, reason = "a value parser may fail")]
fn unread(text: &str) -> Result<SecretString, std::convert::Infallible> {
    Ok(text.into())
}

/// Reads a provider's URL: scheme, host, port, and nothing else.
fn provider_url(text: &str) -> Result<String, &'static str> {
    let refused = "not a URL such as https://provider:7070";
    let url: Uri = text.parse().map_err(|_| refused)?;
    let authority = url.authority().ok_or(refused)?;
    let scheme = url.scheme_str().unwrap_or_default();
    let is_bare = matches!(scheme, "http" | "https")
        && authority.port_u16().is_some()
        && !authority.host().is_empty()
        && !authority.as_str().contains('@')
        && matches!(url.path(), "" | "/")
        && url.query().is_none();
    if is_bare { Ok(format!("{scheme}://{authority}")) } else { Err(refused) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::Provider as _;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Probe {
        #[command(flatten)]
        provider: ProviderOptions,
    }

    fn parsed(more: &[&str]) -> Result<ProviderOptions, clap::Error> {
        Probe::try_parse_from(["probe"].iter().chain(more)).map(|probe| probe.provider)
    }

    #[test]
    fn without_a_url_there_is_no_provider() {
        assert!(parsed(&[]).unwrap().config().unwrap().is_none());
    }

    #[tokio::test]
    async fn a_provider_remembers_keys_for_a_day_unless_said_otherwise() {
        let provider = |more: &[&str]| {
            let given = ["--provider-url", "http://provider:7070/"];
            parsed(&given.iter().chain(more).copied().collect::<Vec<_>>()).unwrap().config().unwrap().unwrap()
        };
        let default = provider(&[]);
        assert_eq!(default.place(), "http://provider:7070");
        assert_eq!(default.open().unwrap().promises().dedup, Dedup::For(Duration::from_hours(24)));
        assert_eq!(default.send_window, Duration::from_mins(5));
        let for_ever = provider(&["--provider-horizon-hours", "0"]);
        assert_eq!(for_ever.open().unwrap().promises().dedup, Dedup::ForEver);
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
    fn refuses_authorities_that_are_none_or_have_nothing_to_certify() {
        let refused = |url: &str, path: &str| {
            let given = parsed(&["--provider-url", url, "--provider-ca-file", path]).unwrap();
            given.config().unwrap_err().to_string()
        };
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        for (url, path) in
            [("https://p:1", "/nowhere.pem"), ("https://p:1", manifest), ("http://p:1", manifest)]
        {
            assert!(refused(url, path).contains("--provider-ca-file"), "{url} {path}");
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

    #[test]
    fn stripe_is_used_with_a_key_of_the_mode_that_is_said() {
        let key = |key: &'static str, livemode: &'static str| {
            let given = ["--provider", "stripe", "--stripe-api-key", key, "--stripe-livemode", livemode];
            parsed(&given).unwrap().config()
        };
        let config = key("sk_test_s3cret", "false").unwrap().unwrap();
        assert_eq!(config.place(), "https://api.stripe.com");
        assert_eq!(config.open().unwrap().promises().dedup, Dedup::For(Duration::from_hours(24)));
        assert!(key("rk_live_s3cret", "true").is_ok());
        let elsewhere = |key: &'static str, livemode: &'static str| {
            let given = ["--provider", "stripe", "--stripe-api-key", key, "--stripe-livemode", livemode];
            parsed(&[&given[..], &["--stripe-api-base", "https://proxy:8443"]].concat()).unwrap().config()
        };
        assert!(elsewhere("sk_test_s3cret", "false").is_ok());
        let error = elsewhere("sk_live_s3cret", "true").unwrap_err().to_string();
        assert!(error.contains("--stripe-api-base") && !error.contains("s3cret"), "{error}");
        for (text, livemode) in [("sk_test_s3cret", "true"), ("sk_live_s3cret", "false"), ("s3cret", "false")]
        {
            let error = key(text, livemode).unwrap_err().to_string();
            assert!(error.contains("--stripe-api-key") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn the_key_is_in_no_debug_output() {
        let given = ["--provider", "stripe", "--stripe-api-key", "sk_test_s3cret"];
        let options = parsed(&given).unwrap();
        let config = options.config().unwrap().unwrap();
        let shown = format!("{options:?} {config:?} {:?}", config.open().unwrap());
        assert!(!shown.contains("s3cret"), "{shown}");
    }

    #[test]
    fn refuses_what_belongs_to_the_other_provider_and_a_key_that_is_missing() {
        let refused = |given: &[&str]| parsed(given).unwrap().config().unwrap_err().to_string();
        let stripe = ["--provider", "stripe", "--stripe-api-key", "sk_test_a"];
        let both = [&stripe[..], &["--provider-url", "http://p:1"]].concat();
        assert!(refused(&both).contains("--provider-url"));
        assert!(refused(&["--stripe-api-key", "sk_test_a"]).contains("--provider stripe"));
        assert!(refused(&stripe[..2]).contains("SEMEL_STRIPE_API_KEY_FILE"));
        let late = [&stripe[..], &["--send-window-seconds", "86340"]].concat();
        assert!(refused(&late).contains("--send-window-seconds"));
    }
}
