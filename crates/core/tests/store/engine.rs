//! The engine's judgement of keys that are known already, with an operation of the test's own.

use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer, Begun, Operation, Terms};
use semel_core::idempotency::store::{self, LookedUp, NewKey};
use semel_core::idempotency::{Command, InvalidCommand, Request, RequestHash, Scope, StoredResponse};
use semel_core::look_up_key;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::database::{Database, with_database};
use crate::keys::scope;

const DAY: Duration = Duration::from_hours(24);

#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Probe {
    pub(crate) value: i64,
}

impl Command for Probe {
    const OPERATION: &'static str = "probes.create";

    fn validate(&self) -> Result<(), InvalidCommand> {
        if self.value < 0 {
            return Err(InvalidCommand { field: "value", reason: "must not be negative".to_owned() });
        }
        Ok(())
    }
}

/// An operation that may only be asked, never executed.
struct Untouched;

impl Operation for Untouched {
    type Command = Probe;

    fn resource_id(&self, _: &Scope) -> Uuid {
        Uuid::nil()
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        look_up_key!("idempotency_look_up", "NULL::UUID", connection, scope).await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        _: &Probe,
        _: &Terms<'_>,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let known = Begun::known(self.look_up(connection, key.scope).await?);
        Ok(Some(known.expect("a known key is never executed")))
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        &[]
    }
}

async fn ask(db: &Database, value: i64, request: Uuid) -> Answer {
    let request = Request { id: request, trace_context: None };
    engine::run(&db.pool, &Untouched, &scope("k"), &Probe { value }, &request, DAY).await.unwrap()
}

/// Claims the key for `Probe { value: 7 }`, with a command and hash as given.
async fn claim(
    db: &Database,
    command: Value,
    hash: RequestHash,
    request: Uuid,
    lease: Duration,
) -> store::Fence {
    let mut connection = db.pool.acquire().await.unwrap();
    let request = Request { id: request, trace_context: None };
    let scope = scope("k");
    let key = NewKey { scope: &scope, hash, command: &command, resource_id: Uuid::nil(), request: &request };
    store::claim(&mut connection, &key, "started", lease).await.unwrap().unwrap()
}

fn hash() -> RequestHash {
    RequestHash::of(&Probe { value: 7 }).unwrap()
}

async fn complete(db: &Database, fence: store::Fence) {
    let stored = StoredResponse { code: 200, headers: Vec::new(), body: b"first".to_vec() };
    let mut connection = db.pool.acquire().await.unwrap();
    store::complete(&mut connection, &scope("k"), fence, &stored, DAY).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_key_at_work_answers_in_progress_and_another_intent_mismatch() {
    with_database(async |db: Database| {
        claim(&db, json!({ "value": 7 }), hash(), Uuid::new_v4(), Duration::from_secs(50)).await;
        let Answer::InProgress { retry_after } = ask(&db, 7, Uuid::new_v4()).await else { panic!() };
        assert!((Duration::from_secs(1)..=Duration::from_secs(50)).contains(&retry_after), "{retry_after:?}");
        assert!(matches!(ask(&db, 8, Uuid::new_v4()).await, Answer::Mismatch));
    })
    .await;
}

#[tokio::test]
async fn recognises_its_own_commit() {
    with_database(async |db: Database| {
        let own = Uuid::new_v4();
        let fence = claim(&db, json!({ "value": 7 }), hash(), own, Duration::ZERO).await;
        complete(&db, fence).await;
        assert!(
            matches!(ask(&db, 7, own).await, Answer::Fresh { response, .. } if response.body == b"first")
        );
        let answer = ask(&db, 7, Uuid::new_v4()).await;
        assert!(matches!(answer, Answer::Replayed { original_request, .. } if original_request == own));
    })
    .await;
}

#[tokio::test]
async fn a_key_of_another_hash_version_is_compared_by_its_command() {
    with_database(async |db: Database| {
        let newer = RequestHash { version: 99, bytes: [1; 32] };
        let fence = claim(&db, json!({ "value": 7 }), newer, Uuid::new_v4(), Duration::ZERO).await;
        complete(&db, fence).await;
        assert!(matches!(ask(&db, 7, Uuid::new_v4()).await, Answer::Replayed { .. }));
        assert!(matches!(ask(&db, 8, Uuid::new_v4()).await, Answer::Mismatch));
        // Written by a newer binary with a field that this one does not know: neither a mismatch nor a match.
        db.execute("UPDATE idempotency_keys SET command = '{\"value\": 7, \"newer\": 1}'").await;
        assert!(matches!(ask(&db, 7, Uuid::new_v4()).await, Answer::Unreadable));
    })
    .await;
}

#[tokio::test]
async fn a_command_that_is_not_acceptable_is_refused_only_under_a_new_key() {
    with_database(async |db: Database| {
        assert!(
            matches!(ask(&db, -1, Uuid::new_v4()).await, Answer::Invalid(error) if error.field == "value")
        );
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys").await, 0);
        // Accepted once, under the rules of then.
        let hash = RequestHash::of(&Probe { value: -1 }).unwrap();
        let fence = claim(&db, json!({ "value": -1 }), hash, Uuid::new_v4(), Duration::ZERO).await;
        complete(&db, fence).await;
        assert!(matches!(ask(&db, -1, Uuid::new_v4()).await, Answer::Replayed { .. }));
    })
    .await;
}
