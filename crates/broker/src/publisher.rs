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
//! sending, because the broker's answer to it would cost the channel.
//!
//! If channel or connection are lost, or a deadline passes, what was not confirmed is
//! [`Outcome::Unknown`]: it may or may not be in a queue, now or later. The publisher is then broken,
//! and its owner opens another. Dropping the future of [`Publisher::publish_wave`] breaks it too:
//! what is still under way would be mistaken for part of the next wave.

mod judgement;

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, ErrorKind, PublisherConfirm};
use tokio::time::Instant;

use crate::connection::{ANSWER_LIMIT, Connection};
use crate::error::{Error, within};
use crate::message::{Encoded, Outgoing};
use crate::url::BrokerUrl;
use judgement::{Heard, judge};

/// How long a wave may take from its first message to its last confirm.
const CONFIRM_LIMIT: Duration = Duration::from_secs(15);

/// How often a wave that waits looks whether an alarm blocks its connection.
const ALARM_LOOK: Duration = Duration::from_millis(100);

/// How long the broker may take to show that it still answers, when confirms are missing.
const ALIVE_LIMIT: Duration = Duration::from_secs(3);

/// A connection with one channel in confirm mode, used by one task.
#[derive(Debug)]
pub struct Publisher {
    channel: Channel,
    connection: Connection,
    confirm_limit: Duration,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Usable,
    /// In the middle of a wave, or broken by one.
    Broken,
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
    /// It was not sent, because the protocol cannot hold it.
    Refused {
        /// What does not fit.
        reason: String,
    },
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

impl Publisher {
    /// Connects and puts a channel into confirm mode.
    ///
    /// # Errors
    ///
    /// As [`Connection::open`], and if the channel cannot be opened.
    pub async fn open(url: &BrokerUrl, name: &str) -> Result<Self, Error> {
        let connection = Connection::open(url, name).await?;
        let channel = connection.channel().await?;
        let select = channel.confirm_select(ConfirmSelectOptions::default());
        within(ANSWER_LIMIT, "put the channel into confirm mode", select).await?;
        Ok(Self { channel, connection, confirm_limit: CONFIRM_LIMIT, state: State::Usable })
    }

    /// Replaces the 15 s that a wave may take from its first message to its last confirm.
    #[must_use]
    pub fn with_confirm_limit(mut self, limit: Duration) -> Self {
        self.confirm_limit = limit;
        self
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
    /// It returns within the confirm limit, and three seconds if confirms are missing then. The caller bounds the wave's size: its messages are in
    /// memory twice while they are sent. Some hundred messages use a channel fully.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: dropping the future breaks the publisher, and what became of the wave is
    /// not known.
    pub async fn publish_wave(&mut self, wave: Vec<Outgoing>) -> Wave {
        if !self.is_usable() {
            let unknown = Outcome::Unknown { reason: Error::PublisherBroken.to_string() };
            return Wave { outcomes: vec![unknown; wave.len()], broken: Some(Error::PublisherBroken) };
        }
        self.state = State::Broken;

        let deadline = Instant::now() + self.confirm_limit;
        let frame_max = self.connection.frame_max();
        let mut outcomes = Vec::with_capacity(wave.len());
        let mut sendable = Vec::with_capacity(wave.len());
        for (position, outgoing) in wave.into_iter().enumerate() {
            match Encoded::new(outgoing, frame_max) {
                Ok(message) => {
                    outcomes.push(Outcome::Unknown { reason: "an earlier part of the wave failed".into() });
                    sendable.push((position, message));
                }
                Err(reason) => outcomes.push(Outcome::Refused { reason }),
            }
        }

        let mut rest = sendable.as_slice();
        while !rest.is_empty() {
            let (part, later) = rest.split_at(distinct_ids(rest));
            rest = later;
            let (judged, broken) = self.publish_part(part, deadline).await;
            for ((position, _), outcome) in part.iter().zip(judged) {
                outcomes[*position] = outcome;
            }
            if let Some(error) = broken {
                return Wave { outcomes, broken: Some(error) };
            }
        }
        self.state = State::Usable;
        Wave { outcomes, broken: None }
    }

    /// Closes politely if that is possible within a few seconds, and cuts the connection otherwise.
    pub async fn close(self) {
        self.connection.close().await;
    }

    /// Publishes messages with distinct ids.
    async fn publish_part(
        &self,
        part: &[(usize, Encoded)],
        deadline: Instant,
    ) -> (Vec<Outcome>, Option<Error>) {
        let mut slots = Vec::with_capacity(part.len());
        for (_, message) in part {
            let mut slot = Slot::Sending(Box::pin(self.channel.basic_publish(
                message.exchange.clone(),
                message.routing_key.clone(),
                BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() },
                &message.body,
                message.properties.clone(),
            )));
            // The first poll puts the message into the send queue, so polling in turn keeps the order.
            poll_fn(|context| Poll::Ready(slot.poll_heard(context).is_ready())).await;
            slots.push(slot);
        }

        let all_heard = async {
            for slot in &mut slots {
                poll_fn(|context| slot.poll_heard(context)).await;
            }
        };
        // Noted while it lasts: an alarm that ends just before the time is up has cost the time all the same.
        let mut was_blocked = false;
        let watching = async {
            let mut tick = tokio::time::interval(ALARM_LOOK);
            loop {
                tick.tick().await;
                was_blocked |= self.connection.is_blocked();
            }
        };
        let in_time = tokio::select! {
            biased;
            () = all_heard => true,
            () = tokio::time::sleep_until(deadline) => false,
            () = watching => false,
        };
        if !in_time {
            // Those behind the first silent one were not looked at yet.
            poll_fn(|context| {
                look_until_quiet(slots.len(), |slot| {
                    let slot = &mut slots[slot];
                    !matches!(slot, Slot::Heard(..)) && slot.poll_heard(context).is_ready()
                });
                Poll::Ready(())
            })
            .await;
        }

        let (heard, causes): (Vec<_>, Vec<_>) = slots.into_iter().map(Slot::into_heard).unzip();
        let ids: Vec<_> = part.iter().map(|(_, message)| message.id()).collect();
        let judged = judge(&ids, heard);

        let broken = if !in_time {
            Some(self.out_of_time(part.len(), was_blocked).await)
        } else if judged.stray_return {
            Some(Error::StrayReturn)
        } else {
            most_telling(causes.into_iter().flatten())
                .map(|cause| Error::failed(format!("publish {} messages", part.len()), cause))
        };
        (judged.outcomes, broken)
    }
}

impl Publisher {
    /// Says why confirms are missing when the time is up, and ends the connection unless an alarm blocks it.
    async fn out_of_time(&self, messages: usize, was_blocked: bool) -> Error {
        let after = self.confirm_limit;
        if was_blocked && self.connection.is_open() {
            return Error::Blocked { after };
        }
        let answers = tokio::time::timeout(ALIVE_LIMIT, self.connection.channel()).await;
        // Ends the library's record of the confirms that are dropped here, and what of the wave
        // was not sent yet.
        self.connection.cut();
        let attempted = format!("get {messages} messages confirmed");
        match answers {
            Ok(Ok(_)) => Error::Unconfirmed { attempted, after },
            _ => Error::TimedOut { attempted, after },
        }
    }
}

/// Looks at every slot in turn until a whole round finds nothing new; `look` says whether it did.
///
/// One round is not enough. Confirms go on arriving meanwhile: a message's return can be handed to
/// a slot that was silent when looked at, and the message's own confirm, which comes after that,
/// be found plain a moment later. A last round that finds nothing new proves that whatever was
/// handed out before the confirms that count has been seen.
fn look_until_quiet(slots: usize, mut look: impl FnMut(usize) -> bool) {
    let mut news = true;
    while news {
        news = false;
        for slot in 0..slots {
            news |= look(slot);
        }
    }
}

/// How many messages from the first on have ids of their own.
fn distinct_ids(messages: &[(usize, Encoded)]) -> usize {
    let mut seen = HashSet::with_capacity(messages.len());
    messages.iter().take_while(|(_, message)| seen.insert(message.id())).count()
}

/// A closed channel also fails what is published after it; the broker's own words say more.
fn most_telling(mut causes: impl Iterator<Item = Box<lapin::Error>>) -> Option<lapin::Error> {
    let first = causes.next()?;
    let told = |error: &lapin::Error| matches!(error.kind(), ErrorKind::ProtocolError(_));
    Some(if told(&first) { *first } else { *causes.find(|error| told(error)).unwrap_or(first) })
}

/// A message on its way.
enum Slot<'a> {
    Sending(Pin<Box<dyn Future<Output = lapin::Result<PublisherConfirm>> + Send + 'a>>),
    Sent(PublisherConfirm),
    Heard(Heard, Option<Box<lapin::Error>>),
}

impl Slot<'_> {
    /// Ready when the broker, or the library in its place, has said what became of the message.
    fn poll_heard(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            *self = match self {
                Self::Sending(publish) => match ready!(publish.as_mut().poll(context)) {
                    Ok(confirm) => Self::Sent(confirm),
                    Err(error) => Self::failed(error),
                },
                Self::Sent(confirm) => match ready!(Pin::new(confirm).poll(context)) {
                    Ok(confirmation) => Self::Heard(Heard::from(confirmation), None),
                    Err(error) => Self::failed(error),
                },
                Self::Heard(..) => return Poll::Ready(()),
            };
        }
    }

    fn failed(error: lapin::Error) -> Self {
        Self::Heard(Heard::Nothing { reason: error.to_string() }, Some(Box::new(error)))
    }

    fn into_heard(self) -> (Heard, Option<Box<lapin::Error>>) {
        match self {
            Self::Sending(_) => (Heard::Nothing { reason: "not sent in time".into() }, None),
            Self::Sent(_) => (Heard::Nothing { reason: "not confirmed in time".into() }, None),
            Self::Heard(heard, cause) => (heard, cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::look_until_quiet;

    /// Slot 0 gets its confirm, with slot 1's return, just after it was looked at; slot 1 gets its
    /// own just before it is.
    #[test]
    fn a_confirm_that_comes_between_two_looks_is_heard() {
        let mut arrived = [false, false];
        let mut heard = [false, false];
        look_until_quiet(2, |slot| {
            let news = arrived[slot] && !heard[slot];
            heard[slot] = arrived[slot];
            arrived = [true, true];
            news
        });
        assert_eq!(heard, [true, true]);
    }
}
