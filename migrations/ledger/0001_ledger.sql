-- A double-entry ledger: every transaction's entries sum to zero per currency, which the database enforces.

CREATE TABLE ledger_transactions (
    transaction_id UUID NOT NULL DEFAULT gen_random_uuid(),
    event_id UUID NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    source_type TEXT COLLATE "C" NOT NULL,
    source_id TEXT COLLATE "C" NOT NULL,
    posted_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT ledger_transactions_pkey PRIMARY KEY (transaction_id),
    CONSTRAINT ledger_transactions_client_id_bounded CHECK (octet_length(client_id) BETWEEN 1 AND 63),
    CONSTRAINT ledger_transactions_source_bounded CHECK (
        octet_length(source_type) BETWEEN 1 AND 127 AND octet_length(source_id) BETWEEN 1 AND 127
    )
);

CREATE INDEX ledger_transactions_source ON ledger_transactions (source_type, source_id);
CREATE INDEX ledger_transactions_client ON ledger_transactions (client_id);

COMMENT ON TABLE ledger_transactions IS 'One row per event that was booked.';
COMMENT ON COLUMN ledger_transactions.transaction_id IS 'Identity of the booking.';
COMMENT ON COLUMN ledger_transactions.event_id IS 'The event that was booked. Not unique on purpose: once-only effects are the inbox''s work, and a double booking must show.';
COMMENT ON COLUMN ledger_transactions.client_id IS 'The account it concerns.';
COMMENT ON COLUMN ledger_transactions.source_type IS 'order | payment | refund: what the event tells of.';
COMMENT ON COLUMN ledger_transactions.source_id IS 'Its id.';
COMMENT ON COLUMN ledger_transactions.posted_at IS 'When it was booked.';

CREATE TABLE ledger_entries (
    transaction_id UUID NOT NULL,
    account TEXT COLLATE "C" NOT NULL,
    currency TEXT COLLATE "C" NOT NULL,
    amount BIGINT NOT NULL,

    CONSTRAINT ledger_entries_pkey PRIMARY KEY (transaction_id, account, currency),
    CONSTRAINT ledger_entries_transaction_id_fkey FOREIGN KEY (transaction_id)
        REFERENCES ledger_transactions (transaction_id),
    CONSTRAINT ledger_entries_account_known CHECK (account IN ('cash', 'receivables', 'sales')),
    CONSTRAINT ledger_entries_currency_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT ledger_entries_amount_not_zero CHECK (amount <> 0)
);

COMMENT ON TABLE ledger_entries IS 'Debits (positive) and credits (negative).';
COMMENT ON COLUMN ledger_entries.transaction_id IS 'The booking it belongs to.';
COMMENT ON COLUMN ledger_entries.account IS 'cash | receivables | sales, of the transaction''s client.';
COMMENT ON COLUMN ledger_entries.currency IS 'ISO 4217 code.';
COMMENT ON COLUMN ledger_entries.amount IS 'In minor units; debit positive, credit negative.';

CREATE FUNCTION ledger_transaction_balances() RETURNS TRIGGER LANGUAGE plpgsql AS $$
DECLARE
    touched UUID;
BEGIN
    -- An entry that is moved leaves one booking and joins another.
    FOREACH touched IN ARRAY CASE TG_OP
        WHEN 'INSERT' THEN ARRAY[NEW.transaction_id]
        WHEN 'DELETE' THEN ARRAY[OLD.transaction_id]
        ELSE ARRAY[OLD.transaction_id, NEW.transaction_id]
    END LOOP
        IF EXISTS (SELECT FROM ledger_transactions WHERE transaction_id = touched)
            AND NOT EXISTS (SELECT FROM ledger_entries WHERE transaction_id = touched)
        THEN
            RAISE EXCEPTION 'ledger transaction % has no entries', touched
                USING ERRCODE = 'check_violation', CONSTRAINT = 'ledger_transactions_entered';
        END IF;
        IF EXISTS (
            SELECT 1 FROM ledger_entries WHERE transaction_id = touched GROUP BY currency HAVING sum(amount) <> 0
        ) THEN
            RAISE EXCEPTION 'ledger transaction % does not balance', touched
                USING ERRCODE = 'check_violation', CONSTRAINT = 'ledger_entries_balance';
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION ledger_transaction_balances IS 'Refuses, at commit, a booking without entries, or whose entries do not sum to zero.';

CREATE CONSTRAINT TRIGGER ledger_entries_balance
    AFTER INSERT OR UPDATE OR DELETE ON ledger_entries
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION ledger_transaction_balances();

CREATE CONSTRAINT TRIGGER ledger_transactions_entered
    AFTER INSERT OR UPDATE OF transaction_id ON ledger_transactions
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION ledger_transaction_balances();

CREATE FUNCTION ledger_is_not_truncated() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is not truncated' USING ERRCODE = 'object_not_in_prerequisite_state';
END
$$;
COMMENT ON FUNCTION ledger_is_not_truncated IS 'Refuses TRUNCATE, which no trigger of a row sees.';

CREATE TRIGGER ledger_transactions_kept
    BEFORE TRUNCATE ON ledger_transactions FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_not_truncated();
CREATE TRIGGER ledger_entries_kept
    BEFORE TRUNCATE ON ledger_entries FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_not_truncated();
