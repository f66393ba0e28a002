"""Count the events in topic `order-events` as a consumer of committed records."""

import os

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

TOPIC = "order-events"
consumer = Consumer(
    {
        "bootstrap.servers": os.environ["MARSHAL_BOOTSTRAP_SERVERS"],
        "group.id": "count",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
)
partitions = set(consumer.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions)
consumer.assign(
    [TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in partitions]
)
ids: list[object] = []
while partitions:
    for message in consumer.consume(500, timeout=1):
        error = message.error()
        if error is None:
            ids.append(dict(message.headers() or [])["marshal-outbox-id"])
        elif error.code() == KafkaError._PARTITION_EOF:
            partitions.discard(message.partition())
        else:
            raise SystemExit(f"{TOPIC} cannot be read: {error}")
consumer.close()
print(f"{len(ids):,} events, {len(set(ids)):,} different ones")
