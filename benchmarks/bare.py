"""The bare Kafka client to compare with: it produces, waits for the acknowledgement, and reads back.

`python -m benchmarks.bare SERVERS TOPIC PARTITION BYTES` makes one round trip and prints `done`. The module imports
only the client library, so that a fresh process loads nothing else. The settings are those of the library's own
clients; a test checks that they are equal.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

DONE: Final = "done"
TIMEOUT_S: Final = 30.0
READ_BATCH: Final = 10_000
DELIVERY_TIMEOUT_MS: Final = 15_000
_CONNECTION_SETTINGS: Final[Mapping[str, Any]] = {
    "security.protocol": "PLAINTEXT",
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1000,
    "enable.sparse.connections": False,
    "enable.metrics.push": False,
}
PRODUCER_SETTINGS: Final[Mapping[str, Any]] = {
    **_CONNECTION_SETTINGS,
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 0,
    "message.timeout.ms": DELIVERY_TIMEOUT_MS,
    "queue.buffering.max.messages": 1_000_000,
    "allow.auto.create.topics": False,
}
CONSUMER_SETTINGS: Final[Mapping[str, Any]] = {
    **_CONNECTION_SETTINGS,
    "fetch.queue.backoff.ms": 1,
    "fetch.error.backoff.ms": 50,
    "group.id": "bare",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
    "allow.auto.create.topics": False,
    "isolation.level": "read_uncommitted",
    "fetch.wait.max.ms": 100,
}
_PASSING: Final = frozenset({KafkaError._PARTITION_EOF})  # noqa: SLF001 - the name under which the library has its own codes


class BareClient:
    """A producer and a consumer on one partition of a topic."""

    def __init__(self, servers: str, topic: str, partition: int = 0) -> None:
        """Connect."""
        self._topic = topic
        self._partition = partition
        self._producer = Producer({"bootstrap.servers": servers, **PRODUCER_SETTINGS})
        self._consumer = Consumer({"bootstrap.servers": servers, **CONSUMER_SETTINGS})
        self._position: int | None = None
        # Waiting for metadata here saves up to 1 s later: the producer gets its id, and the consumer learns the
        # leader of the partition.
        for client in (self._producer, self._producer, self._consumer):
            client.list_topics(topic, timeout=TIMEOUT_S)

    def round_trip(self, values: Sequence[bytes]) -> None:
        """Produce `values`, wait until all are acknowledged, and read all of them back.

        The producer is idempotent: if the last record is acknowledged, those before it are too.
        """
        acknowledged: list[tuple[KafkaError | None, int | None]] = []
        for value in values[:-1]:
            self._producer.produce(self._topic, value, partition=self._partition)
        self._producer.produce(
            self._topic,
            values[-1],
            partition=self._partition,
            on_delivery=lambda error, message: acknowledged.append((error, message.offset())),
        )
        if self._producer.flush(TIMEOUT_S) or acknowledged[0][0] is not None:
            raise RuntimeError(f"not acknowledged: {acknowledged}")
        last = cast("int", acknowledged[0][1])
        if self._position is None:
            self._position = last + 1 - len(values)
            self._consumer.assign([TopicPartition(self._topic, self._partition, self._position)])
        self._read_until(last + 1)

    def _read_until(self, end: int) -> None:
        position = cast("int", self._position)
        while position < end:
            # Waiting for one record and taking all that have arrived is faster than waiting for all that are due.
            messages = self._consumer.consume(1, timeout=TIMEOUT_S)
            if not messages:
                raise RuntimeError(f"read up to {position} of {end}, then nothing within {TIMEOUT_S:g} s")
            messages += self._consumer.consume(READ_BATCH, timeout=0)
            position += sum(map(_is_record, messages))
        self._position = position

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def _is_record(message: Message) -> bool:
    error = message.error()
    if error is None:
        return True
    if error.code() not in _PASSING:
        raise KafkaException(error)
    return False


def read_all(servers: str, topic: str, ends: Mapping[int, int]) -> Consumer:
    """Read each partition from offset 0 up to its end, in large batches, and return the consumer, which is still open.

    The consumer's positions show when all is read, so that no message has to be inspected.
    """
    consumer = Consumer({"bootstrap.servers": servers, **CONSUMER_SETTINGS})
    partitions = [TopicPartition(topic, number, 0) for number in ends]
    consumer.assign(partitions)
    total, read = sum(ends.values()), 0
    while read < total:
        if not consumer.consume(min(READ_BATCH, total - read), timeout=TIMEOUT_S):
            raise RuntimeError(f"read {read} of {total} records, then none within {TIMEOUT_S:g} s")
        read = sum(max(0, at.offset) for at in consumer.position(partitions))
    return consumer


def main(servers: str, topic: str, partition: str, size: str) -> None:
    """Make one round trip and print `done`."""
    client = BareClient(servers, topic, int(partition))
    client.round_trip([b"x" * int(size)])
    print(DONE, flush=True)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
