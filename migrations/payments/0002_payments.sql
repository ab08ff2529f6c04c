-- Payments: money moved by a provider that is in no transaction of ours.

CREATE TABLE payments (
    payment_id UUID NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    operation TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C" NOT NULL,
    reference TEXT NOT NULL,
    amount BIGINT NOT NULL,
    currency TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    provider TEXT COLLATE "C" NOT NULL,
    provider_key TEXT COLLATE "C" NOT NULL,
    provider_reference TEXT COLLATE "C",
    decline_code TEXT COLLATE "C",
    version BIGINT NOT NULL DEFAULT 0,
    refund_reserved BIGINT NOT NULL DEFAULT 0,
    created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    settled_at TIMESTAMPTZ,

    CONSTRAINT payments_pkey PRIMARY KEY (payment_id),
    -- For the payment's whole life, longer than the key's: a retry after the key expired is answered, never executed.
    CONSTRAINT payments_idempotency_key_once UNIQUE (client_id, operation, idempotency_key),
    CONSTRAINT payments_provider_key_once UNIQUE (provider_key),
    CONSTRAINT payments_reference_bounded CHECK (octet_length(reference) BETWEEN 1 AND 255),
    CONSTRAINT payments_amount_positive CHECK (amount > 0),
    CONSTRAINT payments_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT payments_status_known CHECK (status IN ('processing', 'succeeded', 'declined', 'canceled')),
    CONSTRAINT payments_settled_has_time CHECK ((status = 'processing') = (settled_at IS NULL)),
    -- A payment in processing is no outcome yet: it has no event, and so no version.
    CONSTRAINT payments_settled_has_version CHECK ((status = 'processing') = (version = 0)),
    CONSTRAINT payments_succeeded_has_reference CHECK (status <> 'succeeded' OR provider_reference IS NOT NULL),
    CONSTRAINT payments_declined_has_code CHECK ((status = 'declined') = (decline_code IS NOT NULL)),
    -- The arithmetic of refunds: however many ask at a time, the row is raised by one after the other, and never past this.
    CONSTRAINT payments_refund_reserved_within_amount CHECK (refund_reserved BETWEEN 0 AND amount),
    CONSTRAINT payments_refund_needs_success CHECK (refund_reserved = 0 OR status = 'succeeded'),
    CONSTRAINT payments_provider_strings_bounded CHECK (
        octet_length(provider) BETWEEN 1 AND 63 AND octet_length(provider_key) BETWEEN 1 AND 255
        AND octet_length(provider_reference) <= 255 AND octet_length(decline_code) <= 63
    )
);

CREATE INDEX payments_newest ON payments (client_id, created_at, payment_id);

COMMENT ON TABLE payments IS 'Payments that clients asked for, whatever became of them.';
COMMENT ON COLUMN payments.payment_id IS 'Derived from namespace, client, operation and key, so that a repeat names the same payment.';
COMMENT ON COLUMN payments.client_id IS 'The account that asked for it.';
COMMENT ON COLUMN payments.operation IS 'The operation that created it; part of the key''s scope.';
COMMENT ON COLUMN payments.idempotency_key IS 'The key it was asked for under.';
COMMENT ON COLUMN payments.reference IS 'The client''s own name for it.';
COMMENT ON COLUMN payments.amount IS 'In minor units of the currency.';
COMMENT ON COLUMN payments.currency IS 'ISO 4217 code.';
COMMENT ON COLUMN payments.status IS 'processing | succeeded | declined | canceled.';
COMMENT ON COLUMN payments.provider IS 'The provider that it was begun with, such as grpc or stripe:live; no other is asked about it or its refunds.';
COMMENT ON COLUMN payments.provider_key IS 'The idempotency key that the provider was given.';
COMMENT ON COLUMN payments.provider_reference IS 'The provider''s own name for the charge.';
COMMENT ON COLUMN payments.decline_code IS 'Why the provider declined.';
COMMENT ON COLUMN payments.version IS 'Version of the aggregate; its events carry it. 0 while processing.';
COMMENT ON COLUMN payments.refund_reserved IS 'How much of the amount refunds have used up: those that succeeded, and those whose outcome is open.';
COMMENT ON COLUMN payments.created_at IS 'When it was asked for.';
COMMENT ON COLUMN payments.settled_at IS 'When its outcome was written.';

CREATE TABLE provider_answers (
    answer_id UUID NOT NULL DEFAULT gen_random_uuid(),
    payment_id UUID NOT NULL,
    refund_id UUID,
    provider_key TEXT COLLATE "C" NOT NULL,
    call TEXT COLLATE "C" NOT NULL,
    outcome TEXT COLLATE "C" NOT NULL,
    provider_reference TEXT COLLATE "C",
    decline_code TEXT COLLATE "C",
    fence BIGINT NOT NULL,
    answered_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT provider_answers_pkey PRIMARY KEY (answer_id),
    CONSTRAINT provider_answers_call_known CHECK (
        call IN ('charge', 'get', 'cancel', 'refund', 'get_refund', 'webhook', 'operator')
    ),
    CONSTRAINT provider_answers_call_fits_subject CHECK (
        call IN ('operator', 'webhook') OR (call IN ('refund', 'get_refund')) = (refund_id IS NOT NULL)
    ),
    -- There is no fence for a refund.
    CONSTRAINT provider_answers_fenced_is_payment CHECK (outcome <> 'fenced' OR refund_id IS NULL),
    CONSTRAINT provider_answers_outcome_known CHECK (outcome IN ('succeeded', 'declined', 'fenced')),
    CONSTRAINT provider_answers_succeeded_has_reference CHECK (outcome <> 'succeeded' OR provider_reference IS NOT NULL),
    CONSTRAINT provider_answers_declined_has_code CHECK (outcome <> 'declined' OR decline_code IS NOT NULL),
    CONSTRAINT provider_answers_strings_bounded CHECK (
        octet_length(provider_key) BETWEEN 1 AND 255
        AND octet_length(provider_reference) <= 255 AND octet_length(decline_code) <= 63
    )
);

CREATE INDEX provider_answers_payment ON provider_answers (payment_id, answered_at) WHERE refund_id IS NULL;
CREATE INDEX provider_answers_refund ON provider_answers (refund_id, answered_at) WHERE refund_id IS NOT NULL;

COMMENT ON TABLE provider_answers IS 'Evidence, only ever appended to: every definitive answer of the provider, whoever received it.';
COMMENT ON COLUMN provider_answers.answer_id IS 'Identity of the entry; of what the provider told by itself derived from its event, so that a repeat is none.';
COMMENT ON COLUMN provider_answers.payment_id IS 'The payment it is about, or whose refund it is about.';
COMMENT ON COLUMN provider_answers.refund_id IS 'The refund it is about; null when it is about the payment itself.';
COMMENT ON COLUMN provider_answers.provider_key IS 'The key that the provider was asked under.';
COMMENT ON COLUMN provider_answers.call IS 'charge | get | cancel | refund | get_refund | webhook | operator: what was answered, or how it was told.';
COMMENT ON COLUMN provider_answers.outcome IS 'succeeded | declined | fenced; of a refund that failed: declined.';
COMMENT ON COLUMN provider_answers.provider_reference IS 'The provider''s own name for the charge or refund.';
COMMENT ON COLUMN provider_answers.decline_code IS 'Why the provider declined, or the refund failed.';
COMMENT ON COLUMN provider_answers.fence IS 'The acquisition under which it was asked, stale or not; 0 when nobody asked.';
COMMENT ON COLUMN provider_answers.answered_at IS 'When it was written down.';
