-- Who may call, and what people did by hand.

CREATE TABLE api_clients (
    client_id TEXT COLLATE "C" NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT api_clients_pkey PRIMARY KEY (client_id),
    CONSTRAINT api_clients_client_id_name CHECK (client_id ~ '^[a-z0-9][a-z0-9_-]{0,62}$')
);

COMMENT ON TABLE api_clients IS 'The accounts that call the API and own keys and resources.';
COMMENT ON COLUMN api_clients.client_id IS 'The account''s name.';
COMMENT ON COLUMN api_clients.created_at IS 'When it was created.';

CREATE TABLE api_credentials (
    credential_id TEXT COLLATE "C" NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    secret_hash BYTEA NOT NULL,
    scopes TEXT[] COLLATE "C",
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    revoked_at TIMESTAMPTZ,

    CONSTRAINT api_credentials_pkey PRIMARY KEY (credential_id),
    CONSTRAINT api_credentials_client_id_fkey FOREIGN KEY (client_id) REFERENCES api_clients (client_id),
    CONSTRAINT api_credentials_credential_id_name CHECK (credential_id ~ '^[0-9a-f]{16}$'),
    CONSTRAINT api_credentials_secret_hash_sha256 CHECK (octet_length(secret_hash) = 32),
    CONSTRAINT api_credentials_scopes_some CHECK (cardinality(scopes) BETWEEN 1 AND 64)
);

CREATE INDEX api_credentials_client_id ON api_credentials (client_id);

COMMENT ON TABLE api_credentials IS 'Bearer credentials; the secret itself is never stored.';
COMMENT ON COLUMN api_credentials.credential_id IS 'The public part of the token.';
COMMENT ON COLUMN api_credentials.client_id IS 'The account it speaks for.';
COMMENT ON COLUMN api_credentials.secret_hash IS 'SHA-256 of the secret part: 256 random bits need no slow hash.';
COMMENT ON COLUMN api_credentials.scopes IS 'What it may be used for; null for everything.';
COMMENT ON COLUMN api_credentials.created_at IS 'When it was created.';
COMMENT ON COLUMN api_credentials.revoked_at IS 'From when it is refused.';

CREATE TABLE operator_actions (
    action_id UUID NOT NULL DEFAULT gen_random_uuid(),
    acted_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason TEXT NOT NULL,

    CONSTRAINT operator_actions_pkey PRIMARY KEY (action_id),
    CONSTRAINT operator_actions_actor_bounded CHECK (octet_length(actor) BETWEEN 1 AND 255),
    CONSTRAINT operator_actions_action_bounded CHECK (octet_length(action) BETWEEN 1 AND 127),
    CONSTRAINT operator_actions_subject_bounded CHECK (octet_length(subject) BETWEEN 1 AND 1024),
    CONSTRAINT operator_actions_reason_bounded CHECK (octet_length(reason) BETWEEN 1 AND 4096)
);

COMMENT ON TABLE operator_actions IS 'Audit: what a person did by command, and why.';
COMMENT ON COLUMN operator_actions.action_id IS 'Identity of the entry.';
COMMENT ON COLUMN operator_actions.acted_at IS 'When.';
COMMENT ON COLUMN operator_actions.actor IS 'Who.';
COMMENT ON COLUMN operator_actions.action IS 'Which command.';
COMMENT ON COLUMN operator_actions.subject IS 'On what.';
COMMENT ON COLUMN operator_actions.reason IS 'Why, in the actor''s words.';
