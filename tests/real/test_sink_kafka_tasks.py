"""The Kafka sink, written by Spark's tasks: values, killed tasks, and writers that take a range over."""

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as f

from marshal_dagster.errors import ConfigurationError, MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import KafkaSink
from marshal_dagster.sinks.conformance.target import part
from marshal_dagster.sinks.kafka.records import evaluated
from marshal_dagster.spark.arrow_tasks import limited_batches
from marshal_dagster.spark.executor_check import check_executors
from tests.conditions import wait_until
from tests.kafka_outputs import KafkaOutput, committed
from tests.real.test_kill_points_sinks import (
    Members,
    coordination_topic,
    data_topic,
    input_rows,
    members,
    result,
)
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["coordination_topic", "data_topic", "members"]

STEPS = ("fenced", "sent", "noted", "committed")
"""The steps of a task."""


@pytest.fixture
def output(connection: KafkaConnection) -> KafkaOutput:
    """An empty topic."""
    return KafkaOutput(connection)


def keyed(frame: "DataFrame") -> "DataFrame":
    """Return rows whose keys name the source message, as `KafkaOutput.rows` reads them."""
    return frame.withColumn("key", f.concat_ws("/", "partition", "offset"))


def in_tasks(step: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Return a hook that acts at a step of a task, but not of this process. It is pickled with its code."""
    driver = os.getpid()

    def reached(now: str) -> None:
        import os

        if now == step and os.getpid() != driver:
            act()

    reached.__module__ = act.__module__ = "__main__"
    return reached


@pytest.mark.parametrize("step", STEPS)
def test_a_task_that_is_killed_at_each_step(
    members: Members, output: KafkaOutput, spark: "SparkSession", tmp_path: Path, step: str
) -> None:
    """The process of a task is killed in its first range. The batch fails, and the next one completes the output."""
    mark = str(tmp_path / "killed")

    def kill() -> None:
        try:
            open(mark, "x").close()  # noqa: PTH123 - the code runs without this module's imports
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    sink = output.open()
    sink._reached = in_tasks(step, kill)  # type: ignore[method-assign,assignment]
    delivery, log = members.open()
    batch = members.batch(delivery, sink)
    with pytest.raises(UnavailableError, match="a Spark task that wrote to it has died"), batch:
        batch.write(keyed(result(batch, spark)))
    assert Path(mark).exists()
    log.dead = True

    delivery, _ = members.open()
    with members.batch(delivery, output.open()) as batch:
        batch.write(keyed(result(batch, spark)))

    assert output.rows() == input_rows()


@pytest.mark.parametrize("step", ["fenced", "sent", "noted"])
def test_a_task_whose_range_another_run_takes_over_adds_nothing(
    output: KafkaOutput, spark: "SparkSession", tmp_path: Path, step: str
) -> None:
    """The claim is lost after the driver's check, while the task is at this step. Each record exists once."""
    at_step, may_continue = tmp_path / "at step", tmp_path / "may continue"
    mark, permission = str(at_step), str(may_continue)

    def stop() -> None:
        import time

        open(mark, "w").close()  # noqa: PTH123 - the code runs without this module's imports
        while not os.path.exists(permission):  # noqa: PTH110
            time.sleep(0.01)

    stale, successor = output.open(), output.open()
    stale._reached = in_tasks(step, stop)  # type: ignore[method-assign,assignment]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(written(stale, spark, [part(0, 0, 10, epoch=1)])))
    thread.start()
    wait_until(lambda: at_step.exists() or found, "the task is at the step")
    assert at_step.exists(), found
    later = written(successor, spark, [part(0, 0, 10, epoch=2)])
    may_continue.touch()
    thread.join()

    assert not isinstance(later, MarshalError), later
    assert later.taken
    if isinstance(found[0], MarshalError):
        assert isinstance(found[0], SinkRejectedError)
    else:
        assert not found[0].taken
    assert output.rows() == [(0, offset, str(offset)) for offset in range(10)]


def test_a_run_that_lost_its_claim_before_its_tasks_start_adds_nothing(
    output: KafkaOutput, spark: "SparkSession"
) -> None:
    """The successor writes the same range right after the driver of the first run has checked its claims."""
    first, second = part(0, 0, 10, epoch=1), part(0, 0, 10, epoch=2)

    def lose() -> None:
        assert written(output.open(), spark, [second]).taken == (second,)

    found = written(output.open(), spark, [first], before_commit=lose)

    assert isinstance(found, SinkRejectedError)
    assert output.rows() == [(0, offset, str(offset)) for offset in range(10)]


def written(
    sink: KafkaSink,
    spark: "SparkSession",
    ranges: Sequence[ClaimedRange],
    before_commit: Callable[[], None] = lambda: None,
) -> Any:  # noqa: ANN401 - a result, or an error
    """Write a row for each offset of the ranges. Return the result or the error."""
    rows = [(each.partition, offset, str(offset)) for each in ranges for offset in range(each.start, each.end)]
    frame = keyed(local_frame(spark, rows, "partition int, offset bigint, value string"))
    try:
        return sink.write(frame, ranges, dict, before_commit)
    except MarshalError as error:
        return error


def test_tasks_send_the_same_records_as_the_driver(spark: "SparkSession", connection: KafkaConnection) -> None:
    """Values, keys, headers, timestamps and output partitions are equal, also where they are null."""
    rows = [
        (0, 0, b"a", b"k", [("h", b"1"), ("h", None)], 1_000, 1),
        (0, 1, None, None, [], None, None),
        (0, 2, b"", b"", None, 2_000, 0),
        (1, 5, b"b", b"k", [("", b"")], 3_000, None),
        (1, 6, b"\x00\xff", None, None, -5, 1),
    ]
    schema = "partition int, offset bigint, value binary, key binary, headers array<struct<key:string,value:binary>>, "
    frame = spark.createDataFrame(rows, f"{schema}ms bigint, output_partition int")
    frame = frame.withColumn("timestamp", f.timestamp_millis("ms")).drop("ms")
    ranges = [part(0, 0, 3), part(1, 5, 7)]
    found = []
    for writer in ("driver", "executors"):
        output = KafkaOutput(connection, written_by=writer)
        assert set(output.open().write(frame, ranges, dict).taken) == set(ranges)
        found.append(sorted(map(_shown, committed(connection, output.topic))))
    assert len(found[0]) == len(rows)
    assert found[0] == found[1]


def _shown(message: Any) -> str:  # noqa: ANN401 - the client's type has no public name
    """Return the fields of a record that the row decides; the one without a value has no time and partition either."""
    free = message.value() is None
    return repr((message.value(), message.key(), message.headers(), free or (message.timestamp(), message.partition())))


def test_rows_of_a_range_in_many_tasks_are_sent_in_order(
    output: KafkaOutput, spark: "SparkSession", connection: KafkaConnection
) -> None:
    """There are more ranges than tasks, ranges without rows, and several rows for a message."""
    ranges = [part(partition, 0, 100) for partition in range(5)]
    frame = (
        spark.range(0, 300, numPartitions=4)
        .selectExpr("int(id % 3) partition", "id div 3 offset")
        .select("partition", "offset", f.explode(f.array(f.lit("a"), f.lit("b"))).alias("value"))
        .withColumn("output_partition", f.col("partition") % 2)
        .repartition(4, "offset")
        .withColumn("key", f.concat_ws("/", "partition", "offset"))
    )

    found = output.open().write(frame, ranges, dict)

    assert (set(found.taken), dict(found.rows)) == (set(ranges), {0: 200, 1: 200, 2: 200, 3: 0, 4: 0})
    messages = committed(connection, output.topic)
    for partition in range(3):
        keys = [message.key().decode() for message in messages]
        assert [key for key in keys if key.startswith(f"{partition}/")] == [
            f"{partition}/{offset}" for offset in range(100) for _ in range(2)
        ]
    again = output.open().write(frame, ranges, dict)
    assert (again.taken, set(again.skipped)) == ((), set(ranges))


@pytest.mark.parametrize("order", [["offset"], ["-offset"], ["partition", "-offset"]])
def test_rows_in_one_task_are_sent_in_order(
    output: KafkaOutput, spark: "SparkSession", connection: KafkaConnection, order: Sequence[str]
) -> None:
    """The rows of one range are reversed, or those of several ranges alternate. The task finds out while it sends."""
    ranges = [part(partition, 0, 100) for partition in range(3)]
    frame = (
        spark.range(0, 300, numPartitions=1)
        .selectExpr("int(id % 3) partition", "if(id < 3, null, id div 3) offset", "'a' value", "0 output_partition")
        .sortWithinPartitions(*map(f.expr, order))
        .withColumn("key", f.concat_ws("/", "partition", f.coalesce("offset", f.lit(0))))
    )

    assert set(output.open().write(frame, ranges, dict).taken) == set(ranges)

    keys = [message.key().decode() for message in committed(connection, output.topic)]
    for partition in range(3):
        assert [key for key in keys if key.startswith(f"{partition}/")] == [f"{partition}/{at}" for at in range(100)]


MISTAKES = {
    "headers": ("array(struct(string(null), binary('x')))", "array()", "a header has no name"),
    "timestamp": ("timestamp_millis(0)", "timestamp_millis(5)", "column 'timestamp' is 0 ms after 1970"),
    "output_partition": ("-1", "0", "column 'output_partition' is -1"),
    "value": ("repeat('x', 2000000)", "'x'", "rejects the record made from it"),
}
"""For each column a wrong value, a correct one, and the error."""


@pytest.mark.parametrize("column", MISTAKES)
def test_a_record_that_is_rejected_is_named(output: KafkaOutput, spark: "SparkSession", column: str) -> None:
    """The error names the message, as it does if the driver writes."""
    wrong, correct, reason = MISTAKES[column]
    kind = "array<struct<key:string,value:binary>>" if column == "headers" else None
    value = f.expr(f"if(partition = 1 and offset = 3, {wrong}, {correct})")
    frame = spark.range(10).selectExpr("int(id % 2) partition", "id div 2 offset", "'x' value")
    frame = frame.withColumn(column, value if kind is None else value.cast(kind))
    with pytest.raises(SinkRejectedError, match=reason) as error:
        output.open().write(frame, [part(0, 0, 5), part(1, 0, 5)], dict)
    assert re.search(r"partition 1, offset 3|/1 offset 3", str(error.value))
    assert len(committed(output.connection, output.topic)) in {0, 5}, "the other range was written or not"


def test_a_missing_package_is_one_line(spark: "SparkSession") -> None:
    """The executors are asked before anything is evaluated."""
    with pytest.raises(ConfigurationError, match=r"no no_such_package: install it there, or wait$"):
        check_executors(spark, ["no_such_package"], "wait")


def test_spark_does_not_measure_a_batch_whose_rows_are_limited(spark: "SparkSession") -> None:
    """Else it measures at each row, which takes longer than all else. Spark 3.5 has no such limit."""
    name = "spark.sql.execution.arrow.maxBytesPerBatch"
    has_limit = spark.conf.isModifiable(name)
    before = spark.conf.get(name) if has_limit else None
    with limited_batches(spark, 5, is_size_known=True):
        assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "5"
        assert not has_limit or spark.conf.get(name) == str(2**31 - 1)
    assert not has_limit or spark.conf.get(name) == before
    assert has_limit or spark.version.startswith("3.5")


def test_one_large_row_makes_no_batch_small(spark: "SparkSession") -> None:
    """The rows are summed up by their sizes, headers included, when they are counted."""
    value = "if(id = 7, repeat('x', 1000000), 'x') value"
    headers = "array(struct('h' AS key, CAST(repeat('y', if(id = 8, 20000, 1)) AS BINARY) AS value)) headers"
    frame = spark.range(1_000).selectExpr("0 partition", "id offset", value, headers)
    with evaluated(frame, []) as records:
        assert records.largest > 1_000_000
        assert 1_020_000 < records.larger[2_000] < 1_021_000
        assert records.batch_rows(32_000_000) > 10_000
