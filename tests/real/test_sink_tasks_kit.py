"""The conformance kit with real frames, on the sinks whose rows are written by Spark's tasks."""

import inspect
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as f
from pyspark.sql.types import StructField, StructType

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.sinks import KafkaSink, PostgresSink
from marshal_dagster.sinks.conformance import CASES, Case, Row, Target
from marshal_dagster.sinks.conformance.target import COLUMNS
from marshal_dagster.sinks.database import task_rows
from marshal_dagster.sinks.kafka import tasks
from marshal_dagster.sinks.kafka.records import FrameRecords
from marshal_dagster.sinks.row_writer import RowWriter
from tests.kafka_outputs import KafkaOutput
from tests.sink_conformance import shared
from tests.sink_outputs import TABLE, TYPES, PostgresOutput, own_schema
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITH_TASKS = (
    "subset_replayed_by_others",
    "batch_refuses",
    "death_at_any_step",
    "overtaken_at_any_step",
    "two_at_once",
    "several_rows_of_a_message",
    "over_older_ranges",
)
"""The cases in which tasks may behave differently from the driver."""
EACH_RANGE = ("rest_of_a_batch", "ranges_without_rows", "batches_that_share_ranges")
"""More of them for Kafka. For PostgreSQL `test_sink_spark` has them."""


def chosen(*names: str) -> list[Case]:
    """Return the cases with these names. With `MARSHAL_WHOLE_KIT=1` in the environment return all cases."""
    return [case for case in CASES if str(case) in names or os.environ.get("MARSHAL_WHOLE_KIT")]


class KeyedSink(KafkaSink):
    """A sink whose record keys name the source message, -1 for a missing offset."""

    def _evaluated(  # type: ignore[override]
        self, frame: "DataFrame", done: Sequence[int]
    ) -> AbstractContextManager[FrameRecords]:
        offset = f.coalesce("offset", f.lit(-1)) if "offset" in frame.columns else f.lit(-1)
        return super()._evaluated(frame.withColumn("key", f.concat_ws("/", "partition", offset)), done)


class TaskTarget(Target):
    """An output whose rows tasks write. A writer dies or stalls at lines of the driver."""

    most_steps = 3

    def __init__(self, spark: "SparkSession") -> None:
        self.spark = spark

    def frame(self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = COLUMNS) -> "DataFrame":
        """Return a frame of these rows in two Spark partitions."""
        assert self.spark is not None
        schema = StructType([StructField(name, TYPES[name]) for name in columns])
        return local_frame(self.spark, rows, schema).repartition(2)


class KafkaTasks(TaskTarget):
    """A topic."""

    range_by_range = True

    def __init__(self, spark: "SparkSession", connection: KafkaConnection) -> None:
        super().__init__(spark)
        self.output = KafkaOutput(connection)

    def sink(self) -> KafkaSink:
        """Return a sink, as another process opens it."""
        sink = KeyedSink(self.output.connection, self.output.topic)
        assert sink.written_by is RowWriter.EXECUTORS
        return sink

    def shared_sink(self) -> KafkaSink:
        """Return a sink for several groups, as another process opens it."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the committed rows."""
        return self.output.rows(patience_s=1)

    def source_files(self) -> Collection[str]:
        """Return the files of the sink and of the driver's part of the tasks."""
        return {*super().source_files(), inspect.getfile(tasks)}


class PostgresTasks(TaskTarget):
    """A table in a schema of its own."""

    def __init__(self, spark: "SparkSession", dsn: str) -> None:
        super().__init__(spark)
        self.output = PostgresOutput(dsn, own_schema())

    def sink(self) -> PostgresSink:
        """Return a sink, as another process opens it."""
        sink = PostgresSink(self.output.dsn, TABLE, schema=self.output.schema)
        assert sink.written_by is RowWriter.EXECUTORS
        return sink

    def shared_sink(self) -> PostgresSink:
        """Return a sink for several groups, as another process opens it."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return self.output.rows()

    def source_files(self) -> Collection[str]:
        """Return the files of the sink and of the driver's part of the tasks."""
        return {*super().source_files(), inspect.getfile(task_rows)}


@pytest.fixture
def kafka_tasks(spark: "SparkSession", connection: KafkaConnection) -> KafkaTasks:
    """An empty topic."""
    return KafkaTasks(spark, connection)


@pytest.fixture
def postgres_tasks(spark: "SparkSession", postgres: str) -> PostgresTasks:
    """An empty table."""
    return PostgresTasks(spark, postgres)


@pytest.mark.parametrize("case", chosen(*WITH_TASKS, *EACH_RANGE), ids=str)
def test_the_kafka_sink_conforms(case: Case, kafka_tasks: KafkaTasks) -> None:
    """Each range is a transaction of a task."""
    case.check(kafka_tasks)


@pytest.mark.parametrize("case", chosen(*WITH_TASKS), ids=str)
def test_the_postgres_sink_conforms(case: Case, postgres_tasks: PostgresTasks) -> None:
    """Tasks copy the rows into a staging table, from which one transaction moves them."""
    case.check(postgres_tasks)
