-- Events waiting to be published. A row is inserted in the transaction of the business change that it tells of.
--
-- `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES …` is a public contract: any service in
-- any language may write it, after it has locked or written the aggregate's own row. Whatever the broker would refuse
-- later is refused here, in the producer's transaction.

CREATE FUNCTION outbox_headers_valid(headers JSONB) RETURNS BOOLEAN
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN jsonb_typeof(headers) = 'object' AND NOT EXISTS (
        SELECT 1 FROM jsonb_each(headers)
        WHERE jsonb_typeof(value) <> 'string'
           OR octet_length(key) NOT BETWEEN 1 AND 127
           -- What the broker acts on or keeps its books in, and what the relay writes itself.
           OR key ~ '^(CC|BCC|x-death|x-delivery-count|x-acquired-count|x-delay)$'
           OR key ~ '^(x-first-death-|x-last-death-|cloudEvents_|x-semel-)'
    );
COMMENT ON FUNCTION outbox_headers_valid IS 'An object of strings, under names that are free for a producer to use.';

CREATE TABLE outbox (
    event_id UUID NOT NULL DEFAULT gen_random_uuid(),
    id BIGSERIAL NOT NULL,
    aggregate_type TEXT COLLATE "C" NOT NULL,
    aggregate_id TEXT COLLATE "C" NOT NULL,
    aggregate_version BIGINT,
    event_type TEXT COLLATE "C" NOT NULL,
    payload JSONB NOT NULL,
    headers JSONB NOT NULL DEFAULT '{}',
    lane SMALLINT NOT NULL GENERATED ALWAYS AS (
        (hashtextextended(aggregate_type || E'\x1f' || aggregate_id, 0) & 63)::SMALLINT
    ) STORED,
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    published_at TIMESTAMPTZ,
    attempts INT NOT NULL DEFAULT 0,
    first_error TEXT,
    last_error TEXT,
    held_at TIMESTAMPTZ,
    dead_at TIMESTAMPTZ,
    skipped_at TIMESTAMPTZ,
    discarded_at TIMESTAMPTZ,
    discarded_by TEXT,
    discard_reason TEXT,

    CONSTRAINT outbox_pkey PRIMARY KEY (event_id),
    CONSTRAINT outbox_event_id_not_nil CHECK (event_id <> '00000000-0000-0000-0000-000000000000'),
    -- All checks of a row are made anew whenever it is updated. Those of what a producer writes are passed over in a row that
    -- is published: they would be two thirds of what a mark costs.
    -- 127 + 1 + 127 bytes: the routing key "<aggregate_type>.<event_type>" fits into AMQP's 255.
    CONSTRAINT outbox_aggregate_type_name CHECK (
        published_at IS NOT NULL
        OR octet_length(aggregate_type) BETWEEN 1 AND 127 AND aggregate_type ~ '^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$'
    ),
    CONSTRAINT outbox_event_type_name CHECK (
        published_at IS NOT NULL
        OR octet_length(event_type) BETWEEN 1 AND 127 AND event_type ~ '^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$'
    ),
    CONSTRAINT outbox_aggregate_id_bounded CHECK (
        published_at IS NOT NULL
        OR octet_length(aggregate_id) BETWEEN 1 AND 127 AND aggregate_id !~ '[[:cntrl:]]'
    ),
    CONSTRAINT outbox_aggregate_version_positive CHECK (aggregate_version > 0),
    CONSTRAINT outbox_headers_strings CHECK (
        published_at IS NOT NULL OR headers = '{}'::JSONB OR outbox_headers_valid(headers)
    ),
    CONSTRAINT outbox_headers_bounded CHECK (published_at IS NOT NULL OR octet_length(headers::TEXT) <= 32768),
    CONSTRAINT outbox_payload_bounded CHECK (published_at IS NOT NULL OR octet_length(payload::TEXT) <= 1048576),
    CONSTRAINT outbox_attempts_not_negative CHECK (attempts >= 0),
    CONSTRAINT outbox_failed_has_errors CHECK (
        (first_error IS NULL) = (last_error IS NULL) AND (first_error IS NOT NULL OR attempts = 0)
    ),
    CONSTRAINT outbox_dead_is_held CHECK (dead_at IS NULL OR held_at IS NOT NULL),
    CONSTRAINT outbox_skipped_is_dead CHECK (skipped_at IS NULL OR dead_at IS NOT NULL),
    CONSTRAINT outbox_discarded_is_held CHECK (discarded_at IS NULL OR held_at IS NOT NULL),
    CONSTRAINT outbox_discarded_has_reason CHECK (
        (discarded_at IS NULL) = (discarded_by IS NULL) AND (discarded_at IS NULL) = (discard_reason IS NULL)
    ),
    CONSTRAINT outbox_published_is_alive CHECK (published_at IS NULL OR (dead_at IS NULL AND discarded_at IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05, vacuum_truncate = off);

-- The only index that knows the order. Any other index in the order of `id`, a primary key on it say, invites the planner
-- to read that one with the lane as a filter, past every published row.
CREATE INDEX outbox_hot ON outbox (lane, id) WHERE published_at IS NULL AND held_at IS NULL;
CREATE INDEX outbox_set_aside ON outbox (aggregate_type, aggregate_id, id)
    WHERE held_at IS NOT NULL AND published_at IS NULL AND discarded_at IS NULL;
CREATE INDEX outbox_dead ON outbox (dead_at) WHERE dead_at IS NOT NULL AND discarded_at IS NULL;

COMMENT ON TABLE outbox IS 'Events, written with the business change they tell of; relays publish them in id order per aggregate.';
COMMENT ON COLUMN outbox.event_id IS 'The event''s stable identity; consumers deduplicate by it.';
COMMENT ON COLUMN outbox.id IS 'The order. Equals commit order within an aggregate because it is drawn after the aggregate''s lock.';
COMMENT ON COLUMN outbox.aggregate_type IS 'What kind of thing changed; first part of the routing key.';
COMMENT ON COLUMN outbox.aggregate_id IS 'Which one changed.';
COMMENT ON COLUMN outbox.aggregate_version IS 'The aggregate''s version after the change, where the producer keeps one.';
COMMENT ON COLUMN outbox.event_type IS 'What happened; second part of the routing key.';
COMMENT ON COLUMN outbox.payload IS 'The message body.';
COMMENT ON COLUMN outbox.headers IS 'Message headers, strings by name; traceparent among them.';
COMMENT ON COLUMN outbox.lane IS 'Hash class of the aggregate, 0 to 63; what a relay locks.';
COMMENT ON COLUMN outbox.created_at IS 'When the row was inserted.';
COMMENT ON COLUMN outbox.published_at IS 'When the broker had confirmed this very event.';
COMMENT ON COLUMN outbox.attempts IS 'Failed attempts that were the event''s own fault, since a person last asked for a retry.';
COMMENT ON COLUMN outbox.first_error IS 'Why the first attempt of all failed.';
COMMENT ON COLUMN outbox.last_error IS 'Why the latest failed; null for an event that only waits behind another.';
COMMENT ON COLUMN outbox.held_at IS 'Since when the event is set aside from the hot path.';
COMMENT ON COLUMN outbox.dead_at IS 'When it was given up on, until a person decides.';
COMMENT ON COLUMN outbox.skipped_at IS 'When it was given up on and its aggregate''s later events went past it.';
COMMENT ON COLUMN outbox.discarded_at IS 'When a person decided that it is never sent.';
COMMENT ON COLUMN outbox.discarded_by IS 'Who decided so.';
COMMENT ON COLUMN outbox.discard_reason IS 'Why, in that person''s words.';

-- One row per aggregate that has a chain: its events that are set aside, in the order of id, those left out that were
-- skipped. A chain that is dead costs a relay nothing, however long it is: its row is due never.
CREATE TABLE outbox_held (
    aggregate_type TEXT COLLATE "C" NOT NULL,
    aggregate_id TEXT COLLATE "C" NOT NULL,
    lane SMALLINT NOT NULL,
    next_attempt_at TIMESTAMPTZ NOT NULL,
    dead_at TIMESTAMPTZ,
    flows BOOLEAN NOT NULL DEFAULT false,

    CONSTRAINT outbox_held_pkey PRIMARY KEY (aggregate_type, aggregate_id),
    CONSTRAINT outbox_held_lane_known CHECK (lane BETWEEN 0 AND 63),
    CONSTRAINT outbox_held_dead_is_never_due CHECK ((dead_at IS NOT NULL) = (next_attempt_at = 'infinity')),
    CONSTRAINT outbox_held_flows_alive CHECK (NOT flows OR dead_at IS NULL)
);

CREATE INDEX outbox_held_due ON outbox_held (lane, next_attempt_at);

COMMENT ON TABLE outbox_held IS 'One row per aggregate whose events are set aside; usually empty.';
COMMENT ON COLUMN outbox_held.aggregate_type IS 'The aggregate''s type, as in outbox.';
COMMENT ON COLUMN outbox_held.aggregate_id IS 'The aggregate''s id, as in outbox.';
COMMENT ON COLUMN outbox_held.lane IS 'The aggregate''s lane, as in outbox.';
COMMENT ON COLUMN outbox_held.next_attempt_at IS 'When its first set-aside event is tried again; infinity once that is dead.';
COMMENT ON COLUMN outbox_held.dead_at IS 'When its first set-aside event was given up on.';
COMMENT ON COLUMN outbox_held.flows IS 'Whether its first set-aside event has never failed, so that its followers are read along.';
