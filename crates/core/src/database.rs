//! The way to Postgres: where it is, a pool with server-side guards, and what its errors mean.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, Executor as _, PgConnection, PgPool};

use crate::backoff::Backoff;
use crate::disposition::{Disposed, Disposition, chain};
use crate::lifecycle::Lifecycle;
use crate::schema::{MigrationSet, SchemaError};

mod lent;

use lent::timed_out;
pub use lent::{CALL_LIMIT, Lent, Loan, call, cut_idle, within};

/// Where the database is, password included; never printed with it.
#[derive(Clone)]
pub struct DatabaseUrl {
    url: SecretString,
    shown: String,
}

impl DatabaseUrl {
    fn options(&self, application: &str) -> PgConnectOptions {
        // Parsed once already, in `from_str`.
        let mut options = PgConnectOptions::from_str(self.url.expose_secret()).unwrap_or_default();
        // The library keeps the brackets of an IPv6 address, and then looks for a host of that name.
        if let Some(address) = options.get_host().strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            let address = address.to_owned();
            options = options.host(&address);
        }
        let given = options.get_options().unwrap_or_default().to_owned();
        let guards = GUARDS.into_iter().filter(|(name, _)| *name == ISOLATION || !names(&given, name));
        options.application_name(application).options(guards)
    }
}

/// Says whether start-up options, `-c name=value -cname=value --name=value`, set this one.
fn names(options: &str, name: &str) -> bool {
    options.split_whitespace().any(|option| {
        let option = option.strip_prefix("-c").or_else(|| option.strip_prefix("--")).unwrap_or(option);
        option.strip_prefix(name).is_some_and(|rest| rest.starts_with('='))
    })
}

/// Ours are written for `read committed`: under a stricter one, a relay's reading would have the snapshot of its locking. So
/// no URL decides it.
const ISOLATION: &str = "default_transaction_isolation";

/// Guards that the server keeps for us, whatever becomes of the client. Another that the URL's `options` name is as they say.
/// Behind a pooler that refuses start-up options, set them on the role.
const GUARDS: [(&str, &str); 5] = [
    (ISOLATION, "read committed"),
    ("lock_timeout", "1s"),
    ("statement_timeout", "15s"),
    ("idle_in_transaction_session_timeout", "30s"),
    // Frees the locks of a client that stopped reading; without effect on unix sockets.
    ("tcp_user_timeout", "10s"),
];

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

/// A connection string that cannot be used. It quotes no part of it.
#[derive(Debug, thiserror::Error)]
pub enum InvalidDatabaseUrl {
    /// It cannot be read.
    #[error("not a Postgres URL such as postgres://user:password@host:5432/database")]
    Form,
    /// A parameter means nothing to us.
    #[error("the Postgres URL has an unknown parameter; known are {}", PARAMETERS.join(", "))]
    Parameter,
}

/// What may stand behind the `?`. The library logs what it does not know with its value.
const PARAMETERS: [&str; 13] = [
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
    "statement-cache-capacity",
];

impl FromStr for DatabaseUrl {
    type Err = InvalidDatabaseUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(InvalidDatabaseUrl::Form);
        }
        let query = text.split_once('?').map_or("", |(_, query)| query);
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let name = parameter.split_once('=').map_or(parameter, |(name, _)| name);
            if !PARAMETERS.contains(&name) {
                return Err(InvalidDatabaseUrl::Parameter);
            }
        }
        // The parser's own error may quote the URL, so it is dropped.
        let options = PgConnectOptions::from_str(text).map_err(|_| InvalidDatabaseUrl::Form)?;
        let database = options.get_database().ok_or(InvalidDatabaseUrl::Form)?;
        let place = match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        };
        let shown = format!("postgres://{}@{place}/{database}", options.get_username());
        Ok(Self { url: SecretString::from(text), shown })
    }
}

/// Says whether the server refused to write, as a standby or a server that is set so does.
#[must_use]
pub fn is_read_only(error: &sqlx::Error) -> bool {
    sqlstate(error).is_some_and(|code| code == "25006")
}

/// Opens a pool that connects when it is first used.
///
/// A connection that lay idle for a second is pinged before it is lent; a busy one is not, which saves a round trip.
#[must_use]
pub fn pool(url: &DatabaseUrl, application: &str, max_connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(Duration::from_secs(3))
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                if meta.idle_for > Duration::from_secs(1) {
                    connection.ping().await?;
                }
                Ok(true)
            })
        })
        .connect_lazy_with(url.options(application))
}

/// Opens one connection, for a loop that owns it.
///
/// # Errors
///
/// When the server cannot be reached within 10 s or refuses.
pub async fn connect(url: &DatabaseUrl, application: &str) -> Result<PgConnection, sqlx::Error> {
    connect_with(url, application, &[]).await
}

/// Opens one connection as [`connect`] does, with settings of its own.
///
/// # Errors
///
/// As [`connect`].
pub async fn connect_with(
    url: &DatabaseUrl,
    application: &str,
    settings: &[(&str, &str)],
) -> Result<PgConnection, sqlx::Error> {
    let options = url.options(application).options(settings.iter().copied());
    // In a task of its own: a connection attempt is never cut half-way by a caller that gives up.
    let mut attempt = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    match tokio::time::timeout(Duration::from_secs(10), &mut attempt).await {
        Ok(Ok(connected)) => connected,
        Ok(Err(_)) => Err(sqlx::Error::WorkerCrashed),
        Err(_) => {
            // A server that accepts and stays silent must not keep the attempt for ever.
            attempt.abort();
            Err(timed_out())
        }
    }
}

/// The database cannot be used, and waiting does not help.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The server refuses this user, password or database.
    #[error("{url} refuses: {reason}")]
    Refused {
        /// Where, without the password.
        url: String,
        /// The server's own word.
        reason: String,
    },
    /// The schema is not one that this binary can use.
    #[error(transparent)]
    Schema(#[from] SchemaError),
    /// A stop was asked for while waiting.
    #[error("stopped while waiting for the database")]
    Stopped,
}

/// Waits until the database answers with a schema that this binary can use, and says what it waits for.
///
/// # Errors
///
/// When waiting does not help: refused credentials, a schema that is too old or too new, a stop.
pub async fn wait_until_usable(
    url: &DatabaseUrl,
    application: &str,
    sets: &[&MigrationSet],
    lifecycle: &Lifecycle,
) -> Result<(), Unusable> {
    let mut backoff = Backoff::for_service();
    loop {
        let verified = tokio::select! {
            verified = crate::schema::verify(url, application, sets) => verified,
            () = lifecycle.stopping() => return Err(Unusable::Stopped),
        };
        let reason = match verified {
            Ok(()) => return Ok(()),
            Err(SchemaError::Missing { set }) => {
                format!("the schema to be made: run the subcommand `migrate` (the set \"{set}\" is missing)")
            }
            Err(SchemaError::Database(error)) => match disposition(&error) {
                Disposition::Fail => {
                    return Err(Unusable::Refused { url: url.to_string(), reason: chain(&error) });
                }
                Disposition::Retry => format!("the database: {}", chain(&error)),
            },
            Err(error) => return Err(error.into()),
        };
        tracing::warn!(database = %url, "waiting for {reason}");
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = lifecycle.stopping() => return Err(Unusable::Stopped),
        }
    }
}

/// Says what a loop does about a database error.
#[must_use]
pub fn disposition(error: &sqlx::Error) -> Disposition {
    match error {
        sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => Disposition::Fail,
        sqlx::Error::Database(_) => match sqlstate(error).as_deref() {
            // Wrong password or user, no such database, not permitted.
            Some("28P01" | "28000" | "3D000" | "42501") => Disposition::Fail,
            _ => Disposition::Retry,
        },
        _ => Disposition::Retry,
    }
}

impl Disposed for sqlx::Error {
    fn disposition(&self) -> Disposition {
        disposition(self)
    }
}

/// Returns the error's SQLSTATE, if the server answered at all.
#[must_use]
pub fn sqlstate(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).map(std::borrow::Cow::into_owned)
}

/// What is known of a statement that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Failure {
    /// It waited for a lock for longer than `lock_timeout`; rolled back.
    LockTimeout,
    /// A conflict with another transaction; rolled back, worth an immediate repeat.
    Conflict,
    /// The server refused it; rolled back.
    Refused,
    /// The connection was lost, or ended by force, while it ran: it may have committed, or may still commit.
    Unknown,
}

/// Classifies the failure of a statement that had been sent.
#[must_use]
pub fn failure(error: &sqlx::Error) -> Failure {
    let Some(code) = sqlstate(error) else { return Failure::Unknown };
    match code.as_str() {
        "55P03" => Failure::LockTimeout,
        "40001" | "40P01" => Failure::Conflict,
        // Connection exceptions, operator intervention, internal errors: the session ended, we do not know where.
        code if ["08", "57", "58", "XX", "F0"].iter().any(|class| code.starts_with(class))
            && code != "57014" =>
        {
            Failure::Unknown
        }
        _ => Failure::Refused,
    }
}

/// Ends a transaction that is not to be committed, and waits for it: a dropped one only queues its ROLLBACK.
///
/// # Errors
///
/// When the connection is lost; the server then rolls back by itself.
pub async fn roll_back(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    connection.execute("ROLLBACK").await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_shows_the_password() {
        let url: DatabaseUrl =
            "postgres://semel:s3cret@db:6432/payments?sslmode=verify-full".parse().unwrap();
        assert_eq!(
            format!("{url} {url:?}"),
            "postgres://semel@db:6432/payments postgres://semel@db:6432/payments"
        );
    }

    #[test]
    fn what_the_url_says_of_a_guard_counts() {
        let options = |url: &str| {
            let url: DatabaseUrl = url.parse().unwrap();
            url.options("test").get_options().unwrap_or_default().to_owned()
        };
        let given = options("postgres://u@h/d?options=-c%20statement_timeout%3D3s");
        assert!(
            given.contains("statement_timeout=3s") && !given.contains("statement_timeout=15s"),
            "{given}"
        );
        let given = options("postgres://u@h/d?options=-c%20deadlock_timeout%3D3s");
        assert!(given.contains(" lock_timeout=1s"), "{given}");
        assert!(options("postgres://u@h/d").contains("statement_timeout=15s"));
        let given = options("postgres://u@h/d?options=-c%20default_transaction_isolation%3Dserializable");
        // The server goes by the last of several.
        let (theirs, ours) = (given.find("isolation=serializable"), given.rfind("isolation=read"));
        assert!(theirs.is_some() && theirs < ours, "{given}");
    }

    #[test]
    fn refuses_what_is_no_postgres_url() {
        let unusable = [
            "",
            "db:5432",
            "mysql://u:p@h/d",
            "postgres://u:p@h:port/d",
            "postgres://u:p@h",
            "postgres://u:p@h/d?sslpassword=p@h",
            "postgres://u:p@h/d?sslmode=prefer&SSLMODE=p@h",
        ];
        for text in unusable {
            let error = text.parse::<DatabaseUrl>().expect_err(text);
            assert!(!error.to_string().contains("p@h"), "{error}");
        }
    }

    #[test]
    fn takes_an_ipv6_address_without_its_brackets() {
        let url: DatabaseUrl = "postgres://semel:s3cret@[::1]:6432/payments".parse().unwrap();
        assert_eq!(url.options("test").get_host(), "::1");
        assert_eq!(url.to_string(), "postgres://semel@[::1]:6432/payments");
    }
}
