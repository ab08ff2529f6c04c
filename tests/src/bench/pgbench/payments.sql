-- What a payment has to read and to write, statement by statement: before the provider is asked, the key is looked up, and
-- key and payment are written; afterwards the provider's answer, the key, the payment and the event. The provider is not
-- asked here. The sizes are those that the API writes.
\set n random(1, 9000000000000000000)
BEGIN;
SELECT request_hash, hash_version, command, request_id, resource_id, status, expires_at,
       response_code, response_headers, response_body
FROM idempotency_keys
WHERE client_id = 'acme' AND operation = 'payments.create' AND key = 'pgbench-' || :n::TEXT;
INSERT INTO idempotency_keys (
    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
    status, recovery_point, lease_until, provider_key, provider_request, provider_first_sent_at
) VALUES (
    'acme', 'payments.create', 'pgbench-' || :n::TEXT,
    '\xee8f0dcd6a52f6d9399b88d29d89783743ea81180f93ba466b08afaa591edf98', 1,
    '{"amount": 1250, "source": "tok_good", "currency": "EUR", "reference": "bench"}',
    md5(:n::TEXT)::UUID, gen_random_uuid(), 'in_progress', 'sent', clock_timestamp() + INTERVAL '30 seconds',
    md5('provider' || :n::TEXT), '\x08e209120345555222086f6b5f676f6f642a2432633236623436622d363866662d386336382d626639392d343533633164333034313334',
    clock_timestamp()
);
INSERT INTO payments (
    payment_id, client_id, operation, idempotency_key, reference, amount, currency, status, provider, provider_key
) VALUES (
    md5(:n::TEXT)::UUID, 'acme', 'payments.create', 'pgbench-' || :n::TEXT, 'bench', 1250, 'EUR', 'processing', 'grpc',
    md5('provider' || :n::TEXT)
);
COMMIT;
BEGIN;
INSERT INTO provider_answers (payment_id, provider_key, call, outcome, provider_reference, fence)
VALUES (md5(:n::TEXT)::UUID, md5('provider' || :n::TEXT), 'charge', 'succeeded', 'ch_' || md5('provider' || :n::TEXT), 1);
UPDATE idempotency_keys
SET status = 'completed', recovery_point = 'completed', lease_until = NULL, command = command - 'source',
    provider_request = NULL, provider_reference = 'ch_' || md5('provider' || :n::TEXT), response_code = 201,
    response_headers = '[["content-type", "application/json"], ["location", "/v1/payments/2c26b46b-68ff-8c68-bf99-453c1d304134"]]',
    response_body = '{"id":"2c26b46b-68ff-8c68-bf99-453c1d304134","status":"succeeded","reference":"bench","amount":1250,"currency":"EUR"}',
    completed_at = clock_timestamp(), expires_at = clock_timestamp() + INTERVAL '24 hours'
WHERE client_id = 'acme' AND operation = 'payments.create' AND key = 'pgbench-' || :n::TEXT AND status = 'in_progress';
UPDATE payments
SET status = 'succeeded', version = version + 1, provider_reference = 'ch_' || md5('provider' || :n::TEXT),
    settled_at = clock_timestamp()
WHERE payment_id = md5(:n::TEXT)::UUID AND status = 'processing';
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
VALUES (
    gen_random_uuid(), 'payment', md5(:n::TEXT)::UUID::TEXT, 1, 'PaymentCreated',
    '{"amount": 1250, "currency": "EUR", "event_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "client_id": "acme", "reference": "bench", "payment_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "provider_reference": "ch_2c26b46b-68ff-8c68-bf99-453c1d304134"}',
    '{}'
);
COMMIT;
