//! The one path of a keyed request: look up key and earlier outcome, and execute where there is none; compare, answer.
//!
//! An operation whose effect lives wholly in our database writes business row, event and completed key in one
//! transaction ([`Begun::Completed`]), so there is nothing to recover: a crash leaves all of it or none. One with an effect
//! elsewhere commits a claim first ([`Begun::Claimed`]) and is driven forward from its recovery point by
//! [`Operation::proceed`], now or later, by this request, by a retry whose lease is dead or by the reaper.

use std::time::Duration;

use serde_json::Value;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::admission::Admission;
use super::store::{self, Fence, KeyState, KnownKey, LookedUp, NewKey};
use super::{Command, InvalidCommand, Request, RequestHash, Scope, StoredResponse};
use crate::database::{self, Failure, Lent};
use crate::metrics::{KeyOutcome, count_request};

/// How often one request tries to execute: lost races, deadlocks and unknown commits together.
const MAX_EXECUTIONS: u32 = 4;

/// What a client is told to wait while another request with its key runs, or an outcome is being found out.
const RETRY_RUNNING: Duration = Duration::from_secs(1);

/// What a client is told to wait that has too many keys in progress: a while, since those end when a provider answers.
const RETRY_IN_PROGRESS: Duration = Duration::from_secs(5);

/// For how long an acquisition is believed: longer than a provider's deadline and the writes around it.
pub const LEASE: Duration = Duration::from_secs(30);

/// How an execution began.
#[derive(Clone, Debug)]
pub enum Begun {
    /// And ended: all is written.
    Completed {
        /// What was stored.
        response: StoredResponse,
        /// Until when it is replayed.
        expires_at: OffsetDateTime,
    },
    /// The claim is committed, the effect is still to come.
    Claimed(Fence),
    /// Not at all: nothing is written, and the key is as free as before.
    Hindered(Hindrance),
    /// Not at all: its client has as many keys in progress as it may.
    Limited,
    /// Not at all: the key is known, or what was made under it is.
    Known(Box<LookedUp>),
}

impl Begun {
    /// Returns what is told by a statement that wrote nothing; none when it is to be asked again.
    #[must_use]
    pub fn known(looked: LookedUp) -> Option<Self> {
        if looked.limited == Some(true) {
            return Some(Self::Limited);
        }
        looked.is_something().then(|| Self::Known(Box::new(looked)))
    }
}

/// Why an execution cannot begin, though the command is acceptable: it acts on something, and that is not as it has to be.
///
/// Never stored, since it may be otherwise for the next request. What is final is [`Begun::Completed`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Hindrance {
    /// What it acts on is not there, or not the client's.
    Missing,
    /// What it acts on is in a state that passes.
    Passing {
        /// When to ask again.
        retry_after: Duration,
    },
    /// What it acts on is held by others for longer than is waited for.
    Busy,
}

/// How far a claimed execution was driven.
#[derive(Clone, Debug)]
pub enum Proceeded {
    /// To its end.
    Completed {
        /// What was stored.
        response: StoredResponse,
        /// Until when it is replayed.
        expires_at: OffsetDateTime,
    },
    /// Its outcome is not known yet; it is driven on later.
    Waiting {
        /// When to ask again.
        retry_after: Duration,
    },
    /// A person has to decide.
    NeedsPerson,
    /// The fence is stale: somebody else has driven it on, and the row tells.
    Lost,
}

/// A state change.
pub trait Operation: Send + Sync {
    /// Its typed intent.
    type Command: Command;

    /// Returns the id of the resource that this key makes; derived, so that a repeat makes the same.
    fn resource_id(&self, scope: &Scope) -> Uuid;

    /// Says what of a command is not acceptable; of a known key's nothing is asked.
    ///
    /// # Errors
    ///
    /// With the field that is not acceptable.
    fn validate(&self, command: &Self::Command) -> Result<(), InvalidCommand> {
        command.validate()
    }

    /// Says whether a new execution may begin; what has begun is driven on in any case.
    fn may_begin(&self) -> bool {
        true
    }

    /// Looks the key up and, where it is not known, for the row that an earlier execution under it left, whatever became of
    /// the key since: in one statement, see [`look_up_key!`](crate::look_up_key). Must be asked of the primary.
    fn look_up(
        &self,
        connection: &mut PgConnection,
        scope: &Scope,
    ) -> impl Future<Output = Result<LookedUp, sqlx::Error>> + Send;

    /// Looks the key up and, where nothing is known of it, writes key and business row in one transaction, the key first and
    /// gating the rest; and where the effect lives wholly in our database, the event too, and the key as completed.
    ///
    /// Returns none when nothing was found and nothing written: the key, or what it acts on, has changed meanwhile. Then it
    /// is asked again, in a new statement.
    fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        command: &Self::Command,
        terms: &Terms<'_>,
    ) -> impl Future<Output = Result<Option<Begun>, sqlx::Error>> + Send;

    /// Drives a claimed execution on from its recovery point. Every write names the fence.
    ///
    /// An operation that never claims has nothing to drive.
    fn proceed(
        &self,
        _pool: &PgPool,
        _scope: &Scope,
        _fence: Fence,
        _retention: Duration,
    ) -> impl Future<Output = Result<Proceeded, sqlx::Error>> + Send {
        async { Ok(Proceeded::Lost) }
    }

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
    /// What it acts on is not as it has to be; nothing was stored.
    Hindered(Hindrance),
    /// The client begins too much; nothing was stored.
    Limited {
        /// When to ask again.
        retry_after: Duration,
    },
    /// Whether it was executed is not known yet.
    Unknown {
        /// What it makes, if it was.
        resource_id: Uuid,
        /// When to ask again.
        retry_after: Duration,
    },
    /// Whether it was executed is for a person to find out.
    NeedsAttention {
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

/// On what terms keys are taken.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// For how long a completed key is replayed.
    pub retention: Duration,
    /// What new executions a client may begin; none bounds nothing.
    pub admission: Option<&'a Admission>,
}

impl Terms<'_> {
    /// Returns how many keys in progress a client may have; none bounds nothing.
    #[must_use]
    pub fn most_in_progress(&self) -> Option<i64> {
        Some(i64::from(self.admission?.most_in_progress()?.get()))
    }
}

/// Whoever bounds nothing has a retention alone.
impl From<Duration> for Terms<'_> {
    fn from(retention: Duration) -> Self {
        Self { retention, admission: None }
    }
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
    terms: impl Into<Terms<'_>>,
) -> Result<Answer, EngineError> {
    let answer = Run { pool, operation, scope, command, request, terms: terms.into() }.answer().await?;
    count_request(scope.operation, outcome(&answer));
    Ok(answer)
}

/// What is known of the execution under a key, for its owner to ask about without the request.
#[derive(Clone, Debug)]
pub enum Found {
    /// The key.
    Key(KnownKey),
    /// The key is gone, and what it made is not.
    Outcome {
        /// What it made.
        resource_id: Uuid,
    },
}

/// Tells what is known of a key; none when nothing is committed under it. That is no proof that nothing will be: a request
/// may still be on its way.
///
/// # Errors
///
/// When the database fails.
pub async fn find<O: Operation>(
    pool: &PgPool,
    operation: &O,
    scope: &Scope,
) -> Result<Option<Found>, sqlx::Error> {
    let looked = database::call(pool, async |c| operation.look_up(c, scope).await).await?;
    found(looked)
}

/// Order and key are written together. So what is found without its key, at one moment, has outlived it.
fn found(looked: LookedUp) -> Result<Option<Found>, sqlx::Error> {
    let outcome = looked.outcome.map(|resource_id| Found::Outcome { resource_id });
    Ok(looked.known()?.map(Found::Key).or(outcome))
}

fn outcome(answer: &Answer) -> Option<KeyOutcome> {
    match answer {
        Answer::Fresh { .. } => Some(KeyOutcome::Fresh),
        Answer::Replayed { .. } => Some(KeyOutcome::Replayed),
        Answer::InProgress { .. } => Some(KeyOutcome::InProgress),
        Answer::Mismatch => Some(KeyOutcome::Mismatch),
        Answer::Expired { .. } => Some(KeyOutcome::Expired),
        Answer::Limited { .. } => Some(KeyOutcome::Limited),
        Answer::Unknown { .. } | Answer::NeedsAttention { .. } => Some(KeyOutcome::Unknown),
        Answer::Invalid(_) | Answer::Hindered(_) | Answer::Unavailable | Answer::Unreadable => None,
    }
}

struct Run<'a, O: Operation> {
    pool: &'a PgPool,
    operation: &'a O,
    scope: &'a Scope,
    command: &'a O::Command,
    request: &'a Request,
    terms: Terms<'a>,
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

        let Ok(mut connection) = Lent::from(self.pool).await else { return Ok(Answer::Unavailable) };
        let Some(refusal) = self.refusal() else { return self.execute(connection, hash, &encoded).await };
        // A known key is not refused: rules may have become stricter since it was executed, and limits are not for it.
        let looked = connection.call(async |c| self.operation.look_up(c, self.scope).await).await;
        match looked.and_then(found) {
            Ok(Some(found)) => self.found(connection, found, hash, &encoded).await,
            Ok(None) => Ok(refusal),
            Err(error) => self.nothing_executed(error),
        }
    }

    /// Returns what keeps a new execution from beginning, as far as that is known without the database.
    fn refusal(&self) -> Option<Answer> {
        if let Err(invalid) = self.operation.validate(self.command) {
            return Some(Answer::Invalid(invalid));
        }
        if !self.operation.may_begin() {
            return Some(Answer::Unavailable);
        }
        let asked = self.terms.admission?.ask(&self.scope.client);
        asked.err().map(|retry_after| Answer::Limited { retry_after })
    }

    /// Executes, and settles what became of it: races that were lost, deadlocks, and commits whose answer was lost.
    ///
    /// An unknown commit is asked about by beginning again. Its absence would prove nothing, since the old transaction may
    /// still commit; but inserting the key again waits for it, and the row tells whose it is.
    async fn execute(&self, first: Lent, hash: RequestHash, encoded: &Value) -> Result<Answer, EngineError> {
        let resource_id = self.operation.resource_id(self.scope);
        let key = NewKey { scope: self.scope, hash, command: encoded, resource_id, request: self.request };
        let mut unsettled = false;
        let mut lent = Some(first);
        for _ in 0..MAX_EXECUTIONS {
            let acquired = match lent.take() {
                Some(connection) => Ok(connection),
                None => Lent::from(self.pool).await,
            };
            let Ok(mut connection) = acquired else { continue };
            let begun = connection
                .call(async |c| self.operation.begin(c, &key, self.command, &self.terms).await)
                .await;
            self.count(&begun);
            match begun {
                Ok(Some(Begun::Completed { response, expires_at })) => {
                    return Ok(Answer::Fresh { response, expires_at });
                }
                Ok(Some(Begun::Claimed(fence))) => {
                    // Nothing is held while the effect is awaited.
                    drop(connection);
                    return self.proceed(fence, resource_id, hash, encoded).await;
                }
                // These do not rule out that an earlier try is still to commit.
                Ok(Some(Begun::Hindered(_) | Begun::Limited)) if unsettled => {}
                Ok(Some(Begun::Hindered(hindrance))) => return Ok(Answer::Hindered(hindrance)),
                Ok(Some(Begun::Limited)) => return Ok(Answer::Limited { retry_after: RETRY_IN_PROGRESS }),
                Ok(Some(Begun::Known(looked))) => match found(*looked) {
                    Ok(Some(found)) => return self.found(connection, found, hash, encoded).await,
                    Ok(None) => {}
                    Err(error) => return self.nothing_executed(error),
                },
                // Met by the INSERT and not seen by the look-up before it, or overtaken by a change of what it acts on: once
                // more.
                Ok(None) => lent = Some(connection),
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
        Ok(if unsettled { unknown(resource_id) } else { Answer::Unavailable })
    }

    /// Counts what was written, or may have been, against its client's rate.
    fn count(&self, begun: &Result<Option<Begun>, sqlx::Error>) {
        let may_be_written = match begun {
            Ok(begun) => matches!(begun, Some(Begun::Completed { .. } | Begun::Claimed(_))),
            Err(error) => database::failure(error) == Failure::Unknown,
        };
        if let Some(admission) = self.terms.admission.filter(|_| may_be_written) {
            admission.take(&self.scope.client);
        }
    }

    /// Answers for what was found instead of executing.
    async fn found(
        &self,
        connection: Lent,
        found: Found,
        hash: RequestHash,
        encoded: &Value,
    ) -> Result<Answer, EngineError> {
        match found {
            Found::Key(known) => self.known(connection, known, hash, encoded).await,
            Found::Outcome { resource_id } => Ok(Answer::Expired { resource_id }),
        }
    }

    /// Answers for a key that is known; drives its execution on if it is our claim, or one whose owner is gone.
    async fn known(
        &self,
        mut connection: Lent,
        known: KnownKey,
        hash: RequestHash,
        encoded: &Value,
    ) -> Result<Answer, EngineError> {
        let (resource_id, mine) = (known.resource_id, known.request_id == self.request.id);
        let KeyState::InProgress { lease_left, fence, taken_over, needs_person } = known.state else {
            return Ok(self.judge(known, hash, encoded));
        };
        match self.judge(known, hash, encoded) {
            Answer::InProgress { .. } if needs_person => Ok(Answer::NeedsAttention { resource_id }),
            // Our claim, of which we were not told. Once it was taken over, the fence is another's, and not ours to use.
            Answer::InProgress { .. } if mine && !taken_over && lease_left.is_some() => {
                drop(connection);
                self.proceed(fence, resource_id, hash, encoded).await
            }
            Answer::InProgress { .. } if lease_left.is_none() => {
                match connection.call(async |c| store::take_over(c, self.scope, fence, LEASE).await).await {
                    Ok(Some(fence)) => {
                        drop(connection);
                        count_request(self.scope.operation, Some(KeyOutcome::TakenOver));
                        self.proceed(fence, resource_id, hash, encoded).await
                    }
                    Ok(None) => Ok(Answer::InProgress { retry_after: RETRY_RUNNING }),
                    Err(error) => match self.nothing_executed(error)? {
                        Answer::Unavailable => Ok(unknown(resource_id)),
                        answer => Ok(answer),
                    },
                }
            }
            answer => Ok(answer),
        }
    }

    /// Drives a claimed execution on, and answers with what came of it. From here on it may have had its effect.
    async fn proceed(
        &self,
        fence: Fence,
        resource_id: Uuid,
        hash: RequestHash,
        encoded: &Value,
    ) -> Result<Answer, EngineError> {
        match self.operation.proceed(self.pool, self.scope, fence, self.terms.retention).await {
            Ok(Proceeded::Completed { response, expires_at }) => Ok(Answer::Fresh { response, expires_at }),
            Ok(Proceeded::Waiting { retry_after }) => Ok(Answer::Unknown { resource_id, retry_after }),
            Ok(Proceeded::NeedsPerson) => Ok(Answer::NeedsAttention { resource_id }),
            Ok(Proceeded::Lost) => {
                let Ok(mut connection) = Lent::from(self.pool).await else { return Ok(unknown(resource_id)) };
                match connection.call(async |c| store::look_up(c, self.scope).await).await {
                    Ok(Some(known)) => Ok(self.judge(known, hash, encoded)),
                    Ok(None) | Err(_) => Ok(unknown(resource_id)),
                }
            }
            Err(error) => {
                tracing::warn!(
                    request = %self.request.id,
                    operation = self.scope.operation,
                    resource = %resource_id,
                    "an execution stopped half-way and is driven on later: {}",
                    crate::disposition::chain(&error)
                );
                Ok(unknown(resource_id))
            }
        }
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
            Failure::LockTimeout if unsettled => Ok(Unwritten::Answer(unknown(resource_id))),
            Failure::LockTimeout => Ok(Unwritten::Answer(Answer::InProgress { retry_after: RETRY_RUNNING })),
            Failure::Refused => {
                let constraint = error.as_database_error().and_then(|error| error.constraint());
                if constraint.is_some_and(|name| self.operation.lifetime_constraints().contains(&name)) {
                    return Ok(Unwritten::Answer(Answer::Expired { resource_id }));
                }
                if is_passing(&error) {
                    // A server that turned read-only says nothing of an earlier attempt.
                    let answer = if unsettled { unknown(resource_id) } else { Answer::Unavailable };
                    return Ok(Unwritten::Answer(answer));
                }
                if unsettled {
                    tracing::error!(
                        request = %self.request.id,
                        operation = self.scope.operation,
                        "refused while the outcome of an earlier commit is unknown: {}",
                        crate::disposition::chain(&error)
                    );
                    return Ok(Unwritten::Answer(unknown(resource_id)));
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

fn unknown(resource_id: Uuid) -> Answer {
    Answer::Unknown { resource_id, retry_after: RETRY_RUNNING }
}

/// A refusal for a state of the server that passes: read-only, out of connections or disk, cancelled.
fn is_passing(error: &sqlx::Error) -> bool {
    database::sqlstate(error).is_some_and(|code| code == "25006" || code == "57014" || code.starts_with("53"))
}
