//! What a person does about credentials: makes, lists, replaces and revokes them.
//!
//! A revocation is in force within half a minute in every API that has seen the credential lately. Replacing leaves the old
//! ones good for a while, so that a client can change over without being refused; a client is the same whichever of its
//! credentials it calls with, so that a retry with the new one replays what was done with the old. Replacing and revoking
//! leave a row in `operator_actions`, in the same transaction.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use sqlx::{Connection as _, PgConnection, PgPool};
use time::OffsetDateTime;

use super::Scopes;
use crate::database::{self, Lent};
use crate::idempotency::ClientId;
use crate::idempotency::store::interval;
use crate::operators::{self, Action};

/// A new credential. The token is shown once and stored nowhere.
#[derive(Debug)]
pub struct NewCredential {
    /// The public part.
    pub credential_id: String,
    /// What the client sends after `Bearer `.
    pub token: secrecy::SecretString,
}

/// What was asked for could not be done.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The system has no random numbers.
    #[error("drawing random numbers")]
    Random(getrandom::Error),
    /// Its credentials may be used for different things.
    #[error("the credentials of {0} have different scopes: say which the new one is to have")]
    ScopesDiffer(ClientId),
    /// There is no such client.
    #[error("there is no client {0}: `credentials create` makes one")]
    UnknownClient(ClientId),
    /// There is no such credential.
    #[error("there is no credential {0}: `credentials list` names them")]
    Unknown(CredentialId),
    /// It is revoked already.
    #[error("credential {credential_id} was revoked at {at}")]
    Revoked {
        /// The credential.
        credential_id: CredentialId,
        /// From when on it is refused.
        at: OffsetDateTime,
    },
    /// The database failed.
    #[error("{attempted} the credentials of {whose}: look at `credentials list` before you do it again")]
    Database {
        /// What was attempted.
        attempted: &'static str,
        /// The client, or the credential.
        whose: String,
        /// Why.
        source: sqlx::Error,
    },
}

/// The public part of a token.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CredentialId(String);

/// Text that names no credential. It is not quoted: it may hold a secret.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a credential is named by the 16 hexadecimal digits between the two `_` of its token")]
pub struct InvalidCredentialId;

impl FromStr for CredentialId {
    type Err = InvalidCredentialId;

    /// Reads the id, also out of a whole token, as somebody has it who found one where it should not be.
    fn from_str(text: &str) -> Result<Self, InvalidCredentialId> {
        let id = super::split(text).map_or(text, |(id, _)| id);
        let is_id = id.len() == 16 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_id { Ok(Self(id.to_owned())) } else { Err(InvalidCredentialId) }
    }
}

impl fmt::Display for CredentialId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who does something, and why.
#[derive(Clone, Copy, Debug)]
pub struct By<'a> {
    /// Who, 1 to 255 bytes.
    pub actor: &'a str,
    /// Why, 1 to 4096 bytes.
    pub reason: &'a str,
}

/// A credential as a person sees it.
#[derive(Clone, Debug)]
pub struct Record {
    /// The public part of the token.
    pub credential_id: String,
    /// The account that it speaks for.
    pub client_id: String,
    /// What it may be used for; none for everything.
    pub scopes: Option<Vec<String>>,
    /// When it was made.
    pub created_at: OffsetDateTime,
    /// From when on it is refused; may lie ahead.
    pub revoked_at: Option<OffsetDateTime>,
    /// Whether it is refused.
    pub is_revoked: bool,
}

/// Creates a credential for a client, and the client where it is new.
///
/// # Errors
///
/// When there are no random numbers, or the database fails.
pub async fn create(
    pool: &PgPool,
    client: &ClientId,
    scopes: &Scopes,
) -> Result<NewCredential, CredentialError> {
    let drawn = Drawn::new()?;
    database::call(pool, async |connection| {
        sqlx::query!(
            "-- credentials_create
            WITH client AS (
                INSERT INTO api_clients (client_id) VALUES ($1) ON CONFLICT DO NOTHING
            )
            INSERT INTO api_credentials (credential_id, client_id, secret_hash, scopes) VALUES ($2, $1, $3, $4)",
            client.as_str(),
            drawn.credential_id,
            &drawn.secret_hash[..],
            scopes.names()
        )
        .execute(connection)
        .await
    })
    .await
    .map_err(failed("creating", client.as_str()))?;
    Ok(drawn.credential())
}

/// Creates a credential as [`create`] does, unless the client has one that is in force. Of many at once one creates it.
///
/// # Errors
///
/// When there are no random numbers, or the database fails.
pub async fn create_unless_any(
    pool: &PgPool,
    client: &ClientId,
    scopes: &Scopes,
) -> Result<Option<NewCredential>, CredentialError> {
    let drawn = Drawn::new()?;
    let failed = |source| failed("creating", client.as_str())(source);
    let mut connection = Lent::from(pool).await.map_err(failed)?;
    let added =
        connection.call(async |connection| add_unless_any(connection, client, scopes, &drawn).await).await;
    Ok(added.map_err(failed)?.then(|| drawn.credential()))
}

async fn add_unless_any(
    connection: &mut PgConnection,
    client: &ClientId,
    scopes: &Scopes,
    drawn: &Drawn,
) -> Result<bool, sqlx::Error> {
    let mut tx = connection.begin().await?;
    sqlx::query!(
        "-- api_clients_add
        INSERT INTO api_clients (client_id) VALUES ($1) ON CONFLICT DO NOTHING",
        client.as_str()
    )
    .execute(&mut *tx)
    .await?;
    // Whoever comes second sees, in a statement of its own, what the first one made.
    lock(&mut tx, client).await?;
    let has_one = sqlx::query_scalar!(
        r#"-- credentials_any
        SELECT EXISTS (
            SELECT FROM api_credentials
            WHERE client_id = $1 AND (revoked_at IS NULL OR revoked_at > clock_timestamp())
        ) AS "has_one!""#,
        client.as_str()
    )
    .fetch_one(&mut *tx)
    .await?;
    if has_one {
        tx.rollback().await?;
        return Ok(false);
    }
    add(&mut tx, client, scopes, drawn).await?;
    tx.commit().await?;
    Ok(true)
}

/// Creates a credential for a client, and ends its others after `overlap`. Returns the new one, and how many are to end.
///
/// Where it is not said what the new one may be used for, that is what the others may, if that is one and the same.
///
/// # Errors
///
/// When there is no such client, its credentials differ in what they may be used for, there are no random numbers, or the
/// database fails.
pub async fn rotate(
    pool: &PgPool,
    client: &ClientId,
    overlap: Duration,
    scopes: Option<&Scopes>,
    by: By<'_>,
) -> Result<(NewCredential, u64), CredentialError> {
    let drawn = Drawn::new()?;
    let failed = |source| failed("replacing", client.as_str())(source);
    let mut connection = Lent::from(pool).await.map_err(failed)?;
    let replaced =
        connection.call(async |connection| replace(connection, client, overlap, scopes, &drawn, by).await);
    match replaced.await.map_err(failed)? {
        Replaced::Done { ending } => Ok((drawn.credential(), ending)),
        Replaced::NoClient => Err(CredentialError::UnknownClient(client.clone())),
        Replaced::ScopesDiffer => Err(CredentialError::ScopesDiffer(client.clone())),
    }
}

/// What came of replacing.
enum Replaced {
    Done { ending: u64 },
    NoClient,
    ScopesDiffer,
}

async fn replace(
    connection: &mut PgConnection,
    client: &ClientId,
    overlap: Duration,
    scopes: Option<&Scopes>,
    drawn: &Drawn,
    by: By<'_>,
) -> Result<Replaced, sqlx::Error> {
    let mut tx = connection.begin().await?;
    // Of two at once the later one ends the credential that the earlier one made.
    if !lock(&mut tx, client).await? {
        tx.rollback().await?;
        return Ok(Replaced::NoClient);
    }
    let scopes = match scopes {
        Some(scopes) => scopes.clone(),
        None => match scopes_in_force(&mut tx, client).await?.as_slice() {
            // Whoever never had any gets one for everything, as by `create`.
            [] => Scopes::all(),
            [scopes] => scopes.clone(),
            _ => {
                tx.rollback().await?;
                return Ok(Replaced::ScopesDiffer);
            }
        },
    };
    let ended = sqlx::query!(
        "-- credentials_end
        UPDATE api_credentials SET revoked_at = clock_timestamp() + $2::INTERVAL
        WHERE client_id = $1 AND (revoked_at IS NULL OR revoked_at > clock_timestamp() + $2::INTERVAL)",
        client.as_str(),
        interval(overlap)
    )
    .execute(&mut *tx)
    .await?
    .rows_affected();
    add(&mut tx, client, &scopes, drawn).await?;
    record(&mut tx, "credentials rotate", client.as_str(), by).await?;
    tx.commit().await?;
    Ok(Replaced::Done { ending: ended })
}

/// Locks a client, so that one at a time changes its credentials; says whether there is such a client.
async fn lock(connection: &mut PgConnection, client: &ClientId) -> Result<bool, sqlx::Error> {
    let known = sqlx::query_scalar!(
        "-- api_clients_lock
        SELECT client_id FROM api_clients WHERE client_id = $1 FOR UPDATE",
        client.as_str()
    )
    .fetch_optional(connection)
    .await?;
    Ok(known.is_some())
}

async fn add(
    connection: &mut PgConnection,
    client: &ClientId,
    scopes: &Scopes,
    drawn: &Drawn,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "-- credentials_add
        INSERT INTO api_credentials (credential_id, client_id, secret_hash, scopes) VALUES ($1, $2, $3, $4)",
        drawn.credential_id,
        client.as_str(),
        &drawn.secret_hash[..],
        scopes.names()
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Returns the scopes of a client's good credentials, each list once; where none is good, of those that were good last.
async fn scopes_in_force(
    connection: &mut PgConnection,
    client: &ClientId,
) -> Result<Vec<Scopes>, sqlx::Error> {
    let lists = sqlx::query_scalar!(
        "-- credentials_scopes
        SELECT DISTINCT scopes FROM api_credentials
        WHERE client_id = $1 AND COALESCE(revoked_at, 'infinity') >= LEAST(
            clock_timestamp(),
            (SELECT max(COALESCE(revoked_at, 'infinity')) FROM api_credentials WHERE client_id = $1)
        )",
        client.as_str()
    )
    .fetch_all(connection)
    .await?;
    Ok(lists.into_iter().map(Scopes::from).collect())
}

/// Revokes a credential at once.
///
/// # Errors
///
/// When there is no such credential, it is revoked already, or the database fails.
pub async fn revoke(pool: &PgPool, id: &CredentialId, by: By<'_>) -> Result<(), CredentialError> {
    let failed = |source| failed("revoking", &id.0)(source);
    let mut connection = Lent::from(pool).await.map_err(failed)?;
    let before =
        connection.call(async |connection| end(connection, &id.0, by).await).await.map_err(failed)?;
    match before {
        None => Err(CredentialError::Unknown(id.clone())),
        Some(Some(at)) => Err(CredentialError::Revoked { credential_id: id.clone(), at }),
        Some(None) => Ok(()),
    }
}

/// Ends a credential, unless it has ended; says since when it has. None when there is no such credential.
async fn end(
    connection: &mut PgConnection,
    credential_id: &str,
    by: By<'_>,
) -> Result<Option<Option<OffsetDateTime>>, sqlx::Error> {
    let mut tx = connection.begin().await?;
    let found = sqlx::query!(
        r#"-- credentials_lock
        SELECT CASE WHEN revoked_at <= clock_timestamp() THEN revoked_at END AS ended_at
        FROM api_credentials WHERE credential_id = $1 FOR UPDATE"#,
        credential_id
    )
    .fetch_optional(&mut *tx)
    .await?;
    let ended_at = found.map(|row| row.ended_at);
    if ended_at != Some(None) {
        tx.rollback().await?;
        return Ok(ended_at);
    }
    sqlx::query!(
        "-- credentials_revoke
        UPDATE api_credentials SET revoked_at = clock_timestamp()
        WHERE credential_id = $1 AND (revoked_at IS NULL OR revoked_at > clock_timestamp())",
        credential_id
    )
    .execute(&mut *tx)
    .await?;
    record(&mut tx, "credentials revoke", credential_id, by).await?;
    tx.commit().await?;
    Ok(Some(None))
}

/// Returns credentials, of one client or of all, by client and age, at most `limit`.
///
/// # Errors
///
/// When the database fails.
pub async fn list(
    pool: &PgPool,
    client: Option<&ClientId>,
    limit: u32,
) -> Result<Vec<Record>, CredentialError> {
    let whose = client.map(ClientId::as_str);
    database::call(pool, async |connection| {
        sqlx::query_as!(
            Record,
            r#"-- credentials_list
            SELECT credential_id, client_id, scopes, created_at, revoked_at,
                   COALESCE(revoked_at <= clock_timestamp(), FALSE) AS "is_revoked!"
            FROM api_credentials
            WHERE $1::TEXT IS NULL OR client_id = $1
            ORDER BY client_id, created_at, credential_id LIMIT $2"#,
            whose,
            i64::from(limit)
        )
        .fetch_all(connection)
        .await
    })
    .await
    .map_err(failed("listing", whose.unwrap_or("all clients")))
}

async fn record(
    connection: &mut PgConnection,
    action: &str,
    subject: &str,
    by: By<'_>,
) -> Result<(), sqlx::Error> {
    operators::record(connection, &Action { actor: by.actor, action, subject, reason: by.reason })
        .await
        .map(drop)
}

fn failed(attempted: &'static str, whose: &str) -> impl FnOnce(sqlx::Error) -> CredentialError {
    let whose = whose.to_owned();
    move |source| CredentialError::Database { attempted, whose, source }
}

/// What a new credential is made of.
struct Drawn {
    credential_id: String,
    secret: String,
    secret_hash: [u8; 32],
}

impl Drawn {
    fn new() -> Result<Self, CredentialError> {
        let mut bytes = [0_u8; 40];
        getrandom::fill(&mut bytes).map_err(CredentialError::Random)?;
        let (id, secret) = bytes.split_at(8);
        let (credential_id, secret) = (hex(id), hex(secret));
        let secret_hash = Sha256::digest(secret.as_bytes()).into();
        Ok(Self { credential_id, secret, secret_hash })
    }

    fn credential(self) -> NewCredential {
        let token = format!("sml_{}_{}", self.credential_id, self.secret).into();
        NewCredential { credential_id: self.credential_id, token }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
