//! The ledger's tables.

use semel_core::schema::{ENGINE, INBOX, MigrationSet};
use sqlx::migrate::Migrator;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/ledger");

/// Transactions and their entries.
pub static LEDGER: MigrationSet =
    MigrationSet { name: "ledger", version: 1, compatible_from: 1, migrations: &MIGRATIONS };

/// All that the ledger's database holds: its own tables, what it has taken effect of, and the outbox of its own events.
pub static SETS: [&MigrationSet; 3] = [&ENGINE, &INBOX, &LEDGER];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_is_at_the_version_of_its_newest_migration() {
        assert_eq!(LEDGER.newest_migration(), i64::from(LEDGER.version));
    }
}
