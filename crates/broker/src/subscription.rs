//! Consumes one queue.
//!
//! It owns its connection and one channel. The stream of deliveries never ends by itself: whatever
//! stops it, a server-sent cancel included, is an error, after which the subscription is dropped
//! and opened anew.
//!
//! A delivery carries the incarnation of its channel: acknowledging one whose channel is gone sends
//! nothing and says [`Settled::Lost`], and the broker delivers the message again. Dropping a
//! delivery settles nothing; it stays unacknowledged until the channel closes.
//!
//! [`Subscription::close`] closes the channel rather than canceling the consumer, because that
//! returns what is unacknowledged to the queue in its order (RabbitMQ documentation, "Quorum
//! Queues"). A crash does the same.

use std::collections::VecDeque;
use std::fmt;

use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{Acker, BasicProperties, Channel, Consumer};

use crate::connection::{ANSWER_LIMIT, CLOSE_LIMIT, Connection, REPLY_SUCCESS};
use crate::envelope::{DecodeError, Received, as_integer, as_text, short};
use crate::error::{Error, within};
use crate::message::{Death, HeaderValue, MessageCopy};
use crate::url::BrokerUrl;

/// A connection that consumes one queue.
#[derive(Debug)]
pub struct Subscription {
    consumer: Consumer,
    channel: Channel,
    connection: Connection,
    queue: String,
    /// What an earlier consumer of this subscription had received when its prefetch was changed.
    pending: VecDeque<Delivery>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Ended,
}

impl Subscription {
    /// Connects and consumes; at most `prefetch` deliveries are unacknowledged at a time (0 would
    /// mean no limit and is taken for 1).
    ///
    /// # Errors
    ///
    /// As [`Connection::open`], and if the queue does not exist (reply code 404).
    pub async fn open(url: &BrokerUrl, name: &str, queue: &str, prefetch: u16) -> Result<Self, Error> {
        let connection = Connection::open(url, name).await?;
        let channel = connection.channel().await?;
        let consumer = consume(&channel, queue, prefetch).await?;
        Ok(Self {
            consumer,
            channel,
            connection,
            queue: queue.to_owned(),
            pending: VecDeque::new(),
            state: State::Running,
        })
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// How many bytes a frame of its connection holds at most.
    #[must_use]
    pub fn frame_max(&self) -> usize {
        self.connection.frame_max()
    }

    /// Waits for the next delivery.
    ///
    /// # Errors
    ///
    /// Whatever ended the subscription; [`Error::ConsumerCanceled`] if the broker did. From then on
    /// every call fails.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no delivery is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<Delivery, Error> {
        if let Some(delivery) = self.pending.pop_front() {
            return Ok(delivery);
        }
        if self.state == State::Running {
            match self.consumer.next().await {
                Some(Ok(delivery)) => return Ok(Delivery::from(delivery)),
                Some(Err(error)) => {
                    self.state = State::Ended;
                    return Err(Error::failed(format!("consume from queue `{}`", self.queue), error));
                }
                // The library ends the stream like this after a server-sent cancel.
                None => self.state = State::Ended,
            }
        }
        Err(Error::ConsumerCanceled { queue: self.queue.clone() })
    }

    /// Changes how many deliveries may be unacknowledged.
    ///
    /// The broker fixes the prefetch when a consumer starts, so this starts another on the same
    /// channel and cancels the one before. Deliveries stay valid, and their order is kept.
    ///
    /// # Errors
    ///
    /// If the broker does not answer or the channel is gone; the subscription is then of no use.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the subscription is of no use afterwards.
    pub async fn set_prefetch(&mut self, prefetch: u16) -> Result<(), Error> {
        let before = std::mem::replace(&mut self.state, State::Ended);
        if before == State::Ended {
            return Err(Error::ConsumerCanceled { queue: self.queue.clone() });
        }
        let consumer = consume(&self.channel, &self.queue, prefetch).await?;
        let mut former = std::mem::replace(&mut self.consumer, consumer);
        let cancel = self.channel.basic_cancel(former.tag(), BasicCancelOptions::default());
        within(ANSWER_LIMIT, &format!("cancel a consumer of queue `{}`", self.queue), cancel).await?;
        while let Some(delivery) = former.next().await {
            let delivery = delivery
                .map_err(|error| Error::failed(format!("consume from queue `{}`", self.queue), error))?;
            self.pending.push_back(delivery.into());
        }
        self.state = State::Running;
        Ok(())
    }

    /// Whether the subscription can still deliver, as far as this side knows.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.state == State::Running && self.connection.is_open() && self.channel.status().connected()
    }

    /// Closes the channel, which returns what is unacknowledged to the queue, then the connection;
    /// each within a few seconds, or else the connection is cut.
    pub async fn close(self) {
        let close = self.channel.close(REPLY_SUCCESS, "OK".into());
        match within(CLOSE_LIMIT, "close the channel", close).await {
            Ok(()) => self.connection.close().await,
            Err(error) => tracing::debug!(queue = self.queue, %error, "consumer was cut instead of closed"),
        }
    }
}

/// Starts a consumer whose tag the broker makes: a tag of ours, used again after a reconnect while
/// the broker still holds the old connection, would be a connection error.
async fn consume(channel: &Channel, queue: &str, prefetch: u16) -> Result<Consumer, Error> {
    let attempted = format!("consume from queue `{queue}`");
    let name = short("queue name", queue)?;
    within(ANSWER_LIMIT, &attempted, async {
        channel.basic_qos(prefetch.max(1), BasicQosOptions::default()).await?;
        channel.basic_consume(name, "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
    })
    .await
}

/// A received message, unacknowledged until it is settled or its channel closes.
#[must_use = "a delivery that is not settled stays unacknowledged until the channel closes"]
pub struct Delivery {
    /// What the message says about itself, or why it is no event.
    pub envelope: Result<Received, DecodeError>,
    /// The payload.
    pub body: Vec<u8>,
    /// Whether it may have been delivered before.
    pub redelivered: bool,
    /// How often a quorum queue has delivered it before; absent at the first delivery, and always
    /// in classic queues.
    pub delivery_count: Option<i64>,
    /// The key it was published with.
    pub routing_key: String,
    /// The exchange it was published to.
    pub exchange: String,
    /// Its number on its channel, in order of delivery.
    pub tag: u64,
    properties: BasicProperties,
    acker: Acker,
}

/// Whether a settlement reached the broker's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Settled {
    /// It was sent.
    Sent,
    /// It was not: the channel is gone, and the broker delivers the message again.
    Lost,
}

impl Delivery {
    /// Acknowledges it: the broker forgets the message.
    pub async fn ack(self) -> Settled {
        settled(self.acker.ack(BasicAckOptions { multiple: false })).await
    }

    /// Gives it back: to the queue, or to the queue's dead letters. Each rejection counts towards
    /// the delivery limit in every broker version, which `basic.nack` does not.
    pub async fn reject(self, requeue: bool) -> Settled {
        settled(self.acker.reject(BasicRejectOptions { requeue })).await
    }

    /// A copy to send on, as a retry or a dead letter.
    #[must_use]
    pub fn copy(&self) -> MessageCopy {
        MessageCopy::new(&self.properties, self.body.clone())
    }

    /// The message's own id, as it stands, whether or not it is one of an event.
    #[must_use]
    pub fn message_id(&self) -> Option<&str> {
        self.properties.message_id().as_ref().map(ShortString::as_str)
    }

    /// Why the broker itself moved the message here, if it did.
    #[must_use]
    pub fn death(&self) -> Option<Death> {
        Death::latest(&self.properties)
    }

    /// One header of the message, of whoever set it, if it is a text or a number.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<HeaderValue> {
        let value = self.properties.headers().as_ref()?.inner().get(name)?;
        as_text(value).map(HeaderValue::Text).or_else(|| as_integer(value).map(HeaderValue::Integer))
    }
}

/// Awaits a settlement, with a limit: where the connection dies with the frame queued, the library never answers.
async fn settled(sending: impl Future<Output = lapin::Result<bool>>) -> Settled {
    let Ok(sent) = tokio::time::timeout(CLOSE_LIMIT, sending).await else {
        tracing::debug!("a settlement was not sent in time");
        return Settled::Lost;
    };
    match sent {
        Ok(true) => Settled::Sent,
        Ok(false) => Settled::Lost,
        Err(error) => {
            tracing::debug!(%error, "settlement was not sent");
            Settled::Lost
        }
    }
}

impl From<lapin::message::Delivery> for Delivery {
    fn from(message: lapin::message::Delivery) -> Self {
        let properties = message.properties;
        let count = properties.headers().as_ref().and_then(|headers| headers.inner().get("x-delivery-count"));
        Self {
            envelope: Received::decode(&properties),
            body: message.data,
            redelivered: message.redelivered,
            delivery_count: count.and_then(as_integer),
            routing_key: message.routing_key.into(),
            exchange: message.exchange.into(),
            tag: message.delivery_tag,
            properties,
            acker: message.acker,
        }
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("event_id", &self.envelope.as_ref().map(|envelope| envelope.event_id))
            .field("routing_key", &self.routing_key)
            .field("tag", &self.tag)
            .field("redelivered", &self.redelivered)
            .field("delivery_count", &self.delivery_count)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}
