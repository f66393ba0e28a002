"""Reading exactly the offsets of a batch with Spark's Kafka connector.

`ClaimedBatch.read` uses it. It also counts the records and offsets of a frame.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import connect, token_endpoint
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.session import runs_tasks_once, shares_consumers
from marshal_dagster.spark.task_attempts import is_first_attempt

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_ROWS_OF_A_TASK = 2**33 - 1
_RUN_AGAIN = (
    "Spark runs a task of this batch again, probably because its executor was lost. Its records may have been "
    "processed already, so this attempt fails before the first record"
)
NOTHING_READ: Final = (
    "the block ended without batch.read(...): nothing was read, so nothing is committed. Read the batch, or call "
    "batch.begin_processing() before you read its ranges with your own reader"
)
_OURS: Final = {"kafka.isolation.level": "read_committed"}
# After each poll the connector looks up the end offsets, on a connection where a fetch at the end of the log may be
# waiting. Larger and fewer polls read about twice as fast, and a short wait saves half a second in each task. Only a
# fetch at the end of the log waits, because the records of a batch exist already.
_CONSUMER_DEFAULTS = {"kafka.max.poll.records": "10000", "kafka.fetch.max.wait.ms": "1"}
_OPTIONS_OF_A_CONNECTION: Final = ("kafka.", "kafkaConsumer.pollTimeoutMs", "fetchOffset.", "databricks.")
_GROUP: Final = "kafka.group.id"
_GROUPS_KNOWN: Final = 64
HIGHEST_OFFSET: Final = 2**63 - 2
"""The highest offset of a message. The next offset after a higher one would overflow."""


def read_ranges(
    spark: "SparkSession",
    kafka_options: Mapping[str, str],
    topic: str,
    ranges: Mapping[int, tuple[int, int]],
    *,
    min_partitions: int | None = None,
    topic_id: str | None = None,
) -> "DataFrame":
    """Return a frame over the messages of `topic` in `ranges`: for each partition the offsets [first readable, end).

    The frame is lazy: each action on it reads Kafka again. It has no row for offsets of compacted or aborted messages
    and of transaction markers. Reading fails if retention deletes an offset of the ranges in the meantime.

    Args:
        spark: The session.
        kafka_options: Options of the connection and of the consumer, each with the prefix `kafka.`.
        topic: The data topic.
        ranges: The offsets of each partition.
        min_partitions: The minimum number of tasks that read (default: one for each Kafka partition).
        topic_id: Kafka's id of the topic. With it, the consumers of one read serve the next read of the same
            incarnation of the topic, if the session allows it (`session.shares_consumers`).

    Returns:
        The frame, with the columns of `read_schema`.

    Raises:
        ConfigurationError: An option has no prefix `kafka.`, or `min_partitions` is below 1.
    """
    check_min_partitions(min_partitions)
    wanted = {partition: bounds for partition, bounds in sorted(ranges.items()) if bounds[0] < bounds[1]}
    if not wanted:
        return spark.createDataFrame([], read_schema())
    frame = read_part(spark, kafka_options, topic, wanted, min_partitions=min_partitions, topic_id=topic_id)
    return run_once(frame) if runs_tasks_once(spark) else frame


def read_part(
    spark: "SparkSession",
    kafka_options: Mapping[str, str],
    topic: str,
    wanted: Mapping[int, tuple[int, int]],
    *,
    min_partitions: int | None = None,
    topic_id: str | None = None,
) -> "DataFrame":
    """Return a frame like `read_ranges`, for one or more partitions, whose ranges may be empty."""
    for name in kafka_options:
        if not name.startswith(_OPTIONS_OF_A_CONNECTION) or name in _OURS:
            raise ConfigurationError(
                f"{name} is not an option of the Kafka connection: use options with the prefix `kafka.`. The isolation "
                "level is always read_committed"
            )
    if connect.is_connect(spark):
        connect.hide_secrets(spark, kafka_options)
    if (endpoint := kafka_options.get(token_endpoint.OPTION)) is not None:
        token_endpoint.allow_token_endpoint(spark, endpoint)
    consumer = {**_CONSUMER_DEFAULTS, **kafka_options, **_OURS}
    if topic_id is not None and shares_consumers(spark):
        consumer.setdefault(_GROUP, _group_of(topic_id, frozenset(consumer.items())))
    reader = spark.read.format("kafka").options(**consumer)
    if min_partitions is not None:
        reader = reader.option("minPartitions", min_partitions)
    return (
        reader.option("assign", json.dumps({topic: list(wanted)}))
        .option("startingOffsets", _offsets(topic, {partition: start for partition, (start, _) in wanted.items()}))
        .option("endingOffsets", _offsets(topic, {partition: end for partition, (_, end) in wanted.items()}))
        .option("failOnDataLoss", "true")
        .option("includeHeaders", "true")
        .load()
        .drop("timestampType")  # leaves the columns of `read_schema`, faster than a select
    )


def run_once(frame: "DataFrame") -> "DataFrame":
    """Return a frame with the rows of `frame` that fails if Spark runs one of its tasks a second time.

    On a cluster Spark repeats a task if its executor was lost with its machine, and a stage whose output was lost. No
    setting prevents that. With the settings `SINGLE_EXECUTION`, which `at_most_once` needs, `batch.read` returns a
    frame that is already protected. The protection covers the tasks up to the next shuffle. In `at_most_once`, apply
    this function to the frame after a shuffle too.

    Args:
        frame: Any frame, for example the result of an aggregation.

    Returns:
        A frame with the same rows.

    Raises:
        ConfigurationError: Nothing shows in this session whether a task runs for the first time.

    Example:
        ```python
        totals = run_once(frame.groupBy("partition").count())
        ```
    """
    # One check for each task is enough.
    is_first_row = f.monotonically_increasing_id().bitwiseAND(f.lit(_ROWS_OF_A_TASK)) == 0
    may_go_on = ~is_first_row | is_first_attempt(frame.sparkSession)
    return frame.where(f.when(may_go_on, f.lit(True)).otherwise(f.raise_error(_RUN_AGAIN).cast("boolean")))  # noqa: FBT003


def check_min_partitions(min_partitions: int | None) -> None:
    """Raise `ConfigurationError` unless the number of tasks is None or at least 1."""
    if min_partitions is not None and min_partitions < 1:
        raise ConfigurationError(f"min_partitions is {min_partitions}; it must be at least 1")


def read_schema() -> "StructType":
    """Return the columns of a batch: key, value, topic, partition, offset, timestamp, headers."""
    header = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    return t.StructType(
        [
            t.StructField("key", t.BinaryType()),
            t.StructField("value", t.BinaryType()),
            t.StructField("topic", t.StringType()),
            t.StructField("partition", t.IntegerType()),
            t.StructField("offset", t.LongType()),
            t.StructField("timestamp", t.TimestampType()),
            t.StructField("headers", t.ArrayType(header)),
        ]
    )


def count_records(frame: "DataFrame") -> dict[int, int]:
    """Return the number of records of each partition in `frame`, in one pass over it."""
    return {row["partition"]: row["count"] for row in frame.groupBy("partition").count().collect()}


def offsets_read(frame: "DataFrame") -> dict[int, list[tuple[int, int]]]:
    """Return the offsets in `frame`, for each partition as rising half-open intervals [start, end).

    Spark computes them in one pass over the columns `partition` and `offset`, sorted by them. The driver receives one
    row for each interval.
    """
    from pyspark.sql import Window

    in_order = Window.partitionBy("partition").orderBy("offset")
    runs = (
        frame.select("partition", "offset", (f.col("offset") - f.dense_rank().over(in_order)).alias("run"))
        .groupBy("partition", "run")
        .agg(f.min("offset").alias("start"), (f.max("offset") + 1).alias("end"))
        .orderBy("partition", "start")
    )
    offsets: dict[int, list[tuple[int, int]]] = {}
    for row in runs.collect():
        offsets.setdefault(row["partition"], []).append((row["start"], row["end"]))
    return offsets


@lru_cache(maxsize=_GROUPS_KNOWN)
def _group_of(topic_id: str, consumer: frozenset[tuple[str, str]]) -> str:  # noqa: ARG001 - both are the key of the cache
    """Return the group id of this process's consumers for an incarnation of a topic with these settings.

    Spark caches consumers, and records that they fetched after the end of a read, by this id and the partition. Without
    an id each read starts with new consumers. They neither join the group nor commit to it.
    """
    return f"marshal-dagster-{uuid4()}"


def _offsets(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): offset for partition, offset in offsets.items()}})
