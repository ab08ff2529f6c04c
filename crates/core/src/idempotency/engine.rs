//! The one path of a keyed request: look up, compare, answer; or ask for an earlier outcome, validate, execute, answer.
//!
//! For operations whose effect lives wholly in our database. Business row, event and completed key are one transaction,
//! so there is nothing to recover: a crash leaves all of it or none.

use std::time::Duration;

use serde_json::Value;
use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres};
use time::OffsetDateTime;
use uuid::Uuid;

use super::store::{self, KeyState, KnownKey, NewKey};
use super::{Command, InvalidCommand, Request, RequestHash, Scope, StoredResponse};
use crate::database::{self, Failure};
use crate::metrics::{KeyOutcome, count_request};

/// How often one request tries to execute: lost races, deadlocks and unknown commits together.
const MAX_EXECUTIONS: u32 = 4;

/// What a client is told to wait while another request with its key runs.
const RETRY_RUNNING: Duration = Duration::from_secs(1);

/// A state change that lives wholly in our database.
pub trait Operation: Send + Sync {
    /// Its typed intent.
    type Command: Command;

    /// Returns the id of the resource that this key makes; derived, so that a repeat makes the same.
    fn resource_id(&self, scope: &Scope) -> Uuid;

    /// Returns the response that is stored and sent once the command has taken effect.
    fn response(&self, resource_id: Uuid, command: &Self::Command) -> StoredResponse;

    /// Looks for the row that an earlier execution under this key left, whatever became of the key since.
    fn earlier_outcome(
        &self,
        connection: &mut PgConnection,
        scope: &Scope,
    ) -> impl Future<Output = Result<Option<Uuid>, sqlx::Error>> + Send;

    /// Writes completed key, business row and event in one transaction, the key first and gating the rest.
    ///
    /// Returns until when the key is replayed, or none when the key is known already and nothing was written.
    fn execute(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &Self::Command,
        response: &StoredResponse,
        retention: Duration,
    ) -> impl Future<Output = Result<Option<OffsetDateTime>, sqlx::Error>> + Send;

    /// The constraints that keep the business row unique per (client, operation, key) for its whole life.
    fn lifetime_constraints(&self) -> &'static [&'static str];
}

/// The answer to a keyed request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Executed now.
    Fresh {
        /// What was stored.
        response: StoredResponse,
        /// Until when it is replayed.
        expires_at: OffsetDateTime,
    },
    /// Executed before.
    Replayed {
        /// What was stored then.
        response: StoredResponse,
        /// Until when it is replayed.
        expires_at: OffsetDateTime,
        /// The request that executed it.
        original_request: Uuid,
    },
    /// Another request with this key is at work.
    InProgress {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The key belongs to another intent.
    Mismatch,
    /// The key's time is over; it is never executed again.
    Expired {
        /// What it made then.
        resource_id: Uuid,
    },
    /// The command is not acceptable; nothing was stored.
    Invalid(InvalidCommand),
    /// Whether it was executed is not known yet.
    Unknown {
        /// What it makes, if it was.
        resource_id: Uuid,
    },
    /// The database could not be asked; nothing was executed.
    Unavailable,
    /// The key was written by a newer binary, in a way that this one cannot compare.
    Unreadable,
}

/// A failure that no answer describes: a bug, or a database that is not ours.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The command cannot be written as JSON.
    #[error("encoding the command of {operation}")]
    Encode {
        /// The operation.
        operation: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// The database refused a statement; it was rolled back.
    #[error("executing {operation}: refused by the database")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// Why.
        source: sqlx::Error,
    },
}

/// Runs a keyed request. Must not be dropped half-way: run it in a task of its own, see
/// [`Lifecycle::spawn`](crate::lifecycle::Lifecycle::spawn).
///
/// # Errors
///
/// When the command cannot be encoded or the database refuses a statement. Nothing was executed then.
pub async fn run<O: Operation>(
    pool: &PgPool,
    operation: &O,
    scope: &Scope,
    command: &O::Command,
    request: &Request,
    retention: Duration,
) -> Result<Answer, EngineError> {
    let answer = Run { pool, operation, scope, command, request, retention }.answer().await?;
    count_request(scope.operation, outcome(&answer));
    Ok(answer)
}

fn outcome(answer: &Answer) -> Option<KeyOutcome> {
    match answer {
        Answer::Fresh { .. } => Some(KeyOutcome::Fresh),
        Answer::Replayed { .. } => Some(KeyOutcome::Replayed),
        Answer::InProgress { .. } => Some(KeyOutcome::InProgress),
        Answer::Mismatch => Some(KeyOutcome::Mismatch),
        Answer::Expired { .. } => Some(KeyOutcome::Expired),
        Answer::Unknown { .. } => Some(KeyOutcome::Unknown),
        Answer::Invalid(_) | Answer::Unavailable | Answer::Unreadable => None,
    }
}

struct Run<'a, O: Operation> {
    pool: &'a PgPool,
    operation: &'a O,
    scope: &'a Scope,
    command: &'a O::Command,
    request: &'a Request,
    retention: Duration,
}

/// How an execution that did not write ended.
enum Unwritten {
    /// Rolled back, or never begun; worth another try.
    Again,
    /// An answer.
    Answer(Answer),
}

impl<O: Operation> Run<'_, O> {
    async fn answer(&self) -> Result<Answer, EngineError> {
        let encode = |source| EngineError::Encode { operation: self.scope.operation, source };
        let hash = RequestHash::of(self.command).map_err(encode)?;
        let encoded = serde_json::to_value(self.command).map_err(encode)?;

        let Ok(mut connection) = self.pool.acquire().await else { return Ok(Answer::Unavailable) };
        match store::look_up(&mut connection, self.scope).await {
            Ok(Some(known)) => return Ok(self.judge(known, hash, &encoded)),
            Ok(None) => {}
            Err(error) => return self.nothing_executed(error),
        }
        // Before it is validated: rules may have become stricter since it was executed.
        match self.operation.earlier_outcome(&mut connection, self.scope).await {
            // Its key was reaped, or a concurrent twin has executed it since the look-up: then the key is there now.
            Ok(Some(resource_id)) => {
                return match store::look_up(&mut connection, self.scope).await {
                    Ok(Some(known)) => Ok(self.judge(known, hash, &encoded)),
                    Ok(None) => Ok(Answer::Expired { resource_id }),
                    Err(error) => self.nothing_executed(error),
                };
            }
            Ok(None) => {}
            Err(error) => return self.nothing_executed(error),
        }
        if let Err(invalid) = self.command.validate() {
            return Ok(Answer::Invalid(invalid));
        }
        self.execute(connection, hash, &encoded).await
    }

    /// Executes, and settles what became of it: races that were lost, deadlocks, and commits whose answer was lost.
    ///
    /// An unknown commit is asked about by executing again. Its absence would prove nothing, since the old transaction may
    /// still commit; but inserting the key again waits for it, and the row tells whose it is.
    async fn execute(
        &self,
        first: PoolConnection<Postgres>,
        hash: RequestHash,
        encoded: &Value,
    ) -> Result<Answer, EngineError> {
        let resource_id = self.operation.resource_id(self.scope);
        let response = self.operation.response(resource_id, self.command);
        let key = NewKey { scope: self.scope, hash, command: encoded, resource_id, request: self.request };
        let mut unsettled = false;
        let mut lent = Some(first);
        for _ in 0..MAX_EXECUTIONS {
            let acquired = match lent.take() {
                Some(connection) => Ok(connection),
                None => self.pool.acquire().await,
            };
            let Ok(mut connection) = acquired else { continue };
            let executed =
                self.operation.execute(&mut connection, &key, self.command, &response, self.retention).await;
            match executed {
                Ok(Some(expires_at)) => return Ok(Answer::Fresh { response, expires_at }),
                Ok(None) => {
                    if let Ok(Some(known)) = store::look_up(&mut connection, self.scope).await {
                        return Ok(self.judge(known, hash, encoded));
                    }
                    // Expired and reaped between the two statements, or the connection is lost: once more.
                }
                Err(error) => {
                    if database::failure(&error) == Failure::Unknown {
                        unsettled = true;
                        tracing::warn!(
                            request = %self.request.id,
                            operation = self.scope.operation,
                            "the outcome of a commit is unknown, asking: {}",
                            crate::disposition::chain(&error)
                        );
                    }
                    match self.unwritten(error, unsettled, resource_id)? {
                        Unwritten::Again => {}
                        Unwritten::Answer(answer) => return Ok(answer),
                    }
                }
            }
        }
        Ok(if unsettled { Answer::Unknown { resource_id } } else { Answer::Unavailable })
    }

    fn unwritten(
        &self,
        error: sqlx::Error,
        unsettled: bool,
        resource_id: Uuid,
    ) -> Result<Unwritten, EngineError> {
        match database::failure(&error) {
            Failure::Unknown | Failure::Conflict => Ok(Unwritten::Again),
            // What holds the lock may be our own earlier attempt, whose outcome is not known.
            Failure::LockTimeout if unsettled => Ok(Unwritten::Answer(Answer::Unknown { resource_id })),
            Failure::LockTimeout => Ok(Unwritten::Answer(Answer::InProgress { retry_after: RETRY_RUNNING })),
            Failure::Refused => {
                let constraint = error.as_database_error().and_then(|error| error.constraint());
                if constraint.is_some_and(|name| self.operation.lifetime_constraints().contains(&name)) {
                    return Ok(Unwritten::Answer(Answer::Expired { resource_id }));
                }
                if is_passing(&error) {
                    // A server that turned read-only says nothing of an earlier attempt.
                    let answer =
                        if unsettled { Answer::Unknown { resource_id } } else { Answer::Unavailable };
                    return Ok(Unwritten::Answer(answer));
                }
                Err(EngineError::Refused { operation: self.scope.operation, source: error })
            }
        }
    }

    /// Answers for a statement that only read.
    fn nothing_executed(&self, error: sqlx::Error) -> Result<Answer, EngineError> {
        if database::failure(&error) == Failure::Refused && !is_passing(&error) {
            return Err(EngineError::Refused { operation: self.scope.operation, source: error });
        }
        Ok(Answer::Unavailable)
    }

    fn judge(&self, known: KnownKey, hash: RequestHash, encoded: &Value) -> Answer {
        let same = if known.hash.version == hash.version {
            known.hash == hash
        } else {
            // Written under another canonical encoding: compare what was meant.
            let Ok(stored) = serde_json::from_value::<O::Command>(known.command) else {
                return Answer::Unreadable;
            };
            let Ok(stored) = serde_json::to_value(stored) else { return Answer::Unreadable };
            stored == *encoded
        };
        if !same {
            return Answer::Mismatch;
        }
        match known.state {
            KeyState::InProgress { lease_left, .. } => {
                Answer::InProgress { retry_after: lease_left.unwrap_or(RETRY_RUNNING).max(RETRY_RUNNING) }
            }
            KeyState::Completed { response, expires_at } if known.request_id == self.request.id => {
                Answer::Fresh { response, expires_at }
            }
            KeyState::Completed { response, expires_at } => {
                Answer::Replayed { response, expires_at, original_request: known.request_id }
            }
            KeyState::Expired => Answer::Expired { resource_id: known.resource_id },
        }
    }
}

/// A refusal for a state of the server that passes: read-only, out of connections or disk, cancelled.
fn is_passing(error: &sqlx::Error) -> bool {
    database::sqlstate(error).is_some_and(|code| code == "25006" || code == "57014" || code.starts_with("53"))
}
