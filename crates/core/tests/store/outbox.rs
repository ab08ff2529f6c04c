//! What the outbox takes and refuses, and in which order it keeps it.

use std::collections::HashSet;

use semel_core::outbox::{self, NewEvent};
use serde_json::{Map, Value, json};
use sqlx::Row as _;
use uuid::Uuid;

use crate::database::{Database, with_database};

fn event(aggregate_id: &str) -> NewEvent {
    NewEvent {
        event_id: Uuid::new_v4(),
        aggregate_type: "probe",
        aggregate_id: aggregate_id.to_owned(),
        aggregate_version: None,
        event_type: "ProbeMade",
        payload: Map::from_iter([("n".to_owned(), json!(1))]),
        trace_context: None,
    }
}

/// An event as any producer might insert it.
#[derive(Clone)]
struct Row {
    event_id: Option<Uuid>,
    aggregate_type: String,
    aggregate_id: String,
    aggregate_version: Option<i64>,
    event_type: String,
    payload: Value,
    headers: Value,
}

impl Row {
    fn good() -> Self {
        Self {
            event_id: Some(Uuid::new_v4()),
            aggregate_type: "probe".to_owned(),
            aggregate_id: "1".to_owned(),
            aggregate_version: None,
            event_type: "ProbeMade".to_owned(),
            payload: json!({}),
            headers: json!({}),
        }
    }

    fn but(change: impl FnOnce(&mut Self)) -> Self {
        let mut row = Self::good();
        change(&mut row);
        row
    }

    /// Inserts it after a business change in one transaction, which commits only if the event is taken.
    async fn produce(self, db: &Database) -> Result<(), sqlx::Error> {
        let mut tx = db.pool.begin().await?;
        sqlx::query("INSERT INTO business DEFAULT VALUES").execute(&mut *tx).await?;
        let inserted = sqlx::query(
            "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(self.event_id)
        .bind(self.aggregate_type)
        .bind(self.aggregate_id)
        .bind(self.aggregate_version)
        .bind(self.event_type)
        .bind(self.payload)
        .bind(self.headers)
        .execute(&mut *tx)
        .await;
        // A producer that goes on regardless: the server has aborted the transaction already.
        let committed = tx.commit().await;
        inserted.map(drop).and(committed)
    }
}

fn bad_names() -> Vec<String> {
    let names = ["", " ", "a b", "a..b", ".a", "a.", "a*", "#", "a/b", "é", "a\n", "a\u{0}"];
    names
        .map(str::to_owned)
        .into_iter()
        .filter(|name| !name.contains('\0'))
        .chain(["n".repeat(128)])
        .collect()
}

fn bad_rows() -> Vec<(&'static str, Row)> {
    let mut rows = Vec::new();
    for name in bad_names() {
        rows.push(("outbox_aggregate_type_name", Row::but(|row| row.aggregate_type.clone_from(&name))));
        rows.push(("outbox_event_type_name", Row::but(|row| row.event_type = name)));
    }
    for id in ["", "a\tb", "a\nb", "\u{7f}", &"i".repeat(128), &"i".repeat(300), &"é".repeat(64)] {
        rows.push(("outbox_aggregate_id_bounded", Row::but(|row| id.clone_into(&mut row.aggregate_id))));
    }
    for version in [0, -1] {
        rows.push((
            "outbox_aggregate_version_positive",
            Row::but(|row| row.aggregate_version = Some(version)),
        ));
    }
    let long_name = "h".repeat(128);
    for headers in [
        json!([]),
        json!("text"),
        json!(null),
        json!({ "a": 1 }),
        json!({ "a": null }),
        json!({ "a": ["b"] }),
        json!({ "": "a" }),
        json!({ long_name: "a" }),
        json!({ "CC": "a" }),
        json!({ "BCC": "a" }),
        json!({ "x-death": "a" }),
        json!({ "x-delay": "a" }),
        json!({ "x-delivery-count": "a" }),
        json!({ "x-first-death-queue": "a" }),
        json!({ "cloudEvents_id": "a" }),
        json!({ "x-semel-lane": "a" }),
    ] {
        rows.push(("outbox_headers_strings", Row::but(|row| row.headers = headers)));
    }
    rows.push(("outbox_event_id_not_nil", Row::but(|row| row.event_id = Some(Uuid::nil()))));
    rows.push(("outbox_headers_bounded", Row::but(|row| row.headers = json!({ "a": "x".repeat(32_768) }))));
    rows.push(("outbox_payload_bounded", Row::but(|row| row.payload = json!("x".repeat(1_048_575)))));
    rows
}

#[tokio::test]
async fn a_mark_does_not_check_an_event_anew_and_whoever_takes_it_back_does() {
    with_database(async |db: Database| {
        db.execute("CREATE TABLE business (id BIGSERIAL)").await;
        Row::but(|row| row.headers = json!({ "a": "b" })).produce(&db).await.unwrap();
        db.execute(
            "CREATE OR REPLACE FUNCTION outbox_headers_valid(headers JSONB) RETURNS BOOLEAN
             LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RAISE 'checked anew'; END $$",
        )
        .await;
        db.execute("UPDATE outbox SET published_at = clock_timestamp()").await;
        let taken_back = sqlx::query("UPDATE outbox SET published_at = NULL").execute(&db.pool).await;
        assert!(taken_back.unwrap_err().to_string().contains("checked anew"));
    })
    .await;
}

#[tokio::test]
async fn a_bad_event_fails_in_its_producers_transaction() {
    with_database(async |db: Database| {
        db.execute("CREATE TABLE business (id BIGSERIAL)").await;
        for (constraint, row) in bad_rows() {
            let shown = format!(
                "{:.40} {:.40} {:.40}",
                row.aggregate_type,
                row.aggregate_id,
                row.headers.to_string()
            );
            let error = row.produce(&db).await.expect_err(&shown);
            let named = error.as_database_error().and_then(|error| error.constraint());
            assert_eq!(named, Some(constraint), "{shown}");
        }
        assert_eq!(db.count("SELECT count(*) FROM business").await, 0, "no change without its event");
        assert_eq!(db.count("SELECT count(*) FROM outbox").await, 0);
    })
    .await;
}

#[tokio::test]
async fn an_event_has_an_identity_and_no_other_has_the_same() {
    with_database(async |db: Database| {
        db.execute("CREATE TABLE business (id BIGSERIAL)").await;
        let row = Row::good();
        row.clone().produce(&db).await.unwrap();
        let error = row.produce(&db).await.unwrap_err();
        assert_eq!(error.as_database_error().and_then(|error| error.constraint()), Some("outbox_pkey"));
        let error = Row::but(|row| row.event_id = None).produce(&db).await.unwrap_err();
        assert_eq!(semel_core::database::sqlstate(&error).as_deref(), Some("23502"), "{error}");
        assert_eq!(db.count("SELECT count(*) FROM business").await, 1);
    })
    .await;
}

#[tokio::test]
async fn takes_events_up_to_the_bounds() {
    with_database(async |db: Database| {
        db.execute("CREATE TABLE business (id BIGSERIAL)").await;
        for row in [
            Row::but(|row| row.aggregate_type = format!("{}.b", "a".repeat(125))),
            Row::but(|row| row.event_type = "n".repeat(127)),
            Row::but(|row| row.aggregate_id = "é".repeat(63)),
            Row::but(|row| row.aggregate_id = "any thing, printable * # .".to_owned()),
            Row::but(|row| row.headers = json!({ "a": "x".repeat(32_768 - 9), })),
            Row::but(|row| row.payload = json!("x".repeat(1_048_574))),
            Row::but(|row| row.aggregate_version = Some(i64::MAX)),
        ] {
            row.produce(&db).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn refuses_states_that_contradict_themselves() {
    with_database(async |db: Database| {
        outbox::append(&mut db.pool.acquire().await.unwrap(), &[event("1")]).await.unwrap();
        for (constraint, change) in [
            ("outbox_attempts_not_negative", "UPDATE outbox SET attempts = -1"),
            ("outbox_failed_has_errors", "UPDATE outbox SET first_error = 'a', attempts = 1"),
            ("outbox_failed_has_errors", "UPDATE outbox SET attempts = 1"),
            ("outbox_dead_is_held", "UPDATE outbox SET dead_at = now()"),
            ("outbox_skipped_is_dead", "UPDATE outbox SET held_at = now(), skipped_at = now()"),
            (
                "outbox_discarded_is_held",
                "UPDATE outbox SET discarded_at = now(), discarded_by = 'a', discard_reason = 'r'",
            ),
            ("outbox_discarded_has_reason", "UPDATE outbox SET held_at = now(), discarded_at = now()"),
            ("outbox_discarded_has_reason", "UPDATE outbox SET discarded_by = 'a', discard_reason = 'r'"),
            (
                "outbox_published_is_alive",
                "UPDATE outbox SET held_at = now(), dead_at = now(), published_at = now()",
            ),
            (
                "outbox_published_is_alive",
                "UPDATE outbox SET held_at = now(), discarded_at = now(), discarded_by = 'a', discard_reason = 'r',
                 published_at = now()",
            ),
        ] {
            let error = sqlx::query(change).execute(&db.pool).await.expect_err(change);
            let named = error.as_database_error().and_then(|error| error.constraint());
            assert_eq!(named, Some(constraint), "{change}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_plain_insert_is_enough_for_a_producer_in_any_language() {
    with_database(async |db: Database| {
        for _ in 0..2 {
            db.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                 VALUES ('invoice', '42', 'InvoiceSent', '{\"total\": 1200}')",
            )
            .await;
        }
        let unpublished = "SELECT count(DISTINCT event_id) FROM outbox
            WHERE headers = '{}' AND attempts = 0 AND lane BETWEEN 0 AND 63 AND aggregate_version IS NULL
              AND created_at BETWEEN now() - INTERVAL '1 hour' AND clock_timestamp()
              AND COALESCE(published_at, held_at, dead_at, discarded_at) IS NULL
              AND first_error IS NULL AND last_error IS NULL";
        assert_eq!(db.count(unpublished).await, 2, "two events, each with an identity");
    })
    .await;
}

#[tokio::test]
async fn appending_keeps_the_order_across_aggregates_and_calls() {
    with_database(async |db: Database| {
        let events: Vec<_> = (0..200).map(|n| event(&format!("{}", n % 7))).collect();
        let mut tx = db.pool.begin().await.unwrap();
        for part in events.chunks(150) {
            outbox::append(&mut tx, part).await.unwrap();
        }
        outbox::append(&mut tx, &[]).await.unwrap();
        tx.commit().await.unwrap();
        let stored: Vec<Uuid> =
            sqlx::query_scalar("SELECT event_id FROM outbox ORDER BY id").fetch_all(&db.pool).await.unwrap();
        assert_eq!(stored, events.iter().map(|event| event.event_id).collect::<Vec<_>>());
    })
    .await;
}

#[tokio::test]
async fn an_appended_event_carries_its_identity_and_trace() {
    with_database(async |db: Database| {
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let traced =
            NewEvent { trace_context: Some(trace.to_owned()), aggregate_version: Some(3), ..event("1") };
        outbox::append(&mut db.pool.acquire().await.unwrap(), std::slice::from_ref(&traced)).await.unwrap();
        let row =
            sqlx::query("SELECT payload, headers, aggregate_version FROM outbox").fetch_one(&db.pool).await;
        let row = row.unwrap();
        assert_eq!(row.get::<Value, _>("payload"), json!({ "n": 1, "event_id": traced.event_id }));
        assert_eq!(row.get::<Value, _>("headers"), json!({ "traceparent": trace }));
        assert_eq!(row.get::<Option<i64>, _>("aggregate_version"), Some(3));
    })
    .await;
}

#[tokio::test]
async fn an_aggregate_has_one_lane_for_ever() {
    with_database(async |db: Database| {
        let events: Vec<_> = (0..500).map(|n| event(&format!("aggregate {n}"))).collect();
        let mut connection = db.pool.acquire().await.unwrap();
        for _ in 0..2 {
            let again: Vec<_> = events
                .iter()
                .map(|e| NewEvent { event_id: Uuid::new_v4(), event_type: "Other", ..e.clone() })
                .collect();
            outbox::append(&mut connection, &again).await.unwrap();
        }
        let lanes: Vec<(i16, i16)> =
            sqlx::query_as("SELECT min(lane), max(lane) FROM outbox GROUP BY aggregate_id")
                .fetch_all(&mut *connection)
                .await
                .unwrap();
        assert!(lanes.iter().all(|(min, max)| min == max && (0..64).contains(min)), "{lanes:?}");
        let used: HashSet<i16> = lanes.iter().map(|(lane, _)| *lane).collect();
        assert!(used.len() > 48, "500 aggregates spread over {} lanes", used.len());
        // Another lane after an upgrade would let two relays hold one aggregate: this value never changes.
        outbox::append(&mut connection, &[event("golden")]).await.unwrap();
        assert_eq!(
            db.count("SELECT lane::BIGINT FROM outbox WHERE aggregate_id = 'golden'").await,
            GOLDEN_LANE
        );
    })
    .await;
}

const GOLDEN_LANE: i64 = 23;
