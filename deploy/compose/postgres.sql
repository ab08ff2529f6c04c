-- The database of the payments is made by the image; this is the ledger's own.
CREATE DATABASE ledger;
