//! A database of one's own.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

use super::postgres::{Postgres, ROLE, connect};
use super::{at_the_end, check_name};
use crate::net::unique_name;

/// A database, dropped with this value unless it is a lasting one.
///
/// Sessions that are still in it are terminated when it is dropped.
#[derive(Debug)]
pub struct Database {
    name: String,
    server: Postgres,
    /// Whether it must still be dropped.
    owed: AtomicBool,
}

/// A database as it once stood.
#[derive(Debug)]
pub struct Backup(Database);

impl Database {
    pub(super) async fn create(server: &Postgres, prefix: &str) -> Result<Self> {
        check_name(prefix)?;
        let database =
            Self { name: unique_name(prefix), server: server.clone(), owed: AtomicBool::new(false) };
        database.build(&mut server.connect().await?).await?;
        database.owed.store(true, Ordering::Release);
        Ok(database)
    }

    pub(super) async fn lasting(server: &Postgres, name: &str) -> Result<Self> {
        check_name(name)?;
        let database = Self { name: name.to_owned(), server: server.clone(), owed: AtomicBool::new(false) };
        let mut connection = server.connect().await?;
        let found = sqlx::query("SELECT 1 FROM pg_database WHERE datname = $1").bind(name);
        let found = found.fetch_optional(&mut connection).await.context("looking for the database")?;
        if found.is_none() {
            database.build(&mut connection).await?;
        }
        Ok(database)
    }

    async fn build(&self, connection: &mut PgConnection) -> Result<()> {
        let name = &self.name;
        // A given role can make nobody else the owner.
        let owner = self.server.password.as_ref().map(|_| format!(" OWNER {ROLE}")).unwrap_or_default();
        let create = format!("CREATE DATABASE \"{name}\"{owner}");
        connection.execute(AssertSqlSafe(create)).await.with_context(|| {
            format!(
                "creating the database {name}; if DATABASE_URL is set, its role needs CREATEDB, or unset it"
            )
        })?;
        Ok(())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its URL for its owner, who is no superuser in a private server.
    #[must_use]
    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    /// Its URL for the superuser of a private server, else the same as [`url`](Self::url).
    #[must_use]
    pub fn admin_url(&self) -> String {
        self.server.admin_url(&self.name)
    }

    /// Its URL for another role.
    #[must_use]
    pub fn url_as(&self, role: &str, password: &str) -> String {
        self.server.url_as(&self.name, role, password)
    }

    /// Connects to it as the superuser of a private server, else as the given role.
    ///
    /// # Errors
    ///
    /// The server does not answer.
    pub async fn connect(&self) -> Result<PgConnection> {
        connect(&self.admin_url()).await
    }

    /// Terminates all sessions in it but the asking one; says how many.
    ///
    /// # Errors
    ///
    /// The server does not answer.
    pub async fn terminate_sessions(&self) -> Result<i64> {
        let mut connection = self.connect().await?;
        let terminate = "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity \
                         WHERE datname = current_database() AND pid <> pg_backend_pid()";
        let row = sqlx::query(terminate).fetch_one(&mut connection).await.context("terminating sessions")?;
        row.try_get(0).context("counting terminated sessions")
    }

    /// Copies it as it stands, for [`restore`](Self::restore). Nobody may be connected to it.
    ///
    /// # Errors
    ///
    /// Somebody is, or the server does not answer.
    pub async fn back_up(&self) -> Result<Backup> {
        let backup =
            Self { name: unique_name("backup"), server: self.server.clone(), owed: AtomicBool::new(true) };
        let owner = self.server.password.as_ref().map(|_| format!(" OWNER {ROLE}")).unwrap_or_default();
        let create = format!("CREATE DATABASE \"{}\" TEMPLATE \"{}\"{owner}", backup.name, self.name);
        let mut connection = self.server.connect().await?;
        connection
            .execute(AssertSqlSafe(create))
            .await
            .with_context(|| format!("copying the database {}", self.name))?;
        Ok(Backup(backup))
    }

    /// Replaces it by what it was when the backup was made. Sessions in it are terminated.
    ///
    /// # Errors
    ///
    /// The server does not answer.
    pub async fn restore(&self, backup: Backup) -> Result<()> {
        destroy(&self.server, &self.name).await?;
        let rename = format!("ALTER DATABASE \"{}\" RENAME TO \"{}\"", backup.0.name, self.name);
        let mut connection = self.server.connect().await?;
        connection
            .execute(AssertSqlSafe(rename))
            .await
            .with_context(|| format!("restoring the database {}", self.name))?;
        // It has the other's name now, and is the other's to drop.
        backup.0.owed.store(false, Ordering::Release);
        Ok(())
    }

    /// Drops it now, and says whether that worked; dropping the value would tell nobody.
    ///
    /// # Errors
    ///
    /// The server does not answer.
    pub async fn drop_now(self) -> Result<()> {
        ensure!(self.owed.swap(false, Ordering::AcqRel), "the database {} is a lasting one", self.name);
        destroy(&self.server, &self.name).await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.owed.swap(false, Ordering::AcqRel) {
            let (server, name) = (self.server.clone(), self.name.clone());
            at_the_end(async move { destroy(&server, &name).await });
        }
    }
}

async fn destroy(server: &Postgres, name: &str) -> Result<()> {
    let mut connection = server.connect().await?;
    let drop = format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)");
    connection.execute(AssertSqlSafe(drop)).await.with_context(|| format!("dropping the database {name}"))?;
    Ok(())
}
