//! What can fail between us and the broker, and whether trying again can help.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use lapin::ErrorKind;
use lapin::protocol::AMQPErrorKind;

/// What was attempted with the broker and failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No connection came about: network, TLS, a broker that is starting, a connection limit.
    #[error("cannot connect to RabbitMQ at {target}")]
    Connect {
        /// `user@host:port/vhost`.
        target: String,
        /// What the client library reported.
        source: Cause,
    },
    /// The broker does not accept the user or the password.
    #[error("RabbitMQ at {target} refuses the login: check the user and the password")]
    Login {
        /// `user@host:port/vhost`.
        target: String,
        /// What the client library reported.
        source: Cause,
    },
    /// The virtual host does not exist, or the user may not enter it.
    #[error(
        "RabbitMQ at {target} refuses the virtual host: check that it exists and that the user may enter it"
    )]
    VirtualHost {
        /// `user@host:port/vhost`.
        target: String,
        /// What the client library reported.
        source: Cause,
    },
    /// No connection came about at any of several addresses.
    #[error("no address of RabbitMQ can be used: {}", told(.refused))]
    NoAddress {
        /// What became of each.
        refused: Vec<Error>,
    },
    /// An operation on an open connection failed.
    #[error("cannot {attempted}")]
    Failed {
        /// What was attempted, as a verb phrase with names.
        attempted: String,
        /// What the client library reported.
        source: Cause,
    },
    /// The broker did not answer in time; whether it acted is unknown.
    #[error("cannot {attempted}: no answer within {after:?}")]
    TimedOut {
        /// What was attempted, as a verb phrase with names.
        attempted: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// An alarm of the broker kept a wave from being confirmed in time.
    #[error("the broker was blocked by an alarm and did not confirm within {after:?}")]
    Blocked {
        /// How long it was waited for.
        after: Duration,
    },
    /// The broker canceled the consumer: its queue was deleted or lost its leader.
    #[error("RabbitMQ canceled the consumer of queue `{queue}`: the queue was deleted or has moved")]
    ConsumerCanceled {
        /// The queue.
        queue: String,
    },
    /// An exchange or queue exists with other settings than the ones declared.
    #[error(
        "{object} exists with other settings than configured: {difference}; RabbitMQ cannot change them in \
         place, so either configure the settings it has, or drain and delete it and start again"
    )]
    Mismatch {
        /// "queue `name`" or "exchange `name`".
        object: String,
        /// The broker's words for what differs.
        difference: String,
    },
    /// A name is too long for the protocol.
    #[error("cannot use a name that RabbitMQ cannot hold")]
    Name(#[from] crate::NameTooLong),
    /// A publisher was used after its connection was lost, after a wave had broken it, or after a
    /// wave was dropped half-way. Nothing was sent.
    #[error("cannot publish on a broken publisher: drop it and open another")]
    PublisherBroken,
    /// The broker returned a message that is not in the wave, so none of its confirms can be trusted.
    #[error("the broker returned a message that is not in the wave")]
    StrayReturn,
}

/// Whether it makes sense to attempt something again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Drop the connection, wait, open another and try again.
    Retry,
    /// A person must change the configuration first.
    Fatal,
}

impl Error {
    /// Says whether to retry or to give up.
    #[must_use]
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::NoAddress { refused }
                if refused.iter().all(|error| error.disposition() == Disposition::Fatal) =>
            {
                Disposition::Fatal
            }
            // Settings that the broker cannot change in place do not change by waiting.
            Self::Login { .. } | Self::VirtualHost { .. } | Self::Mismatch { .. } => Disposition::Fatal,
            _ => Disposition::Retry,
        }
    }

    /// The AMQP reply code that the broker gave, such as 404 (no such exchange or queue) or 403.
    #[must_use]
    pub fn reply_code(&self) -> Option<u16> {
        match self {
            Self::Connect { source, .. }
            | Self::Login { source, .. }
            | Self::VirtualHost { source, .. }
            | Self::Failed { source, .. } => source.reply_code(),
            Self::Mismatch { .. } => Some(PRECONDITION_FAILED),
            _ => None,
        }
    }

    /// Judges a failed login. With its `authentication_failure_close` capability the client is
    /// told the reason by a `connection.close`. 530 is also what an exceeded connection limit
    /// gives, and that passes.
    pub(crate) fn connecting(target: &str, error: lapin::Error) -> Self {
        let (target, source) = (target.to_owned(), Cause::from(error));
        match source.reply_code() {
            Some(ACCESS_REFUSED) => Self::Login { target, source },
            Some(NOT_ALLOWED) if !source.to_string().contains("limit") => {
                Self::VirtualHost { target, source }
            }
            _ => Self::Connect { target, source },
        }
    }

    /// What is told when each address was refused: of a single one, its own error.
    pub(crate) fn no_address(mut refused: Vec<Self>) -> Self {
        if refused.len() == 1 { refused.remove(0) } else { Self::NoAddress { refused } }
    }

    pub(crate) fn failed(attempted: impl Into<String>, error: lapin::Error) -> Self {
        Self::Failed { attempted: attempted.into(), source: error.into() }
    }
}

pub(crate) const ACCESS_REFUSED: u16 = 403;
pub(crate) const NOT_FOUND: u16 = 404;
pub(crate) const PRECONDITION_FAILED: u16 = 406;
pub(crate) const NOT_ALLOWED: u16 = 530;

/// What the AMQP client library reported, as text.
pub struct Cause(Box<lapin::Error>);

impl Cause {
    /// The AMQP reply code, if the broker gave one.
    #[must_use]
    pub fn reply_code(&self) -> Option<u16> {
        match self.0.kind() {
            ErrorKind::ProtocolError(error) => Some(error.get_id()),
            _ => None,
        }
    }

    /// Whether the broker closed a channel because of a message that was published on it, such as one that is too large,
    /// and not because of the exchange: one that is missing, or that the user may not write to.
    pub(crate) fn is_about_message(&self) -> bool {
        match self.0.kind() {
            ErrorKind::ProtocolError(error) if matches!(error.kind(), AMQPErrorKind::Soft(_)) => {
                match error.get_id() {
                    NOT_FOUND => false,
                    ACCESS_REFUSED => self.is_about_topic(),
                    _ => true,
                }
            }
            _ => false,
        }
    }

    /// Whether the broker refused the use of a routing key, and not that of the exchange.
    pub(crate) fn is_about_topic(&self) -> bool {
        // "access to topic 'k' in exchange …", and since RabbitMQ 4 "write access to topic …"; of the exchange it is
        // "access to exchange 'e' …". No name stands before these words.
        self.reply_text().is_some_and(|words| {
            let words = words.strip_prefix("ACCESS_REFUSED - ").unwrap_or(&words);
            words.strip_prefix("write ").unwrap_or(words).starts_with("access to topic ")
        })
    }

    /// The broker's words alone, if it gave any.
    pub(crate) fn reply_text(&self) -> Option<String> {
        match self.0.kind() {
            ErrorKind::ProtocolError(error) => Some(error.get_message().to_string()),
            _ => None,
        }
    }
}

impl From<lapin::Error> for Cause {
    fn from(error: lapin::Error) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cause({})", self.0)
    }
}

// The client library's text already contains its own source.
impl std::error::Error for Cause {}

/// Tells errors with their causes, in one line.
fn told(errors: &[Error]) -> String {
    let told = errors.iter().map(|error| match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    });
    told.collect::<Vec<_>>().join("; ")
}

/// Runs one exchange with the broker under a deadline.
pub(crate) async fn within<T>(
    limit: Duration,
    attempted: &str,
    operation: impl Future<Output = lapin::Result<T>>,
) -> Result<T, Error> {
    match tokio::time::timeout(limit, operation).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Error::failed(attempted, error)),
        Err(_) => Err(Error::TimedOut { attempted: attempted.to_owned(), after: limit }),
    }
}
