//! A Postgres: a private one, or one that the user gave.

mod private;

use std::time::Duration;

use anyhow::{Context as _, Result};
use reqwest::Url;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};

pub use self::private::PrivatePostgres;
use super::database::Database;
use crate::net::owner_of;
use crate::pid::ProcessId;

/// The role of a private Postgres that owns the databases made for a test, and needs a password.
pub const ROLE: &str = "semel";

const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// A Postgres server to make databases in.
#[derive(Clone, Debug)]
pub struct Postgres {
    pub(super) admin: Url,
    /// The password of [`ROLE`]; none where the server was given.
    pub(super) password: Option<String>,
    pub(super) private: Option<PrivatePostgres>,
}

impl Postgres {
    /// The private server behind this, which may be stopped and killed.
    #[must_use]
    pub fn private(&self) -> Option<&PrivatePostgres> {
        self.private.as_ref()
    }

    /// The URL of a database for its owner: [`ROLE`] in a private server, else the given role.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        match &self.password {
            Some(password) => self.url_as(database, ROLE, password),
            None => self.admin_url(database),
        }
    }

    /// The URL of a database for the superuser of a private server, else for the given role.
    #[must_use]
    pub fn admin_url(&self, database: &str) -> String {
        let mut url = self.admin.clone();
        url.set_path(database);
        url.into()
    }

    /// The URL of a database for another role.
    #[must_use]
    pub fn url_as(&self, database: &str, role: &str, password: &str) -> String {
        let mut url = self.admin.clone();
        url.set_path(database);
        // Both fail only for a URL without a host, which has no user in this place either.
        let _ = url.set_username(role);
        let _ = url.set_password(Some(password));
        url.into()
    }

    /// Makes a database that is dropped with its value. The prefix is a word of at most 30 bytes.
    ///
    /// # Errors
    ///
    /// The server does not answer, or its role may not create databases.
    pub async fn create_database(&self, prefix: &str) -> Result<Database> {
        Database::create(self, prefix).await
    }

    /// Finds or makes a database of this very name, which stays.
    ///
    /// # Errors
    ///
    /// The server does not answer, or its role may not create databases.
    pub async fn lasting_database(&self, name: &str) -> Result<Database> {
        Database::lasting(self, name).await
    }

    /// Connects as the superuser, or as the given role, to a database that always exists.
    pub(super) async fn connect(&self) -> Result<PgConnection> {
        connect(self.admin.as_str()).await
    }

    /// Checks that the server answers.
    pub(super) async fn check(&self) -> Result<String> {
        let mut connection = self.connect().await?;
        let version = sqlx::query_scalar("SHOW server_version").fetch_one(&mut connection).await;
        version.context("asking Postgres for its version")
    }

    /// Drops the databases that processes which are gone left behind in a private server.
    pub(super) async fn sweep(&self) -> Result<()> {
        let mut connection = self.connect().await?;
        let names = sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE NOT datistemplate");
        let names: Vec<String> = names.fetch_all(&mut connection).await.context("listing databases")?;
        for name in names {
            if owner_of(&name).is_some_and(|owner| ProcessId::of(owner).is_none()) {
                let drop = format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)");
                connection.execute(AssertSqlSafe(drop)).await.with_context(|| format!("dropping {name}"))?;
            }
        }
        Ok(())
    }
}

/// Connects within a deadline.
pub(super) async fn connect(url: &str) -> Result<PgConnection> {
    let connection = tokio::time::timeout(CONNECT_DEADLINE, PgConnection::connect(url)).await;
    connection.context("Postgres did not answer in time")?.context("connecting to Postgres")
}
