"""Reading a file output into Spark by its commits, without the rows that a newer generation has replaced."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.files.commit_log import CommitView
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_OFFSETS_PER_BUCKET = 4096


@dataclass(slots=True)
class _Part:
    """Files that are read in one go, and the offsets at which their rows do not count: (partition, start, end)."""

    files: list[str] = field(default_factory=list)
    replaced: list[tuple[int, int, int]] = field(default_factory=list)


def read_committed(
    spark: "SparkSession", view: CommitView, path_of: Callable[[str], str], options: Mapping[str, str]
) -> "DataFrame":
    """Return the rows that count by the commits of `view`; `path_of` gives the path of each of their files.

    Files that hold replaced rows are read apart, each generation's together, and joined with what replaces them.
    """
    schema = _schema(view)
    format_name = view.commits[-1].format
    frames = []
    for part in _parts(view, path_of):
        rows = spark.read.format(format_name).options(**options).schema(schema).load(part.files)
        frames.append(_without(spark, rows, part.replaced) if part.replaced else rows)
    if not frames:
        return spark.createDataFrame([], schema)
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _parts(view: CommitView, path_of: Callable[[str], str]) -> list[_Part]:
    parts: dict[tuple[object, ...], _Part] = {}
    for commit in view.commits:
        for entry in commit.entries:
            if not entry.files:
                continue
            replaced = view.replaced(entry)
            # Rows of one class meet the same replaced offsets: a partition's offsets mean the same in all of them.
            taken = entry.taken
            row_class = (taken.group, taken.topic, taken.data_topic_id, taken.generation) if replaced else ()
            part = parts.setdefault(row_class, _Part())
            part.files.extend(path_of(f"{commit.attempt}/{name}") for name in entry.files)
            part.replaced.extend((taken.partition, start, end) for start, end in replaced)
    return list(parts.values())


def _without(spark: "SparkSession", rows: "DataFrame", replaced: list[tuple[int, int, int]]) -> "DataFrame":
    """Leave out the rows at `replaced`; buckets of offsets make it a join by equality, however many there are."""
    first, last = f.col("start"), f.col("end") - 1
    bucket = f.explode(f.sequence(_bucket(first), _bucket(last))).alias("bucket")
    gone = (
        spark.createDataFrame(sorted(set(replaced)), "partition int, start long, end long")
        .select("partition", "start", "end", bucket)
        .alias("gone")
    )
    kept = rows.alias("kept")
    offset = f.col(f"kept.{OFFSET_COLUMN}")
    return kept.join(
        gone,
        (f.col(f"kept.{PARTITION_COLUMN}") == f.col("gone.partition"))
        & (_bucket(offset) == f.col("gone.bucket"))
        & (offset >= f.col("gone.start"))
        & (offset < f.col("gone.end")),
        "left_anti",
    )


def _bucket(offset: "Column") -> "Column":
    return f.floor(offset / _OFFSETS_PER_BUCKET)


def _schema(view: CommitView) -> "StructType":
    fields: dict[str, t.StructField] = {}
    for text in dict.fromkeys(commit.schema for commit in reversed(view.commits)):
        for column in t.StructType.fromJson(json.loads(text)).fields:
            known = fields.setdefault(column.name, t.StructField(column.name, column.dataType, nullable=True))
            if known.dataType != column.dataType:
                raise ConfigurationError(
                    f"column {column.name!r}: its type changed from {column.dataType.simpleString()} to "
                    f"{known.dataType.simpleString()} between commits of this output; read `committed_files` yourself"
                )
    return t.StructType(list(fields.values()))
