"""Count the events in topic `order-events` as a consumer of committed records."""

import os
from uuid import uuid4

from confluent_kafka import Consumer

consumer = Consumer(
    {
        "bootstrap.servers": os.environ["MARSHAL_BOOTSTRAP_SERVERS"],
        "group.id": f"count-{uuid4()}",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
    }
)
consumer.subscribe(["order-events"])
ids: list[object] = []
while messages := consumer.consume(500, timeout=10):
    ids += [dict(message.headers() or [])["marshal-outbox-id"] for message in messages]
consumer.close()
print(f"{len(ids):,} events, {len(set(ids)):,} different ones")
