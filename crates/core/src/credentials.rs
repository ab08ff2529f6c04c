//! Bearer credentials: `sml_<id>_<secret>`, where the id is 8 random bytes and the secret 32, both in hex.
//!
//! Only the SHA-256 of the secret is stored (256 random bits need no slow hash), and it is compared in constant time. An
//! unknown id costs the same comparison as a wrong secret.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use sqlx::PgPool;
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use crate::database;
use crate::idempotency::ClientId;

pub mod operator;
mod scopes;

pub use scopes::Scopes;

/// For how long a found credential is believed without asking again; a revocation is in force after this at the latest.
const BELIEVED_FOR: Duration = Duration::from_secs(30);
/// How many credentials are remembered.
const MOST_REMEMBERED: usize = 10_000;

/// Tells whom a token speaks for, remembering what it found for half a minute.
#[derive(Debug)]
pub struct Authenticator {
    pool: PgPool,
    found: Mutex<HashMap<String, Found>>,
    /// Strangers may guess, and each guess asks the database: not all connections at a time are theirs.
    questions: Arc<Semaphore>,
}

/// Questions about credentials at a time.
const QUESTIONS: usize = 4;

/// Whom a token speaks for, and for what.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Caller {
    /// The account.
    pub client: ClientId,
    /// What the credential may be used for.
    pub scopes: Scopes,
}

#[derive(Clone, Debug)]
struct Found {
    caller: Caller,
    secret_hash: [u8; 32],
    at: Instant,
}

impl Authenticator {
    /// Reads credentials from this database.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { pool, found: Mutex::default(), questions: Arc::new(Semaphore::new(QUESTIONS)) }
    }

    /// Returns whom a token speaks for; none when the token is malformed, unknown, wrong or revoked.
    ///
    /// # Errors
    ///
    /// When the database has to be asked and fails.
    pub async fn authenticate(&self, token: &str) -> Result<Option<Caller>, sqlx::Error> {
        let Some((credential_id, secret)) = split(token) else { return Ok(None) };
        let hash: [u8; 32] = Sha256::digest(secret.as_bytes()).into();
        let found = match self.remembered(credential_id) {
            Some(found) => Some(found),
            None => self.ask(credential_id).await?,
        };
        let expected = found.as_ref().map_or([0; 32], |found| found.secret_hash);
        let equal: bool = expected.ct_eq(&hash).into();
        Ok(found.filter(|_| equal).map(|found| found.caller))
    }

    fn remembered(&self, credential_id: &str) -> Option<Found> {
        let found = self.found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        found.get(credential_id).filter(|found| found.at.elapsed() < BELIEVED_FOR).cloned()
    }

    async fn ask(&self, credential_id: &str) -> Result<Option<Found>, sqlx::Error> {
        let question =
            Arc::clone(&self.questions).acquire_owned().await.map_err(|_| sqlx::Error::PoolClosed)?;
        let at = Instant::now();
        let (pool, id) = (self.pool.clone(), credential_id.to_owned());
        // In a task of its own: whoever asks may go away, a stranger too, and a call that is dropped costs its connection.
        let asked = tokio::spawn(async move {
            let _question = question;
            database::call(&pool, async |connection| {
                sqlx::query!(
                    "-- credentials_find
                    SELECT client_id, secret_hash, scopes FROM api_credentials
                    WHERE credential_id = $1 AND (revoked_at IS NULL OR revoked_at > clock_timestamp())",
                    id
                )
                .fetch_optional(connection)
                .await
            })
            .await
        });
        let row = asked.await.map_err(|_| sqlx::Error::WorkerCrashed)??;
        let unreadable = |column: &str| sqlx::Error::Decode(format!("api_credentials.{column}").into());
        let found = match row {
            None => None,
            Some(row) => Some(Found {
                caller: Caller {
                    client: row.client_id.parse().map_err(|_| unreadable("client_id"))?,
                    scopes: row.scopes.into(),
                },
                secret_hash: row.secret_hash.try_into().map_err(|_| unreadable("secret_hash"))?,
                at,
            }),
        };
        let mut remembered = self.found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match &found {
            Some(found) => {
                if remembered.len() >= MOST_REMEMBERED {
                    remembered.retain(|_, found| found.at.elapsed() < BELIEVED_FOR);
                }
                if remembered.len() < MOST_REMEMBERED {
                    remembered.insert(credential_id.to_owned(), found.clone());
                }
            }
            None => {
                remembered.remove(credential_id);
            }
        }
        Ok(found)
    }
}

/// Says whether a client was shut out: it has credentials, and each of them is revoked.
///
/// A client without any was let in by other means, and is not shut out.
///
/// # Errors
///
/// When the database fails.
pub async fn is_shut_out(pool: &PgPool, client: &ClientId) -> Result<bool, sqlx::Error> {
    database::call(pool, async |connection| {
        sqlx::query_scalar!(
            r#"-- credentials_is_shut_out
        SELECT COALESCE(bool_and(COALESCE(revoked_at <= clock_timestamp(), FALSE)), FALSE) AS "shut_out!"
        FROM api_credentials WHERE client_id = $1"#,
            client.as_str()
        )
        .fetch_one(connection)
        .await
    })
    .await
}

fn split(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.strip_prefix("sml_")?.split_once('_')?;
    let is_hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    (id.len() == 16 && secret.len() == 64 && is_hex(id) && is_hex(secret)).then_some((id, secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_only_well_formed_tokens() {
        let (id, secret) = ("0123456789abcdef", "f".repeat(64));
        assert_eq!(split(&format!("sml_{id}_{secret}")), Some((id, secret.as_str())));
        for token in
            ["", "sml_", "sml_0_1", &format!("sml_{id}_{}", &secret[1..]), &format!("xml_{id}_{secret}")]
        {
            assert_eq!(split(token), None, "{token}");
        }
    }
}
