//! A hint that there is something to publish: it shortens the wait of relays, which find everything by themselves anyway.
//!
//! It is a NOTIFY *after* the commit, on a connection of its own, at most one every ten milliseconds. Inside the business
//! transaction it would make all commits wait for one lock of the whole server. Nobody waits for a hint, and none fails
//! because of one: whoever has committed something says so ([`Hints::give`], which only sets a flag), and a task sends it.
//! Of many in a row the first goes out at once and the last one is never swallowed.
//!
//! A relay listens on a connection of its own ([`listen`]). While that is lost, silent or leads through a pooler that does
//! not support LISTEN, the relay polls as ever. Others may hint, too: `NOTIFY semel_outbox`.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgListener;
use sqlx::{Executor as _, PgConnection};
use tokio::sync::Notify;

use crate::backoff::Backoff;
use crate::database::{self, DatabaseUrl, within};
use crate::disposition::chain;
use crate::lifecycle::Lifecycle;

/// The channel of the hints.
pub const CHANNEL: &str = "semel_outbox";

/// What sends one. It need not be on disk: it tells of what is.
const NOTIFY: &str = "SET LOCAL synchronous_commit TO off; NOTIFY semel_outbox";

/// How far hints are apart.
const APART: Duration = Duration::from_millis(10);
/// How far wake-ups by hints are apart, however many processes give some.
const WAKE_APART: Duration = Duration::from_millis(5);
/// How long a hint, or an answer to a ping, may take before the connection is given up.
const LIMIT: Duration = Duration::from_secs(5);
/// How long a listener hears nothing before it asks whether its connection is alive.
const SILENCE: Duration = Duration::from_secs(30);

/// Gives hints; clones share one sender.
#[derive(Clone, Debug, Default)]
pub struct Hints {
    due: Arc<Notify>,
}

impl Hints {
    /// Starts the sender, which ends with the process's hard stop. One that is made by `default` has none.
    #[must_use]
    pub fn start(database: DatabaseUrl, application: &'static str, life: &Lifecycle) -> Self {
        let (hints, life) = (Self::default(), life.clone());
        let due = Arc::clone(&hints.due);
        // Not a task that a stop waits for: what it would still send is found by polling.
        tokio::spawn(async move {
            tokio::select! {
                () = send(&database, application, &due) => {}
                () = life.hard_stop() => {}
            }
        });
        hints
    }

    /// Says that something was committed. Returns at once.
    pub fn give(&self) {
        self.due.notify_one();
    }
}

async fn send(database: &DatabaseUrl, application: &str, due: &Notify) {
    let (mut connection, mut backoff) = (None, Backoff::for_service());
    loop {
        due.notified().await;
        let wait = match send_one(database, application, &mut connection).await {
            Ok(()) => {
                backoff.reset();
                APART
            }
            Err(error) => {
                tracing::debug!("hints are not sent: {}", chain(&error));
                // It is due still.
                due.notify_one();
                backoff.next_wait()
            }
        };
        tokio::time::sleep(wait).await;
    }
}

async fn send_one(
    database: &DatabaseUrl,
    application: &str,
    connection: &mut Option<PgConnection>,
) -> Result<(), sqlx::Error> {
    // Taken out, so that one that failed is not used again.
    let mut open = match connection.take() {
        Some(open) => open,
        None => database::connect(database, application).await?,
    };
    within(LIMIT, open.execute(NOTIFY)).await?;
    *connection = Some(open);
    Ok(())
}

/// Wakes somebody at each hint, until the stop; and whenever it begins to listen, for what was not heard before.
pub async fn listen(database: &DatabaseUrl, application: &str, wake: &Notify, life: &Lifecycle) {
    let heard = Notify::new();
    let hear_on = async {
        let mut backoff = Backoff::for_service();
        loop {
            if let Err(error) = hear(database, application, &heard, &mut backoff).await {
                tracing::info!("hints are not heard, so events wait for the next poll: {}", chain(&error));
            }
            tokio::time::sleep(backoff.next_wait()).await;
        }
    };
    // Apart from the hearing, which must not pause: the server keeps what a listener does not take.
    let wake_up = async {
        loop {
            heard.notified().await;
            wake.notify_one();
            tokio::time::sleep(WAKE_APART).await;
        }
    };
    tokio::select! {
        () = hear_on => {}
        () = wake_up => {}
        () = life.stopping() => {}
    }
}

/// Listens until the connection is lost.
async fn hear(
    database: &DatabaseUrl,
    application: &str,
    heard: &Notify,
    backoff: &mut Backoff,
) -> Result<(), sqlx::Error> {
    // The library listens on connections of pools alone.
    let pool = database::pool(database, application, 1);
    let mut listener = within(LIMIT, PgListener::connect_with(&pool)).await?;
    listener.eager_reconnect(false);
    within(LIMIT, listener.listen(CHANNEL)).await?;
    backoff.reset();
    heard.notify_one();
    loop {
        match tokio::time::timeout(SILENCE, listener.try_recv()).await {
            Ok(Ok(Some(_))) => heard.notify_one(),
            Ok(Ok(None)) => return Err(lost()),
            Ok(Err(error)) => return Err(error),
            // A connection whose peer is gone without a word is as silent as one without hints.
            Err(_) => {
                within(LIMIT, listener.execute("SELECT 1")).await?;
            }
        }
    }
}

fn lost() -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the connection was lost"))
}
