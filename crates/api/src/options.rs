//! The API's options, and the configuration that they become.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use semel_core::database::DatabaseUrl;
use semel_core::derive::Namespace;
use semel_core::idempotency::ClientId;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions};

use crate::problem::ProblemBase;
use crate::state::Settings;

/// Takes orders over HTTP, each under an idempotency key: at most one effect per key, the same answer to every repeat.
#[derive(Parser)]
#[command(name = "semel-api", version, about, long_about = None)]
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
        let missing = OptionError::Missing { option: "--namespace", env: "SEMEL_NAMESPACE" };
        Ok(Config {
            database: self.database.url()?,
            database_connections: self.max_connections,
            listen: self.listen,
            settings: Settings {
                namespace: self.namespace.clone().ok_or(missing)?,
                key_retention: Duration::from_hours(self.key_retention_hours),
                problem_base: self.problem_base_url.clone(),
            },
        })
    }
}
