//! Whether an exchange takes messages, found out without sending one.
//!
//! The broker checks a message in this order: the exchange is there, the user may write to it, the user may use this
//! routing key, and then the message's own properties. So a message is sent whose properties it refuses, by two of its
//! documented rules: the user id is not the connection's, and the expiration is no number. Whatever it says of that one
//! costs the channel, and no queue ever sees it.

use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};

use super::Publisher;
use crate::connection::ANSWER_LIMIT;
use crate::envelope::short;
use crate::error::{ACCESS_REFUSED, Error, NOT_FOUND, PRECONDITION_FAILED, within};

/// How an exchange answers to messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acceptance {
    /// It takes them.
    Takes,
    /// There is no such exchange.
    Missing,
    /// This connection's user may not write to it.
    Refused {
        /// The broker's words.
        reason: String,
    },
}

impl Publisher {
    /// Asks whether an exchange takes messages of this connection's user. Sends nothing that a queue could get.
    ///
    /// # Errors
    ///
    /// [`Error::Blocked`] if an alarm keeps the broker from reading the question; the publisher is then to be kept as after
    /// a wave. Otherwise if the broker does not answer.
    pub async fn exchange_takes(&self, exchange: &str) -> Result<Acceptance, Error> {
        let name = short("exchange name", exchange)?;
        let channel = self.connection.channel().await?;
        let select = channel.confirm_select(ConfirmSelectOptions::default());
        within(ANSWER_LIMIT, "put the channel into confirm mode", select).await?;
        let refused = BasicProperties::default().with_user_id("".into()).with_expiration("never".into());
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let asking =
            async { channel.basic_publish(name, "semel.probe".into(), options, &[], refused).await?.await };
        let attempted = format!("ask whether exchange `{exchange}` takes messages");
        match within(ANSWER_LIMIT, &attempted, asking).await {
            Err(Error::TimedOut { after, .. }) if self.is_blocked() => Err(Error::Blocked { after }),
            Err(Error::Failed { source, .. }) if self.connection.is_open() => match source.reply_code() {
                Some(PRECONDITION_FAILED) => Ok(Acceptance::Takes),
                Some(NOT_FOUND) => Ok(Acceptance::Missing),
                Some(ACCESS_REFUSED) if source.is_about_topic() => Ok(Acceptance::Takes),
                Some(ACCESS_REFUSED) => Ok(Acceptance::Refused { reason: source.to_string() }),
                _ => Err(Error::Failed { attempted, source }),
            },
            Err(error) => Err(error),
            Ok(_) => Ok(Acceptance::Takes),
        }
    }
}
