//! The domain's tables.

use semel_core::schema::MigrationSet;
use sqlx::migrate::Migrator;

static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/payments");

/// Orders, payments, refunds, and what the provider said.
pub static PAYMENTS: MigrationSet =
    MigrationSet { name: "payments", version: 3, compatible_from: 1, migrations: &MIGRATIONS };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_is_at_the_version_of_its_newest_migration() {
        assert_eq!(PAYMENTS.newest_migration(), i64::from(PAYMENTS.version));
    }
}
