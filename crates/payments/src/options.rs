//! Command line options about the provider, for every daemon that drives payments on, and what they become once checked.
//!
//! One set of names for all of them: a front door that sends for five minutes and a reaper that believes in ten would
//! contradict each other.

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, io};

use clap::Args;
use semel_core::options::OptionError;
use tonic::transport::Uri;

use crate::payments::create::SEND_WINDOW;
use crate::provider::{DEADLINE, Dedup, MARGIN};

/// Where the provider is, and how it is used.
#[derive(Args, Clone, Debug)]
pub struct ProviderOptions {
    /// Provider of payments that speaks semel.provider.v1: <https://provider:7070>, or http:// without TLS. Without one there
    /// are no payments.
    #[arg(long, env = "SEMEL_PROVIDER_URL", value_parser = provider_url, value_name = "URL")]
    provider_url: Option<String>,
    /// File with certificates (PEM) of authorities that an https:// provider may be certified by, beside the machine's.
    #[arg(long, env = "SEMEL_PROVIDER_CA_FILE", value_name = "PATH")]
    provider_ca_file: Option<PathBuf>,
    /// Hours for which the provider recognises a key, counted from its first use; 0 is for ever.
    #[arg(long, env = "SEMEL_PROVIDER_HORIZON_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u64).range(0..=87_600), value_name = "HOURS")]
    provider_horizon_hours: u64,
    /// Seconds after its first send for which a charge without an answer is sent again; later the provider is asked what
    /// happened, and the charge fenced.
    #[arg(long, env = "SEMEL_SEND_WINDOW", default_value_t = SEND_WINDOW.as_secs(), value_parser = clap::value_parser!(u64).range(1..=604_800), value_name = "SECONDS")]
    send_window_seconds: u64,
}

/// The provider of payments, and how it is used.
#[derive(Clone, Debug)]
pub struct ProviderConfig {
    /// Where it is.
    pub url: String,
    /// Authorities that it may be certified by, beside the machine's: PEM.
    pub authorities: Option<String>,
    /// For how long it recognises a key.
    pub dedup: Dedup,
    /// For how long after the first send a charge is sent again.
    pub send_window: Duration,
}

impl ProviderOptions {
    /// Checks the options; none when no provider is given.
    ///
    /// # Errors
    ///
    /// When the send window reaches up to the provider's horizon.
    pub fn config(&self) -> Result<Option<ProviderConfig>, OptionError> {
        let dedup = match self.provider_horizon_hours {
            0 => Dedup::ForEver,
            hours => Dedup::For(Duration::from_hours(hours)),
        };
        let send_window = Duration::from_secs(self.send_window_seconds);
        if !dedup.is_clear_of_horizon(send_window) {
            return Err(OptionError::Combination(format!(
                "--send-window-seconds: {} s, the provider's deadline of {} s and a margin of {} s do not end before \
                 --provider-horizon-hours: a charge could be sent again to a provider that has forgotten its key",
                send_window.as_secs(),
                DEADLINE.as_secs(),
                MARGIN.as_secs()
            )));
        }
        let authorities = self.authorities()?;
        Ok(self.provider_url.clone().map(|url| ProviderConfig { url, authorities, dedup, send_window }))
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

    #[test]
    fn a_provider_remembers_keys_for_a_day_unless_said_otherwise() {
        let provider = |more: &[&str]| {
            let given = ["--provider-url", "http://provider:7070/"];
            parsed(&given.iter().chain(more).copied().collect::<Vec<_>>()).unwrap().config().unwrap().unwrap()
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
}
