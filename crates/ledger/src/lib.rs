//! The ledger: every placed order and every payment is booked exactly once, however often its event is delivered.
//!
//! A booking, the record that its event was processed, and the event `LedgerPosted` that tells of it commit together, in
//! the ledger's own database. Every transaction's entries sum to zero per currency, which the database enforces. A crash
//! at any point leaves either all of that or none, and the message unacknowledged.
//!
//! What cannot be booked (an amount that is not positive, a currency that is none, an event of another type) goes to the
//! dead letters of its queue. It publishes nothing itself: a relay on the ledger's database does.

mod balances;
mod booking;
mod grants;
mod options;
mod schema;
mod store;

use std::error::Error;

use semel_consumer_kit::dead::DeadLetters;
use semel_consumer_kit::{Consumer, ConsumerBuilder, Readiness};
use semel_core::daemon::{Daemon, print_metrics};
use semel_core::grants::{Grant, WRITE_EVENTS, grant};
use semel_core::{admin, database, telemetry};
use sqlx::PgPool;

pub use booking::{
    AGGREGATE_TYPE, Book, CONSUMER, LEDGER_POSTED, ORDER_PLACED, OrderPlaced, PAYMENT_CREATED,
    PAYMENT_REFUNDED, PaymentCreated, PaymentRefunded, ROUTING_KEYS,
};
pub use options::{Config, Options, Ordering, TopologyMode};
pub use schema::{LEDGER, SETS};
pub use store::{Balance, Page, balances};

use options::Command;

type Failure = Box<dyn Error + Send + Sync>;

/// Runs the ledger until it is asked to stop.
///
/// # Errors
///
/// When the configuration cannot be used, or database or broker refuse for good.
pub async fn run(options: Options) -> Result<(), Failure> {
    telemetry::start_logs(&options.process.logs);
    match &options.command {
        None => {}
        Some(Command::Migrate) => {
            return Ok(semel_core::schema::migrate(&options.database.url()?, &SETS).await?);
        }
        Some(Command::Grant { role, operator }) => {
            let rights: &[&[Grant]] =
                if *operator { &[&grants::OPERATOR] } else { &[&grants::LEDGER, &WRITE_EVENTS] };
            return Ok(grant(&options.database.url()?, role, &SETS, rights).await?);
        }
        Some(Command::Metrics) => {
            return Ok(print_metrics(&[&semel_consumer_kit::metrics::METRICS, &semel_core::metrics::POOL])?);
        }
        Some(Command::Parked(command)) => {
            let pool = database::pool(&options.database.url()?, "semel-ledger parked", 1);
            return command.run(CONSUMER, &pool).await;
        }
        Some(Command::Dead(command)) => {
            let pool = database::pool(&options.database.url()?, "semel-ledger dead", 1);
            return command
                .run(DeadLetters::new(CONSUMER, pool, options.broker()?, options.queue.as_str()))
                .await;
        }
    }
    let config = options.config()?;
    // Beside those of the messages one for the look at the schema, and some for what is parked.
    let beside = if config.ordering == Ordering::Aggregate { 5 } else { 1 };
    let pool = database::pool(&config.database, "semel-ledger", u32::from(config.concurrency) + beside);
    if options.process.check {
        consumer(&config, &pool).build(Book::new(config.namespace))?;
        return Ok(());
    }
    let daemon = Daemon::start("semel-ledger", env!("CARGO_PKG_VERSION"), &options.process).await?;
    semel_consumer_kit::metrics::describe(CONSUMER);
    daemon.report_pool(&pool);
    let to_ask = match options.balances_listen {
        None => None,
        Some(address) => {
            let listener = admin::bind(address, "--balances-listen").await?;
            let pool = database::pool(&config.database, "semel-ledger balances", balances::CONNECTIONS);
            let asked = pool.clone();
            admin::serve_answers(listener, daemon.life.clone(), move |question| {
                balances::answer(asked.clone(), question)
            });
            tracing::info!(%address, "tells balances");
            Some(pool)
        }
    };
    let result =
        match database::wait_until_usable(&config.database, "semel-ledger", &SETS, &daemon.life).await {
            Ok(()) => consume(&config, &pool, &daemon).await,
            Err(database::Unusable::Stopped) => Ok(()),
            Err(error) => Err(error.into()),
        };
    let pools: Vec<_> = std::iter::once(&pool).chain(&to_ask).collect();
    daemon.finish(&pools).await;
    result
}

fn consumer(config: &Config, pool: &PgPool) -> ConsumerBuilder {
    let consumer = Consumer::builder(CONSUMER, pool.clone(), config.broker.clone(), config.queue.as_str());
    ROUTING_KEYS
        .iter()
        .fold(consumer, |consumer, key| consumer.bind(*key))
        .exchange(config.exchange.as_str())
        .topology(config.topology.into())
        .prefetch(config.prefetch)
        .concurrency(config.concurrency)
        .batch(config.batch)
        .ordering(config.ordering.into())
}

/// Consumes until the stop; what is in work then is waited for by `Daemon::finish`, within the grace.
async fn consume(config: &Config, pool: &PgPool, daemon: &Daemon) -> Result<(), Failure> {
    let health = daemon.health.clone();
    let consumer = consumer(config, pool)
        .heartbeat(daemon.health.watch("consumer"))
        .on_readiness(move |readiness| match readiness {
            Readiness::Ready => health.ready(),
            Readiness::NotReady(reason) => health.not_ready(reason),
        })
        .build(Book::new(config.namespace.clone()))?;
    let life = daemon.life.clone();
    let consuming = daemon.life.spawn(async move { consumer.run(&life).await });
    tokio::select! {
        ended = consuming => Ok(ended??),
        () = daemon.life.stopping() => Ok(()),
    }
}
