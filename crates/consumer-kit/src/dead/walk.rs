//! A walk along the dead letters, oldest first, that holds what it has passed.
//!
//! A quorum queue keeps what was returned apart from what never was delivered, and delivers it first; but what is returned once
//! more goes behind the others of these. So a walk goes to the end, whatever it looks for: all that it holds is then returned
//! together, sorted as it was taken, and nothing of it has been overtaken.

use std::time::{Duration, Instant};

use semel_broker::inspect::{self, Depth};
use semel_broker::{Connection, Delivery, Subscription};

use super::letter::Letter;
use super::{Bound, DeadError, DeadLetters};

/// Most letters that a command holds.
pub(super) const MOST_HELD: usize = 16_384;
/// Most bytes of payload that it has the broker hold.
const MOST_HELD_BYTES: usize = 64 * 1024 * 1024;
/// A letter that was ready and does not come for this long is one that somebody else took.
const SILENCE: Duration = Duration::from_secs(3);
/// How long the broker may take to have everything back.
const RETURN_LIMIT: Duration = Duration::from_secs(5);
/// Between looks at that.
const LOOK: Duration = Duration::from_millis(10);

/// A consumer of the dead letters. Dropping it, or its end in a crash, gives back all that is not acknowledged.
#[derive(Debug)]
pub(super) struct Walk {
    subscription: Option<Subscription>,
    connection: Connection,
    queue: String,
    depth: Depth,
    /// How many letters were there when it began.
    there: usize,
    /// How many of them it passes.
    window: usize,
    passed: usize,
    passed_bytes: usize,
    acknowledged: usize,
    acknowledged_bytes: usize,
    is_short: bool,
}

impl Walk {
    /// Begins at the oldest letter. It passes `window` letters at most.
    pub(super) async fn open(letters: &DeadLetters, window: usize) -> Result<Self, DeadError> {
        let queue = letters.dead_queue();
        let connection = Connection::open(&letters.broker, &letters.name()).await?;
        let depth = inspect::look_at(&connection, &queue).await?;
        let there = usize::try_from(depth.ready).unwrap_or(usize::MAX);
        let window = window.min(there);
        // All that it may hold comes to one consumer: only so the broker returns it in its order.
        let prefetch = u16::try_from(window).unwrap_or(u16::MAX);
        let subscription = if window == 0 {
            None
        } else {
            Some(Subscription::open(&letters.broker, &letters.name(), &queue, prefetch).await?)
        };
        Ok(Self {
            subscription,
            connection,
            queue,
            depth,
            there,
            window,
            passed: 0,
            passed_bytes: 0,
            acknowledged: 0,
            acknowledged_bytes: 0,
            is_short: false,
        })
    }

    /// The next letter; `None` at the end, or when it holds as many bytes as it may.
    pub(super) async fn next(&mut self) -> Result<Option<(Letter, Delivery)>, DeadError> {
        let held_bytes = self.passed_bytes - self.acknowledged_bytes;
        if self.passed >= self.window || self.is_short || held_bytes >= MOST_HELD_BYTES {
            return Ok(None);
        }
        let Some(subscription) = &mut self.subscription else { return Ok(None) };
        let Ok(delivery) = tokio::time::timeout(SILENCE, subscription.next()).await else {
            self.is_short = true;
            return Ok(None);
        };
        let delivery = delivery?;
        self.passed += 1;
        self.passed_bytes += delivery.body.len();
        Ok(Some((Letter::read(self.passed, &delivery), delivery)))
    }

    /// Notes that a letter of this size is not held any more.
    pub(super) fn acknowledged(&mut self, bytes: usize) {
        self.acknowledged += 1;
        self.acknowledged_bytes += bytes;
    }

    /// Passes all that is left.
    pub(super) async fn finish(&mut self) -> Result<(), DeadError> {
        while self.next().await?.is_some() {}
        Ok(())
    }

    /// How many letters it has passed.
    pub(super) fn passed(&self) -> usize {
        self.passed
    }

    /// Why there may be more than it has passed.
    pub(super) fn bound(&self) -> Option<Bound> {
        if self.is_short || self.depth.consumers > 0 {
            Some(Bound::Others)
        } else if self.passed < self.there {
            Some(Bound::Held)
        } else {
            None
        }
    }

    /// Gives back what it holds, and waits a little until that is to be seen again, so that the next command sees it.
    pub(super) async fn close(self) {
        // Where others hold some, what is there says nothing.
        let is_alone = self.bound() != Some(Bound::Others);
        let Some(subscription) = self.subscription else { return self.connection.close().await };
        subscription.close().await;
        let given_back = self.there - self.acknowledged;
        let began = Instant::now();
        while is_alone && began.elapsed() < RETURN_LIMIT {
            match inspect::message_count(&self.connection, &self.queue).await {
                Ok(ready) if usize::try_from(ready).unwrap_or(usize::MAX) < given_back => {
                    tokio::time::sleep(LOOK).await;
                }
                _ => break,
            }
        }
        self.connection.close().await;
    }
}
