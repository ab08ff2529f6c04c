-- Orders: a state change that lives wholly in this database.

CREATE TABLE orders (
    order_id UUID NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    operation TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C" NOT NULL,
    reference TEXT NOT NULL,
    amount BIGINT NOT NULL,
    currency TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL DEFAULT 1,
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT orders_pkey PRIMARY KEY (order_id),
    -- For the order's whole life, longer than the key's: a retry after the key expired is answered, never executed.
    CONSTRAINT orders_idempotency_key_once UNIQUE (client_id, operation, idempotency_key),
    CONSTRAINT orders_reference_bounded CHECK (octet_length(reference) BETWEEN 1 AND 255),
    CONSTRAINT orders_amount_positive CHECK (amount > 0),
    CONSTRAINT orders_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT orders_status_known CHECK (status IN ('placed')),
    CONSTRAINT orders_version_positive CHECK (version > 0)
);

CREATE INDEX orders_newest ON orders (client_id, created_at, order_id);

COMMENT ON TABLE orders IS 'Orders that clients placed.';
COMMENT ON COLUMN orders.order_id IS 'Derived from namespace, client, operation and key, so that a repeat names the same order.';
COMMENT ON COLUMN orders.client_id IS 'The account that placed it.';
COMMENT ON COLUMN orders.operation IS 'The operation that created it; part of the key''s scope.';
COMMENT ON COLUMN orders.idempotency_key IS 'The key it was placed under.';
COMMENT ON COLUMN orders.reference IS 'The client''s own name for it.';
COMMENT ON COLUMN orders.amount IS 'In minor units of the currency.';
COMMENT ON COLUMN orders.currency IS 'ISO 4217 code.';
COMMENT ON COLUMN orders.status IS 'placed.';
COMMENT ON COLUMN orders.version IS 'Version of the aggregate; its events carry it.';
COMMENT ON COLUMN orders.created_at IS 'When it was placed.';
