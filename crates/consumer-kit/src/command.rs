//! The commands of a consumer's daemon about what it could not take effect of, for a command line made with clap.
//!
//! ```no_run
//! use semel_consumer_kit::command::{DeadCommand, ParkedCommand};
//! use semel_consumer_kit::dead::DeadLetters;
//!
//! #[derive(clap::Subcommand)]
//! enum Command {
//!     /// Events that were given up on, and what is decided about them.
//!     Dead(DeadCommand),
//!     /// Events that wait in the order of their aggregate. For a consumer that keeps that order.
//!     Parked(ParkedCommand),
//! }
//!
//! # async fn run(
//! #     command: Command,
//! #     pool: sqlx::PgPool,
//! #     broker: semel_consumer_kit::BrokerUrl,
//! # ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! match command {
//!     Command::Dead(command) => {
//!         command.run(DeadLetters::new("stock", pool, broker, "stock.orders")).await
//!     }
//!     Command::Parked(command) => command.run("stock", &pool).await,
//! }
//! # }
//! ```
//!
//! Standard output holds results alone, those of a decision as they are carried out; a refusal is an error. The database needs
//! the migration set `semel_core::schema::ENGINE`: each decision is written down in `operator_actions`.

mod dead;
mod parked;

use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

pub use dead::DeadCommand;
pub use parked::ParkedCommand;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn say(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn count(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Longest age that may be asked for: beyond a few thousand years, neither clock goes back.
const LONGEST_AGE: Duration = Duration::from_hours(24 * 36_500);

/// Reads a number with its unit.
fn age(text: &str) -> Result<Duration, String> {
    let seconds = ["s", "m", "h", "d"].iter().zip([1, 60, 3600, 86_400]).find_map(|(unit, seconds)| {
        text.strip_suffix(unit)?.parse::<u32>().ok().map(|count| u64::from(count) * seconds)
    });
    let age = seconds.map(Duration::from_secs).filter(|age| *age <= LONGEST_AGE);
    age.ok_or_else(|| "must be a number and s, m, h or d, such as 15m, and at most 36500d".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units_and_a_bound() {
        assert_eq!(age("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(age("36500d"), Ok(LONGEST_AGE));
        for bad in ["", "s", "90", "-1s", "1.5h", "36501d", "4294967295d"] {
            assert!(age(bad).is_err(), "{bad}");
        }
    }
}
