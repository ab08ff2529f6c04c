//! Applying migration sets, and judging them.

use semel_core::database::{self, Unusable};
use semel_core::lifecycle::Lifecycle;
use semel_core::schema::{self, ENGINE, INBOX, MigrationSet, SchemaError};

use crate::database::{Database, with_database, with_sets};

/// The engine's set as a binary would have it that needs version `version`.
fn engine_at(version: i32) -> MigrationSet {
    MigrationSet { name: "engine", version, compatible_from: 1, migrations: ENGINE.migrations }
}

#[tokio::test]
async fn migrating_again_changes_nothing() {
    with_database(async |db: Database| {
        let applied = "SELECT count(*) FROM schema_migrations_engine";
        let before = db.count(applied).await;
        schema::migrate(&db.url, &[&ENGINE, &INBOX]).await.unwrap();
        schema::verify(&db.url, "semel-test", &[&ENGINE, &INBOX]).await.unwrap();
        assert_eq!(db.count(applied).await, before);
        assert_eq!(db.count("SELECT count(*) FROM schema_versions").await, 2);
    })
    .await;
}

#[tokio::test]
async fn migrations_may_run_side_by_side() {
    with_sets(&[], async |db: Database| {
        let sets = [&ENGINE, &INBOX];
        let (one, other) = tokio::join!(schema::migrate(&db.url, &sets), schema::migrate(&db.url, &sets));
        one.unwrap();
        other.unwrap();
        schema::verify(&db.url, "semel-test", &[&ENGINE, &INBOX]).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn names_the_set_that_is_missing() {
    with_sets(&[], async |db: Database| {
        let error = schema::verify(&db.url, "semel-test", &[&ENGINE]).await.unwrap_err();
        assert!(matches!(error, SchemaError::Missing { set: "engine" }), "{error}");
        schema::migrate(&db.url, &[&ENGINE]).await.unwrap();
        let error = schema::verify(&db.url, "semel-test", &[&ENGINE, &INBOX]).await.unwrap_err();
        assert!(matches!(error, SchemaError::Missing { set: "inbox" }), "{error}");
        assert!(error.to_string().contains("migrate"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn refuses_a_schema_that_is_too_old() {
    with_database(async |db: Database| {
        let error =
            schema::verify(&db.url, "semel-test", &[&engine_at(ENGINE.version + 1)]).await.unwrap_err();
        assert!(matches!(error, SchemaError::TooOld { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn accepts_a_newer_schema_only_while_it_serves_this_binary() {
    with_database(async |db: Database| {
        db.execute("UPDATE schema_versions SET version = version + 7 WHERE set_name = 'engine'").await;
        schema::verify(&db.url, "semel-test", &[&ENGINE]).await.unwrap();
        // An older binary's migrate leaves the newer version as it is.
        schema::migrate(&db.url, &[&ENGINE]).await.unwrap();
        let found = db.count("SELECT version::BIGINT FROM schema_versions WHERE set_name = 'engine'").await;
        assert_eq!(found, i64::from(ENGINE.version + 7));

        db.execute("UPDATE schema_versions SET compatible_from = version WHERE set_name = 'engine'").await;
        let error = schema::verify(&db.url, "semel-test", &[&ENGINE]).await.unwrap_err();
        assert!(matches!(error, SchemaError::TooNew { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn waits_for_a_schema_that_is_still_to_be_made() {
    with_sets(&[], async |db: Database| {
        let (life, sets) = (Lifecycle::new(), [&ENGINE]);
        let waits = database::wait_until_usable(&db.url, "semel-test", &sets, &life);
        let (usable, migrated) = tokio::join!(waits, schema::migrate(&db.url, &sets));
        migrated.unwrap();
        usable.unwrap();
    })
    .await;
}

#[tokio::test]
async fn does_not_wait_where_waiting_does_not_help() {
    with_database(async |db: Database| {
        let life = Lifecycle::new();
        let newer = engine_at(ENGINE.version + 1);
        let error = database::wait_until_usable(&db.url, "semel-test", &[&newer], &life).await.unwrap_err();
        assert!(matches!(error, Unusable::Schema(SchemaError::TooOld { .. })), "{error}");

        let server = std::env::var("SEMEL_TEST_POSTGRES_URL").unwrap();
        let (place, _) = server.rsplit_once('/').unwrap();
        let nowhere: database::DatabaseUrl = format!("{place}/semel_no_such_database").parse().unwrap();
        let error = database::wait_until_usable(&nowhere, "semel-test", &[&ENGINE], &life).await.unwrap_err();
        assert!(matches!(error, Unusable::Refused { .. }), "{error}");

        life.stop();
        let error = database::wait_until_usable(&db.url, "semel-test", &[&MISSING], &life).await.unwrap_err();
        assert!(matches!(error, Unusable::Stopped), "{error}");
    })
    .await;
}

static MISSING: MigrationSet =
    MigrationSet { name: "missing", version: 1, compatible_from: 1, migrations: &EMPTY };
static EMPTY: sqlx::migrate::Migrator = sqlx::migrate::Migrator::DEFAULT;
