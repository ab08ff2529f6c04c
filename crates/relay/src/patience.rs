//! Whether the server is patient enough for a batch.
//!
//! The server ends a session whose transaction waits for its client for too long. A batch that outlives that is rolled back,
//! published and all, and would be repeated for ever.

use semel_core::database::{self, CALL_LIMIT, within};
use semel_core::outbox::drain;
use sqlx::{PgConnection, PgPool};

use crate::error::RelayError;
use crate::options::Config;

impl Config {
    /// Checks at the start that the server lets a batch last as long as it may. A server that does not answer is asked
    /// again by each worker.
    pub(crate) async fn suits_server(&self, pool: &PgPool) -> Result<(), RelayError> {
        match database::call(pool, drain::patience).await {
            Ok(patience) => self.check(patience),
            Err(_) => Ok(()),
        }
    }

    /// Checks it on a worker's connection, which may lead to another server than the last one.
    pub(crate) async fn suits(&self, connection: &mut PgConnection) -> Result<(), RelayError> {
        let patience = within(CALL_LIMIT, drain::patience(connection))
            .await
            .map_err(RelayError::database("asking how long a batch may last"))?;
        self.check(patience)
    }

    fn check(&self, patience: Option<std::time::Duration>) -> Result<(), RelayError> {
        let batch = self.longest_batch();
        match patience {
            Some(patience) if patience <= batch => Err(RelayError::Impatient { batch, patience }),
            _ => Ok(()),
        }
    }
}
