//! Consumers of events whose effects happen once, however often a message is delivered.
//!
//! It promises:
//!
//! * **No effect twice.** The event's row in `processed_events` and the handler's writes commit together, in the
//!   consumer's own database, and the row is written first: a concurrent twin waits for it and then writes nothing.
//! * **No effect lost.** A message is acknowledged after the commit, and never when its outcome is unknown: then the
//!   channel is closed, and redelivery and deduplication decide.
//! * **No message lost.** What cannot be handled now goes to a retry queue or is parked in the database, and what never can to `<queue>.dead`, with the
//!   reason in its headers, by a publish that the broker has confirmed before the original is acknowledged.
//!
//! A [`Handler`] gets a transaction and a typed [`Event`]. It may append events of its own to the outbox in that
//! transaction (`semel_core::outbox::append`). It cannot acknowledge, and it cannot forget to deduplicate. A
//! [`Consumer`] does the rest: topology, connections, retries, dead letters, shutdown.
//!
//! The database needs the migration set `semel_core::schema::INBOX`, and `ENGINE` where a handler uses the outbox.
//!
//! # Example
//!
//! `examples/stock.rs`:
//!
//! ```no_run
#![doc = include_str!("../examples/stock.rs")]
//! ```
//!
//! [`dead`] is for people who look at dead letters and put them back; with the feature `command` a daemon gets commands for
//! that. An event's trace goes on in the handler's log lines, which stand in a span with `trace_id`, and in
//! [`Event::trace_context`]. See `docs/consumers.md`.
//!
//! [`testing`] delivers events to a handler twice, out of order and with a crash in between, without a broker.
//!
//! # What becomes of a message
//!
//! | what happens | what is done | counted as |
//! |---|---|---|
//! | the handler succeeds | commit, then acknowledge | `effect` |
//! | the event took effect before | acknowledge | `duplicate` |
//! | the handler fails [transiently](HandlerError::Transient), panics or exceeds its time | roll back, copy to a retry queue, acknowledge; it comes back after the delay | `retried` |
//! | the same, at the last [attempt](ConsumerBuilder::attempts) | roll back, dead letter, acknowledge | `dead` |
//! | the process ends while it is handled | the broker delivers it again, and at the [delivery limit](ConsumerBuilder::delivery_limit) moves it to the dead letters | |
//! | the handler fails [permanently](HandlerError::Permanent) | roll back, dead letter, acknowledge | `dead` |
//! | no event id, or a payload of another shape | dead letter, acknowledge | `invalid` |
//! | the database answers and cannot work: it is read-only or full, or a table or a permission is missing | roll back, keep the message, be not ready, try again until it works | |
//! | the database is away or silent, or the outcome of the commit is unknown | close the channel, wait until the database takes a write, subscribe again and fetch what comes again one by one | |
//! | the broker or the way to it fails, the queue is deleted | the same, once it is back | |
//! | the client library cannot read the message, such as one whose id is no UTF-8 | it ends its connection each time, until the delivery limit moves it to the dead letters | |
//!
//! So an outage of the database costs a message one delivery at most, whatever its length. Only where the database takes
//! writes and a handler's own table or permission stays missing, it costs one each time that the broker ends the
//! subscription because nothing is acknowledged, after 30 minutes by default.
//!
//! A message waits for its retry in `<queue>.retry.<delay>`, whose time to live gives it back to its own queue and to no
//! other consumer's. It comes back behind what has arrived meanwhile.
//!
//! A dead letter that would not fit into the protocol with these headers is left to the queue's own dead-lettering, which
//! tells only `x-death`; a retry that would not fit goes back to its queue at once.
//!
//! No call to the database waits without a limit: that is the handler's time budget, and after it
//! [`answer_limit`](ConsumerBuilder::answer_limit). Of a database's error only the SQLSTATE and the constraint are told, in
//! the log as in a dead letter's headers, because its text may quote the event.
//!
//! A serialisation failure or a deadlock is repeated once at once. A crash at any point leaves the message
//! unacknowledged; at worst, a copy that was confirmed but whose original was not acknowledged is there beside it: a dead
//! letter twice, or a retry that turns out to be a duplicate.
//!
//! With [`batch`](ConsumerBuilder::batch) those that have arrived share a transaction. When it fails, all of it is rolled back
//! and each is handled by itself, one after another.
//!
//! Messages are handled side by side and in no order, unless [`Ordering::Aggregate`] is asked for:
//!
//! # In the order of an aggregate
//!
//! The broker hands the queue to one process at a time (a single active consumer). There the events of one aggregate are handled one
//! after another and different aggregates side by side. An event that fails is *parked* in `parked_events` and acknowledged, and so
//! are those of its aggregate that come after it; no other aggregate waits. It is tried again from there after the
//! [delays](ConsumerBuilder::retry_delays), by any process of the consumer, and after as many
//! [attempts](ConsumerBuilder::attempts) as elsewhere, or at once if its handler refuses it, it goes to the dead letters and its
//! followers go on. So an aggregate stands still for as long as its attempts take, and no longer.
//!
//! | what happens in this order | what is done | counted as |
//! |---|---|---|
//! | the handler fails transiently, panics or exceeds its time | roll back, park, acknowledge | `parked`, later `retried`, `effect` or `dead` |
//! | an earlier event of the aggregate is parked | park, acknowledge | `parked` |
//! | the event was delivered before and has not taken effect: it may be one that ends the process | park, acknowledge; there the attempt is counted before the handler runs, and one whose last attempt did not end is tried alone | `parked` |
//! | a later [version](Event::aggregate_version) of the aggregate took effect before | dead letter `stale`, acknowledge | `dead` |
//! | [as many](ConsumerBuilder::parked_limit) are parked as may be, or the database answers that it cannot park | keep the message, be not ready | |
//! | the message could not be made again from where it would be parked: its headers are nested too deep, or take more than a frame | dead letter, acknowledge | `invalid` |
//!
//! An old process that does not know yet that the queue was handed on may still be at work: each transaction holds its aggregate's
//! advisory lock, and looks at what its last holder has committed. Gaps in the versions are no fault, since a queue need not be bound
//! to all events. A dead letter that is put back when its followers took effect is `stale`, unless the
//! [guard](ConsumerBuilder::version_guard) is off. An event that tells no aggregate is handled as without an order; one that ends the
//! process is counted by the broker then, and with it what was sent ahead, for nothing is fetched one by one here. There are no
//! batches, and the pool needs four connections more. The broker's own order holds as long as messages are given back to it in
//! theirs; where it does not, the guard refuses what comes late rather than to take effect of it in the wrong order.
//!
//! It does not purge `processed_events` and `aggregate_versions`: keep their rows longer than the longest time after which a message
//! may be delivered again. `parked_events` is bounded, and empties itself while such a consumer runs, but for an event that there
//! can be no dead letter of: that one stays, says so, and waits for a person. Without an order the consumer does not begin before
//! the table is empty of its events.

mod aggregate;
mod attempts;
mod builder;
#[cfg(feature = "command")]
pub mod command;
mod consumer;
mod copies;
pub mod dead;
mod error;
mod event;
pub mod failpoints;
mod handler;
mod lanes;
mod message;
pub mod metrics;
mod parking;
mod retrier;
mod session;
pub mod testing;
mod told;
mod transaction;

pub use aggregate::{Ordering, VersionGuard};
pub use builder::{ConsumerBuilder, InvalidConsumer, Readiness, TopologyMode};
pub use consumer::Consumer;
pub use copies::headers;
pub use error::Error;
pub use event::Event;
pub use handler::{Handler, HandlerError};
/// Where the broker is.
pub use semel_broker::{BrokerUrl, BrokerUrlError, NoCertificate};
