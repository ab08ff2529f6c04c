//! Executions with an effect elsewhere: claimed, and driven on by whoever holds the fence.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use semel_core::idempotency::engine::{self, Answer, Begun, LEASE, Operation, Proceeded, Terms};
use semel_core::idempotency::store::{self, Fence, LookedUp, NewKey};
use semel_core::idempotency::{Request, Scope, StoredResponse};
use semel_core::look_up_key;
use sqlx::{Executor as _, PgConnection, PgPool};
use uuid::Uuid;

use crate::database::{Database, with_database};
use crate::engine::Probe;
use crate::keys::scope;

const DAY: Duration = Duration::from_hours(24);

/// What an operation does when it is driven on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Complete,
    Wait,
    GiveToPerson,
    /// Loses its fence to somebody who completes the key.
    Lose,
    /// The database fails.
    Fail,
}

/// How beginning goes wrong.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lost {
    Nothing,
    /// The claim commits, and the connection is lost before its answer arrives.
    Answer,
    /// Also, and somebody takes the claim over before it is asked about.
    AnswerAndClaim,
    /// A twin claims first.
    Race,
}

/// An operation that claims, and is driven on by a script.
#[derive(Clone, Debug)]
pub(crate) struct Scripted {
    steps: Arc<Mutex<VecDeque<Step>>>,
    /// The fences it was driven on with.
    driven: Arc<Mutex<Vec<Fence>>>,
    pub(crate) lost: Lost,
    pub(crate) may_begin: bool,
}

impl Scripted {
    pub(crate) fn new(steps: &[Step]) -> Self {
        Self {
            steps: Arc::new(Mutex::new(steps.iter().copied().collect())),
            driven: Arc::default(),
            lost: Lost::Nothing,
            may_begin: true,
        }
    }

    fn driven(&self) -> usize {
        self.driven.lock().unwrap().len()
    }
}

impl Operation for Scripted {
    type Command = Probe;

    fn resource_id(&self, _: &Scope) -> Uuid {
        Uuid::from_u128(7)
    }

    fn may_begin(&self) -> bool {
        self.may_begin
    }

    async fn look_up(&self, connection: &mut PgConnection, scope: &Scope) -> Result<LookedUp, sqlx::Error> {
        look_up_key!("idempotency_look_up", "NULL::UUID", connection, scope).await
    }

    async fn begin(
        &self,
        connection: &mut PgConnection,
        key: &NewKey<'_>,
        _: &Probe,
        terms: &Terms<'_>,
    ) -> Result<Option<Begun>, sqlx::Error> {
        let looked = self.look_up(connection, key.scope).await?;
        if looked.is_something() {
            return Ok(Begun::known(looked));
        }
        if let Some(most) = terms.most_in_progress()
            && store::count_in_progress(connection, &key.scope.client, most).await? >= most
        {
            return Ok(Some(Begun::Limited));
        }
        if self.lost == Lost::Race {
            let twin = Request { id: Uuid::new_v4(), trace_context: None };
            let key = NewKey { request: &twin, ..key.clone() };
            store::claim(connection, &key, "sent", LEASE).await?.unwrap();
        }
        let Some(fence) = store::claim(connection, key, "sent", LEASE).await? else { return Ok(None) };
        if self.lost == Lost::AnswerAndClaim {
            connection.execute("UPDATE idempotency_keys SET lease_until = clock_timestamp()").await?;
            store::take_over(connection, key.scope, fence, LEASE).await?.unwrap();
        }
        if self.lost != Lost::Nothing {
            return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()));
        }
        Ok(Some(Begun::Claimed(fence)))
    }

    async fn proceed(
        &self,
        pool: &PgPool,
        scope: &Scope,
        fence: Fence,
        retention: Duration,
    ) -> Result<Proceeded, sqlx::Error> {
        self.driven.lock().unwrap().push(fence);
        let step =
            self.steps.lock().unwrap().pop_front().expect("it is driven on no more often than it should");
        let mut connection = pool.acquire().await?;
        match step {
            Step::Complete => {
                let response = stored(b"driven");
                let done = store::complete(&mut connection, scope, fence, &response, retention).await?;
                Ok(done.map_or(Proceeded::Lost, |expires_at| Proceeded::Completed { response, expires_at }))
            }
            Step::Wait => {
                assert!(store::postpone(&mut connection, scope, fence, DAY).await?);
                Ok(Proceeded::Waiting { retry_after: Duration::from_secs(3) })
            }
            Step::GiveToPerson => {
                assert!(store::leave_to_person(&mut connection, scope, fence, "nobody knows").await?);
                Ok(Proceeded::NeedsPerson)
            }
            Step::Lose => {
                connection.execute("UPDATE idempotency_keys SET lease_until = clock_timestamp()").await?;
                let other = store::take_over(&mut connection, scope, fence, LEASE).await?.unwrap();
                store::complete(&mut connection, scope, other, &stored(b"another's"), retention)
                    .await?
                    .unwrap();
                let mine =
                    store::complete(&mut connection, scope, fence, &stored(b"mine"), retention).await?;
                assert_eq!(mine, None);
                Ok(Proceeded::Lost)
            }
            Step::Fail => Err(sqlx::Error::PoolTimedOut),
        }
    }

    fn lifetime_constraints(&self) -> &'static [&'static str] {
        &[]
    }
}

fn stored(body: &[u8]) -> StoredResponse {
    StoredResponse { code: 201, headers: Vec::new(), body: body.to_vec() }
}

async fn ask(db: &Database, operation: &Scripted, value: i64) -> Answer {
    let request = Request { id: Uuid::new_v4(), trace_context: None };
    engine::run(&db.pool, operation, &scope("k"), &Probe { value }, &request, DAY).await.unwrap()
}

fn expect_fresh(answer: &Answer, body: &[u8]) {
    assert!(matches!(answer, Answer::Fresh { response, .. } if response.body == body), "{answer:?}");
}

#[tokio::test]
async fn a_claim_is_driven_to_its_end_and_replayed() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::Complete]);
        expect_fresh(&ask(&db, &operation, 7).await, b"driven");
        let again = ask(&db, &operation, 7).await;
        assert!(matches!(again, Answer::Replayed { response, .. } if response.body == b"driven"));
        assert_eq!(operation.driven(), 1);
    })
    .await;
}

#[tokio::test]
async fn what_waits_is_unknown_and_driven_on_by_the_next_retry() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::Wait, Step::Complete]);
        let answer = ask(&db, &operation, 7).await;
        assert!(
            matches!(answer, Answer::Unknown { resource_id, retry_after }
                if resource_id == Uuid::from_u128(7) && retry_after == Duration::from_secs(3)),
            "{answer:?}"
        );
        assert!(
            matches!(ask(&db, &operation, 8).await, Answer::Mismatch),
            "another intent drives nothing on"
        );
        assert_eq!(operation.driven(), 1);
        expect_fresh(&ask(&db, &operation, 7).await, b"driven");
        let fences = operation.driven.lock().unwrap().clone();
        assert!(fences[1] > fences[0], "{fences:?}");
    })
    .await;
}

#[tokio::test]
async fn what_failed_half_way_is_unknown_and_left_alone_while_the_lease_is_alive() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::Fail, Step::Complete]);
        assert!(matches!(ask(&db, &operation, 7).await, Answer::Unknown { .. }));
        let answer = ask(&db, &operation, 7).await;
        assert!(
            matches!(answer, Answer::InProgress { retry_after } if retry_after > LEASE / 2 && retry_after <= LEASE),
            "{answer:?}"
        );
        assert_eq!(operation.driven(), 1);
        db.execute("UPDATE idempotency_keys SET lease_until = clock_timestamp()").await;
        expect_fresh(&ask(&db, &operation, 7).await, b"driven");
    })
    .await;
}

#[tokio::test]
async fn what_waits_for_a_person_is_driven_on_by_nobody() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::GiveToPerson]);
        for _ in 0..3 {
            let answer = ask(&db, &operation, 7).await;
            assert!(
                matches!(answer, Answer::NeedsAttention { resource_id } if resource_id == Uuid::from_u128(7)),
                "{answer:?}"
            );
        }
        assert!(matches!(ask(&db, &operation, 8).await, Answer::Mismatch));
        assert_eq!(operation.driven(), 1);
    })
    .await;
}

#[tokio::test]
async fn who_lost_the_fence_answers_from_the_row() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::Lose]);
        expect_fresh(&ask(&db, &operation, 7).await, b"another's");
    })
    .await;
}

#[tokio::test]
async fn of_many_retries_that_find_a_dead_lease_one_drives_on() {
    with_database(async |db: Database| {
        let operation = Scripted::new(&[Step::Wait, Step::Complete]);
        ask(&db, &operation, 7).await;
        let retries: Vec<_> = (0..16)
            .map(|_| {
                let (db, operation) = (db.clone(), operation.clone());
                tokio::spawn(async move { ask(&db, &operation, 7).await })
            })
            .collect();
        let mut fresh = 0;
        for retry in retries {
            match retry.await.unwrap() {
                Answer::Fresh { .. } => fresh += 1,
                Answer::Replayed { .. } | Answer::InProgress { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((fresh, operation.driven()), (1, 2));
    })
    .await;
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_driven_on_as_ones_own() {
    with_database(async |db: Database| {
        let operation = Scripted { lost: Lost::Answer, ..Scripted::new(&[Step::Complete]) };
        expect_fresh(&ask(&db, &operation, 7).await, b"driven");
        assert_eq!(operation.driven(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_claim_that_was_taken_over_is_not_driven_on_with_the_others_fence() {
    with_database(async |db: Database| {
        let operation = Scripted { lost: Lost::AnswerAndClaim, ..Scripted::new(&[]) };
        let answer = ask(&db, &operation, 7).await;
        assert!(matches!(answer, Answer::InProgress { .. }), "{answer:?}");
        assert_eq!(operation.driven(), 0);
    })
    .await;
}

#[tokio::test]
async fn what_may_not_begin_stores_nothing_and_what_has_begun_is_driven_on() {
    with_database(async |db: Database| {
        let closed = Scripted { may_begin: false, ..Scripted::new(&[Step::Complete]) };
        assert!(matches!(ask(&db, &closed, 7).await, Answer::Unavailable));
        assert_eq!(db.count("SELECT count(*) FROM idempotency_keys").await, 0);
        ask(&db, &Scripted::new(&[Step::Wait]), 7).await;
        expect_fresh(&ask(&db, &closed, 7).await, b"driven");
    })
    .await;
}
