"""Consumes the queue QUEUE at AMQP_URL until it is ended.

Prints "ready", and then each message as one JSON object a line: properties, headers, and the body's text.
"""

import json
import os

import pika

PROPERTIES = ["message_id", "type", "content_type", "app_id", "delivery_mode", "timestamp"]


def say(line):
    print(line, flush=True)


def handle(channel, delivery, properties, body):
    message = {name: getattr(properties, name) for name in PROPERTIES}
    message |= {"routing_key": delivery.routing_key, "headers": properties.headers, "body": body.decode()}
    say(json.dumps(message))
    channel.basic_ack(delivery.delivery_tag)


channel = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"])).channel()
channel.basic_consume(os.environ["QUEUE"], handle)
say("ready")
channel.start_consuming()
