//! The domain's tables.

use semel_core::schema::MigrationSet;
use sqlx::migrate::Migrator;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/payments");

/// Orders, payments, and what the provider said.
pub static PAYMENTS: MigrationSet =
    MigrationSet { name: "payments", version: 2, compatible_from: 1, migrations: &MIGRATIONS };
