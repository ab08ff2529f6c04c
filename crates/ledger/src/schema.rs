//! The ledger's tables.

use semel_core::schema::{ENGINE, INBOX, MigrationSet};
use sqlx::migrate::Migrator;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/ledger");

/// Transactions and their entries.
pub static LEDGER: MigrationSet =
    MigrationSet { name: "ledger", version: 1, compatible_from: 1, migrations: &MIGRATIONS };

/// All that the ledger's database holds: its own tables, what it has taken effect of, and the outbox of its own events.
pub static SETS: [&MigrationSet; 3] = [&ENGINE, &INBOX, &LEDGER];
