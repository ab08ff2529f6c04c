//! A walk along the dead letters, oldest first, that holds what it has passed.

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
    /// How many letters were there when it began, of those it may see.
    there: usize,
    /// How many may be held.
    window: usize,
    passed: usize,
    passed_bytes: usize,
    acknowledged: usize,
    acknowledged_bytes: usize,
    is_short: bool,
}

impl Walk {
    /// Begins at the oldest letter. It passes `most` letters at most, of which it holds up to `window` unacknowledged.
    pub(super) async fn open(letters: &DeadLetters, window: usize, most: usize) -> Result<Self, DeadError> {
        let queue = letters.dead_queue();
        let connection = Connection::open(&letters.broker, &letters.name()).await?;
        let depth = inspect::look_at(&connection, &queue).await?;
        let there = usize::try_from(depth.ready).unwrap_or(usize::MAX).min(most);
        let window = window.min(there);
        // All that it may hold comes to one consumer: only so the broker returns it in its order.
        let prefetch = u16::try_from(window).unwrap_or(u16::MAX);
        let subscription = if there == 0 {
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

    /// The next letter; `None` at the end, or when it holds as much as it may.
    pub(super) async fn next(&mut self) -> Result<Option<(Letter, Delivery)>, DeadError> {
        if self.is_at_end() || self.is_full() {
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

    pub(super) fn is_at_end(&self) -> bool {
        self.passed >= self.there || self.is_short
    }

    /// Whether it holds as much as it may.
    pub(super) fn is_full(&self) -> bool {
        self.passed - self.acknowledged >= self.window || self.holds_too_many_bytes()
    }

    pub(super) fn holds_too_many_bytes(&self) -> bool {
        self.passed_bytes - self.acknowledged_bytes >= MOST_HELD_BYTES
    }

    /// How many it may hold.
    pub(super) fn window(&self) -> usize {
        self.window
    }

    /// How many it may pass.
    pub(super) fn there(&self) -> usize {
        self.there
    }

    /// Why there may be more than it has passed.
    pub(super) fn bound(&self) -> Option<Bound> {
        if !self.is_at_end() {
            Some(Bound::Held)
        } else if self.is_short || self.depth.consumers > 0 {
            Some(Bound::Others)
        } else {
            None
        }
    }

    /// Gives back what it holds, and waits a little until that is to be seen again, so that the next command sees it.
    pub(super) async fn close(self) {
        let Some(subscription) = self.subscription else { return self.connection.close().await };
        subscription.close().await;
        let given_back = self.there - self.acknowledged;
        let began = Instant::now();
        while began.elapsed() < RETURN_LIMIT {
            match inspect::message_count(&self.connection, &self.queue).await {
                // One that others took from meanwhile does not get there.
                Ok(ready) if usize::try_from(ready).unwrap_or(usize::MAX) < given_back && !self.is_short => {
                    tokio::time::sleep(LOOK).await;
                }
                _ => break,
            }
        }
        self.connection.close().await;
    }
}
