//! Giving a role what a daemon's statements need, and no more.
//!
//! Roles belong to the whole server, so no migration makes them: somebody creates the role, and the owner of the tables runs
//! the daemon's subcommand `grant` for it, after each migration. A version that needs more grants more; nothing is taken away,
//! since one role may serve several daemons, or be granted other things by its owner.
//!
//! All grants of one call are made or none. Two calls at a time wait for each other: Postgres fails one of two that change the
//! rights on one table.

use std::fmt;
use std::str::FromStr;

use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

use crate::database::{self, DatabaseUrl};
use crate::schema::{self, MigrationSet, SchemaError};

/// The right to do something with tables or sequences.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    /// What may be done, as `GRANT` says it: `SELECT, UPDATE (attempts)`.
    pub right: &'static str,
    /// With which tables or sequences. One that the database does not have is passed over.
    pub on: &'static [&'static str],
}

impl Grant {
    /// The right to do this with these.
    #[must_use]
    pub const fn of(right: &'static str, on: &'static [&'static str]) -> Self {
        Self { right, on }
    }
}

/// What whoever starts on a schema needs: its version.
pub const VERSIONS: Grant = Grant::of("SELECT", &["schema_versions"]);

/// To write events, and nothing else of the outbox.
pub const WRITE_EVENTS: [Grant; 2] = [
    Grant::of(
        "INSERT (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)",
        &["outbox"],
    ),
    Grant::of("USAGE", &["outbox_id_seq"]),
];

/// The name of a role.
#[derive(Clone, Debug)]
pub struct Role(String);

/// A name that we do not take for a role's.
#[derive(Debug, thiserror::Error)]
#[error("must be 1 to 63 small letters, digits or _, and begin with no digit")]
pub struct InvalidRole;

impl FromStr for Role {
    type Err = InvalidRole;

    fn from_str(text: &str) -> Result<Self, InvalidRole> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let begins = |c: char| !c.is_ascii_digit();
        if (1..=63).contains(&text.len()) && text.chars().all(allowed) && text.starts_with(begins) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidRole)
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// Rights that could not be granted.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The tables are not there, or of another version.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// The database refuses.
    #[error("granting {role} its rights")]
    Database {
        /// To whom.
        role: Role,
        /// Why.
        source: sqlx::Error,
    },
}

/// Grants a role these rights, in the schema that the URL's role finds first. The schema's sets have to be applied.
///
/// # Errors
///
/// When a set is not as this version has it, there is no such role, or the URL's role may not grant.
pub async fn grant(
    url: &DatabaseUrl,
    role: &Role,
    sets: &[&MigrationSet],
    grants: &[&[Grant]],
) -> Result<(), GrantError> {
    schema::verify(url, "semel-grant", sets).await?;
    let failed = |source| GrantError::Database { role: role.clone(), source };
    let mut connection = database::connect(url, "semel-grant").await.map_err(failed)?;
    let granted = grant_all(&mut connection, role, grants).await.map_err(failed)?;
    connection.close().await.map_err(failed)?;
    tracing::info!(role = role.0, granted, "granted");
    Ok(())
}

async fn grant_all(
    connection: &mut PgConnection,
    role: &Role,
    grants: &[&[Grant]],
) -> Result<usize, sqlx::Error> {
    let mut granted = 0;
    let mut tx = connection.begin().await?;
    tx.execute("SELECT pg_advisory_xact_lock(hashtextextended('semel grants', 0))").await?;
    let schema: String = sqlx::query_scalar("-- grants_schema\n SELECT quote_ident(current_schema())")
        .fetch_one(&mut *tx)
        .await?;
    tx.execute(AssertSqlSafe(format!("GRANT USAGE ON SCHEMA {schema} TO {role}"))).await?;
    for Grant { right, on } in grants.iter().copied().flatten() {
        for object in *on {
            let kind: Option<String> = sqlx::query_scalar(
                "-- grants_kind\n SELECT relkind::text FROM pg_class WHERE oid = to_regclass($1)",
            )
            .bind(object)
            .fetch_optional(&mut *tx)
            .await?;
            let kind = match kind.as_deref() {
                Some("S") => "SEQUENCE",
                Some(_) => "TABLE",
                None => continue,
            };
            tx.execute(AssertSqlSafe(format!("GRANT {right} ON {kind} {object} TO {role}"))).await?;
            granted += 1;
        }
    }
    tx.commit().await?;
    Ok(granted)
}

/// Lets a role see the transactions of others, as the gauge of the oldest one needs. Says so where the URL's role may not grant
/// that, which only a superuser may.
///
/// # Errors
///
/// When the database fails otherwise.
pub async fn grant_statistics(url: &DatabaseUrl, role: &Role) -> Result<(), GrantError> {
    let failed = |source| GrantError::Database { role: role.clone(), source };
    let mut connection = database::connect(url, "semel-grant").await.map_err(failed)?;
    match connection.execute(AssertSqlSafe(format!("GRANT pg_read_all_stats TO {role}"))).await {
        Err(error) if database::sqlstate(&error).as_deref() == Some("42501") => {
            tracing::warn!(
                role = role.0,
                "only a superuser can grant pg_read_all_stats, without which it sees its own transactions alone"
            );
        }
        Err(error) => return Err(failed(error)),
        Ok(_) => {}
    }
    connection.close().await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_a_plain_name() {
        assert_eq!("semel_api".parse::<Role>().unwrap().to_string(), "\"semel_api\"");
        for name in ["", "1st", "a b", "a\"b", "A", "a;b", &"a".repeat(64)] {
            assert!(name.parse::<Role>().is_err(), "{name}");
        }
    }
}
