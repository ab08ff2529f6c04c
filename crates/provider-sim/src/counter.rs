//! The counter in front of the desk: it takes calls, and does to them what the ordered faults say.
//!
//! Every call runs in a task of its own. A client that gives up, or whose connection breaks, ends the waiting and never the
//! work; that is what makes a late charge possible. A stop of the process ends what waits without applying it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::counter;
use semel_core::lifecycle::Lifecycle;
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Happening, Reason};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use crate::asks::{Answer as _, Ask};
use crate::clerk::{Clerk, Failure};
use crate::clock::Clock;
use crate::desk::{Manner, Refusal};
use crate::faults::{Fault, Hit, Plan};
use crate::history::History;
use crate::holds::{self, Holds, Stopping};
use crate::metrics::FAULTS;

/// How many calls are served at a time, those that wait included.
const MOST_CALLS: usize = 4096;

/// The counter.
#[derive(Debug)]
pub(crate) struct Counter {
    pub(crate) clerk: Clerk,
    pub(crate) plan: Mutex<Plan>,
    pub(crate) holds: Holds,
    pub(crate) history: History,
    pub(crate) clock: Clock,
    life: Lifecycle,
    places: Arc<Semaphore>,
}

/// What a call comes to.
enum Outcome<T> {
    Answered(T),
    /// It is never answered.
    Lost,
}

impl<T> Outcome<T> {
    fn map(self, change: impl FnOnce(T) -> T) -> Self {
        match self {
            Self::Answered(answer) => Self::Answered(change(answer)),
            Self::Lost => Self::Lost,
        }
    }
}

impl Counter {
    pub(crate) fn new(clerk: Clerk, history: History, clock: Clock, life: Lifecycle) -> Self {
        let places = Arc::new(Semaphore::new(MOST_CALLS));
        Self { clerk, plan: Mutex::default(), holds: Holds::default(), history, clock, life, places }
    }

    /// Serves a call.
    ///
    /// # Cancel safety
    ///
    /// A call whose future is dropped goes on.
    pub(crate) async fn serve<A: Ask>(self: &Arc<Self>, ask: A) -> Result<A::Answer, Status> {
        self.history.count(A::CALL);
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| Status::resource_exhausted("too many calls at a time"))?;
        let counter = Arc::clone(self);
        let task = self.life.spawn(async move { (counter.go(ask).await, place) });
        let (outcome, place) = task.await.map_err(|_| Status::internal("the call panicked"))?;
        match outcome? {
            Outcome::Answered(answer) => Ok(answer),
            Outcome::Lost => Err(self.hang(place).await),
        }
    }

    /// Hangs until the client gives up, but not for ever.
    async fn hang(&self, place: OwnedSemaphorePermit) -> Status {
        tokio::select! {
            () = self.life.stopping() => {}
            () = tokio::time::sleep(holds::LONGEST) => {}
        }
        drop(place);
        Status::unavailable("the answer was lost")
    }

    async fn go<A: Ask>(&self, ask: A) -> Result<Outcome<A::Answer>, Status> {
        let arrived = self.clock.now();
        let key = ask.key().to_owned();
        let hits = self.plan.lock().unwrap_or_else(PoisonError::into_inner).meet(A::CALL, &key);
        let about = |hit: &Hit, what: What| Happening {
            what: what.into(),
            call: A::CALL.into(),
            key: key.clone(),
            kind: hit.fault.kind().into(),
            fault: hit.number,
            hold: hit.fault.hold().unwrap_or_default().to_owned(),
            ..Happening::default()
        };
        for hit in &hits {
            counter!(FAULTS).increment(1);
            self.history.push(about(hit, What::Fault));
        }
        let plain = Manner::default();
        let mut acting = None;
        for hit in &hits {
            match &hit.fault {
                Fault::Latency { delay } => self.pause(*delay).await.map_err(stopping)?,
                _ => acting = Some(hit),
            }
        }
        let Some(hit) = acting else { return self.apply(ask, plain).await };
        // Waits at the fault's hold, or for its delay.
        let wait = async || {
            self.history.push(about(hit, What::Held));
            let waited = self.wait(&hit.fault).await;
            self.history.push(about(hit, What::LetGo));
            waited.map_err(stopping)
        };
        match &hit.fault {
            Fault::Refuse | Fault::Flapping | Fault::Outage => Err(unavailable()),
            Fault::InUse => Err(refused(Reason::KeyInUse)),
            Fault::Sticky { applied } => {
                if *applied {
                    drop(self.apply(ask, plain).await);
                }
                Err(Status::internal("as before"))
            }
            Fault::AnswerLost => {
                drop(self.apply(ask, plain).await);
                Ok(Outcome::Lost)
            }
            Fault::AnswerUnavailable => {
                drop(self.apply(ask, plain).await);
                Err(unavailable())
            }
            Fault::ApplyLate { .. } => {
                wait().await?;
                self.apply(ask, Manner { arrived: Some(arrived), ..plain }).await
            }
            Fault::HoldBefore { .. } => {
                let claim = ask.clone();
                if self.clerk.ask(move |desk, now| claim.claim(desk, now)).await != Ok(true) {
                    // There is nothing to wait for: it is answered or refused at once.
                    return self.apply(ask, plain).await;
                }
                wait().await?;
                self.apply(ask, Manner { claimed: true, ..plain }).await
            }
            Fault::HoldAfter { .. } => {
                let outcome = self.apply(ask.clone(), plain).await;
                wait().await?;
                outcome
            }
            Fault::Decline { code } => self.apply(ask, Manner { code: Some(code.clone()), ..plain }).await,
            Fault::Garbage => {
                let outcome = self.apply(ask, plain).await?;
                Ok(outcome.map(|_| A::Answer::garbage()))
            }
            Fault::WrongKey => self.spoil(ask, A::Answer::for_another_key).await,
            Fault::WrongAmount => self.spoil(ask, A::Answer::with_another_amount).await,
            // Has acted.
            Fault::Latency { .. } => self.apply(ask, plain).await,
        }
    }

    async fn spoil<A: Ask>(&self, ask: A, how: fn(&mut A::Answer)) -> Result<Outcome<A::Answer>, Status> {
        let outcome = self.apply(ask, Manner::default()).await?;
        Ok(outcome.map(|mut answer| {
            how(&mut answer);
            answer
        }))
    }

    async fn apply<A: Ask>(&self, ask: A, manner: Manner) -> Result<Outcome<A::Answer>, Status> {
        let key = ask.key().to_owned();
        let executed =
            self.clerk.execute(A::CALL, key, move |desk, now| ask.execute(desk, manner, now)).await;
        executed.map(Outcome::Answered).map_err(failed)
    }

    async fn wait(&self, fault: &Fault) -> Result<(), Stopping> {
        match fault {
            Fault::ApplyLate { delay: Some(delay), hold: None } => self.pause(*delay).await,
            Fault::ApplyLate { delay, hold: Some(hold) } => {
                self.holds.wait(hold, delay.unwrap_or(holds::LONGEST), &self.life).await
            }
            Fault::HoldBefore { hold } | Fault::HoldAfter { hold } => {
                self.holds.wait(hold, holds::LONGEST, &self.life).await
            }
            _ => Ok(()),
        }
    }

    async fn pause(&self, delay: Duration) -> Result<(), Stopping> {
        tokio::select! {
            () = tokio::time::sleep(delay) => Ok(()),
            () = self.life.stopping() => Err(Stopping),
        }
    }
}

fn unavailable() -> Status {
    Status::unavailable("as ordered")
}

fn stopping(_: Stopping) -> Status {
    Status::unavailable("the simulator stops")
}

/// The one place where a failure becomes a status.
fn failed(failure: Failure) -> Status {
    match failure {
        Failure::Refused(Refusal::For(reason)) => refused(reason),
        Failure::Refused(Refusal::NotFound) => Status::not_found("nothing is known about the key"),
        Failure::Refused(Refusal::Full) => Status::resource_exhausted("the book is full"),
        Failure::NotSaved => Status::unavailable("the book cannot be written, nothing was executed"),
        Failure::Gone => Status::unavailable("the simulator stops"),
    }
}

fn refused(reason: Reason) -> Status {
    reason.refuse(match reason {
        Reason::KeyMismatch => "the key was used with another order",
        Reason::Fenced => "the key is fenced: no charge with it can succeed",
        Reason::KeyInUse => "another call is working on the key",
        Reason::TooLate => "not_after has passed: this call executed nothing",
        Reason::AlreadySucceeded => "the charge has succeeded",
        Reason::AlreadyCanceled => "the charge is canceled already",
        Reason::AlreadyDeclined => "the charge was declined",
        Reason::ChargeNotSucceeded => "there is no succeeded charge to refund",
        Reason::ExceedsCharge => "refunds would add up to more than the charge",
        Reason::Unspecified => "refused",
    })
}
