//! Below which id of a lane nothing can appear any more: what a relay asks to find that out, and the answer.
//!
//! An id is drawn long before its event is seen. But who draws one holds a lock on the sequence, from before the draw to
//! the end of the transaction. So: read the [`position`] of the sequence, *then* ask for the [`writers`]. When all of
//! those have ended, no event up to that position is still to come. `pg_snapshot_xmin` would not do: a transaction may
//! draw its id before it has a transaction id, and writers of other databases hold it back.
//!
//! What is known of one run of a server says nothing about its successor, which may have lost the last commits. So
//! [`Floors`] name the run, and the statements that use them compare it, whatever a pooler or a name in between leads to.

use std::collections::BTreeSet;

use sqlx::PgConnection;
use time::OffsetDateTime;

use super::{LANES, LaneHead};

const LANE_COUNT: usize = LANES as usize;

/// One run of one server: when its postmaster started.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ServerRun(pub(super) OffsetDateTime);

impl ServerRun {
    /// The run that began at this instant.
    #[must_use]
    pub const fn since(start: OffsetDateTime) -> Self {
        Self(start)
    }
}

/// For each lane an id below which no event of it is ready to publish, nor ever will be, on one run of a server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Floors {
    run: Option<ServerRun>,
    ids: [i64; LANE_COUNT],
}

impl Floors {
    /// None at all: everything is read.
    pub const NONE: Self = Self { run: None, ids: [0; LANE_COUNT] };

    /// The lowest ones, on this run.
    #[must_use]
    pub const fn on(run: ServerRun) -> Self {
        Self { run: Some(run), ids: [0; LANE_COUNT] }
    }

    /// The run that they hold for.
    #[must_use]
    pub const fn run(&self) -> Option<ServerRun> {
        self.run
    }

    /// The floor of a lane.
    #[must_use]
    pub fn of(&self, lane: i16) -> i64 {
        usize::try_from(lane).ok().and_then(|lane| self.ids.get(lane)).copied().unwrap_or_default()
    }

    /// All of them, by lane.
    #[must_use]
    pub fn all(&self) -> &[i64] {
        &self.ids
    }

    /// Raises each to the lane's oldest event in `heads`, but no higher than to `limit`. None is lowered.
    pub fn raise(&mut self, heads: &[LaneHead], limit: i64) {
        let mut next = [limit; LANE_COUNT];
        for head in heads {
            let next = usize::try_from(head.lane).ok().and_then(|lane| next.get_mut(lane));
            if let (Some(next), Some(id)) = (next, head.id) {
                *next = id.min(*next);
            }
        }
        for (floor, next) in self.ids.iter_mut().zip(next) {
            *floor = next.max(*floor);
        }
    }

    /// What a statement compares the server's run with.
    pub(in crate::outbox) fn started(&self) -> Option<OffsetDateTime> {
        self.run.map(|run| run.0)
    }
}

/// How far the outbox's sequence has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Position {
    /// On which run.
    pub run: ServerRun,
    /// The last id that was drawn, 0 before the first; none where sessions draw ids in advance, so that it says nothing.
    pub last: Option<i64>,
}

/// The transactions that may have drawn an id, and how safe that is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Writers {
    /// On which run.
    pub run: ServerRun,
    /// The virtual ids of the transactions that hold a lock on the sequence.
    pub open: BTreeSet<String>,
    /// Those of them that are prepared: being prepared gives a transaction another virtual id.
    pub prepared: BTreeSet<String>,
    /// The end of the log as it is written.
    pub logged: i64,
    /// The end of the log as a crash would leave it: beyond it, the sequence may come back lower.
    pub flushed: i64,
}

/// Reads how far the sequence has come.
///
/// # Errors
///
/// When the database fails, or the role may not read the sequence.
pub async fn position(connection: &mut PgConnection) -> Result<Position, sqlx::Error> {
    let row = sqlx::query!(
        r#"-- outbox_position
        SELECT pg_postmaster_start_time() AS "run!",
               CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS "last!",
               (SELECT seqcache = 1 FROM pg_sequence WHERE seqrelid = outbox_id_seq.tableoid) AS "one_by_one!"
        FROM outbox_id_seq"#
    )
    .fetch_one(connection)
    .await?;
    Ok(Position { run: ServerRun(row.run), last: row.one_by_one.then_some(row.last) })
}

/// Asks which transactions hold a lock on the sequence, and how far the log is safe.
///
/// A statement of its own, after [`position`]: whoever drew an id up to that position and is not named has ended.
///
/// # Errors
///
/// When the database fails.
pub async fn writers(connection: &mut PgConnection) -> Result<Writers, sqlx::Error> {
    let row = sqlx::query!(
        r#"-- outbox_writers
        SELECT pg_postmaster_start_time() AS "run!",
               (pg_current_wal_insert_lsn() - '0/0')::BIGINT AS "logged!",
               (pg_current_wal_flush_lsn() - '0/0')::BIGINT AS "flushed!",
               ARRAY (
                   SELECT virtualtransaction FROM pg_locks
                   WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
                     AND relation = 'outbox_id_seq'::REGCLASS
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
               ) AS "open!""#
    )
    .fetch_one(connection)
    .await?;
    let open: BTreeSet<String> = row.open.into_iter().collect();
    // The server gives prepared transactions no backend: -1.
    let prepared = open.iter().filter(|transaction| transaction.starts_with("-1/")).cloned().collect();
    Ok(Writers { run: ServerRun(row.run), open, prepared, logged: row.logged, flushed: row.flushed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_rise_to_the_oldest_event_and_no_further_than_the_limit_and_never_fall() {
        let mut floors = Floors::on(ServerRun(OffsetDateTime::UNIX_EPOCH));
        let head = |lane, id| LaneHead { lane, id };
        floors.raise(&[head(3, Some(7)), head(4, Some(90)), head(5, None)], 50);
        assert_eq!([floors.of(3), floors.of(4), floors.of(5)], [7, 50, 50]);
        floors.raise(&[head(5, Some(20))], 60);
        assert_eq!([floors.of(3), floors.of(4), floors.of(5)], [60, 60, 50]);
    }
}
