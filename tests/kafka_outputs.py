"""A Kafka topic as an output: the sink with plain Python rows in place of Spark's, and a reader for the results."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import KafkaSink
from marshal_dagster.sinks.kafka.records import Record
from marshal_dagster.sinks.row_writer import RowWriter
from tests.sink_conformance import Frame, Row
from tests.sink_outputs import hook

KAFKA_STEPS: Final = ("evaluated", "fenced", "sent", "noted", "committed")
PARTITIONS: Final = 2


@dataclass(frozen=True)
class FakeRecords:
    """Rows as Kafka records without Spark; each key names the message that the row comes from."""

    rows: Sequence[Mapping[str, Any]]
    rejected: None = None

    @property
    def counts(self) -> dict[int | None, int]:
        """Return the number of rows in each partition."""
        partitions = [row["partition"] for row in self.rows]
        return {partition: partitions.count(partition) for partition in partitions}

    def __iter__(self) -> Iterator[Record]:
        for row in sorted(self.rows, key=lambda row: (row["partition"], -1 if _offset(row) is None else _offset(row))):
            key = f"{row['partition']}/{-1 if _offset(row) is None else _offset(row)}"
            yield Record(row["partition"], _offset(row), row["value"].encode(), key.encode())


def _offset(row: Mapping[str, Any]) -> int | None:
    return row.get("offset")


class FakeKafkaSink(KafkaSink):
    """A Kafka sink that gets its rows without Spark."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int]) -> Iterator[FakeRecords]:  # type: ignore[override]
        rows = frame.rows if hasattr(frame.rows, "append") else [row.asDict() for row in frame.collect()]
        yield FakeRecords([row for row in rows if row["partition"] not in done])


class KafkaOutput:
    """An output topic of its own, with its notes topic."""

    steps: ClassVar[Sequence[str]] = KAFKA_STEPS

    def __init__(self, connection: KafkaConnection, topic: str | None = None, **options: Any) -> None:  # noqa: ANN401
        self.connection, self.options = connection, options
        self.topic = topic or f"output-{os.urandom(6).hex()}"
        if topic is None:
            with Topics(connection) as topics:
                assert topics.create(self.topic, PARTITIONS, 1, {"retention.ms": "-1"})  # a test may write old records
            assert KafkaSink(connection, self.topic).create_notes()

    def sink(self, reached: Callable[[str], None] | None = None) -> KafkaSink:
        """Return a sink as another process would have it, with plain rows in place of Spark's frames."""
        sink = FakeKafkaSink(self.connection, self.topic, **self.options)
        hook(sink, reached)
        return sink

    def open(self, reached: Callable[[str], None] | None = None) -> KafkaSink:
        """Return a sink as another process would have it. With `reached` the steps are those of this process."""
        writer = RowWriter.EXECUTORS if reached is None else RowWriter.DRIVER
        sink = KafkaSink(self.connection, self.topic, **{"written_by": writer, **self.options})
        hook(sink, reached)
        return sink

    def rows(self, patience_s: float = 10.0) -> list[Row]:
        """Return the rows that a read_committed reader sees now; wait up to `patience_s` for open transactions."""
        found = [
            (message.key().decode().split("/"), message.value().decode())
            for message in committed(self.connection, self.topic, patience_s)
        ]
        return sorted((int(partition), int(offset), value) for (partition, offset), value in found)


def committed(connection: KafkaConnection, topic: str, patience_s: float = 10.0) -> list[Any]:
    """Read a topic from its start to its end with a read_committed consumer."""
    settings = {"bootstrap.servers": connection.bootstrap_servers, "group.id": "reader", "enable.partition.eof": True}
    consumer = Consumer({**settings, "isolation.level": "read_committed", "fetch.wait.max.ms": 10})
    try:
        with Topics(connection) as topics:
            partitions = topics.describe(topic).partitions
            ends = {number: at.end for number, at in topics.offsets(topic, partitions, committed_only=False).items()}
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        found: list[Any] = []
        due, looked_at = set(ends), set[int]()
        deadline = time.monotonic() + patience_s
        while due and (time.monotonic() < deadline or looked_at < due):
            messages: list[Any] = consumer.consume(1000, 0.05)
            found += [message for message in messages if message.error() is None]
            at_end = {each.partition(): each.offset() for each in messages if _is_end(each.error())}
            looked_at |= at_end.keys()
            due -= {number for number, offset in at_end.items() if offset >= ends[number]}
        return found
    finally:
        consumer.close()


def _is_end(error: KafkaError | None) -> bool:
    return error is not None and error.code() == KafkaError._PARTITION_EOF
