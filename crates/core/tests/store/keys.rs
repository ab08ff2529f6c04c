//! Claiming, taking over, completing and looking up keys.

use std::time::Duration;

use semel_core::idempotency::store::{self, Fence, KeyState, NewKey};
use semel_core::idempotency::{Request, RequestHash, Scope, StoredResponse};
use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::database::{Database, with_database};

const LEASE: Duration = Duration::from_mins(5);
const DEAD: Duration = Duration::ZERO;
const DAY: Duration = Duration::from_hours(24);

pub(crate) fn scope(key: &str) -> Scope {
    Scope { client: "acme".parse().unwrap(), operation: "probes.create", key: key.parse().unwrap() }
}

fn response(body: &[u8]) -> StoredResponse {
    StoredResponse { code: 201, headers: Vec::new(), body: body.to_vec() }
}

async fn claim(connection: &mut PgConnection, scope: &Scope, lease: Duration) -> Option<Fence> {
    let request = Request { id: Uuid::new_v4(), trace_context: None };
    let command: Value = json!({ "alpha": 1 });
    let hash = RequestHash { version: 1, bytes: [7; 32] };
    let key = NewKey { scope, hash, command: &command, resource_id: Uuid::new_v4(), request: &request };
    store::claim(connection, &key, "started", lease).await.unwrap()
}

async fn state(connection: &mut PgConnection, scope: &Scope) -> Option<KeyState> {
    store::look_up(connection, scope).await.unwrap().map(|known| known.state)
}

async fn complete(connection: &mut PgConnection, scope: &Scope, fence: Fence, body: &[u8]) -> bool {
    store::complete(connection, scope, fence, &response(body), DAY).await.unwrap().is_some()
}

#[tokio::test]
async fn claims_a_key_once() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        assert!(state(&mut connection, &scope).await.is_none());
        let fence = claim(&mut connection, &scope, LEASE).await.unwrap();
        assert_eq!(claim(&mut connection, &scope, LEASE).await, None);
        let Some(KeyState::InProgress { lease_left: Some(left), fence: held, taken_over, needs_person }) =
            state(&mut connection, &scope).await
        else {
            panic!("a claimed key is in progress with a lease");
        };
        assert_eq!((held, taken_over, needs_person), (fence, false, false));
        assert!(left <= LEASE && left > LEASE / 2, "{left:?}");
    })
    .await;
}

#[tokio::test]
async fn of_concurrent_claims_one_wins() {
    with_database(async |db: Database| {
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(32));
        let claims: Vec<_> = (0..32)
            .map(|_| {
                let (db, barrier) = (db.clone(), barrier.clone());
                tokio::spawn(async move {
                    let mut connection = db.pool.acquire().await.unwrap();
                    barrier.wait().await;
                    claim(&mut connection, &scope("k"), LEASE).await
                })
            })
            .collect();
        let mut winners = 0;
        for claim in claims {
            winners += usize::from(claim.await.unwrap().is_some());
        }
        assert_eq!(winners, 1);
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys").await, 1);
    })
    .await;
}

#[tokio::test]
async fn client_operation_and_spelling_are_part_of_a_key() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let own = scope("k");
        for other in [
            Scope { client: "other".parse().unwrap(), ..own.clone() },
            Scope { operation: "probes.cancel", ..own.clone() },
            scope("K"),
            own.clone(),
        ] {
            assert!(claim(&mut connection, &other, LEASE).await.is_some(), "{other:?} is a key of its own");
        }
    })
    .await;
}

#[tokio::test]
async fn takes_over_only_a_dead_lease_and_only_from_the_acquisition_that_was_seen() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let alive = scope("alive");
        let fence = claim(&mut connection, &alive, LEASE).await.unwrap();
        assert_eq!(store::take_over(&mut connection, &alive, fence, LEASE).await.unwrap(), None);

        let dead = scope("dead");
        let seen = claim(&mut connection, &dead, DEAD).await.unwrap();
        let lease_left = match state(&mut connection, &dead).await {
            Some(KeyState::InProgress { lease_left, .. }) => lease_left,
            other => panic!("{other:?}"),
        };
        assert_eq!(lease_left, None, "a dead lease has nothing left");
        let stale = Fence(seen.0 - 1);
        assert_eq!(store::take_over(&mut connection, &dead, stale, LEASE).await.unwrap(), None);
        let taken = store::take_over(&mut connection, &dead, seen, LEASE).await.unwrap().unwrap();
        assert!(taken > seen);
        assert!(matches!(
            state(&mut connection, &dead).await,
            Some(KeyState::InProgress { lease_left: Some(_), fence, taken_over: true, .. }) if fence == taken
        ));
        assert_eq!(store::take_over(&mut connection, &dead, seen, LEASE).await.unwrap(), None);
        assert_eq!(
            db.count("SELECT attempts::BIGINT FROM idempotency_keys WHERE key = 'dead'").await,
            2,
            "a take-over counts as an attempt"
        );
    })
    .await;
}

#[tokio::test]
async fn does_not_take_over_what_waits_for_a_person() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let fence = claim(&mut connection, &scope, LEASE).await.unwrap();
        assert!(store::leave_to_person(&mut connection, &scope, fence, "nobody knows").await.unwrap());
        assert!(matches!(
            state(&mut connection, &scope).await,
            Some(KeyState::InProgress { lease_left: None, needs_person: true, .. })
        ));
        assert_eq!(store::take_over(&mut connection, &scope, fence, LEASE).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn of_concurrent_take_overs_one_wins() {
    with_database(async |db: Database| {
        let seen = claim(&mut db.pool.acquire().await.unwrap(), &scope("k"), DEAD).await.unwrap();
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(16));
        let attempts: Vec<_> = (0..16)
            .map(|_| {
                let (db, barrier) = (db.clone(), barrier.clone());
                tokio::spawn(async move {
                    let mut connection = db.pool.acquire().await.unwrap();
                    barrier.wait().await;
                    store::take_over(&mut connection, &scope("k"), seen, LEASE).await.unwrap()
                })
            })
            .collect();
        let mut winners = 0;
        for attempt in attempts {
            winners += usize::from(attempt.await.unwrap().is_some());
        }
        assert_eq!(winners, 1);
    })
    .await;
}

#[tokio::test]
async fn a_stale_fence_completes_nothing() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let zombie = claim(&mut connection, &scope, DEAD).await.unwrap();
        let owner = store::take_over(&mut connection, &scope, zombie, LEASE).await.unwrap().unwrap();
        assert!(!complete(&mut connection, &scope, zombie, b"zombie").await);
        assert!(matches!(state(&mut connection, &scope).await, Some(KeyState::InProgress { .. })));
        assert!(complete(&mut connection, &scope, owner, b"owner").await);
        assert!(!complete(&mut connection, &scope, owner, b"twice").await, "completed once");
        let Some(KeyState::Completed { response, .. }) = state(&mut connection, &scope).await else {
            panic!("the owner's answer is stored");
        };
        assert_eq!(response.body, b"owner");
    })
    .await;
}

#[tokio::test]
async fn a_completed_key_can_be_neither_claimed_nor_taken_over() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let fence = claim(&mut connection, &scope, DEAD).await.unwrap();
        assert!(complete(&mut connection, &scope, fence, b"").await);
        assert_eq!(claim(&mut connection, &scope, LEASE).await, None);
        assert_eq!(store::take_over(&mut connection, &scope, fence, LEASE).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn advances_only_from_the_expected_point_and_with_the_fence() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let stale = claim(&mut connection, &scope, DEAD).await.unwrap();
        let fence = store::take_over(&mut connection, &scope, stale, LEASE).await.unwrap().unwrap();
        let mut advance =
            async |fence, from, to| store::advance(&mut connection, &scope, fence, from, to).await.unwrap();
        assert!(!advance(stale, "started", "middle").await);
        assert!(!advance(fence, "middle", "end").await);
        assert!(advance(fence, "started", "middle").await);
        assert!(!advance(fence, "started", "middle").await);
        assert!(advance(fence, "middle", "end").await);
        assert!(complete(&mut connection, &scope, fence, b"").await);
        assert!(!store::advance(&mut connection, &scope, fence, "completed", "end").await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_held_key_is_given_up_only_with_its_fence() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let stale = claim(&mut connection, &scope, DEAD).await.unwrap();
        let fence = store::take_over(&mut connection, &scope, stale, LEASE).await.unwrap().unwrap();
        assert!(!store::postpone(&mut connection, &scope, stale, LEASE).await.unwrap());
        assert!(!store::leave_to_person(&mut connection, &scope, stale, "stale").await.unwrap());
        assert!(matches!(
            state(&mut connection, &scope).await,
            Some(KeyState::InProgress { lease_left: Some(_), needs_person: false, .. })
        ));
        assert!(store::postpone(&mut connection, &scope, fence, LEASE).await.unwrap());
        assert!(matches!(
            state(&mut connection, &scope).await,
            Some(KeyState::InProgress { lease_left: None, .. })
        ));
        // A retry of the client need not wait for the next check.
        assert!(store::take_over(&mut connection, &scope, fence, LEASE).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test]
async fn replays_a_response_exactly() {
    let lines = |lines: &[(&str, &str)]| -> Vec<(String, String)> {
        lines.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let responses = [
        StoredResponse { code: 204, headers: lines(&[]), body: Vec::new() },
        StoredResponse {
            code: 201,
            headers: lines(&[("location", "/a")]),
            body: b"\xff\x00\xfe {}".to_vec(),
        },
        StoredResponse {
            code: 402,
            headers: lines(&[("link", "<b>, <c>"), ("etag", "\"é\\\""), ("link", "<a>")]),
            body: br#"{ "b":1, "a" :1.0e0, "b":2 }"#.to_vec(),
        },
        StoredResponse { code: 499, headers: lines(&[]), body: vec![b'x'; 65_536] },
    ];
    with_database(async move |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        for (number, stored) in responses.into_iter().enumerate() {
            let scope = scope(&format!("k{number}"));
            let fence = claim(&mut connection, &scope, LEASE).await.unwrap();
            let expires =
                store::complete(&mut connection, &scope, fence, &stored, DAY).await.unwrap().unwrap();
            let Some(KeyState::Completed { response, expires_at }) = state(&mut connection, &scope).await
            else {
                panic!("a completed key is replayed");
            };
            assert_eq!((response, expires_at), (stored, expires));
        }
    })
    .await;
}

#[tokio::test]
async fn refuses_to_store_what_is_not_final_or_too_large() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let fence = claim(&mut connection, &scope, LEASE).await.unwrap();
        for (code, size, constraint) in [
            (500, 0, "idempotency_keys_response_final"),
            (199, 0, "idempotency_keys_response_final"),
            (201, 65_537, "idempotency_keys_response_body_bounded"),
        ] {
            let refused = StoredResponse { code, headers: Vec::new(), body: vec![b'x'; size] };
            let error = store::complete(&mut connection, &scope, fence, &refused, DAY).await.unwrap_err();
            assert_eq!(error.as_database_error().and_then(|e| e.constraint()), Some(constraint));
        }
        assert!(matches!(state(&mut connection, &scope).await, Some(KeyState::InProgress { .. })));
    })
    .await;
}

#[tokio::test]
async fn expiry_is_judged_by_its_instant_though_the_row_is_still_there() {
    with_database(async |db: Database| {
        let mut connection = db.pool.acquire().await.unwrap();
        let scope = scope("k");
        let fence = claim(&mut connection, &scope, LEASE).await.unwrap();
        assert!(complete(&mut connection, &scope, fence, b"").await);
        db.execute(
            "UPDATE idempotency_keys SET completed_at = clock_timestamp() - INTERVAL '2 days',
                                         expires_at = clock_timestamp() - INTERVAL '1 microsecond'",
        )
        .await;
        assert!(matches!(state(&mut connection, &scope).await, Some(KeyState::Expired)));
        assert_eq!(claim(&mut connection, &scope, LEASE).await, None, "an expired key is not free");
        db.execute("UPDATE idempotency_keys SET expires_at = clock_timestamp() + INTERVAL '1 hour'").await;
        assert!(matches!(state(&mut connection, &scope).await, Some(KeyState::Completed { .. })));
    })
    .await;
}
