//! Retention: deletes what is older than it has to be kept.
//!
//! Promise: what is past its retention goes, in bounded pieces, and nothing else: no event that is neither published nor
//! discarded, no evidence of a payment that is not settled. Rows that somebody has locked are left for the next round, so
//! that nobody waits.
//!
//! How: each pass looks at the next blocks of one table (see [`walk`]), and begins anew behind the last. A table that this
//! database has not, such as `processed_events` beside an API, is passed over.
//!
//! In a crash the walk begins anew; it holds nothing but where it is.

use std::time::Duration;

use ::metrics::counter;
use semel_core::database::Lent;
use semel_core::lifecycle::{Pass, Work};
use semel_core::walk::{self, Blocks};
use semel_core::{inbox, operators, outbox};
use semel_payments::payments::retention::reap_evidence;
use sqlx::{PgConnection, PgPool};

use crate::metrics;

/// How many blocks one pass looks at: 8 MiB.
const BLOCKS: i64 = 1024;

/// What is walked for rows past their retention.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kept {
    /// Events, once they are published or discarded.
    PublishedEvents,
    /// What consumers have taken effect of.
    ProcessedEvents,
    /// The last versions that consumers have taken effect of.
    AggregateVersions,
    /// Answers of the provider, once their payment is settled.
    ProviderAnswers,
    /// What people did by command.
    OperatorActions,
}

impl Kept {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::PublishedEvents,
        Self::ProcessedEvents,
        Self::AggregateVersions,
        Self::ProviderAnswers,
        Self::OperatorActions,
    ];

    const fn table(self) -> &'static str {
        match self {
            Self::PublishedEvents => "outbox",
            Self::ProcessedEvents => "processed_events",
            Self::AggregateVersions => "aggregate_versions",
            Self::ProviderAnswers => "provider_answers",
            Self::OperatorActions => "operator_actions",
        }
    }

    /// The name in logs, and the label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::PublishedEvents => "published_events",
            Self::ProcessedEvents => "processed_events",
            Self::AggregateVersions => "aggregate_versions",
            Self::ProviderAnswers => "provider_answers",
            Self::OperatorActions => "operator_actions",
        }
    }

    async fn reap(
        self,
        connection: &mut PgConnection,
        blocks: Blocks,
        age: Duration,
        limit: i64,
    ) -> Result<u64, sqlx::Error> {
        match self {
            Self::PublishedEvents => outbox::retention::reap_published(connection, blocks, age, limit).await,
            Self::ProcessedEvents => inbox::reap(connection, blocks, age, limit).await,
            Self::AggregateVersions => inbox::order::reap(connection, blocks, age, limit).await,
            Self::ProviderAnswers => reap_evidence(connection, blocks, age, limit).await,
            Self::OperatorActions => operators::reap(connection, blocks, age, limit).await,
        }
    }
}

/// Walks one table.
#[derive(Debug)]
pub struct Retention {
    pool: PgPool,
    kept: Kept,
    age: Duration,
    batch: u32,
    blocks: i64,
    next: i64,
}

impl Retention {
    /// Deletes what is older than `age`, at most `batch` rows a pass.
    #[must_use]
    pub fn new(pool: PgPool, kept: Kept, age: Duration, batch: u32) -> Self {
        Self { pool, kept, age, batch, blocks: BLOCKS, next: 0 }
    }

    /// Replaces how many blocks one pass looks at.
    #[must_use]
    pub fn with_blocks(mut self, blocks: u32) -> Self {
        self.blocks = i64::from(blocks).max(1);
        self
    }
}

impl Work for Retention {
    type Error = sqlx::Error;

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        let mut connection = Lent::from(&self.pool).await?;
        let table = self.kept.table();
        let size = connection.call(async |connection| walk::blocks_of(connection, table).await).await?;
        let Some(size) = size else { return Ok(Pass::Idle) };
        if self.next >= size {
            self.next = 0;
        }
        let blocks = Blocks { first: self.next, end: self.next + self.blocks };
        let (kept, age, batch) = (self.kept, self.age, i64::from(self.batch));
        let reaped =
            connection.call(async |connection| kept.reap(connection, blocks, age, batch).await).await?;
        counter!(metrics::REAPED, "kind" => self.kept.label()).increment(reaped);
        if reaped == u64::from(self.batch) {
            // These blocks may hold more.
            return Ok(Pass::Full);
        }
        self.next = blocks.end;
        Ok(match reaped {
            0 => Pass::Idle,
            _ if self.next < size => Pass::Full,
            _ => Pass::Worked,
        })
    }
}

/// Walks several tables, in turn.
#[derive(Debug)]
pub struct Walks {
    walks: Vec<(Retention, Pass)>,
}

impl Walks {
    /// Walks these.
    #[must_use]
    pub fn new(walks: Vec<Retention>) -> Self {
        Self { walks: walks.into_iter().map(|walk| (walk, Pass::Idle)).collect() }
    }
}

impl Work for Walks {
    type Error = sqlx::Error;

    async fn run_once(&mut self) -> Result<Pass, sqlx::Error> {
        // A table with more to delete goes on at once, without the others being read again for nothing.
        let some_have_more = self.walks.iter().any(|(_, last)| *last == Pass::Full);
        let (mut found, mut failed) = (Pass::Idle, None);
        for (walk, last) in self.walks.iter_mut().filter(|(_, last)| !some_have_more || *last == Pass::Full) {
            // One table that cannot be walked keeps no other from it.
            *last = walk.run_once().await.unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Pass::Idle
            });
            found = match (found, *last) {
                (Pass::Full, _) | (_, Pass::Full) => Pass::Full,
                (Pass::Worked, _) | (_, Pass::Worked) => Pass::Worked,
                (Pass::Idle, Pass::Idle) => Pass::Idle,
            };
        }
        failed.map_or(Ok(found), Err)
    }
}
