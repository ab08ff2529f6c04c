-- What a consumer keeps that takes effect of an aggregate's events in their order. Lives in the consumer's own database.
--
-- Whoever writes a row of an aggregate here, or takes effect of one of its events in order, holds the transaction's advisory
-- lock of (consumer, aggregate), which it takes in a statement of its own before it reads.

-- An event that failed, and the aggregate's events that came after it: acknowledged to the broker, retried from here.
-- A row goes when its event took effect, became a dead letter or was discarded by a person, and the aggregate's next row
-- then becomes due. So the rows of an aggregate, in the order of parked_id, are its events in their order, and at most the
-- first is due.
CREATE TABLE parked_events (
    parked_id BIGINT GENERATED ALWAYS AS IDENTITY,
    consumer TEXT COLLATE "C" NOT NULL,
    event_id UUID NOT NULL,
    aggregate_type TEXT COLLATE "C" NOT NULL,
    aggregate_id TEXT COLLATE "C" NOT NULL,
    aggregate_version BIGINT,
    event_type TEXT COLLATE "C",
    exchange TEXT COLLATE "C" NOT NULL,
    routing_key TEXT COLLATE "C" NOT NULL,
    properties JSON NOT NULL,
    payload BYTEA NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    error TEXT,
    attempts INT NOT NULL,
    is_under_way BOOLEAN NOT NULL DEFAULT false,
    parked_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    first_failed_at TIMESTAMPTZ,
    last_failed_at TIMESTAMPTZ,
    next_attempt_at TIMESTAMPTZ,

    CONSTRAINT parked_events_pkey PRIMARY KEY (parked_id),
    CONSTRAINT parked_events_event UNIQUE (consumer, event_id),
    CONSTRAINT parked_events_consumer_bounded CHECK (octet_length(consumer) BETWEEN 1 AND 127),
    CONSTRAINT parked_events_aggregate_bounded CHECK (
        octet_length(aggregate_type) BETWEEN 1 AND 255 AND octet_length(aggregate_id) BETWEEN 1 AND 255
    ),
    CONSTRAINT parked_events_reason_known CHECK (reason IN ('failed', 'behind', 'redelivered')),
    CONSTRAINT parked_events_failed_has_error CHECK (
        (reason = 'failed') = (error IS NOT NULL)
        AND (error IS NULL) = (first_failed_at IS NULL)
        AND (error IS NULL) = (last_failed_at IS NULL)
    ),
    CONSTRAINT parked_events_error_bounded CHECK (octet_length(error) <= 1024),
    CONSTRAINT parked_events_attempts_not_negative CHECK (attempts >= 0)
);

CREATE INDEX parked_events_chain ON parked_events (consumer, aggregate_type, aggregate_id, parked_id);
CREATE INDEX parked_events_due ON parked_events (consumer, next_attempt_at) WHERE next_attempt_at IS NOT NULL;

COMMENT ON TABLE parked_events IS 'Events of which a consumer that keeps aggregates in order could not take effect yet; usually empty.';
COMMENT ON COLUMN parked_events.parked_id IS 'The order within an aggregate.';
COMMENT ON COLUMN parked_events.consumer IS 'The consumer''s name, as in processed_events.';
COMMENT ON COLUMN parked_events.event_id IS 'The event''s identity, the message''s message_id.';
COMMENT ON COLUMN parked_events.aggregate_type IS 'What kind of thing it happened to.';
COMMENT ON COLUMN parked_events.aggregate_id IS 'Which one it happened to.';
COMMENT ON COLUMN parked_events.aggregate_version IS 'The aggregate''s version after the event, where the message tells one.';
COMMENT ON COLUMN parked_events.event_type IS 'What happened, where the message tells it.';
COMMENT ON COLUMN parked_events.exchange IS 'The exchange that the message was published to.';
COMMENT ON COLUMN parked_events.routing_key IS 'The routing key that the message was published with.';
COMMENT ON COLUMN parked_events.properties IS 'The message''s properties and headers; with the payload, all that a copy of it is made of.';
COMMENT ON COLUMN parked_events.payload IS 'The message''s body, byte for byte.';
COMMENT ON COLUMN parked_events.reason IS 'failed: its handling failed; behind: an earlier event of its aggregate is parked; redelivered: it was delivered before, and may be one that ends its process.';
COMMENT ON COLUMN parked_events.error IS 'What the handler said last, without what may quote the event.';
COMMENT ON COLUMN parked_events.attempts IS 'How often its handling was begun; counted before the handler runs, so that one that ends the process counts.';
COMMENT ON COLUMN parked_events.is_under_way IS 'An attempt was begun, and its end is not noted: it runs, or its process ended in the middle of it.';
COMMENT ON COLUMN parked_events.parked_at IS 'When it was parked.';
COMMENT ON COLUMN parked_events.first_failed_at IS 'When its handling failed first.';
COMMENT ON COLUMN parked_events.last_failed_at IS 'When its handling failed last.';
COMMENT ON COLUMN parked_events.next_attempt_at IS 'When it is tried next, or taken for given up by whoever tries it now; null while it waits behind another.';

-- The guard against events that come late: one whose version is below the last one does not take effect any more.
CREATE TABLE aggregate_versions (
    consumer TEXT COLLATE "C" NOT NULL,
    aggregate_type TEXT COLLATE "C" NOT NULL,
    aggregate_id TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    effect_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT aggregate_versions_pkey PRIMARY KEY (consumer, aggregate_type, aggregate_id),
    CONSTRAINT aggregate_versions_consumer_bounded CHECK (octet_length(consumer) BETWEEN 1 AND 127),
    CONSTRAINT aggregate_versions_aggregate_bounded CHECK (
        octet_length(aggregate_type) BETWEEN 1 AND 255 AND octet_length(aggregate_id) BETWEEN 1 AND 255
    )
-- Each effect updates a row, in columns that no index holds: room on its page keeps the indexes out of it.
) WITH (fillfactor = 80);

COMMENT ON TABLE aggregate_versions IS 'The last version of each aggregate that a consumer took effect of in order, written in the effect''s own transaction.';
COMMENT ON COLUMN aggregate_versions.consumer IS 'The consumer''s name, as in processed_events.';
COMMENT ON COLUMN aggregate_versions.aggregate_type IS 'What kind of thing it is.';
COMMENT ON COLUMN aggregate_versions.aggregate_id IS 'Which one it is.';
COMMENT ON COLUMN aggregate_versions.version IS 'Its version after the last event that took effect.';
COMMENT ON COLUMN aggregate_versions.effect_at IS 'When that was.';
