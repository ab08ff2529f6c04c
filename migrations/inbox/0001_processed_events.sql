-- What a consumer has taken effect of. Lives in the consumer's own database.

CREATE TABLE processed_events (
    consumer TEXT COLLATE "C" NOT NULL,
    event_id UUID NOT NULL,
    processed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    -- Deliberately not partitioned by time: a unique key that holds the time deduplicates only within a partition.
    CONSTRAINT processed_events_pkey PRIMARY KEY (consumer, event_id),
    CONSTRAINT processed_events_consumer_bounded CHECK (octet_length(consumer) BETWEEN 1 AND 127)
);

COMMENT ON TABLE processed_events IS 'One row per consumer and event that took effect, written in the effect''s own transaction.';
COMMENT ON COLUMN processed_events.consumer IS 'The consumer''s name: one service may hold several consumers.';
COMMENT ON COLUMN processed_events.event_id IS 'The event''s identity, the message''s message_id.';
COMMENT ON COLUMN processed_events.processed_at IS 'When the effect was written.';
