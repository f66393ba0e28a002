"""Reading exactly the offsets of a batch with the official connector, and saying which offsets that gave."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import connect
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.session import runs_tasks_once, shares_consumers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_FIRST_ATTEMPT = r"task [0-9]+\.0 in stage [0-9]+\.0 "
_ROWS_OF_A_TASK = 2**33 - 1
_RUN_AGAIN = (
    "Spark runs a task of this batch again, most likely as its executor was lost: its records may have been processed, "
    "so this attempt ends before the first"
)
NOTHING_READ: Final = (
    "the block ended without batch.read(...): nothing was read, so nothing is committed. Read the batch, or call "
    "batch.begin_processing() before you read its ranges with a reader of your own"
)
_OURS: Final = {"kafka.isolation.level": "read_committed"}
# After each poll the connector asks for the log's ends, on a connection where a fetch at the log's end may be waiting:
# larger and fewer polls read about twice as fast, and a short wait saves half a second in every task. No fetch but that
# one waits: what a batch reads is there.
_CONSUMER_DEFAULTS = {"kafka.max.poll.records": "10000", "kafka.fetch.max.wait.ms": "1"}
_GROUP: Final = "kafka.group.id"
_GROUPS_KNOWN: Final = 64
HIGHEST_OFFSET: Final = 2**63 - 2
"""Of a message. The offset after a higher one would overflow: an error, or a negative number without ANSI mode."""


def read_ranges(
    spark: "SparkSession",
    kafka_options: Mapping[str, str],
    topic: str,
    ranges: Mapping[int, tuple[int, int]],
    *,
    min_partitions: int | None = None,
    topic_id: str | None = None,
) -> "DataFrame":
    """Return the messages of `topic` at `ranges`: for each partition the offsets [first readable, end).

    Columns as in `read_schema`. Lazy: each action on the frame reads Kafka again. `kafka_options` are the connection's,
    with the connector's `kafka.` in front of each name; a consumer's own may be among them. Where messages were
    compacted away, aborted, or are a transaction's markers, the frame has none at that offset. Reading fails when
    retention takes an offset of the ranges meanwhile. `min_partitions` splits the reading into at least so many tasks
    (by default one for each Kafka partition). With Kafka's `topic_id` the consumers of one read serve the next
    one of the same incarnation of the topic, if it comes soon and the session forgets soon enough
    (`session.shares_consumers`). Raises `ConfigurationError`.
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
    """Return the messages at ranges of at least one partition, as `read_ranges`; these may be empty."""
    for name in kafka_options:
        if not name.startswith("kafka.") or name in _OURS:
            raise ConfigurationError(
                f"{name}: not an option of the Kafka connection; give those with `kafka.` in front. The isolation "
                "level is always read_committed"
            )
    if connect.is_connect(spark):
        connect.hide_secrets(spark, kafka_options)
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
        .drop("timestampType")  # leaves what `read_schema` has, in less time than naming that
    )


def run_once(frame: "DataFrame") -> "DataFrame":
    """Give `frame`, whose rows come from first attempts of tasks alone: Spark's action fails where it begins another.

    Spark runs a task again whose executor was lost with its machine, and a stage that lost what it had given to the
    next, whatever its settings say. What `batch.read` gives in a session on a cluster under which no task is to fail
    twice (`SINGLE_EXECUTION`, which at most once asks for) is such a frame. It holds for the tasks up to the next
    shuffle: put it around what follows one, too, in at most once.
    """
    # Where a task runs stands in the name of its thread alone, as far as SQL goes. Once for each task is enough.
    thread = f.call_function("reflect", f.lit("java.lang.Thread"), f.lit("currentThread"))
    is_first_row = f.monotonically_increasing_id().bitwiseAND(f.lit(_ROWS_OF_A_TASK)) == 0
    may_go_on = ~is_first_row | thread.rlike(_FIRST_ATTEMPT)
    return frame.where(f.when(may_go_on, f.lit(True)).otherwise(f.raise_error(_RUN_AGAIN).cast("boolean")))  # noqa: FBT003


def check_min_partitions(min_partitions: int | None) -> None:
    """Refuse a number of tasks that Spark cannot have. Raises `ConfigurationError`."""
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
    """Return how many records `frame` has of each partition that has any, in one pass over it."""
    return {row["partition"]: row["count"] for row in frame.groupBy("partition").count().collect()}


def offsets_read(frame: "DataFrame") -> dict[int, list[tuple[int, int]]]:
    """Return the offsets that are in `frame`, for each partition as rising half-open intervals [start, end).

    Spark works it out (one pass over columns `partition` and `offset`, sorted by them); what comes to the driver is one
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
def _group_of(topic_id: str, consumer: frozenset[tuple[str, str]]) -> str:  # noqa: ARG001 - told apart by them
    """Name the consumers of this process that read an incarnation of a topic with these settings.

    Spark keeps consumers, and what they have fetched beyond the end of a read, by this name and the partition; without
    one each read begins with new ones. None of them joins the group or commits to it.
    """
    return f"marshal-dagster-{uuid4()}"


def _offsets(topic: str, offsets: Mapping[int, int]) -> str:
    return json.dumps({topic: {str(partition): offset for partition, offset in offsets.items()}})
