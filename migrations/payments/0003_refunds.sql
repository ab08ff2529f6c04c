-- Refunds: money of a payment given back, by the same provider.

CREATE TABLE refunds (
    refund_id UUID NOT NULL,
    payment_id UUID NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    operation TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C" NOT NULL,
    amount BIGINT NOT NULL,
    currency TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    provider_key TEXT COLLATE "C",
    provider_reference TEXT COLLATE "C",
    failure_code TEXT COLLATE "C",
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    settled_at TIMESTAMPTZ,

    CONSTRAINT refunds_pkey PRIMARY KEY (refund_id),
    CONSTRAINT refunds_payment_id_fkey FOREIGN KEY (payment_id) REFERENCES payments (payment_id),
    -- For the refund's whole life, longer than the key's: a retry after the key expired is answered, never executed.
    CONSTRAINT refunds_idempotency_key_once UNIQUE (client_id, operation, idempotency_key),
    CONSTRAINT refunds_provider_key_once UNIQUE (provider_key),
    CONSTRAINT refunds_amount_positive CHECK (amount > 0),
    CONSTRAINT refunds_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT refunds_status_known CHECK (status IN ('processing', 'succeeded', 'failed', 'refused')),
    CONSTRAINT refunds_settled_has_time CHECK ((status = 'processing') = (settled_at IS NULL)),
    -- One that was refused here was never asked for at the provider.
    CONSTRAINT refunds_asked_has_provider_key CHECK ((status = 'refused') = (provider_key IS NULL)),
    CONSTRAINT refunds_succeeded_has_reference CHECK (status <> 'succeeded' OR provider_reference IS NOT NULL),
    CONSTRAINT refunds_failed_has_code CHECK ((status = 'failed') = (failure_code IS NOT NULL)),
    CONSTRAINT refunds_provider_strings_bounded CHECK (
        octet_length(provider_key) BETWEEN 1 AND 255
        AND octet_length(provider_reference) <= 255 AND octet_length(failure_code) <= 63
    )
);

CREATE INDEX refunds_newest ON refunds (payment_id, created_at, refund_id);
CREATE INDEX refunds_newest_of_client ON refunds (client_id, created_at, refund_id);

COMMENT ON TABLE refunds IS 'Refunds that clients asked for, whatever became of them; several per payment.';
COMMENT ON COLUMN refunds.refund_id IS 'Derived from namespace, client, operation and key, so that a repeat names the same refund.';
COMMENT ON COLUMN refunds.payment_id IS 'The payment whose money it gives back.';
COMMENT ON COLUMN refunds.client_id IS 'The account that asked for it, and that made the payment.';
COMMENT ON COLUMN refunds.operation IS 'The operation that created it; part of the key''s scope.';
COMMENT ON COLUMN refunds.idempotency_key IS 'The key it was asked for under.';
COMMENT ON COLUMN refunds.amount IS 'In minor units of the currency.';
COMMENT ON COLUMN refunds.currency IS 'ISO 4217 code, the payment''s.';
COMMENT ON COLUMN refunds.status IS 'processing | succeeded | failed | refused: larger than what was left.';
COMMENT ON COLUMN refunds.provider_key IS 'The idempotency key that the provider was given; null when it was refused here.';
COMMENT ON COLUMN refunds.provider_reference IS 'The provider''s own name for the refund.';
COMMENT ON COLUMN refunds.failure_code IS 'Why the provider did not give the money back.';
COMMENT ON COLUMN refunds.created_at IS 'When it was asked for.';
COMMENT ON COLUMN refunds.settled_at IS 'When its outcome was written.';
