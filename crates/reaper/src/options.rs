//! The reaper's options, and the configuration that they become.

use std::time::Duration;

use clap::{Parser, Subcommand};
use semel_core::database::DatabaseUrl;
use semel_core::options::{DatabaseOptions, OptionError, ProcessOptions};

/// Deletes what is past its retention, and reports how the database stands. One per database; several do no harm.
#[derive(Parser)]
#[command(name = "semel-reaper", version, about, long_about = None)]
pub struct Options {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) database: DatabaseOptions,
    /// Seconds between passes that find nothing.
    #[arg(long, env = "SEMEL_REAPER_PERIOD", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600), value_name = "SECONDS")]
    period: u64,
    /// Most rows that one pass deletes.
    #[arg(long, env = "SEMEL_REAPER_BATCH", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000), value_name = "ROWS")]
    batch: u32,
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
}

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum Command {
    /// Make or upgrade the engine's tables, and leave.
    Migrate,
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
}

impl Options {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The first option that cannot be used.
    pub fn config(&self) -> Result<Config, OptionError> {
        Ok(Config {
            database: self.database.url()?,
            period: Duration::from_secs(self.period),
            batch: self.batch,
        })
    }
}
