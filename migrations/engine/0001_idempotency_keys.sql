-- The client's idempotency keys: who claimed what, how far it is known to have come, and the answer to replay.

CREATE SEQUENCE idempotency_fence CACHE 1;
COMMENT ON SEQUENCE idempotency_fence IS 'Drawn anew at each acquisition of a key, so that an earlier owner''s writes fail.';

CREATE TABLE idempotency_keys (
    client_id TEXT COLLATE "C" NOT NULL,
    operation TEXT COLLATE "C" NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    request_hash BYTEA NOT NULL,
    hash_version SMALLINT NOT NULL,
    command JSONB NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    recovery_point TEXT COLLATE "C" NOT NULL,
    fence BIGINT NOT NULL DEFAULT nextval('idempotency_fence'),
    lease_until TIMESTAMPTZ,
    attempts INT NOT NULL DEFAULT 1,
    next_check_at TIMESTAMPTZ,
    needs_person_at TIMESTAMPTZ,
    needs_person_reason TEXT,
    resource_id UUID NOT NULL,
    provider_key TEXT COLLATE "C",
    provider_request BYTEA,
    provider_reference TEXT COLLATE "C",
    provider_first_sent_at TIMESTAMPTZ,
    request_id UUID NOT NULL,
    trace_context TEXT,
    response_code SMALLINT,
    response_headers JSONB,
    response_body BYTEA,
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    completed_at TIMESTAMPTZ,
    expires_at TIMESTAMPTZ,

    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (client_id, operation, key),
    CONSTRAINT idempotency_keys_client_id_bounded CHECK (octet_length(client_id) BETWEEN 1 AND 63),
    CONSTRAINT idempotency_keys_operation_bounded CHECK (octet_length(operation) BETWEEN 1 AND 63),
    CONSTRAINT idempotency_keys_key_visible_ascii CHECK (
        octet_length(key) BETWEEN 1 AND 255 AND key ~ '^[!-~]+$' AND key !~ '["\\,;]'
    ),
    CONSTRAINT idempotency_keys_request_hash_sha256 CHECK (octet_length(request_hash) = 32),
    CONSTRAINT idempotency_keys_hash_version_positive CHECK (hash_version > 0),
    CONSTRAINT idempotency_keys_command_bounded CHECK (octet_length(command::TEXT) <= 131072),
    CONSTRAINT idempotency_keys_status_known CHECK (status IN ('in_progress', 'completed')),
    CONSTRAINT idempotency_keys_recovery_point_bounded CHECK (octet_length(recovery_point) BETWEEN 1 AND 63),
    CONSTRAINT idempotency_keys_attempts_positive CHECK (attempts > 0),
    CONSTRAINT idempotency_keys_in_progress_is_leased CHECK (
        status <> 'in_progress' OR (
            lease_until IS NOT NULL
            AND response_code IS NULL AND response_headers IS NULL AND response_body IS NULL
            AND completed_at IS NULL AND expires_at IS NULL
        )
    ),
    CONSTRAINT idempotency_keys_completed_has_response CHECK (
        status <> 'completed' OR (
            response_code IS NOT NULL AND response_headers IS NOT NULL AND response_body IS NOT NULL
            AND completed_at IS NOT NULL AND expires_at IS NOT NULL
            AND lease_until IS NULL AND next_check_at IS NULL
        )
    ),
    CONSTRAINT idempotency_keys_response_final CHECK (response_code BETWEEN 200 AND 499),
    CONSTRAINT idempotency_keys_response_headers_array CHECK (jsonb_typeof(response_headers) = 'array'),
    CONSTRAINT idempotency_keys_response_body_bounded CHECK (octet_length(response_body) <= 65536),
    CONSTRAINT idempotency_keys_expires_after_completion CHECK (expires_at > completed_at),
    CONSTRAINT idempotency_keys_person_has_reason CHECK ((needs_person_at IS NULL) = (needs_person_reason IS NULL)),
    -- The request is cleared with the command's secrets when the key is completed.
    CONSTRAINT idempotency_keys_sent_has_request CHECK (
        provider_first_sent_at IS NULL OR (
            provider_key IS NOT NULL AND (provider_request IS NOT NULL OR status = 'completed')
        )
    )
);

CREATE INDEX idempotency_keys_expiry ON idempotency_keys (expires_at) WHERE status = 'completed';
-- Said by lease and person and not by status, so that what asks for one client's keys in progress cannot be answered from here.
CREATE INDEX idempotency_keys_lease ON idempotency_keys (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX idempotency_keys_for_person ON idempotency_keys (resource_id) WHERE needs_person_at IS NOT NULL;
-- Of the whole key, though only the client is asked for: being small, it is also chosen for one key, and then has to find just that.
CREATE INDEX idempotency_keys_in_progress ON idempotency_keys (client_id, operation, key) WHERE status = 'in_progress';

COMMENT ON TABLE idempotency_keys IS 'One row per key that a client used for an operation, until it expires.';
COMMENT ON COLUMN idempotency_keys.client_id IS 'The account that owns the key; not the credential it called with.';
COMMENT ON COLUMN idempotency_keys.operation IS 'Named state change of the API; part of the key''s scope.';
COMMENT ON COLUMN idempotency_keys.key IS 'The client''s Idempotency-Key, unquoted.';
COMMENT ON COLUMN idempotency_keys.request_hash IS 'SHA-256 over the canonical encoding of the command.';
COMMENT ON COLUMN idempotency_keys.hash_version IS 'Version of that encoding.';
COMMENT ON COLUMN idempotency_keys.command IS 'The intent itself, so that another hash version can still compare; cleared of secrets on completion.';
COMMENT ON COLUMN idempotency_keys.status IS 'in_progress | completed.';
COMMENT ON COLUMN idempotency_keys.recovery_point IS 'How far the execution is known to have come.';
COMMENT ON COLUMN idempotency_keys.fence IS 'Number of the current acquisition; every write of the owner names it.';
COMMENT ON COLUMN idempotency_keys.lease_until IS 'Until when the owner is believed to be at work; null once completed.';
COMMENT ON COLUMN idempotency_keys.attempts IS 'Acquisitions so far, the first included.';
COMMENT ON COLUMN idempotency_keys.next_check_at IS 'When recovery looks at the key again; null means as soon as the lease is dead.';
COMMENT ON COLUMN idempotency_keys.needs_person_at IS 'When recovery gave up and asked for a person.';
COMMENT ON COLUMN idempotency_keys.needs_person_reason IS 'Why a person is needed.';
COMMENT ON COLUMN idempotency_keys.resource_id IS 'The resource that the operation creates or changes.';
COMMENT ON COLUMN idempotency_keys.provider_key IS 'Idempotency key towards the provider; wins over one derived anew.';
COMMENT ON COLUMN idempotency_keys.provider_request IS 'The provider request, byte for byte as sent.';
COMMENT ON COLUMN idempotency_keys.provider_reference IS 'The provider''s own name for what it was asked to do.';
COMMENT ON COLUMN idempotency_keys.provider_first_sent_at IS 'When the request was first about to be sent; the send window counts from here.';
COMMENT ON COLUMN idempotency_keys.request_id IS 'The request that claimed the key.';
COMMENT ON COLUMN idempotency_keys.trace_context IS 'W3C traceparent of that request.';
COMMENT ON COLUMN idempotency_keys.response_code IS 'HTTP status to replay.';
COMMENT ON COLUMN idempotency_keys.response_headers IS 'Headers to replay, an array of [name, value] pairs in order.';
COMMENT ON COLUMN idempotency_keys.response_body IS 'Body to replay, byte for byte.';
COMMENT ON COLUMN idempotency_keys.created_at IS 'When the key was claimed first.';
COMMENT ON COLUMN idempotency_keys.completed_at IS 'When the outcome became final.';
COMMENT ON COLUMN idempotency_keys.expires_at IS 'From when the key is no longer replayed; counts from completion.';
