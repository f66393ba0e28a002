"""A script of Pipes that needs no Spark: it reads Kafka with a plain consumer and writes to SQLite.

In at least once it adds the rows without a sink.

At each step it leaves a file, and it waits at the step in the variable `PAUSE_AT` until that file is removed. At
"checking" it checks its claims until one is lost, and leaves the file after some heartbeats.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition
from dagster_pipes import open_dagster_pipes
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from marshal_dagster import ClaimedRange, DeliveryMode, KafkaConnection, SubmittedBatch, WriteResult, submitted_batch
from sqlite_sink import TABLES, SqliteSink

STEPS = Path(os.environ["STEPS"])
COLUMNS = (("partition", IntegerType()), ("offset", LongType()), ("value", StringType()))


def reached(step: str) -> None:
    """Leave a file, and wait while it exists if the script pauses at this step."""
    path = STEPS / step
    path.touch()
    while os.environ.get("PAUSE_AT") == step and path.exists():
        time.sleep(0.02)


class Rows:
    """What the sink needs of a DataFrame."""

    columns = tuple(name for name, _ in COLUMNS)
    schema = StructType([StructField(name, kind) for name, kind in COLUMNS])

    def __init__(self, rows: Sequence[tuple[int, int, str]]) -> None:
        self._rows = rows

    def collect(self) -> list[dict[str, Any]]:
        """Return the rows."""
        return [dict(zip(self.columns, row, strict=True)) for row in self._rows]


class SteppedSink(SqliteSink):
    """The sink, which stops just before and after its transaction."""

    def write(
        self,
        frame: Any,  # noqa: ANN401 - as above
        ranges: Sequence[ClaimedRange],
        offsets_read: Callable[[], Mapping[int, Any]],
        before_commit: Callable[[], None] = lambda: None,
    ) -> WriteResult:
        """Write as the sink does."""

        def check() -> None:
            before_commit()
            reached("before commit")

        result = super().write(frame, ranges, offsets_read, check)
        reached("written")
        return result


def messages(connection: KafkaConnection, batch: SubmittedBatch) -> list[tuple[int, int, str]]:
    """Read exactly the ranges of the batch."""
    # Until a fetch has ended, the next one waits for it.
    quick = {"fetch.wait.max.ms": 10, "group.id": "not used", "enable.auto.commit": False}
    consumer = Consumer({**connection.librdkafka(), **quick})
    rows: list[tuple[int, int, str]] = []
    for part in batch.ranges:
        consumer.assign([TopicPartition(batch.topic, part.partition, part.first_readable)])
        for _ in range(part.first_readable, part.end):
            record = consumer.poll(30)
            error = None if record is None else record.error()
            if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:  # the script needs no group
                record = consumer.poll(30)
            assert record is not None
            assert record.error() is None
            rows.append((part.partition, record.offset() or 0, (record.value() or b"").decode()))
    consumer.close()
    return rows


def append(batch: SubmittedBatch, rows: Sequence[tuple[int, int, str]]) -> None:
    """Add the rows to an output of the script's own."""
    batch.check()
    reached("before commit")
    with closing(sqlite3.connect(STEPS.with_name("orders.db"))) as database, database:
        database.executescript(TABLES)
        database.executemany('INSERT INTO result (partition, "offset", value) VALUES (?, ?, ?)', rows)
    reached("written")


def check_for_ever(batch: SubmittedBatch) -> None:
    """Check the claims until one is lost; leave a file when a heartbeat has renewed them."""
    beats = set()
    while True:
        batch.check()
        beats.add(batch._watch._beats[batch.ranges[0].partition])
        if len(beats) > 1:
            (STEPS / "checking").touch()
        time.sleep(0.05)


def main() -> None:
    """Process the batch."""
    with open_dagster_pipes() as pipes:
        reached("started")
        connection = KafkaConnection.from_environment()
        pipes.log.info(repr(connection))
        with submitted_batch(pipes, connection) as batch:
            reached("claim seen")
            batch.begin_processing()
            if os.environ.get("PAUSE_AT") == "checking":
                check_for_ever(batch)
            rows = messages(connection, batch)
            reached("read")
            if batch.mode is DeliveryMode.AT_LEAST_ONCE:
                append(batch, rows)
            else:
                batch.write(SteppedSink(batch.output), Rows(rows))  # type: ignore[arg-type]
        reached("reported")


main()
