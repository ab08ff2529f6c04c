"""Writes the cases' events into the outbox, each in the transaction of the shipment that it tells of.

Usage: produce.py CASES, with DATABASE_URL set. Prints for each refused event, in a line, the constraint that refused it.
"""

import json
import os
import sys

import psycopg


def ship(connection, event):
    """Changes a shipment and tells of it, in one transaction. Sets the columns that the event names and no others."""
    columns, places = ", ".join(event), ", ".join(["%s"] * len(event))
    with connection.transaction():
        connection.execute("INSERT INTO shipments (shipment_id) VALUES (%s)", (event["aggregate_id"],))
        connection.execute(f"INSERT INTO outbox ({columns}) VALUES ({places})", list(event.values()))


with open(sys.argv[1], encoding="utf-8") as file:
    cases = json.load(file)
with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
    for event in cases["accepted"]:
        ship(connection, event)
    for event in cases["refused"].values():
        try:
            ship(connection, event)
            print("accepted")
        except psycopg.errors.IntegrityError as error:
            print(error.diag.constraint_name)
