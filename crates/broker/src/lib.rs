//! RabbitMQ for Semel: the only crate that knows the AMQP client library.
//!
//! It promises:
//!
//! * [`Publisher`]: a message is called confirmed only if the broker confirmed that very message
//!   and did not return it. What could not be found out is called unknown, never "not sent".
//! * [`Subscription`]: the stream of deliveries never ends cleanly; a server-sent cancel, a lost
//!   connection and a deleted queue are all errors, and an acknowledgement that was not sent says so.
//! * Nothing waits without a limit: connecting, declaring, publishing and closing each have a deadline.
//! * No password and no payload is in an error, in `Debug` output or in a log. (The AMQP client
//!   library logs every returned message whole; its thread is therefore kept from logging.)
//!
//! It does not reconnect: a connection that has failed is dropped and opened anew by its owner's
//! loop, which knows how long to wait ([`Error::disposition`] says whether waiting makes sense).
//! It counts nothing; its callers do.
//!
//! Publishing and consuming use separate connections: when the broker raises an alarm it stops
//! reading from connections that publish, and acknowledgements on them would stop too
//! (RabbitMQ documentation, "Alarms").

mod connection;
mod envelope;
mod error;
pub mod inspect;
mod message;
mod publisher;
mod socket;
mod stored;
mod subscription;
pub mod topology;
mod url;

pub use connection::Connection;
pub use envelope::{DecodeError, Envelope, NameTooLong, Received};
pub use error::{Cause, Disposition, Error};
pub use message::{Death, HeaderValue, Message, MessageCopy, Outgoing};
pub use publisher::{Acceptance, Outcome, Patience, Publisher, Wave};
pub use stored::NotStored;
pub use subscription::{Delivery, Settled, Subscription};
pub use topology::{Consumers, Topology};
pub use url::{BrokerUrl, BrokerUrlError, NoCertificate};
