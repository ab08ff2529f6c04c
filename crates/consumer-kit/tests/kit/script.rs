//! A handler that does what the event tells it to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use semel_consumer_kit::{Event, Handler, HandlerError};
use semel_core::outbox::{self, NewEvent};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

/// What the handler does after it has written a row of `effects`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Act {
    Succeed,
    /// Keeps its transaction open for a moment, so that a twin meets it.
    Linger,
    /// Waits until the test opens the gate.
    WaitAtGate,
    Refuse,
    /// Fails transiently this often, then succeeds.
    Fail(u32),
    /// Fails transiently with a reason of 2,000 letters.
    FailAtLength,
    /// Fails transiently with a reason that no row can hold as it is.
    FailWithZeroByte,
    /// Panics this often, then succeeds.
    Panic(u32),
    /// Never ends, this often, then succeeds; half-way into a savepoint.
    Hang(u32),
    /// Runs a statement that lasts too long, this often, then succeeds.
    HangInDatabase(u32),
    /// Meets a serialisation failure this often, then succeeds.
    Conflict(u32),
    /// Loses its connection this often, then succeeds.
    LoseConnection(u32),
    /// Loses its connection at the first call, and waits at the gate at the second.
    LoseConnectionThenWait,
    /// Blocks its thread until the test opens the gate.
    BlockThread,
    /// Writes to a table that the test makes later.
    NeedTable,
    /// Makes the database quote a value in its error.
    QuoteValue,
    /// Ignores the failure of a statement, which dooms the transaction.
    Swallow,
    /// Writes a value that a constraint refuses.
    BreakConstraint,
    /// Ends the process, each time.
    Abort,
    /// Fails transiently, and ends the process each time that it is tried from where it was parked.
    FailThenAbort,
    /// Appends to the outbox.
    Append,
    /// Appends to the outbox and refuses.
    AppendAndRefuse,
}

#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Order {
    pub(crate) act: Act,
}

#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) calls: Arc<Mutex<HashMap<Uuid, u32>>>,
    pub(crate) gate: Arc<Semaphore>,
    pub(crate) at_gate: Arc<Semaphore>,
}

impl Default for Script {
    fn default() -> Self {
        let closed = || Arc::new(Semaphore::new(0));
        Self { calls: Arc::default(), gate: closed(), at_gate: closed() }
    }
}

impl Script {
    pub(crate) fn calls(&self, event: Uuid) -> u32 {
        self.calls.lock().unwrap().get(&event).copied().unwrap_or(0)
    }
}

impl Handler for Script {
    type Payload = Order;

    async fn handle(&self, tx: &mut PgConnection, event: Event<Order>) -> Result<(), HandlerError> {
        let call = {
            let mut calls = self.calls.lock().unwrap();
            let call = calls.entry(event.id).or_default();
            *call += 1;
            *call
        };
        let insert = sqlx::query("INSERT INTO effects (event_id) VALUES ($1)").bind(event.id);
        insert.execute(&mut *tx).await?;
        match event.payload.act {
            Act::Linger => {
                tx.execute("SELECT pg_sleep(0.02)").await?;
            }
            Act::LoseConnectionThenWait if call == 1 => {
                tx.execute("SELECT pg_terminate_backend(pg_backend_pid())").await?;
            }
            Act::WaitAtGate | Act::LoseConnectionThenWait => {
                self.at_gate.add_permits(1);
                self.gate.acquire().await.unwrap().forget();
            }
            Act::BlockThread => {
                self.at_gate.add_permits(1);
                let (runtime, gate) = (Handle::current(), Arc::clone(&self.gate));
                let waits = std::thread::spawn(move || {
                    let until = Instant::now() + Duration::from_secs(15);
                    while gate.try_acquire().map(SemaphorePermit::forget).is_err() && Instant::now() < until {
                        // This worker may have served timers and sockets. Another has to wake up and do so.
                        runtime.spawn(async {});
                        std::thread::sleep(Duration::from_millis(10));
                    }
                });
                waits.join().unwrap();
            }
            Act::NeedTable => {
                tx.execute("INSERT INTO made_later VALUES (1)").await?;
            }
            Act::QuoteValue => {
                tx.execute("SELECT 'card 4242'::INT").await?;
            }
            Act::Refuse => {
                return Err(HandlerError::permanent(format!("no such account {}", "ü".repeat(2000))));
            }
            Act::Fail(times) if call <= times => return Err(HandlerError::transient("the bank is closed")),
            Act::FailAtLength => return Err(HandlerError::transient("x".repeat(2000))),
            Act::FailWithZeroByte => return Err(HandlerError::transient("the bank\0is closed")),
            Act::Panic(times) if call <= times => panic!("as ordered"),
            Act::Hang(times) if call <= times => {
                let mut savepoint = tx.begin().await?;
                savepoint.execute("SELECT 1").await?;
                std::future::pending::<()>().await;
            }
            Act::HangInDatabase(times) if call <= times => {
                tx.execute("SELECT pg_sleep(60)").await?;
            }
            Act::Conflict(times) if call <= times => {
                tx.execute("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$").await?;
            }
            Act::LoseConnection(times) if call <= times => {
                tx.execute("SELECT pg_terminate_backend(pg_backend_pid())").await?;
            }
            Act::Abort => std::process::abort(),
            Act::FailThenAbort => {
                let is_parked =
                    sqlx::query_scalar("SELECT EXISTS (SELECT FROM parked_events WHERE event_id = $1)");
                if is_parked.bind(event.id).fetch_one(&mut *tx).await? {
                    std::process::abort();
                }
                return Err(HandlerError::transient("the bank is closed"));
            }
            Act::Swallow => assert!(tx.execute("SELECT 1 / 0").await.is_err()),
            Act::BreakConstraint => {
                tx.execute("INSERT INTO effects (event_id) VALUES (NULL)").await?;
            }
            Act::Append => outbox::append(tx, &[follow_up(&event)]).await?,
            Act::AppendAndRefuse => {
                outbox::append(tx, &[follow_up(&event)]).await?;
                return Err(HandlerError::permanent("changed its mind"));
            }
            _ => {}
        }
        Ok(())
    }
}

fn follow_up(cause: &Event<Order>) -> NewEvent {
    NewEvent {
        event_id: Uuid::new_v4(),
        aggregate_type: "shipment",
        aggregate_id: cause.id.to_string(),
        aggregate_version: cause.aggregate_version,
        event_type: "Ordered",
        payload: serde_json::Map::new(),
        trace_context: cause.trace_context.clone(),
    }
}
