//! The tables' versions: applying migration sets, and refusing a schema that a binary cannot use.
//!
//! A database holds one or more *sets* (engine, payments, inbox, ledger), each with its own version. A daemon refuses a
//! set that is older than it needs, and accepts a newer one that still names the daemon's version as compatible, so that
//! a rolling upgrade restarts old pods safely.

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::database::{self, CALL_LIMIT, DatabaseUrl, within};

/// A set of migrations that belong together.
#[derive(Debug)]
pub struct MigrationSet {
    /// The set's name, also the folder under `migrations/`.
    pub name: &'static str,
    /// The set's version: the number of its newest migration.
    pub version: i32,
    /// The oldest version whose binaries can still use the newest schema.
    pub compatible_from: i32,
    /// The migrations.
    pub migrations: &'static Migrator,
}

impl MigrationSet {
    /// Returns the number of the newest migration, which the set's version has to be.
    #[must_use]
    pub fn newest_migration(&self) -> i64 {
        self.migrations.iter().map(|migration| migration.version).max().unwrap_or_default()
    }
}

static ENGINE_MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/engine");
static INBOX_MIGRATIONS: Migrator = sqlx::migrate!("../../migrations/inbox");

/// Idempotency keys, outbox, clients.
pub static ENGINE: MigrationSet =
    MigrationSet { name: "engine", version: 3, compatible_from: 1, migrations: &ENGINE_MIGRATIONS };

/// What consumers have taken effect of.
pub static INBOX: MigrationSet =
    MigrationSet { name: "inbox", version: 2, compatible_from: 1, migrations: &INBOX_MIGRATIONS };

/// A schema that a binary cannot use, or make.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// A set was never applied.
    #[error("the schema set \"{set}\" is missing: run the subcommand `migrate`")]
    Missing {
        /// The set's name.
        set: &'static str,
    },
    /// A set is older than this binary needs.
    #[error(
        "the schema set \"{set}\" is at version {found}, this binary needs {needed}: run the subcommand `migrate`"
    )]
    TooOld {
        /// The set's name.
        set: &'static str,
        /// The version in the database.
        found: i32,
        /// The version that this binary needs.
        needed: i32,
    },
    /// A set is newer, and no longer made for this binary.
    #[error(
        "the schema set \"{set}\" is at version {found} and serves binaries from version {compatible_from} on, this one \
         is of version {ours}: deploy a newer binary"
    )]
    TooNew {
        /// The set's name.
        set: &'static str,
        /// The version in the database.
        found: i32,
        /// The oldest version that it serves.
        compatible_from: i32,
        /// This binary's version.
        ours: i32,
    },
    /// A migration failed.
    #[error("applying the schema set \"{set}\"")]
    Migrate {
        /// The set's name.
        set: &'static str,
        /// Why.
        source: MigrateError,
    },
    /// The database could not be asked.
    #[error("asking the database for its schema")]
    Database(#[from] sqlx::Error),
}

/// Applies the sets, each as far as this binary knows it; a newer schema is left as it is.
///
/// # Errors
///
/// When a migration fails (each is one transaction), or the database cannot be reached.
pub async fn migrate(url: &DatabaseUrl, sets: &[&MigrationSet]) -> Result<(), SchemaError> {
    let mut connection = database::connect(url, "semel-migrate").await?;
    // A migration may wait for the statements of daemons at work, and may take its time.
    connection.execute("SET lock_timeout = '30s'; SET statement_timeout = 0").await?;
    bootstrap(&mut connection).await?;
    for set in sets {
        let migrator = Migrator {
            migrations: set.migrations.migrations.clone(),
            // An older binary meets migrations that it does not know.
            ignore_missing: true,
            locking: true,
            no_tx: false,
            table_name: format!("schema_migrations_{}", set.name).into(),
            create_schemas: std::borrow::Cow::Borrowed(&[]),
        };
        migrator
            .run(&mut connection)
            .await
            .map_err(|source| SchemaError::Migrate { set: set.name, source })?;
        sqlx::query(
            "-- schema_raise_version
             INSERT INTO schema_versions AS v (set_name, version, compatible_from) VALUES ($1, $2, $3)
             ON CONFLICT (set_name) DO UPDATE
                SET version = EXCLUDED.version, compatible_from = EXCLUDED.compatible_from, applied_at = clock_timestamp()
                WHERE v.version < EXCLUDED.version",
        )
        .bind(set.name)
        .bind(set.version)
        .bind(set.compatible_from)
        .execute(&mut connection)
        .await?;
        tracing::info!(set = set.name, version = set.version, "schema set is applied");
    }
    connection.close().await?;
    Ok(())
}

async fn bootstrap(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    // CREATE TABLE IF NOT EXISTS races with itself, hence the lock; it goes with the session's transaction.
    let mut tx = connection.begin().await?;
    tx.execute("SELECT pg_advisory_xact_lock(hashtextextended('semel schema_versions', 0))").await?;
    tx.execute(
        "-- schema_bootstrap
         CREATE TABLE IF NOT EXISTS schema_versions (
            set_name TEXT COLLATE \"C\" NOT NULL CONSTRAINT schema_versions_pkey PRIMARY KEY,
            version INT NOT NULL,
            compatible_from INT NOT NULL,
            applied_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
            CONSTRAINT schema_versions_ordered CHECK (compatible_from BETWEEN 1 AND version)
         );
         COMMENT ON TABLE schema_versions IS 'Which version each set of tables is at.';
         COMMENT ON COLUMN schema_versions.set_name IS 'The set.';
         COMMENT ON COLUMN schema_versions.version IS 'Its version.';
         COMMENT ON COLUMN schema_versions.compatible_from IS 'The oldest version whose binaries it still serves.';
         COMMENT ON COLUMN schema_versions.applied_at IS 'When it reached that version.';",
    )
    .await?;
    tx.commit().await
}

/// Checks, over a connection of its own, that every set is one that this binary can use.
///
/// A pool would say of a server that is away no more than that it waited in vain.
///
/// # Errors
///
/// When a set is missing, too old or too new, or the database cannot be asked.
pub async fn verify(url: &DatabaseUrl, application: &str, sets: &[&MigrationSet]) -> Result<(), SchemaError> {
    let mut connection = database::connect(url, application).await?;
    let found = within(CALL_LIMIT, versions(&mut connection)).await?;
    drop(connection.close().await);
    sets.iter().try_for_each(|set| judge(set, &found))
}

/// Checks as [`verify`] does, over a connection of a pool.
///
/// # Errors
///
/// As [`verify`].
pub async fn verify_in(pool: &PgPool, sets: &[&MigrationSet]) -> Result<(), SchemaError> {
    let found = database::call(pool, async |connection| versions(connection).await).await?;
    sets.iter().try_for_each(|set| judge(set, &found))
}

async fn versions(connection: &mut PgConnection) -> Result<Vec<(String, i32, i32)>, sqlx::Error> {
    // Not checked at compile time: the table may not exist, which is an answer here.
    let asked = "-- schema_versions\n SELECT set_name, version, compatible_from FROM schema_versions";
    match sqlx::query_as(asked).fetch_all(connection).await {
        Err(error) if database::sqlstate(&error).as_deref() == Some("42P01") => Ok(Vec::new()),
        found => found,
    }
}

fn judge(set: &MigrationSet, found: &[(String, i32, i32)]) -> Result<(), SchemaError> {
    let Some((_, version, compatible_from)) = found.iter().find(|(name, ..)| name == set.name) else {
        return Err(SchemaError::Missing { set: set.name });
    };
    if *version < set.version {
        return Err(SchemaError::TooOld { set: set.name, found: *version, needed: set.version });
    }
    if *compatible_from > set.version {
        return Err(SchemaError::TooNew {
            set: set.name,
            found: *version,
            compatible_from: *compatible_from,
            ours: set.version,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    static SET: MigrationSet =
        MigrationSet { name: "engine", version: 5, compatible_from: 3, migrations: &ENGINE_MIGRATIONS };

    fn judged(version: i32, compatible_from: i32) -> Result<(), SchemaError> {
        judge(&SET, &[("engine".to_owned(), version, compatible_from)])
    }

    #[test]
    fn a_set_is_at_the_version_of_its_newest_migration() {
        for set in [&ENGINE, &INBOX] {
            assert_eq!(set.newest_migration(), i64::from(set.version), "{}", set.name);
        }
    }

    #[test]
    fn accepts_its_own_version_and_compatible_newer_ones() {
        judged(5, 3).unwrap();
        judged(9, 5).unwrap();
    }

    #[test]
    fn refuses_missing_older_and_incompatible_newer() {
        assert!(matches!(judge(&SET, &[]), Err(SchemaError::Missing { .. })));
        assert!(matches!(judged(4, 1), Err(SchemaError::TooOld { found: 4, needed: 5, .. })));
        assert!(matches!(judged(9, 6), Err(SchemaError::TooNew { compatible_from: 6, ours: 5, .. })));
    }
}
