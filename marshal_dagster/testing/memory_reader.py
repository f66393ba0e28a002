"""Reading of records in memory: into frames of Spark, or into rows for functions that need no Spark."""

import inspect
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.spark.reader import read_schema
from marshal_dagster.testing.crashes import CrashPoint, MortalProcess
from marshal_dagster.testing.memory_topics import MemoryRecord, MemoryTopics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.kafka.admin_client import Topics

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
"""The columns of a batch."""


class FrameKind(StrEnum):
    """The kind of frame that a function gets in memory, by the annotation of its third argument."""

    SPARK = "spark"
    """A DataFrame of Spark, as in production."""
    ROWS = "rows"
    """A list of dicts."""
    PANDAS = "pandas"
    """A DataFrame of pandas."""


_KINDS: Final = {
    FrameKind.ROWS: re.compile(r"(list|List|Sequence|Iterable)(\[.*\])?"),
    FrameKind.PANDAS: re.compile(r"(pd|pandas)\.(.*\.)?DataFrame"),
    FrameKind.SPARK: re.compile(r"(pyspark\..*|sql\.)?DataFrame"),
}


def frame_kind(function: Callable[..., Any]) -> FrameKind:
    """Return the kind of frame that a function gets in memory if the test passes no Spark session.

    Raises `ConfigurationError` if the annotation does not include Spark's DataFrame, which it gets in production.
    """
    arguments = list(inspect.signature(function).parameters.values())
    if len(arguments) < 3:  # noqa: PLR2004 - context, batch and frame
        return FrameKind.SPARK
    given = arguments[2].annotation
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    parts = [part.strip().strip("'\"").removeprefix("typing.") for part in text.strip("'\"").split("|")]
    kinds = {kind for part in parts for kind, pattern in _KINDS.items() if pattern.fullmatch(part)}
    without_spark = [kind for kind in (FrameKind.ROWS, FrameKind.PANDAS) if kind in kinds]
    if not without_spark:
        return FrameKind.SPARK
    if FrameKind.SPARK not in kinds:
        raise ConfigurationError(
            f"{arguments[2].name!r} of {getattr(function, '__qualname__', function)} is annotated as {text}, but a run "
            f"passes a DataFrame of Spark: annotate it as `DataFrame | {text}`, and take both"
        )
    return without_spark[0]


def frame_of(records: list[MemoryRecord], kind: FrameKind) -> Any:  # noqa: ANN401 - a list or a frame of pandas
    """Return the records as rows, or as a frame of pandas."""
    rows = [record.as_row() for record in records]
    if kind is FrameKind.ROWS:
        return rows
    import pandas as pd

    return pd.DataFrame(rows, columns=list(COLUMNS))


class MemoryReader:
    """Reads the batches of a process from topics in memory (`marshal_dagster.batches.record_reader.RecordReader`)."""

    def __init__(self, topics: MemoryTopics, process: MortalProcess) -> None:
        self._topics = topics
        self._process = process

    def check_session(self, spark: "SparkSession", mode: DeliveryMode) -> None:
        """Accept any session, because it needs no Kafka connector and its frames are in memory."""

    def read_ranges(
        self,
        spark: "SparkSession",
        topic: str,
        ranges: Mapping[int, tuple[int, int]],
        *,
        min_partitions: int | None = None,
        topic_id: str | None = None,  # noqa: ARG002 - there are no consumers to share
    ) -> "DataFrame":
        """Return a frame over the records of the ranges; die before that if the process crashes after its claim."""
        self._process.reach(CrashPoint.AFTER_CLAIM)
        frame = self.read_part(spark, topic, ranges)
        return frame if min_partitions is None else frame.repartition(min_partitions)

    def read_part(self, spark: "SparkSession", topic: str, offsets: Mapping[int, tuple[int, int]]) -> "DataFrame":
        """Return a frame over the records at these offsets."""
        rows = [tuple(record.as_row().values()) for record in self._topics.read_offsets(topic, offsets)]
        return spark.createDataFrame(rows, read_schema())

    def bytes_per_offset(self, topics: "Topics", group: str, topic: str) -> float | None:  # noqa: ARG002 - all are in memory
        """Return the mean size of the topic's records, None if it has none."""
        everything = dict.fromkeys(self._topics.describe(topic).partitions, (0, 2**63))
        sizes = [
            len(record.key or b"") + len(record.value or b"") for record in self._topics.read_offsets(topic, everything)
        ]
        return sum(sizes) / len(sizes) if sizes else None
