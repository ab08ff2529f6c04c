// Writes the cases' events into the outbox, each in the transaction of the shipment that it tells of.
//
// Usage: produce.js CASES, with DATABASE_URL set. Prints for each refused event, in a line, the constraint that refused it.

import { readFileSync } from "node:fs";
import pg from "pg";

const cases = JSON.parse(readFileSync(process.argv[2], "utf8"));
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });

// Changes a shipment and tells of it, in one transaction. Sets the columns that the event names and no others.
async function ship(event) {
  const columns = Object.keys(event);
  const places = columns.map((_, at) => `$${at + 1}`);
  await client.query("BEGIN");
  try {
    await client.query("INSERT INTO shipments (shipment_id) VALUES ($1)", [event.aggregate_id]);
    await client.query(`INSERT INTO outbox (${columns}) VALUES (${places})`, Object.values(event));
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  }
}

await client.connect();
for (const event of cases.accepted) await ship(event);
for (const event of Object.values(cases.refused)) {
  try {
    await ship(event);
    console.log("accepted");
  } catch (error) {
    console.log(error.constraint);
  }
}
await client.end();
