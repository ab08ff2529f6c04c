-- What the ledger has to write for an order, statement by statement as it does: the event is recorded as processed, and
-- booking, entries and the event that tells of it are written in one transaction. The sizes are those that the ledger writes.
\set n random(1, 9000000000000000000)
BEGIN;
INSERT INTO processed_events (consumer, event_id)
SELECT 'ledger', event_id FROM unnest(ARRAY[md5(:n::TEXT)::UUID]) AS given (event_id) ORDER BY event_id
ON CONFLICT DO NOTHING
RETURNING event_id;
WITH booked AS (
    INSERT INTO ledger_transactions (event_id, client_id, source_type, source_id)
    VALUES (md5(:n::TEXT)::UUID, 'pgbench', 'order', md5(:n::TEXT)::UUID::TEXT)
    RETURNING transaction_id
), entered AS (
    INSERT INTO ledger_entries (transaction_id, account, currency, amount)
    SELECT transaction_id, account, 'EUR', amount
    FROM booked, (VALUES ('receivables', 1250::BIGINT), ('sales', -1250::BIGINT)) AS entries (account, amount)
)
SELECT transaction_id FROM booked;
INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, headers)
VALUES (
    gen_random_uuid(), 'ledger_transaction', md5(:n::TEXT)::UUID::TEXT, 1, 'LedgerPosted',
    '{"amount": 1250, "currency": "EUR", "event_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "client_id": "acme", "source_id": "2c26b46b-68ff-8c68-bf99-453c1d304134", "source_type": "order", "transaction_id": "2c26b46b-68ff-8c68-bf99-453c1d304134"}',
    '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
);
COMMIT;
