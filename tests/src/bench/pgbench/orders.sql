-- What an order has to read and to write, statement by statement: the key is looked up, and key, order and event are
-- written in one transaction. The sizes are those that the API writes.
\set n random(1, 9000000000000000000)
BEGIN;
SELECT request_hash, hash_version, command, request_id, resource_id, status, expires_at,
       response_code, response_headers, response_body
FROM idempotency_keys
WHERE client_id = 'acme' AND operation = 'orders.create' AND key = 'pgbench-' || :n::TEXT;
INSERT INTO idempotency_keys (
    client_id, operation, key, request_hash, hash_version, command, resource_id, request_id,
    status, recovery_point, response_code, response_headers, response_body, completed_at, expires_at
) VALUES (
    'acme', 'orders.create', 'pgbench-' || :n::TEXT,
    '\xee8f0dcd6a52f6d9399b88d29d89783743ea81180f93ba466b08afaa591edf98', 1,
    '{"amount": 1250, "currency": "EUR", "reference": "bench"}',
    md5(:n::TEXT)::UUID, gen_random_uuid(), 'completed', 'completed', 201,
    '[["content-type", "application/json"], ["location", "/v1/orders/2c26b46b-68ff-8c68-bf99-453c1d304134"]]',
    '{"id":"2c26b46b-68ff-8c68-bf99-453c1d304134","status":"placed","reference":"bench","amount":1250,"currency":"EUR"}',
    clock_timestamp(), clock_timestamp() + INTERVAL '24 hours'
);
INSERT INTO orders (order_id, client_id, operation, idempotency_key, reference, amount, currency, status)
VALUES (md5(:n::TEXT)::UUID, 'acme', 'orders.create', 'pgbench-' || :n::TEXT, 'bench', 1250, 'EUR', 'placed');
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
VALUES (
    gen_random_uuid(), 'order', md5(:n::TEXT)::UUID::TEXT, 1, 'OrderPlaced',
    '{"amount": 1250, "currency": "EUR", "event_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "order_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "client_id": "acme", "reference": "bench"}',
    '{}'
);
COMMIT;
