# ruff: noqa: PT012 - the block that raises is a batch
"""If Spark fails at a record, the error names the record and the command that skips it, for every kind of batch."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from pyspark import TaskContext
from pyspark.sql import functions as f

from marshal_dagster.batches import BatchRequest, BatchSession, failing_record
from marshal_dagster.errors import FailingRecordError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks import DeltaSink, FileSink, PostgresSink, Sink
from tests.conditions import WITHIN_S
from tests.kafka_outputs import KafkaOutput
from tests.real.conftest import MakeTopic
from tests.real.test_batches import Group
from tests.sink_outputs import TABLE, PostgresOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS, EACH = 3, 8
BAD_PARTITION, BAD_OFFSET = 1, 5
NANOSECONDS = 1_764_000_000_000_000_000


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the time limit of the search for busy machines."""
    monkeypatch.setattr(failing_record, "SEARCH_S", 600.0)


@pytest.fixture(scope="module")
def group(connection: KafkaConnection, topics: Topics) -> Iterator[Group]:
    """A group for all tests of this module. Each test has its own data topic."""
    name = f"coordination-{time.time_ns()}"
    topics.create(name, 1, 1, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})
    group = Group(connection, name, topics)
    yield group
    group.close()


@pytest.fixture(scope="module")
def session(group: Group) -> BatchSession:
    """A member of the group."""
    return group.open(DeliveryMode.EFFECTIVELY_ONCE)


def write(kafka: str, topic: str, *, time_ms: int = 0) -> None:
    """Write `EACH` numbers into each partition. One value is not a number, or has the timestamp `time_ms`."""
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(PARTITIONS * EACH):
        partition, offset = number % PARTITIONS, number // PARTITIONS
        is_bad = (partition, offset) == (BAD_PARTITION, BAD_OFFSET)
        value = "x" if is_bad and not time_ms else str(number)
        given: dict[str, Any] = {"timestamp": time_ms} if is_bad and time_ms else {}
        producer.produce(topic, value, partition=partition, on_delivery=_require, **given)
    assert producer.flush(WITHIN_S) == 0


def _require(error: object, _: object) -> None:
    assert error is None, error


def number(value: bytes) -> int:
    """Return the number of a message."""
    return int(value)


class MortalNumber:
    """Returns the number of a message. Once one has failed, a worker process of the next stage dies."""

    def __init__(self, folder: Path) -> None:
        self.failed, self.died = folder / "failed", folder / "died"

    def __setstate__(self, state: dict[str, Path]) -> None:
        vars(self).update(state)
        if self.failed.exists() and not self.died.exists() and self.failed.read_text() != stage():
            self.died.touch()
            os._exit(1)

    def __call__(self, value: bytes) -> int:
        """Return the number, or store the stage in which that fails."""
        try:
            return int(value)
        except ValueError:
            new = self.failed.with_suffix(".new")
            new.write_text(stage())
            new.replace(self.failed)
            raise


def stage() -> str:
    """Return the id of the stage of this task."""
    context = TaskContext.get()
    assert context is not None
    return str(context.stageId())


def by_udf(frame: "DataFrame") -> "DataFrame":
    """Return rows computed by a Python function."""
    return frame.select("partition", "offset", f.udf(number, "int")(f.col("value").cast("string")).alias("n"))


def by_cast(frame: "DataFrame") -> "DataFrame":
    """Return rows computed by a cast, which raises in a session with ANSI rules."""
    return frame.selectExpr("partition", "offset", "CAST(CAST(value AS string) AS int) AS n")


def by_total(frame: "DataFrame") -> "DataFrame":
    """Return one row for each partition, without an offset."""
    return by_cast(frame).groupBy("partition").agg(f.sum("n").alias("n"))


def by_itself(frame: "DataFrame") -> "DataFrame":
    """Return rows of a join of the batch with itself."""
    other = by_cast(frame).select(f.col("offset").alias("o"), "n").groupBy("o").agg(f.max("n").alias("most"))
    return frame.select("partition", "offset").join(other, f.col("offset") == f.col("o")).drop("o")


def as_it_is(frame: "DataFrame") -> "DataFrame":
    """Return rows of the messages."""
    return frame.selectExpr("partition", "offset", "CAST(value AS string) AS value")


SKIP = f"`marshal-dagster position reset {{group}} {{topic}} --to-offset {BAD_PARTITION}={BAD_OFFSET + 1}`"
CASES = [
    pytest.param(by_udf, "ValueError: invalid literal for int", id="udf"),
    pytest.param(by_cast, "[CAST_INVALID_INPUT] The value 'x'", id="cast"),
    pytest.param(by_total, "[CAST_INVALID_INPUT] The value 'x'", id="aggregation"),
    pytest.param(by_itself, "[CAST_INVALID_INPUT] The value 'x'", id="self-join"),
]


@pytest.mark.parametrize(("rows", "error"), CASES)
def test_the_record_that_fails_is_named(  # noqa: PLR0917 - fixtures
    session: BatchSession,
    group: Group,
    spark: "SparkSession",
    topic: MakeTopic,
    tmp_path: Path,
    rows: Callable[["DataFrame"], "DataFrame"],
    error: str,
) -> None:
    """One line names group, topic, partition, offset, the original error and the command. Nothing is written."""
    name = topic(PARTITIONS)
    write(group.kafka, name)
    sink = FileSink(tmp_path / "output")
    with (
        pytest.raises(FailingRecordError) as raised,
        session.claimed_batch(BatchRequest(topic=name), sink) as batch,
    ):
        batch.write(rows(batch.read(spark)))
    text = str(raised.value)
    place = f"group '{group.name}': the message of topic '{name}', partition {BAD_PARTITION}, offset {BAD_OFFSET} "
    assert text.startswith(f"{place}fails in Spark: {error}")
    skip = f"{SKIP.format(group=group.name, topic=name)}, which also skips the {BAD_OFFSET} offsets of the batch"
    assert f"skip it: {skip}" in text
    assert "\n" not in text
    assert raised.value.__cause__ is not None
    assert group.key(name, BAD_PARTITION).plan_end == EACH


@pytest.mark.parametrize("kind", ["postgres", "kafka", "delta"])
def test_the_record_that_fails_is_named_whatever_the_sink(  # noqa: PLR0917 - fixtures
    session: BatchSession, group: Group, topic: MakeTopic, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """Each sink evaluates the rows in a different way, and all errors name the record."""
    spark: SparkSession = request.getfixturevalue("spark")
    name = topic(PARTITIONS)
    write(group.kafka, name)
    if kind == "postgres":
        output = PostgresOutput(request.getfixturevalue("postgres"), own_schema())
        sink: Sink = PostgresSink(output.dsn, TABLE, schema=output.schema)
    elif kind == "kafka":
        sink = KafkaOutput(group.connection).open()
    else:
        sink = DeltaSink(str(tmp_path / "table"), session=lambda: spark)
    with (
        pytest.raises(
            FailingRecordError, match=f"partition {BAD_PARTITION}, offset {BAD_OFFSET} fails in Spark: Value"
        ),
        session.claimed_batch(BatchRequest(topic=name), sink) as batch,
    ):
        batch.write(by_udf(batch.read(spark)).selectExpr("partition", "offset", "CAST(n AS string) AS value"))


def test_a_worker_process_that_dies_does_not_end_the_search(
    session: BatchSession, group: Group, topic: MakeTopic, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The search begins with a part without messages. If a worker process dies there, that part is tried again."""
    spark: SparkSession = request.getfixturevalue("spark")
    name = topic(PARTITIONS)
    write(group.kafka, name)
    output = PostgresOutput(request.getfixturevalue("postgres"), own_schema())
    number = MortalNumber(tmp_path)
    with (
        pytest.raises(
            FailingRecordError, match=f"partition {BAD_PARTITION}, offset {BAD_OFFSET} fails in Spark: Value"
        ),
        session.claimed_batch(BatchRequest(topic=name), PostgresSink(output.dsn, TABLE, schema=output.schema)) as batch,
    ):
        batch.write(batch.read(spark).select("partition", "offset", f.udf(number, "string")("value").alias("value")))
    assert number.died.exists()


def test_a_time_that_spark_cannot_hold_is_named(group: Group, spark: "SparkSession", topic: MakeTopic) -> None:
    """A message with a time in nanoseconds cannot be read at all, even without a sink. The error names it."""
    name = topic(PARTITIONS, {"message.timestamp.after.max.ms": str(2**63 - 1)})
    write(group.kafka, name, time_ms=NANOSECONDS)
    other = Group(group.connection, group.coordination_topic, group.topics)
    with (
        pytest.raises(FailingRecordError) as raised,
        other.open().claimed_batch(BatchRequest(topic=name)) as batch,
    ):
        batch.read(spark).count()
    other.close()
    assert f"partition {BAD_PARTITION}, offset {BAD_OFFSET} cannot be read by Spark: " in str(raised.value)
    assert "long overflow (its time is beyond the range of Spark's timestamps). Correct its sender" in str(raised.value)


def test_what_is_of_no_record_stays_as_it_is(
    session: BatchSession, group: Group, spark: "SparkSession", topic: MakeTopic, tmp_path: Path
) -> None:
    """An error without a record is not changed. If only the records together fail, the error states that."""
    name = topic(PARTITIONS)
    write(group.kafka, name)
    with (
        pytest.raises(Exception, match="of no record") as raised,
        session.claimed_batch(BatchRequest(topic=name), FileSink(tmp_path / "a")) as batch,
    ):
        frame = as_it_is(batch.read(spark))
        batch.write(
            frame.unionByName(spark.sql("SELECT 0 AS partition, 0L AS offset, raise_error('of no record') AS value"))
        )
    assert not isinstance(raised.value, FailingRecordError)
    many = "IF(count(*) > 6, raise_error('too many'), count(*)) AS n"
    with (
        pytest.raises(
            FailingRecordError, match=rf"no single message fails: those of .*, offsets 0 to {EACH - 1} fail tog"
        ),
        session.claimed_batch(BatchRequest(topic=name), FileSink(tmp_path / "b")) as batch,
    ):
        batch.write(as_it_is(batch.read(spark)).groupBy("partition").agg(f.expr(many)))
