"""The snapshot topic as a topic of a Kafka cluster.

It implements `marshal_dagster.coordination.snapshots.SnapshotTopic` with confluent-kafka.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from marshal_dagster.coordination.kafka_log import READ_BATCH
from marshal_dagster.coordination.snapshots import Read, Snapshots, snapshot_topic_of
from marshal_dagster.errors import AuthorizationError, UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.state import OffsetBounds

CLIENT_ID: Final = "marshal-dagster-snapshots"
_SLICE_S: Final = 0.5


def kafka_snapshots(connection: KafkaConnection, coordination_topic: str) -> Snapshots:
    """Return the snapshots of a coordination topic; the clients connect when they are first used."""
    topic = KafkaSnapshotTopic(connection, snapshot_topic_of(coordination_topic))
    return Snapshots(topic, timeout_s=connection.timeout_s)


class KafkaSnapshotTopic:
    """A topic of a Kafka cluster, as a `marshal_dagster.coordination.snapshots.SnapshotTopic`."""

    def __init__(self, connection: KafkaConnection, topic: str) -> None:
        self.topic = topic
        self._connection = connection
        self._topics: Topics | None = None
        self._consumer: Consumer | None = None

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present bounds; check first that the topic exists, so that no broker creates it by itself."""
        if self._topics is None:
            self._topics = Topics(self._connection, client_id=CLIENT_ID)
        self._topics.describe(self.topic)
        return self._topics.offsets(self.topic, partitions, committed_only=False)

    def read(self, ranges: Mapping[int, OffsetBounds], timeout_s: float) -> Mapping[int, Read]:
        """Read each range up to its end; if there is no record at the end, the end of the partition shows it."""
        found: dict[int, list[tuple[bytes | None, bytes | None]]] = {partition: [] for partition in ranges}
        due = {partition: at.end for partition, at in ranges.items() if at.start < at.end}
        if not due:
            return found
        if self._consumer is None:
            self._consumer = clients.consumer(self._connection, client_id=CLIENT_ID)[0]
        self._consumer.assign([TopicPartition(self.topic, number, ranges[number].start) for number in due])
        deadline = time.monotonic() + timeout_s
        while due:
            messages = self._consumer.consume(1, min(_SLICE_S, timeout_s))
            if messages:
                messages += self._consumer.consume(READ_BATCH, 0)
                deadline = time.monotonic() + timeout_s
            for message in messages:
                self._take(message, due, found)
            if due and time.monotonic() > deadline:
                raise UnavailableError(
                    f"partitions {sorted(due)} of snapshot topic {self.topic!r} were not read within {timeout_s:g} s; "
                    "check that their leaders are up and that this principal has READ on it"
                )
        self._consumer.unassign()
        return found

    def _take(
        self,
        message: Any,  # noqa: ANN401 - by the library's type hints, a message with an error has no partition
        due: dict[int, int],
        found: Mapping[int, list[tuple[bytes | None, bytes | None]]],
    ) -> None:
        error, partition = message.error(), message.partition()
        end = due.get(partition)
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's own name
            if not error.retriable() and error.code() not in clients.HARMLESS_TO_A_READER:
                raise UnavailableError(
                    f"partition {partition} of snapshot topic {self.topic!r} cannot be read: {error.str()}. Check the "
                    "broker and this principal's rights on the topic"
                )
            return
        if end is None:
            return
        offset = message.offset()
        if error is None and offset < end:
            found[partition].append((message.key(), message.value()))
        if offset >= (end - 1 if error is None else end):
            del due[partition]

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append records with a new producer and close it, because few runs write a snapshot."""
        if not records:
            return
        timeout_s = self._connection.timeout_s
        refused: list[KafkaError] = []

        def note(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                refused.append(error)

        producer, log = clients.producer(
            self._connection, delivery_timeout_ms=round(1_000 * timeout_s), client_id=CLIENT_ID
        )
        try:
            clients.reach(producer, log, timeout_s=timeout_s, topic=self.topic)
            with suppress(KafkaException):  # a producer without the right to write; `refused` has the error
                for key, value in records:
                    producer.produce(self.topic, value, key, partition=partition, on_delivery=note)
            deadline, unsent = time.monotonic() + 2 * timeout_s, len(records)
            with suppress(KafkaException):
                while unsent and time.monotonic() < deadline:
                    unsent = producer.flush(_SLICE_S)
        finally:
            clients.close_client(producer, log)
        if any(error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED for error in refused):
            raise AuthorizationError(
                f"this user is not allowed to write snapshots: grant WRITE on topic {self.topic!r}"
            )
        if refused or unsent:
            why = refused[0].str() if refused else log.fatal or "no acknowledgement came"
            raise UnavailableError(
                f"a snapshot was not written to partition {partition} of topic {self.topic!r}: {why}. A later run "
                "writes it"
            )

    def close(self) -> None:
        """Close the clients."""
        consumer, topics = self._consumer, self._topics
        self._consumer = self._topics = None
        if consumer is not None:
            consumer.close()
        if topics is not None:
            topics.close()
