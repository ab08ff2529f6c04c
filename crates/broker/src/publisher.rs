//! Publishes in waves, and says of every message what became of it.
//!
//! A message is [`Outcome::Confirmed`] only if the broker confirmed it and did not return it. What
//! makes this more than waiting for a confirm: for an unroutable message the broker sends the
//! message back and *then* confirms it, a return carries no delivery tag, and the client library
//! gives each return to whichever confirm arrives next. Under pipelining that is often another
//! message's. So a wave is judged only when all its confirms are in, and a returned message is
//! recognised by its `message_id` over the whole wave ([`judgement`] says why none is missed).
//!
//! All messages of a wave are sent before the first confirm is awaited, in their order. Within a
//! wave the ids must differ for that to work; where one repeats, the wave is cut in two and the
//! second part is sent when the first is judged. Copies of messages without any id can be sent too:
//! "no id" counts as an id.
//!
//! Messages are mandatory and persistent. A message the protocol cannot hold is refused before
//! sending. One that the broker does not take at all, such as one that is too large for it or whose
//! routing key the user may not use, costs the channel, and the other messages of the wave what was
//! still to be heard of them. It is then singled out on fresh channels ([`Publisher::single_out`]),
//! and the others are sent again.
//!
//! If connection or exchange are lost, what was not confirmed is [`Outcome::Unknown`]: it may or may
//! not be in a queue, now or later. The publisher is then broken, and its owner opens another.
//! When the time is up and the broker still answers, the publisher goes on with another channel, and
//! what was sent in vain is [`Outcome::Unconfirmed`].
//! Dropping the future of [`Publisher::publish_wave`] breaks it: what is still under way would be
//! mistaken for part of the next wave.

mod exchange;
mod flight;
mod judgement;
mod suspects;

use std::collections::HashSet;
use std::time::Duration;

use lapin::Channel;
use lapin::options::ConfirmSelectOptions;
use tokio::time::Instant;

use crate::connection::{ANSWER_LIMIT, CLOSE_LIMIT, Connection, REPLY_SUCCESS};
use crate::error::{Cause, Error, within};
use crate::message::Outgoing;
use crate::url::BrokerUrl;
pub use exchange::Acceptance;
use flight::{Until, fly};
use judgement::judge;
use suspects::Suspects;

/// How long the broker may take to show that it still answers, when confirms are missing.
const ALIVE_LIMIT: Duration = Duration::from_secs(3);

/// The largest frame of a connection for events, in bytes: all headers of a message share one, and those of an event have
/// 32 KiB at most. The library keeps room for 64 frames per connection, 8 MiB of the usual ones.
const EVENT_FRAMES: u32 = 64 * 1024;

/// A connection with one channel in confirm mode, used by one task.
#[derive(Debug)]
pub struct Publisher {
    channel: Channel,
    connection: Connection,
    patience: Patience,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Usable,
    /// In the middle of a wave, or broken by one.
    Broken,
}

/// How long a wave is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From its first message to its last confirm.
    pub whole: Duration,
    /// Without hearing anything, once something of it was confirmed.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { whole: Duration::from_secs(15), silence: Duration::from_secs(5) }
    }
}

/// What became of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every queue it was routed to has it safe.
    Confirmed,
    /// No queue wanted it.
    Returned {
        /// The broker's words.
        reason: String,
    },
    /// The broker did not take it, such as when a queue is full. Other queues may have it.
    Nacked,
    /// It is in no queue: the protocol cannot hold it, or the broker closed the channel because of it.
    Refused {
        /// What does not fit, or the broker's words.
        reason: String,
    },
    /// It was sent, and then there was silence, although the broker answers on the same connection. Whether it is in a
    /// queue is not known.
    Unconfirmed,
    /// Whether it is in a queue is not known. Never to be taken for "not sent".
    Unknown {
        /// What prevented knowing.
        reason: String,
    },
}

/// What became of a wave.
#[derive(Debug)]
#[must_use]
pub struct Wave {
    /// One outcome per message, in the order they were given.
    pub outcomes: Vec<Outcome>,
    /// Why the publisher can no longer be used, if so.
    pub broken: Option<Error>,
}

/// A message of a wave.
struct Numbered {
    /// Its place in the wave.
    place: usize,
    id: Option<String>,
    outgoing: Outgoing,
}

impl Publisher {
    /// Connects and puts a channel into confirm mode.
    ///
    /// # Errors
    ///
    /// As [`Connection::open`], and if the channel cannot be opened.
    pub async fn open(url: &BrokerUrl, name: &str) -> Result<Self, Error> {
        Self::on(Connection::open(url, name).await?).await
    }

    /// Does so for events of an outbox, whose headers are bounded, and holds less memory.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub async fn for_events(url: &BrokerUrl, name: &str) -> Result<Self, Error> {
        Self::on(Connection::open_with_frames(url, name, Some(EVENT_FRAMES)).await?).await
    }

    async fn on(connection: Connection) -> Result<Self, Error> {
        let channel = confirmed_channel(&connection).await?;
        Ok(Self { channel, connection, patience: Patience::default(), state: State::Usable })
    }

    /// Replaces the 15 s that a wave may take from its first message to its last confirm, and the 5 s that it may be silent.
    #[must_use]
    pub fn with_patience(mut self, patience: Patience) -> Self {
        self.patience = patience;
        self
    }

    /// Its connection, to declare things on.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether another wave can be published.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.state == State::Usable && self.connection.is_open() && self.channel.status().connected()
    }

    /// Whether the broker has raised an alarm and reads nothing from this publisher.
    ///
    /// A wave published meanwhile is unknown when its time is up, and breaks the publisher ([`Error::Blocked`]). Such a
    /// publisher still learns when the alarm is over; a new one would not know that there is one.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.connection.is_open() && self.connection.is_blocked()
    }

    /// Publishes all messages, waits for all confirms, and judges them.
    ///
    /// It returns within its patience, and a few seconds if confirms are missing then. The caller bounds the wave's size:
    /// its messages are in memory twice while they are sent. Some hundred messages use a channel fully.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: dropping the future breaks the publisher, and what became of the wave is
    /// not known.
    pub async fn publish_wave(&mut self, wave: Vec<Outgoing>) -> Wave {
        self.publish_wave_within(self.patience, wave).await
    }

    /// Does so with another patience.
    ///
    /// # Cancel safety
    ///
    /// As [`publish_wave`](Self::publish_wave).
    pub async fn publish_wave_within(&mut self, patience: Patience, wave: Vec<Outgoing>) -> Wave {
        if !self.is_usable() {
            let unknown = Outcome::Unknown { reason: Error::PublisherBroken.to_string() };
            return Wave { outcomes: vec![unknown; wave.len()], broken: Some(Error::PublisherBroken) };
        }
        self.state = State::Broken;
        let deadline = Instant::now() + patience.whole;
        let outcomes = vec![Outcome::Unknown { reason: "not sent in time".into() }; wave.len()];
        let numbered = |(place, outgoing): (usize, Outgoing)| Numbered { place, id: outgoing.id(), outgoing };
        let messages: Vec<Numbered> = wave.into_iter().enumerate().map(numbered).collect();
        let mut attempt =
            Attempt { until: Until { deadline, silence: patience.silence }, patience, outcomes };
        let broken = self.publish_all(&messages, &mut attempt).await.err();
        if broken.is_none() {
            self.state = State::Usable;
        }
        Wave { outcomes: attempt.outcomes, broken }
    }

    /// Closes politely if that is possible within a few seconds, and cuts the connection otherwise.
    pub async fn close(self) {
        self.connection.close().await;
    }
}

/// The publishing of a wave.
struct Attempt {
    until: Until,
    patience: Patience,
    outcomes: Vec<Outcome>,
}

impl Attempt {
    fn is_over(&self) -> bool {
        Instant::now() >= self.until.deadline
    }

    fn is_unheard(&self, place: usize) -> bool {
        matches!(self.outcomes[place], Outcome::Unknown { .. })
    }
}

/// How a part of a wave ended, with a channel that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// Something was heard of each message, or the time is up.
    Landed,
    /// The broker closed the channel because of one of its messages, and nothing was heard of some.
    Refused,
}

impl Publisher {
    async fn publish_all(&mut self, messages: &[Numbered], attempt: &mut Attempt) -> Result<(), Error> {
        let mut rest: Vec<&Numbered> = messages.iter().collect();
        while !rest.is_empty() && !attempt.is_over() {
            let later = rest.split_off(distinct_ids(&rest));
            if self.publish_part(&rest, attempt).await? == Ended::Refused {
                rest.retain(|message| attempt.is_unheard(message.place));
                rest = self.single_out(rest, attempt).await?;
            } else {
                rest.clear();
            }
            rest.extend(later);
        }
        Ok(())
    }

    /// Sends messages anew, by halves, until it is known which of them the broker refuses. Returns those behind it.
    ///
    /// The messages ahead of it were most likely routed, but what was to be heard of them went with the channel.
    async fn single_out<'m>(
        &mut self,
        suspects: Vec<&'m Numbered>,
        attempt: &mut Attempt,
    ) -> Result<Vec<&'m Numbered>, Error> {
        let wave = attempt.until.deadline;
        let mut suspects = Suspects::new(suspects);
        while !suspects.half().is_empty() && !attempt.is_over() {
            // One that is not answered must leave time for the others.
            let (now, silence) = (Instant::now(), attempt.patience.silence);
            let share = if suspects.half().len() == 1 { silence } else { silence.max((wave - now) / 2) };
            attempt.until.deadline = wave.min(now + share);
            let ended = self.publish_part(suspects.half(), attempt).await;
            attempt.until.deadline = wave;
            match ended? {
                Ended::Landed => suspects.landed(),
                Ended::Refused => suspects.refused(|message| attempt.is_unheard(message.place)),
            }
        }
        Ok(suspects.behind())
    }

    /// Publishes messages with distinct ids.
    async fn publish_part(&mut self, part: &[&Numbered], attempt: &mut Attempt) -> Result<Ended, Error> {
        let messages: Vec<&Outgoing> = part.iter().map(|message| &message.outgoing).collect();
        let is_blocked = || self.connection.is_blocked();
        let landed =
            fly(&self.channel, self.connection.frame_max(), &messages, attempt.until, is_blocked).await;
        let ids: Vec<_> = part.iter().map(|message| message.id.as_deref()).collect();
        let judged = judge(&ids, landed.heard);
        let is_any_late = judged.outcomes.contains(&Outcome::Unconfirmed);
        let is_silent = landed.is_silent;
        for (message, outcome) in part.iter().zip(judged.outcomes) {
            attempt.outcomes[message.place] = outcome;
        }
        let attempted = || format!("publish {} messages", part.len());
        let ended = if judged.stray_return {
            Err(Error::StrayReturn)
        } else if let Some(cause) = landed.cause {
            let cause = Cause::from(cause);
            if self.connection.is_open() && cause.is_about_message() {
                if let [message] = part {
                    attempt.outcomes[message.place] = Outcome::Refused { reason: cause.to_string() };
                }
                // Whoever bounds the wave counts on that.
                let left = attempt.until.deadline - Instant::now();
                let limit = left.clamp(ALIVE_LIMIT, ANSWER_LIMIT);
                self.renew(limit, "open another channel").await.map(|()| Ended::Refused)
            } else {
                Err(Error::Failed { attempted: attempted(), source: cause })
            }
        } else if landed.is_complete {
            Ok(Ended::Landed)
        } else if landed.was_blocked && self.connection.is_open() {
            Err(Error::Blocked { after: attempt.patience.whole })
        } else {
            let attempted = format!("get {} messages confirmed", part.len());
            let renewed = self.renew(ALIVE_LIMIT, &attempted).await;
            let silent = |_| Error::TimedOut { attempted, after: attempt.patience.whole };
            renewed.map(|()| Ended::Landed).map_err(silent)
        };
        // A broker that is slow, blocked or away says nothing about a message that it did not confirm.
        if is_any_late && (ended.is_err() || !is_silent) {
            for message in part {
                let outcome = &mut attempt.outcomes[message.place];
                if *outcome == Outcome::Unconfirmed {
                    *outcome = Outcome::Unknown { reason: "not confirmed in time".into() };
                }
            }
        }
        ended.map_err(|error| self.broken(error))
    }

    /// Goes on with another channel. The library's record of what is not confirmed on the old one ends with that.
    async fn renew(&mut self, limit: Duration, attempted: &str) -> Result<(), Error> {
        let opened = tokio::time::timeout(limit, confirmed_channel(&self.connection)).await;
        let timed_out = |_| Error::TimedOut { attempted: attempted.to_owned(), after: limit };
        let old = std::mem::replace(&mut self.channel, opened.map_err(timed_out)??);
        if old.status().connected() {
            within(CLOSE_LIMIT, "close a channel", old.close(REPLY_SUCCESS, "late".into())).await?;
        }
        Ok(())
    }

    /// Cuts the connection, unless it is blocked and knows it: what of the wave was not sent yet ends with that.
    fn broken(&self, error: Error) -> Error {
        if !matches!(error, Error::Blocked { .. }) {
            self.connection.cut();
        }
        error
    }
}

async fn confirmed_channel(connection: &Connection) -> Result<Channel, Error> {
    let channel = connection.channel().await?;
    let select = channel.confirm_select(ConfirmSelectOptions::default());
    within(ANSWER_LIMIT, "put the channel into confirm mode", select).await?;
    Ok(channel)
}

/// How many messages from the first on have ids of their own.
fn distinct_ids(messages: &[&Numbered]) -> usize {
    let mut seen = HashSet::with_capacity(messages.len());
    messages.iter().take_while(|message| seen.insert(message.id.as_deref())).count()
}
