//! Calls to the database that cannot last for ever, and connections of a pool that are sound when they go back.
//!
//! A connection whose peer fell silent, without a reset, answers nothing and reports nothing. So every call has a limit,
//! and the connection of a call that ran into it is cut.
//!
//! A pool pings what it takes back, without a limit: one that fell silent just then would keep its place in the pool for
//! ever, and a few of them would be the whole pool. So a connection is given back here, with a limit, and never one whose
//! last call was dropped or ran into its limit: that is closed.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres};

use super::is_read_only;

/// How long a call may take before its connection is given up: longer than the server lets a statement run, so that a call
/// of one statement comes to this only on a connection that is dead without knowing it. One of several may also be slow;
/// what became of it is not known then.
pub const CALL_LIMIT: Duration = Duration::from_secs(20);

/// How long a connection may take to show that it is sound when it is given back.
const PING_LIMIT: Duration = Duration::from_secs(5);

/// Awaits a call at most for `limit`; then it fails as one whose connection was lost.
///
/// The connection must not be used again after that, nor go back to its pool, which would wait for it: drop a
/// [`PgConnection`] or a [`Loan`]. [`Lent`] does.
///
/// # Errors
///
/// Those of the call, and a time-out, which says nothing of what the server did.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(timed_out()))
}

pub(super) fn timed_out() -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "the database does not answer"))
}

/// A connection of a pool, for as long as one transaction takes. It is closed when it is dropped.
#[derive(Debug)]
pub struct Loan(PoolConnection<Postgres>);

impl Loan {
    /// Takes a connection from the pool.
    ///
    /// # Errors
    ///
    /// When none is free, or none can be made, within what the pool allows, or [`CALL_LIMIT`].
    pub async fn take(pool: &PgPool) -> Result<Self, sqlx::Error> {
        // On the heap: it would be most of the size of every future that waits for a connection.
        let mut connection = within(CALL_LIMIT, Box::pin(pool.acquire())).await?;
        connection.close_on_drop();
        Ok(Self(connection))
    }

    /// Gives the connection back. As the pool does, it is pinged first, in a task of its own; but not for ever.
    pub fn give_back(mut self) {
        tokio::spawn(tokio::time::timeout(PING_LIMIT, self.0.return_to_pool()));
    }

    /// Cuts the connection, which is not to be waited for.
    fn cut(self) {
        drop(self.0.detach());
    }
}

impl Deref for Loan {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Loan {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

/// A pooled connection whose calls have a limit. One that does not answer leaves the pool; any other goes back when this
/// is dropped.
#[derive(Debug)]
pub struct Lent {
    connection: Option<Loan>,
}

impl Lent {
    /// Takes a connection from the pool.
    ///
    /// # Errors
    ///
    /// When none is free, or none can be made, in time.
    pub async fn from(pool: &PgPool) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: Some(Loan::take(pool).await?) })
    }

    /// Makes a call.
    ///
    /// # Errors
    ///
    /// Those of the call; a time-out; and after one, a lost connection at once.
    ///
    /// # Cancel safety
    ///
    /// A call that is dropped half-way closes the connection. What the server had of it by then may still commit.
    pub async fn call<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        // Taken out, so that a call that is dropped takes it along.
        let Some(mut connection) = self.connection.take() else { return Err(timed_out()) };
        let Ok(outcome) = tokio::time::timeout(CALL_LIMIT, call(&mut connection)).await else {
            connection.cut();
            return Err(timed_out());
        };
        if outcome.as_ref().is_err_and(is_read_only) {
            // It leads to a server that was demoted: the next one may lead to its successor.
            connection.cut();
        } else {
            self.connection = Some(connection);
        }
        outcome
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.give_back();
        }
    }
}

/// Makes one call on a connection of the pool, with a limit.
///
/// # Errors
///
/// As [`Lent::from`] and [`Lent::call`].
pub async fn call<T>(
    pool: &PgPool,
    call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
) -> Result<T, sqlx::Error> {
    Lent::from(pool).await?.call(call).await
}

/// Cuts the connections that lie idle in the pool. For use after one of them fell silent, died or led to a server that
/// takes no writes: the others may be like it, and each would cost its user a wait, or a message, to find out.
pub fn cut_idle(pool: &PgPool) {
    while let Some(connection) = pool.try_acquire() {
        drop(connection.detach());
    }
}
