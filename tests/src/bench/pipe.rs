//! The broker's end of a measurement: an exchange and one quorum queue, and the bare confirmed publisher as its floor.
//!
//! Plain lapin, not the layer that the relay uses: a floor must not be made of what stands on it.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind, PublisherConfirm,
};
use uuid::Uuid;

use super::statistics::float;
use crate::services::{Services, Vhost};

/// The aggregate type of every event that is measured.
pub(crate) const AGGREGATE_TYPE: &str = "bench";
/// The event type that the queue is bound to.
pub(crate) const EVENT_TYPE: &str = "Happened";
/// Their routing key.
const KEY: &str = "bench.Happened";
/// How many messages the bare publisher has under way.
pub(crate) const WINDOW: usize = 500;

/// An exchange with a quorum queue in a virtual host of their own.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) vhost: Vhost,
    pub(crate) exchange: String,
    pub(crate) queue: String,
}

/// A message as a relay published it: where to, properties, headers and body.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    exchange: String,
    properties: BasicProperties,
    body: Vec<u8>,
}

impl Pipe {
    pub(crate) async fn lay(services: &Services) -> Result<Self> {
        let vhost = services.create_vhost("bench").await?;
        let (exchange, queue) = (vhost.scoped("semel.events"), vhost.scoped("bench"));
        let pipe = Self { vhost, exchange, queue };
        let (connection, channel) = pipe.channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        channel
            .exchange_declare(
                pipe.exchange.as_str().into(),
                ExchangeKind::Topic,
                durable,
                FieldTable::default(),
            )
            .await
            .context("declaring the exchange")?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel
            .queue_declare(pipe.queue.as_str().into(), durable, arguments)
            .await
            .context("declaring the queue")?;
        channel
            .queue_bind(
                pipe.queue.as_str().into(),
                pipe.exchange.as_str().into(),
                KEY.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .context("binding the queue")?;
        close(&connection).await;
        Ok(pipe)
    }

    /// Opens a connection with one channel.
    pub(crate) async fn channel(&self) -> Result<(Connection, Channel)> {
        let connection = Connection::connect(&self.vhost.url(), ConnectionProperties::default()).await;
        let connection = connection.context("connecting to the broker")?;
        let channel = connection.create_channel().await.context("opening a channel")?;
        Ok((connection, channel))
    }

    /// Opens a connection with one channel in confirm mode.
    pub(crate) async fn confirming_channel(&self) -> Result<(Connection, Channel)> {
        let (connection, channel) = self.channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.context("asking for confirms")?;
        Ok((connection, channel))
    }

    /// Takes one message out of the queue, to publish others like it.
    pub(crate) async fn template(&self) -> Result<Template> {
        let (connection, channel) = self.channel().await?;
        let got = channel.basic_get(self.queue.as_str().into(), BasicGetOptions { no_ack: true }).await;
        let message = got.context("getting a message")?.context("the queue is empty")?;
        close(&connection).await;
        let (properties, body) = (message.delivery.properties.clone(), message.delivery.data.clone());
        Ok(Template { exchange: self.exchange.clone(), properties, body })
    }

    /// Publishes so many messages like the template, at most [`WINDOW`] of them unconfirmed at a time; returns messages
    /// per second from the first message to the last confirm.
    pub(crate) async fn floor(&self, template: &Template, messages: usize) -> Result<f64> {
        let template = template.at(self);
        let (connection, channel) = self.confirming_channel().await?;
        let began = Instant::now();
        let mut unconfirmed = VecDeque::with_capacity(WINDOW);
        for _ in 0..messages {
            if unconfirmed.len() == WINDOW
                && let Some(oldest) = unconfirmed.pop_front()
            {
                confirmed(oldest).await?;
            }
            unconfirmed.push_back(template.send(&channel, Uuid::new_v4()).await?);
        }
        for oldest in unconfirmed {
            confirmed(oldest).await?;
        }
        let rate = float(messages) / began.elapsed().as_secs_f64();
        close(&connection).await;
        Ok(rate)
    }
}

impl Template {
    /// The same for another pipe.
    pub(crate) fn at(&self, pipe: &Pipe) -> Self {
        Self { exchange: pipe.exchange.clone(), ..self.clone() }
    }

    /// The same of another event, with the headers that an audit reads.
    pub(crate) fn of(&self, aggregate: &str, version: i64, payload: &str) -> Self {
        let mut headers = self.properties.headers().clone().unwrap_or_default();
        headers.insert("x-semel-aggregate-id".into(), AMQPValue::LongString(aggregate.into()));
        headers.insert("x-semel-aggregate-version".into(), AMQPValue::LongLongInt(version));
        Self {
            properties: self.properties.clone().with_headers(headers),
            body: payload.into(),
            ..self.clone()
        }
    }

    /// Sends one message like this, with an id of its own.
    pub(crate) async fn send(&self, channel: &Channel, id: Uuid) -> Result<PublisherConfirm> {
        let properties = self.properties.clone().with_message_id(id.to_string().as_str().into());
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        channel
            .basic_publish(self.exchange.as_str().into(), KEY.into(), options, &self.body, properties)
            .await
            .context("publishing")
    }
}

/// Awaits a confirm.
pub(crate) async fn confirmed(confirm: PublisherConfirm) -> Result<()> {
    match confirm.await.context("waiting for a confirm")? {
        Confirmation::Ack(returned) => {
            ensure!(returned.is_none(), "a message was returned as unroutable");
            Ok(())
        }
        other => bail!("a message was not confirmed: {other:?}"),
    }
}

/// Closes a connection; whether that works is no matter to a measurement that is over.
pub(crate) async fn close(connection: &Connection) {
    let _ = connection.close(200, "done".into()).await;
}
