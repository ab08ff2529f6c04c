//! The one who owns the desk and writes the book: a thread to which jobs are handed.
//!
//! Promise: jobs are done one after the other, so that a charge and a cancel are strictly ordered, and nobody is answered
//! before what the answer tells is in the book. Jobs that wait are taken together, and their lines are made durable at once.
//! When that fails, nothing of them has happened, and each is told so, whether it wrote or read.

use std::io;
use std::thread;

use metrics::counter;
use semel_core::disposition::chain;
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, Happening};
use time::OffsetDateTime;
use tokio::sync::{mpsc, oneshot, watch};

use crate::book::Storage;
use crate::clock::Clock;
use crate::desk::{Desk, Done, How, Refusal};
use crate::history::History;
use crate::metrics::LINES;

/// How many jobs wait at most; more wait outside.
const WAITING: usize = 1024;
/// How many jobs are saved together at most.
const TOGETHER: usize = 256;

/// Does a job, and returns how to answer it once it is known whether it was saved.
type Job = Box<dyn FnOnce(&mut Desk, OffsetDateTime) -> Reply + Send>;
type Reply = Box<dyn FnOnce(Saved) + Send>;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Saved {
    Yes,
    No,
}

/// The way to the clerk.
#[derive(Clone, Debug)]
pub(crate) struct Clerk {
    jobs: mpsc::Sender<Job>,
    history: History,
    ended: watch::Receiver<()>,
}

/// Why a job has no answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Failure {
    /// It was refused.
    Refused(Refusal),
    /// It could not be saved, and so it has not happened.
    NotSaved,
    /// The clerk is gone.
    Gone,
}

impl Clerk {
    /// Starts the clerk, who stays until the last way to it is dropped.
    pub(crate) fn start(
        desk: Desk,
        book: Box<dyn Storage>,
        clock: Clock,
        history: History,
    ) -> io::Result<Self> {
        let (jobs, received) = mpsc::channel(WAITING);
        let (end, ended) = watch::channel(());
        thread::Builder::new().name("clerk".to_owned()).spawn(move || {
            work(desk, book, received, &clock);
            // Last of all: the book is closed.
            drop(end);
        })?;
        Ok(Self { jobs, history, ended })
    }

    /// Waits until the clerk has gone, which it does only when nobody can ask it any more, or when it panicked.
    pub(crate) fn gone(&self) -> impl Future<Output = ()> + use<> {
        let mut ended = self.ended.clone();
        async move { while ended.changed().await.is_ok() {} }
    }

    /// Has a call done; what came of it stands in the history before it is answered.
    pub(crate) async fn execute<T: Send + 'static>(
        &self,
        call: Call,
        key: String,
        work: impl FnOnce(&mut Desk, OffsetDateTime) -> Result<Done<T>, Refusal> + Send + 'static,
    ) -> Result<T, Failure> {
        let history = self.history.clone();
        let told = move |result: &Result<Done<T>, Refusal>| {
            if let Some(happening) = tell(result) {
                history.push(Happening { call: call.into(), key, ..happening });
            }
        };
        self.run(work, told).await?.map(|done| done.answer).map_err(Failure::Refused)
    }

    /// Has something else done at the desk.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Desk, OffsetDateTime) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.run(work, |_| ()).await
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Desk, OffsetDateTime) -> T + Send + 'static,
        told: impl FnOnce(&T) + Send + 'static,
    ) -> Result<T, Failure> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |desk, now| {
            let result = work(desk, now);
            Box::new(move |saved| {
                let result = match saved {
                    Saved::Yes => {
                        told(&result);
                        Ok(result)
                    }
                    Saved::No => Err(Failure::NotSaved),
                };
                // Whoever asked may be gone.
                drop(answer.send(result));
            })
        });
        self.jobs.send(job).await.map_err(|_| Failure::Gone)?;
        answered.await.map_err(|_| Failure::Gone)?
    }
}

/// What the history tells of a result; nothing of what was only read.
fn tell<T>(result: &Result<Done<T>, Refusal>) -> Option<Happening> {
    let (what, reference, reason) = match result {
        Ok(Done { how: How::Written(reference), .. }) => (What::Applied, reference.clone(), None),
        Ok(Done { how: How::Known, .. }) => (What::Replayed, String::new(), None),
        Err(Refusal::For(reason)) => (What::Refused, String::new(), Some(*reason)),
        Ok(Done { how: How::Read, .. }) | Err(Refusal::NotFound | Refusal::Full) => return None,
    };
    let reason = reason.map(i32::from).unwrap_or_default();
    Some(Happening { what: what.into(), reference, reason, ..Happening::default() })
}

fn work(mut desk: Desk, mut book: Box<dyn Storage>, mut jobs: mpsc::Receiver<Job>, clock: &Clock) {
    let mut replies = Vec::new();
    while let Some(job) = jobs.blocking_recv() {
        replies.push(job(&mut desk, clock.now()));
        while replies.len() < TOGETHER {
            let Ok(job) = jobs.try_recv() else { break };
            replies.push(job(&mut desk, clock.now()));
        }
        let saved = match save(&desk, &mut *book) {
            Ok(()) => {
                desk.keep();
                Saved::Yes
            }
            Err(error) => {
                tracing::error!("the book cannot be written, nothing was applied: {}", chain(&error));
                desk.undo();
                Saved::No
            }
        };
        for reply in replies.drain(..) {
            reply(saved);
        }
    }
}

fn save(desk: &Desk, book: &mut dyn Storage) -> io::Result<()> {
    let entries = desk.unsaved();
    if entries.is_empty() {
        return Ok(());
    }
    let mut lines = Vec::new();
    for entry in entries {
        serde_json::to_writer(&mut lines, entry)?;
        lines.push(b'\n');
    }
    book.append(&lines)?;
    counter!(LINES).increment(entries.len() as u64);
    Ok(())
}
