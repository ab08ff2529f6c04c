//! Walking a table by its blocks, for what is deleted by age where no index knows the age.
//!
//! An index for the sake of retention costs every insert, and one on the outbox in the order of `id` would lead the
//! planner astray. The blocks of a table are an order that costs nothing: `ctid >= first AND ctid < last` reads just them.
//! A row that is inserted behind the walk is met in its next round.

use sqlx::PgConnection;

/// Some neighbouring blocks of a table: from `first` up to, and without, `end`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Blocks {
    /// The first.
    pub first: i64,
    /// The one after the last.
    pub end: i64,
}

/// Returns how many blocks a table has; none when there is no such table.
///
/// # Errors
///
/// When the database fails.
pub async fn blocks_of(connection: &mut PgConnection, table: &str) -> Result<Option<i64>, sqlx::Error> {
    sqlx::query_scalar!(
        "-- walk_blocks_of
        SELECT pg_relation_size(to_regclass($1)) / current_setting('block_size')::BIGINT",
        table
    )
    .fetch_one(connection)
    .await
}
