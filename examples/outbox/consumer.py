"""Read topic `delays` into a SQLite table, each event once, until interrupted.

The header `marshal-outbox-id` identifies an event, and is a unique column of the table.
The consumer commits its offsets after the table's transaction. After a crash it may
therefore read an event again, which only increases `deliveries`.
"""

import os
import signal
import sqlite3
import sys
from contextlib import closing

from confluent_kafka import Consumer, Message

TABLE = """
    CREATE TABLE IF NOT EXISTS delays (
        place INTEGER PRIMARY KEY, id TEXT UNIQUE, carrier TEXT, event TEXT,
        deliveries INT DEFAULT 1
    )
"""
ONCE = """
    INSERT INTO delays (id, carrier, event)
    VALUES (CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT))
    ON CONFLICT (id) DO UPDATE SET deliveries = deliveries + 1
"""
SETTINGS = {
    "bootstrap.servers": os.environ["MARSHAL_BOOTSTRAP_SERVERS"],
    "group.id": "delays-reader",
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    # librdkafka's default; clients in Java must set it.
    "isolation.level": "read_committed",
}


def row(message: Message) -> tuple[object, object, object]:
    """Return the id, key and value of an event, as bytes."""
    return (
        dict(message.headers() or [])["marshal-outbox-id"],
        message.key(),
        message.value(),
    )


def read(consumer: Consumer, table: sqlite3.Connection) -> None:
    """Read without end. Each batch of events is one transaction."""
    while True:
        received = consumer.consume(500, timeout=1.0)
        for error in filter(None, (message.error() for message in received)):
            # The client continues, for example once the topic is created.
            print(error, file=sys.stderr)
        messages = [message for message in received if message.error() is None]
        if not messages:
            continue
        with table:
            table.executemany(ONCE, map(row, messages))
        consumer.commit()


signal.signal(signal.SIGTERM, signal.default_int_handler)
reader = Consumer(SETTINGS)
reader.subscribe(["delays"])
with closing(sqlite3.connect(os.environ.get("DELAYS_FILE", "delays.db"))) as database:
    database.execute(TABLE)
    try:
        read(reader, database)
    except KeyboardInterrupt:
        reader.close()
