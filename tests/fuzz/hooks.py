"""Hooks of schemathesis: what a client knows that a document cannot tell, and a tally of every answer.

A client reads what it has made, asks of keys that it has used, and begins a page where the last one ended. So valid
requests are given such ids, keys and cursors, most of the time; invalid ones go out as they were generated.
"""

import atexit
import json
import os
import random
import threading
import uuid

import schemathesis
from schemathesis import GenerationMode

chance = random.Random(int(os.environ["SEMEL_FUZZ_SEED"]))
lock = threading.Lock()
# By path of the collection: the ids that were made. By operation: the keys that were used. By list: the cursors met.
made, used, cursors = {}, {}, {}
# By operation, then by status: how many.
tally = {}

KEY = "Idempotency-Key"
REFUNDS = "/v1/payments/{id}/refunds"
OPERATIONS = {"/v1/orders": "orders.create", "/v1/payments": "payments.create", REFUNDS: "refunds.create"}


def mostly():
    return chance.random() < 0.8


@schemathesis.hook
def before_call(context, case, kwargs):
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE:
        return
    path = case.operation.path
    with lock:
        if case.method == "POST" and mostly():
            case.headers[KEY] = str(uuid.uuid4())
        if "id" in case.path_parameters and made.get(collection(path)) and mostly():
            case.path_parameters["id"] = chance.choice(made[collection(path)])
        if case.method == "POST" and path == REFUNDS and mostly():
            # Of a payment, only so much is left as it took.
            case.body["amount"] = 1
        operation = case.path_parameters.get("operation")
        if operation and used.get(operation) and mostly():
            case.headers[KEY] = chance.choice(used[operation])
        if case.query and "cursor" in case.query and mostly():
            if cursors.get(path):
                case.query["cursor"] = chance.choice(cursors[path])
            else:
                del case.query["cursor"]


def collection(path):
    """Returns the path under which the resources lie whose id this route takes."""
    return path.rsplit("/{", 1)[0]


@schemathesis.hook
def after_call(context, case, response):
    path = case.operation.path
    with lock:
        # What was sent with another method than the operation's is answered by no operation.
        label = case.operation.label if case.method == case.operation.method.upper() else "other methods"
        statuses = tally.setdefault(label, {})
        status = str(response.status_code)
        statuses[status] = statuses.get(status, 0) + 1
        if label == "other methods" or not 200 <= response.status_code < 300:
            return
        if case.method == "POST":
            where, made_now = response.headers["location"][0].rsplit("/", 1)
            made.setdefault(where, []).append(made_now)
            sent = response.request.headers.get(KEY)
            used.setdefault(OPERATIONS.get(path, path), []).append(sent.decode() if isinstance(sent, bytes) else sent)
        elif "cursor" in json.dumps([parameter.name for parameter in case.operation.query]):
            cursor = response.json().get("next_cursor")
            if cursor:
                cursors.setdefault(path, []).append(cursor)


def write():
    with open(os.environ["SEMEL_FUZZ_TALLY"], "w", encoding="utf-8") as file:
        json.dump(tally, file)


atexit.register(write)
