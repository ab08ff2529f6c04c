//! A connection of the pool for as long as one transaction takes.
//!
//! It goes back to the pool only when it is known to be sound, that is when an answer of the server has ended its
//! transaction. In every other case, its owner being dropped included, it is closed: a pool that takes a connection back
//! pings it without a limit, and one that fell silent would keep its place in the pool for as long.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use semel_core::database::{CALL_LIMIT, within};
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres};

pub(crate) struct Lease(PoolConnection<Postgres>);

impl Lease {
    /// Waits for a connection; for how long is the pool's to say, within reason.
    pub(crate) async fn take(pool: &PgPool) -> Result<Self, sqlx::Error> {
        let mut connection = within(CALL_LIMIT, pool.acquire()).await?;
        connection.close_on_drop();
        Ok(Self(connection))
    }

    /// Gives the connection back. As the pool does, it is pinged first, in a task of its own; but not for ever.
    pub(crate) fn give_back(mut self, limit: Duration) {
        tokio::spawn(tokio::time::timeout(limit, self.0.return_to_pool()));
    }
}

impl Deref for Lease {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

/// Cuts the connections that lie idle in the pool. For use after one of them fell silent, died or led to a server that
/// takes no writes: the others may be like it, and each would cost a message, or a wait, to find out.
pub(crate) fn cut_idle(pool: &PgPool) {
    while let Some(connection) = pool.try_acquire() {
        drop(connection.detach());
    }
}
