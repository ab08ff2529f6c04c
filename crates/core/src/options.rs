//! Command line options that daemons share, each with its environment twin, and what they become once checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::database::{DatabaseUrl, InvalidDatabaseUrl};

/// An option that cannot be used; the message names it.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    /// Neither the value nor its file is given.
    #[error("{option} is not set: give it, {env} or {env}_FILE")]
    Missing {
        /// The option's flag.
        option: &'static str,
        /// Its environment twin.
        env: &'static str,
    },
    /// A value without a file of its own is not given.
    #[error("{option} is not set: give it or {env}")]
    Unset {
        /// The option's flag.
        option: &'static str,
        /// Its environment twin.
        env: &'static str,
    },
    /// The file that holds the value cannot be read.
    #[error("{option}: cannot read {path}")]
    File {
        /// The option's flag.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The value is no Postgres URL.
    #[error("{option}")]
    DatabaseUrl {
        /// The option's flag.
        option: &'static str,
        /// Why.
        source: InvalidDatabaseUrl,
    },
    /// Two values do not go together.
    #[error("{0}")]
    Combination(String),
}

/// Reads a secret from its option or from the file that holds it.
///
/// # Errors
///
/// When neither is given, or the file cannot be read.
pub fn secret(
    option: &'static str,
    env: &'static str,
    value: Option<&str>,
    file: Option<&PathBuf>,
) -> Result<String, OptionError> {
    // Set to nothing is not set, as in a manifest that leaves it to the file.
    match (value.filter(|value| !value.is_empty()), file) {
        (Some(value), _) => Ok(value.to_owned()),
        (None, Some(path)) => std::fs::read_to_string(path)
            .map(|text| text.trim().to_owned())
            .map_err(|source| OptionError::File { option, path: path.clone(), source }),
        (None, None) => Err(OptionError::Missing { option, env }),
    }
}

/// Reads a line of text that is stored, 1 to `BYTES` bytes, without control characters.
///
/// # Errors
///
/// When it is something else.
pub fn text<const BYTES: usize>(text: &str) -> Result<String, String> {
    if (1..=BYTES).contains(&text.len()) && !text.chars().any(char::is_control) {
        Ok(text.to_owned())
    } else {
        Err(format!("must be 1 to {BYTES} bytes without control characters"))
    }
}

/// Where the database is.
#[derive(Args, Clone)]
pub struct DatabaseOptions {
    /// Postgres URL: <postgres://user:password@host:5432/database>.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
    /// File that holds the Postgres URL.
    #[arg(long, env = "DATABASE_URL_FILE", value_name = "PATH")]
    database_url_file: Option<PathBuf>,
}

impl DatabaseOptions {
    /// Returns the checked URL.
    ///
    /// # Errors
    ///
    /// When it is missing or no Postgres URL.
    pub fn url(&self) -> Result<DatabaseUrl, OptionError> {
        let option = "--database-url";
        let text =
            secret(option, "DATABASE_URL", self.database_url.as_deref(), self.database_url_file.as_ref())?;
        text.parse().map_err(|source| OptionError::DatabaseUrl { option, source })
    }
}

/// How logs look.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// What is logged, and how.
#[derive(Args, Clone, Debug)]
pub struct LogOptions {
    /// What is logged: a level, or targets with levels. Libraries are silent by default where what they say comes once
    /// more from where it is dealt with.
    #[arg(
        long,
        env = "SEMEL_LOG",
        default_value = "info,lapin=off,sqlx_core::pool=error",
        value_parser = filter,
        value_name = "FILTER"
    )]
    pub log_filter: String,
    /// How it looks.
    #[arg(long, env = "SEMEL_LOG_FORMAT", default_value = "json", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

fn filter(text: &str) -> Result<String, tracing_subscriber::filter::ParseError> {
    tracing_subscriber::EnvFilter::try_new(text).map(|_| text.to_owned())
}

/// Admin endpoint and shutdown.
#[derive(Args, Clone, Debug)]
pub struct ProcessOptions {
    /// Address of /livez, /readyz, /metrics and /version; never expose it publicly.
    #[arg(long, env = "SEMEL_ADMIN_LISTEN", default_value = "127.0.0.1:9090", value_name = "ADDRESS")]
    pub admin_listen: SocketAddr,
    /// Seconds that work in flight gets to finish after SIGTERM.
    #[arg(long, env = "SEMEL_GRACE", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600), value_name = "SECONDS")]
    grace: u64,
    /// Check the configuration and leave.
    #[arg(long)]
    pub check: bool,
    /// Logs.
    #[command(flatten)]
    pub logs: LogOptions,
}

impl ProcessOptions {
    /// Returns the grace.
    #[must_use]
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace)
    }
}
