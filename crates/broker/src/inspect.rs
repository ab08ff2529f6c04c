//! Small looks and interventions, for tests and for operators' commands.
//!
//! Each uses a channel of its own, so that a missing queue costs nothing else.

use lapin::options::{
    BasicGetOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions,
};
use lapin::types::FieldTable;

use crate::connection::{ANSWER_LIMIT, Connection};
use crate::envelope::short;
use crate::error::{Error, within};
use crate::subscription::Delivery;
use crate::topology::{Existence, bind, close, declare_queue, quorum};

/// How a plain queue stores its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// On one node.
    Classic,
    /// Replicated.
    Quorum,
}

/// Declares a durable queue without dead letters and binds it to routing keys of an exchange.
///
/// # Errors
///
/// As [`crate::topology::declare`].
pub async fn declare_plain_queue(
    connection: &Connection,
    queue: &str,
    kind: QueueKind,
    exchange: &str,
    keys: &[&str],
) -> Result<(), Error> {
    let channel = connection.channel().await?;
    let arguments = match kind {
        QueueKind::Classic => FieldTable::default(),
        QueueKind::Quorum => quorum([]),
    };
    declare_queue(&channel, queue, arguments, Existence::Made).await?;
    for key in keys {
        bind(&channel, exchange, queue, key).await?;
    }
    close(&channel).await
}

/// How many messages are ready in a queue; those being consumed are not counted.
///
/// # Errors
///
/// If the queue does not exist (reply code 404) or the broker does not answer.
pub async fn message_count(connection: &Connection, queue: &str) -> Result<u32, Error> {
    Ok(look_at(connection, queue).await?.ready)
}

/// What a queue holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Messages that nobody holds.
    pub ready: u32,
    /// Who consumes it.
    pub consumers: u32,
}

/// Looks at a queue, and takes nothing.
///
/// # Errors
///
/// If the queue does not exist (reply code 404) or the broker does not answer.
pub async fn look_at(connection: &Connection, queue: &str) -> Result<Depth, Error> {
    let channel = connection.channel().await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let look = channel.queue_declare(short("queue name", queue)?, options, FieldTable::default());
    let found = within(ANSWER_LIMIT, &format!("look at queue `{queue}`"), look).await?;
    close(&channel).await?;
    Ok(Depth { ready: found.message_count(), consumers: found.consumer_count() })
}

/// Takes up to `limit` messages out of a queue, in order; they are gone from it.
///
/// # Errors
///
/// If the queue does not exist (reply code 404) or the broker does not answer.
pub async fn take(connection: &Connection, queue: &str, limit: usize) -> Result<Vec<Delivery>, Error> {
    let channel = connection.channel().await?;
    let name = short("queue name", queue)?;
    let mut taken = Vec::new();
    while taken.len() < limit {
        let get = channel.basic_get(name.clone(), BasicGetOptions { no_ack: true });
        match within(ANSWER_LIMIT, &format!("get a message from queue `{queue}`"), get).await? {
            Some(message) => taken.push(message.delivery.into()),
            None => break,
        }
    }
    close(&channel).await?;
    Ok(taken)
}

/// Removes all ready messages of a queue, and says how many there were.
///
/// # Errors
///
/// If the queue does not exist (reply code 404) or the broker does not answer.
pub async fn purge(connection: &Connection, queue: &str) -> Result<u32, Error> {
    let channel = connection.channel().await?;
    let purge = channel.queue_purge(short("queue name", queue)?, QueuePurgeOptions::default());
    let count = within(ANSWER_LIMIT, &format!("purge queue `{queue}`"), purge).await?;
    close(&channel).await?;
    Ok(count)
}

/// Deletes a queue with its messages; one that does not exist is fine.
///
/// # Errors
///
/// If the broker does not answer or refuses.
pub async fn delete_queue(connection: &Connection, queue: &str) -> Result<(), Error> {
    let channel = connection.channel().await?;
    let delete = channel.queue_delete(short("queue name", queue)?, QueueDeleteOptions::default());
    within(ANSWER_LIMIT, &format!("delete queue `{queue}`"), delete).await?;
    close(&channel).await
}

/// Deletes an exchange; one that does not exist is fine.
///
/// # Errors
///
/// If the broker does not answer or refuses.
pub async fn delete_exchange(connection: &Connection, exchange: &str) -> Result<(), Error> {
    let channel = connection.channel().await?;
    let delete = channel.exchange_delete(short("exchange name", exchange)?, ExchangeDeleteOptions::default());
    within(ANSWER_LIMIT, &format!("delete exchange `{exchange}`"), delete).await?;
    close(&channel).await
}
