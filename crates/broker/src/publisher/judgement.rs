//! From what was heard of a wave to what became of its messages.
//!
//! The client library keeps returned messages in a queue and hands the oldest to whichever confirm
//! arrives next. Why none is missed when all confirms are in: the broker sends a message's return
//! before its confirm, so the returns waiting in the queue are never more than the returned
//! messages whose own confirm is still to come. When no confirm is to come, the queue is empty, and
//! every return was handed to some confirm of the wave.
//!
//! When confirms are missing, a return may be among what was lost. A message that was acked with
//! *another* message's return may then have its own still in the queue, so it is unknown. One that
//! was acked with none is safe to call confirmed: the queue was empty at that moment, so a return
//! of its own would have been handed out before, to a confirm that was heard.

use std::collections::HashMap;

use lapin::Confirmation;
use lapin::message::BasicReturnMessage;

use super::Outcome;

/// What was heard of one message.
#[derive(Debug)]
pub(super) enum Heard {
    /// The broker confirmed it; the library attached this return, of whichever message.
    Ack(Option<Return>),
    /// The broker did not take it; the library attached this return, of whichever message.
    Nack(Option<Return>),
    /// It was not sent, because the protocol cannot hold it.
    Refused { reason: String },
    /// Nothing although it was sent, until it was no longer waited for.
    Silence,
    /// Nothing, for this reason.
    Nothing { reason: String },
}

impl From<Confirmation> for Heard {
    fn from(confirmation: Confirmation) -> Self {
        match confirmation {
            Confirmation::Ack(returned) => Self::Ack(returned.map(Return::from)),
            Confirmation::Nack(returned) => Self::Nack(returned.map(Return::from)),
            Confirmation::NotRequested => {
                Self::Nothing { reason: "the channel is not in confirm mode".into() }
            }
        }
    }
}

/// A returned message.
#[derive(Debug)]
pub(super) struct Return {
    id: Option<String>,
    reason: String,
}

impl From<BasicReturnMessage> for Return {
    fn from(message: BasicReturnMessage) -> Self {
        let id = message.delivery.properties.message_id().as_ref().map(ToString::to_string);
        Self { id, reason: format!("{} {}", message.reply_code, message.reply_text) }
    }
}

/// What became of the messages.
#[derive(Debug)]
pub(super) struct Judged {
    pub(super) outcomes: Vec<Outcome>,
    /// A message came back that is not in the wave. It must not happen; if it does, something
    /// renamed one of ours, and no confirm of the wave is believed.
    pub(super) stray_return: bool,
}

/// Judges messages by their distinct ids.
pub(super) fn judge(ids: &[Option<&str>], heard: Vec<Heard>) -> Judged {
    let complete = !heard.iter().any(|heard| matches!(heard, Heard::Silence | Heard::Nothing { .. }));

    let mut returned: HashMap<Option<String>, String> = HashMap::new();
    let mut acks = Vec::with_capacity(heard.len());
    for heard in heard {
        acks.push(match heard {
            Heard::Ack(None) => Ack::Plain,
            Heard::Nack(None) => Ack::Refused,
            Heard::Refused { reason } => Ack::Unsendable(reason),
            Heard::Silence => Ack::Late,
            Heard::Nothing { reason } => Ack::Missing(reason),
            Heard::Ack(Some(message)) => {
                returned.insert(message.id, message.reason);
                Ack::WithReturn
            }
            Heard::Nack(Some(message)) => {
                returned.insert(message.id, message.reason);
                Ack::Refused
            }
        });
    }

    let mut outcomes: Vec<Outcome> = ids
        .iter()
        .zip(acks)
        .map(|(id, ack)| match (returned.remove(&id.map(str::to_owned)), ack) {
            (Some(reason), _) => Outcome::Returned { reason },
            (None, Ack::Refused) => Outcome::Nacked,
            (None, Ack::Unsendable(reason)) => Outcome::Refused { reason },
            (None, Ack::Late) => Outcome::Unconfirmed,
            (None, Ack::Missing(reason)) => Outcome::Unknown { reason },
            (None, Ack::Plain) => Outcome::Confirmed,
            (None, Ack::WithReturn) if complete => Outcome::Confirmed,
            (None, Ack::WithReturn) => {
                Outcome::Unknown { reason: "confirmed, but its return may have been lost".into() }
            }
        })
        .collect();

    let stray_return = !returned.is_empty();
    if stray_return {
        for outcome in &mut outcomes {
            if *outcome == Outcome::Confirmed {
                *outcome =
                    Outcome::Unknown { reason: "a message that is not in the wave was returned".into() };
            }
        }
    }
    Judged { outcomes, stray_return }
}

enum Ack {
    Plain,
    WithReturn,
    Refused,
    Unsendable(String),
    Late,
    Missing(String),
}

#[cfg(test)]
mod tests;
