//! Two loops that drain an outbox as textbooks do, and are wrong.

use anyhow::{Result, ensure};
use semel_broker::{Envelope, Message, Outcome, Outgoing, Publisher};
use sqlx::postgres::PgRow;
use sqlx::{Executor as _, Row as _};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::yard::Yard;

const BATCH: i64 = 20;

/// Locks rows and skips those that another one has locked. Ends when it is told to and nothing is left.
pub(super) async fn with_skip_locked(yard: &Yard, stop: &CancellationToken) -> Result<()> {
    let mut connection = yard.connect().await?;
    let mut publisher = Publisher::open(&yard.vhost.url().parse()?, "textbook").await?;
    loop {
        let is_last = stop.is_cancelled();
        connection.execute("BEGIN").await?;
        let rows = sqlx::query(
            "SELECT event_id, id, aggregate_id, aggregate_version FROM outbox
             WHERE published_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED",
        )
        .bind(BATCH)
        .fetch_all(&mut connection)
        .await?;
        for row in &rows {
            publish(yard, &mut publisher, row).await?;
        }
        let ids = rows.iter().map(|row| row.try_get::<Uuid, _>(0)).collect::<Result<Vec<_>, _>>()?;
        let mark = "UPDATE outbox SET published_at = now() WHERE event_id = ANY($1)";
        sqlx::query(mark).bind(ids).execute(&mut connection).await?;
        connection.execute("COMMIT").await?;
        if rows.is_empty() {
            if is_last {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    publisher.close().await;
    Ok(())
}

/// Reads what has a higher id than the last one it read. Ends when it is told to and nothing is left; returns how many
/// events it published.
pub(super) async fn by_cursor(yard: &Yard, stop: &CancellationToken) -> Result<usize> {
    let mut connection = yard.connect().await?;
    let mut publisher = Publisher::open(&yard.vhost.url().parse()?, "textbook").await?;
    let (mut cursor, mut sent) = (0_i64, 0);
    loop {
        let is_last = stop.is_cancelled();
        let rows = sqlx::query(
            "SELECT event_id, id, aggregate_id, aggregate_version FROM outbox WHERE id > $1 ORDER BY id LIMIT $2",
        )
        .bind(cursor)
        .bind(BATCH)
        .fetch_all(&mut connection)
        .await?;
        for row in &rows {
            publish(yard, &mut publisher, row).await?;
            cursor = row.try_get(1)?;
            sent += 1;
        }
        if rows.is_empty() {
            if is_last {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    publisher.close().await;
    Ok(sent)
}

async fn publish(yard: &Yard, publisher: &mut Publisher, row: &PgRow) -> Result<()> {
    let envelope = Envelope {
        event_id: row.try_get(0)?,
        event_type: "Happened".to_owned(),
        aggregate_type: "thing".to_owned(),
        aggregate_id: row.try_get(2)?,
        aggregate_version: row.try_get(3)?,
        outbox_id: row.try_get(1)?,
        created_at_unix_micros: 0,
        source: "textbook".to_owned(),
        headers: std::collections::BTreeMap::new(),
    };
    let message = Message::Event { envelope: Box::new(envelope), body: b"{}".to_vec() };
    let outgoing =
        Outgoing { exchange: yard.exchange.clone(), routing_key: "thing.Happened".to_owned(), message };
    let wave = publisher.publish_wave(vec![outgoing]).await;
    ensure!(wave.outcomes == [Outcome::Confirmed], "{:?}", wave.outcomes);
    Ok(())
}
