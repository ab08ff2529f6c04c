//! The domain's tables.

use semel_core::schema::MigrationSet;
use sqlx::migrate::Migrator;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/payments");

/// Orders.
pub static PAYMENTS: MigrationSet =
    MigrationSet { name: "payments", version: 1, compatible_from: 1, migrations: &MIGRATIONS };
