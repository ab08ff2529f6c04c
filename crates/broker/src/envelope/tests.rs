use super::*;

fn envelope() -> Envelope {
    Envelope {
        event_id: Uuid::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0001),
        event_type: "payment.succeeded".into(),
        aggregate_type: "payment".into(),
        aggregate_id: "p-1".into(),
        aggregate_version: Some(3),
        outbox_id: 42,
        created_at_unix_micros: 1_700_000_000_123_456,
        source: "payments-api".into(),
        headers: BTreeMap::from([
            ("traceparent".into(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()),
            ("tracestate".into(), "vendor=1".into()),
            ("tenant".into(), "größe".into()),
        ]),
    }
}

fn header(properties: &BasicProperties, name: &str) -> Option<AMQPValue> {
    properties.headers().as_ref()?.inner().get(name).cloned()
}

#[test]
fn writes_the_documented_properties_and_headers() {
    let properties = envelope().properties().unwrap();
    let id = "01920000-0000-7000-8000-000000000001";
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), id);
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "payment.succeeded");
    assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
    assert_eq!(*properties.timestamp(), Some(1_700_000_000));
    assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "payments-api");
    assert_eq!(*properties.delivery_mode(), Some(2));
    for (name, value) in [
        ("cloudEvents_id", text(id)),
        ("cloudEvents_source", text("payments-api")),
        ("cloudEvents_specversion", text("1.0")),
        ("cloudEvents_subject", text("payment/p-1")),
        ("cloudEvents_time", text("2023-11-14T22:13:20.123456Z")),
        ("cloudEvents_type", text("payment.succeeded")),
        ("x-semel-outbox-id", AMQPValue::LongLongInt(42)),
        ("x-semel-aggregate-type", text("payment")),
        ("x-semel-aggregate-id", text("p-1")),
        ("x-semel-aggregate-version", AMQPValue::LongLongInt(3)),
        ("tracestate", text("vendor=1")),
    ] {
        assert_eq!(header(&properties, name), Some(value), "{name}");
    }
}

#[test]
fn comes_back_as_it_went() {
    for version in [None, Some(0), Some(i64::MAX)] {
        let sent = Envelope { aggregate_version: version, ..envelope() };
        let received = Received::decode(&sent.properties().unwrap()).unwrap();
        assert_eq!(
            received,
            Received {
                event_id: sent.event_id,
                event_type: Some(sent.event_type),
                aggregate_type: Some(sent.aggregate_type),
                aggregate_id: Some(sent.aggregate_id),
                aggregate_version: version,
                outbox_id: Some(sent.outbox_id),
                created_at_unix_micros: Some(sent.created_at_unix_micros),
                source: Some(sent.source),
                headers: sent.headers,
            }
        );
    }
}

#[test]
fn refuses_what_the_protocol_cannot_hold() {
    let long = "x".repeat(256);
    for (envelope, reason) in [
        (Envelope { event_type: long.clone(), ..envelope() }, "the event type is 256 bytes"),
        (Envelope { source: long.clone(), ..envelope() }, "the source is 256 bytes"),
        (
            Envelope { headers: BTreeMap::from([(long, String::new())]), ..envelope() },
            "the header name is 256 bytes",
        ),
        (Envelope { created_at_unix_micros: -1, ..envelope() }, "the creation time of -1"),
        (Envelope { created_at_unix_micros: i64::MAX, ..envelope() }, "the creation time"),
        (Envelope { created_at_unix_micros: i64::MIN, ..envelope() }, "the creation time"),
    ] {
        let refusal = envelope.properties().unwrap_err();
        assert!(refusal.starts_with(reason), "{refusal}");
    }
}

#[test]
fn multibyte_names_are_measured_in_bytes() {
    let envelope = |letters| Envelope { event_type: "ß".repeat(letters), ..envelope() };
    assert!(envelope(127).properties().is_ok());
    assert!(envelope(128).properties().is_err());
}

#[test]
fn an_event_cannot_set_headers_that_mean_something() {
    for name in ["CC", "BCC", "x-death", "x-delivery-count", "x-semel-outbox-id", "cloudEvents_id"] {
        let envelope =
            Envelope { headers: BTreeMap::from([(name.into(), "elsewhere".into())]), ..envelope() };
        assert!(envelope.properties().unwrap_err().contains("reserved"), "{name}");
    }
}

#[test]
fn only_a_message_id_is_required() {
    let id = Uuid::from_u128(7);
    let bare = BasicProperties::default().with_message_id(id.to_string().as_str().into());
    let received = Received::decode(&bare).unwrap();
    assert_eq!(received.event_id, id);
    assert_eq!(received.event_type, None);
    assert_eq!(received.created_at_unix_micros, None);
    assert!(received.headers.is_empty());

    let nil = BasicProperties::default().with_message_id("00000000-0000-0000-0000-000000000000".into());
    for without in [BasicProperties::default(), nil] {
        assert_eq!(Received::decode(&without), Err(DecodeError::NoMessageId));
    }
    for hostile in ["", "7", "not-a-uuid", "\u{0}\n", "00000000-0000-0000-0000-00000000000g"] {
        let properties = BasicProperties::default().with_message_id(hostile.into());
        assert_eq!(Received::decode(&properties), Err(DecodeError::MessageIdNotUuid(hostile.into())));
    }
}

#[test]
fn ignores_pieces_of_the_wrong_type() {
    let headers = FieldTable::from(BTreeMap::from([
        ("x-semel-outbox-id".into(), AMQPValue::Boolean(true)),
        ("x-semel-aggregate-version".into(), text("12")),
        ("x-semel-aggregate-id".into(), AMQPValue::LongLongInt(9)),
        ("x-semel-aggregate-type".into(), AMQPValue::LongString(vec![b'a', 0xff].into())),
        ("cloudEvents_time".into(), text("yesterday")),
        ("cloudEvents_type".into(), text("order.placed")),
        ("x-death".into(), AMQPValue::Void),
        ("nested".into(), AMQPValue::FieldTable(FieldTable::default())),
        ("plain".into(), AMQPValue::ShortString("kept".into())),
    ]));
    let properties = BasicProperties::default()
        .with_message_id(Uuid::from_u128(1).to_string().as_str().into())
        .with_timestamp(u64::MAX)
        .with_headers(headers);
    let received = Received::decode(&properties).unwrap();
    assert_eq!(received.outbox_id, None);
    assert_eq!(received.aggregate_version, Some(12));
    assert_eq!(received.aggregate_id, None);
    assert_eq!(received.aggregate_type.as_deref(), Some("a\u{fffd}"));
    assert_eq!(received.event_type.as_deref(), Some("order.placed"));
    assert_eq!(received.created_at_unix_micros, None);
    assert_eq!(received.headers, BTreeMap::from([("plain".into(), "kept".into())]));
}
