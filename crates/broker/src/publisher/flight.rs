//! Messages on their way: sent in their order, and waited for together.
//!
//! Confirms are awaited from the first message on, and every tenth of a second all of them are looked at: that tells
//! whether an alarm blocks the connection, and since when nothing was heard.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::{Channel, ErrorKind, PublisherConfirm};
use tokio::time::{Instant, MissedTickBehavior};

use super::judgement::Heard;
use crate::message::{Encoded, Outgoing};

/// How often a wave that waits looks at all its messages and at the connection.
const LOOK: Duration = Duration::from_millis(100);

/// Until when messages are waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until {
    /// At most until then.
    pub(super) deadline: Instant,
    /// No longer than this without hearing anything, once something was confirmed.
    pub(super) silence: Duration,
}

/// What was heard of messages.
pub(super) struct Landed {
    /// One per message, in their order.
    pub(super) heard: Vec<Heard>,
    /// The first failures that the client library reported, the broker's own words before its.
    pub(super) cause: Option<lapin::Error>,
    /// Whether something was heard of each.
    pub(super) is_complete: bool,
    /// Whether the wait ended in silence, rather than while one confirm came after the other.
    pub(super) is_silent: bool,
    /// Whether an alarm blocked the connection at some time meanwhile.
    pub(super) was_blocked: bool,
}

/// Sends all messages but those that the protocol cannot hold, and waits until each is heard of, or for as long as `until` says.
pub(super) async fn fly(
    channel: &Channel,
    frame_max: usize,
    messages: &[&Outgoing],
    until: Until,
    is_blocked: impl Fn() -> bool,
) -> Landed {
    let mut slots = Vec::with_capacity(messages.len());
    for message in messages {
        // Encoded as it is sent: the library takes what it is given, and a copy for it would cost as much again.
        let mut slot = match Encoded::new(message, frame_max) {
            Ok(encoded) => Slot::Sending(Box::pin(channel.basic_publish(
                encoded.exchange,
                encoded.routing_key,
                BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() },
                encoded.body,
                encoded.properties,
            ))),
            Err(reason) => Slot::Heard(Heard::Refused { reason }, None),
        };
        // The first poll puts the message into the send queue, so polling in turn keeps the order.
        poll_fn(|context| Poll::Ready(slot.poll_heard(context).is_ready())).await;
        slots.push(slot);
    }

    // Noted while it lasts: an alarm that ends just before the time is up has cost the time all the same.
    let mut was_blocked = false;
    let look = LOOK.min(until.silence);
    let mut tick = tokio::time::interval_at(Instant::now() + look, look);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut next, mut heard, mut last_heard) = (0, 0, Instant::now());
    let is_complete = loop {
        let all_heard = poll_fn(|context| {
            while next < slots.len() {
                ready!(slots[next].poll_heard(context));
                next += 1;
            }
            Poll::Ready(())
        });
        let is_complete = tokio::select! {
            biased;
            () = all_heard => break true,
            () = tokio::time::sleep_until(until.deadline) => false,
            _ = tick.tick() => {
                was_blocked |= is_blocked();
                poll_fn(|context| {
                    for slot in &mut slots[next..] {
                        let _ = slot.poll_heard(context);
                    }
                    Poll::Ready(())
                })
                .await;
                let now_heard = slots.iter().filter(|slot| slot.is_heard()).count();
                if now_heard > heard {
                    (heard, last_heard) = (now_heard, Instant::now());
                }
                let is_over = slots.iter().any(Slot::is_acked) && last_heard.elapsed() >= until.silence;
                if was_blocked || !is_over {
                    continue;
                }
                false
            }
        };
        break is_complete;
    };
    let is_silent = last_heard.elapsed() >= until.silence;
    if !is_complete {
        // Those behind the first silent one may not have been looked at since.
        poll_fn(|context| {
            look_until_quiet(slots.len(), |slot| {
                let slot = &mut slots[slot];
                !slot.is_heard() && slot.poll_heard(context).is_ready()
            });
            Poll::Ready(())
        })
        .await;
    }
    let (heard, causes): (Vec<_>, Vec<_>) = slots.into_iter().map(Slot::into_heard).unzip();
    Landed { heard, cause: most_telling(causes.into_iter().flatten()), is_complete, is_silent, was_blocked }
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

    fn is_heard(&self) -> bool {
        matches!(self, Self::Heard(..))
    }

    fn is_acked(&self) -> bool {
        matches!(self, Self::Heard(Heard::Ack(_), _))
    }

    fn into_heard(self) -> (Heard, Option<Box<lapin::Error>>) {
        match self {
            Self::Sending(_) => (Heard::Nothing { reason: "not sent in time".into() }, None),
            Self::Sent(_) => (Heard::Silence, None),
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
