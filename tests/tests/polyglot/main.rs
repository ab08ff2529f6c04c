//! The public contracts, held by the languages that they are for: their INSERTs reach their consumers as `docs/outbox.md`
//! says, and their calls are answered as `docs/grpc.md` says.
//!
//! Each producer writes the same cases (`tests/polyglot/cases.json`) into a database of its own; a real relay publishes
//! them; a Python and a Node.js consumer each take them from a queue of their own.

mod api;
mod consumers;
mod psql;
mod yard;

use std::collections::BTreeMap;

use anyhow::Result;
use semel_tests::polyglot::Language;
use serde_json::{Value, json};

use yard::{Row, Yard};

/// The cases' event with all columns.
const EVERYTHING: &str = "6f1c2a34-9d5e-4b7a-8c21-0e4f5a6b7c8d";

#[tokio::test]
async fn what_python_inserts_reaches_consumers_in_python_and_node() -> Result<()> {
    let yard = Yard::new("python").await?;
    let refusals = yard.produce(Language::Python).await?;
    yard.holds_what_was_accepted_and_nothing_of_what_was_refused(&refusals).await?;
    arrives_everywhere(&yard).await
}

#[tokio::test]
async fn what_node_inserts_reaches_consumers_in_python_and_node() -> Result<()> {
    let yard = Yard::new("node").await?;
    let refusals = yard.produce(Language::Node).await?;
    yard.holds_what_was_accepted_and_nothing_of_what_was_refused(&refusals).await?;
    arrives_everywhere(&yard).await
}

#[tokio::test]
async fn what_psql_inserts_reaches_consumers_in_python_and_node() -> Result<()> {
    let yard = Yard::new("psql").await?;
    let refusals = psql::produce(&yard).await?;
    yard.holds_what_was_accepted_and_nothing_of_what_was_refused(&refusals).await?;
    arrives_everywhere(&yard).await
}

async fn arrives_everywhere(yard: &Yard) -> Result<()> {
    let rows = yard.rows().await?;
    for language in [Language::Python, Language::Node] {
        let messages = yard.messages(language).await?;
        assert_eq!(messages.len(), rows.len(), "{language:?}");
        for row in &rows {
            let message = messages.iter().find(|message| message["message_id"] == json!(row.event_id));
            is_the_event(message.unwrap_or(&Value::Null), row, language);
        }
    }
    Ok(())
}

/// Holds a message against its row, property by property.
fn is_the_event(message: &Value, row: &Row, language: Language) {
    let Row { event_id, aggregate_id, payload, created_at, .. } = row;
    let expected = json!({
        "message_id": event_id, "type": "ShipmentMoved", "content_type": "application/json", "app_id": "polyglot",
        "delivery_mode": 2, "timestamp": created_at, "routing_key": "shipment.ShipmentMoved", "body": payload,
    });
    for (property, value) in expected.as_object().expect("an object") {
        assert_eq!(&message[property], value, "{property} of {event_id} in {language:?}");
    }
    let mut headers: BTreeMap<String, Value> =
        serde_json::from_value(message["headers"].clone()).expect("headers are an object");
    let time = headers.remove("cloudEvents_time");
    assert!(time.is_some_and(|time| time.is_string()), "cloudEvents_time of {event_id} in {language:?}");
    let mut expected = json!({
        "cloudEvents_id": event_id, "cloudEvents_source": "polyglot", "cloudEvents_type": "ShipmentMoved",
        "cloudEvents_subject": format!("shipment/{aggregate_id}"), "cloudEvents_specversion": "1.0",
        "x-semel-outbox-id": row.id, "x-semel-aggregate-type": "shipment", "x-semel-aggregate-id": aggregate_id,
    });
    // Not in the message at all, where the producer did not set it.
    if event_id == EVERYTHING {
        expected["x-semel-aggregate-version"] = json!(7);
        expected["traceparent"] = json!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        expected["Grüße"] = json!("Zoë 🚢");
        assert_eq!(aggregate_id, "Übergrößen/船 'no. 2' %s $1 \\ \"", "{language:?}");
        for part in ["東京 🚢 é", "9007199254740993", "123456789012345678901234567890", "0.10", "null"] {
            assert!(payload.contains(part), "{part} is not in {payload}");
        }
    }
    assert_eq!(json!(headers), expected, "headers of {event_id} in {language:?}");
}
