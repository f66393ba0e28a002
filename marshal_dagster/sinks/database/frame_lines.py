"""The rows of an evaluated frame on their way through this process: as Arrow batches, or as lines of text.

A line is what a database parses: Python only forwards it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marshal_dagster.sinks.caching import COUNTING, in_order, persisted, without_partitions
from marshal_dagster.sinks.rejected_rows import RejectedRow, RowCheck
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.interrupts import changed_settings
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.local_batches import local_batches

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import DataType, StructType

_BYTES_AT_ONCE = 4 * 1024 * 1024
_LARGE_BYTES = 64 * 1024 * 1024
"""The size of a partition of the frame above which the rows are divided: Spark passes a partition as a whole."""
_ROWS_AT_ONCE = 2_000
_FIXED_BYTES = 10
"""The size of a value that is neither a string nor nested, in bytes."""


@dataclass(frozen=True, slots=True)
class FrameLines:
    """An evaluated frame, persisted on the executors. Its lines can be iterated repeatedly."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    all_have_offsets: bool
    rejected: RejectedRow | None
    """The first row with a value that the database would change or reject, or None."""
    rows: "DataFrame"
    """The rows as they were evaluated."""
    _line: "Column"
    _size: int
    _is_divided: bool
    """Whether the rows were divided and ordered after their evaluation, because a partition of the frame was large."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield each row's partition and line; this process holds a few megabytes of them at a time."""
        batches = self.batches(self._lines)
        if batches is None:
            yield from self._one_by_one(self._lines(self.rows))
            return
        for batch in batches:
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def batches(self, select: Callable[["DataFrame"], "DataFrame"]) -> "Iterator[RecordBatch] | None":
        """Return the rows as Arrow batches, in the order of the lines, or None if Spark cannot pass them.

        Args:
            select: Returns columns of simple types, selected from `rows`.
        """
        return local_batches(self._joined(select(self.rows)), _ROWS_AT_ONCE, at_once=self._pieces == 1)

    def _lines(self, rows: "DataFrame") -> "DataFrame":
        return rows.select(f.col(PARTITION_COLUMN).cast("bigint"), self._line.alias("line"))

    def _one_by_one(self, lines: "DataFrame") -> "Iterable[Row]":
        if self._pieces == 1:
            return lines.collect()
        return self._joined(lines).toLocalIterator(prefetchPartitions=True)

    def _joined(self, selected: "DataFrame") -> "DataFrame":
        """Return the rows in few partitions of the frame if there are few rows."""
        return selected if self._is_divided else selected.coalesce(self._pieces)  # which may change their order

    @property
    def _pieces(self) -> int:
        return max(1, math.ceil(self._size / _BYTES_AT_ONCE))


@contextmanager
def evaluated_lines(frame: "DataFrame", done: Sequence[int], line: "Column", check: RowCheck) -> Iterator[FrameLines]:
    """Evaluate `frame` once, and yield its rows, which render as `line`, and the first one that fails `check`."""
    has_offset = f.col(OFFSET_COLUMN).isNotNull() if OFFSET_COLUMN in frame.columns else f.lit(False)  # noqa: FBT003
    with persisted(without_partitions(frame, done)) as rows:
        counted = rows.groupBy(PARTITION_COLUMN, f.spark_partition_id()).agg(
            f.count("*"), f.sum(_size(rows.schema)), f.bool_and(has_offset), f.min(check.problem)
        )
        with changed_settings(rows.sparkSession, COUNTING):
            totals = counted.collect()
        counts, sizes = Counter[int | None](), Counter[int]()
        for partition, held_by, count, size, *_ in totals:
            counts[partition] += count
            sizes[held_by] += size
        total = sizes.total()
        is_large = max(sizes.values(), default=0) > _LARGE_BYTES
        yield FrameLines(
            counts=counts,
            all_have_offsets=all(row[4] for row in totals),
            rejected=check.first((row[0], row[5]) for row in totals),
            rows=in_order(rows, math.ceil(total / _BYTES_AT_ONCE)) if is_large else rows,
            _line=line,
            _size=total,
            _is_divided=is_large,
        )


def _size(schema: "StructType") -> "Column":
    """Return about the size of a row in bytes."""
    size = f.lit(0)
    for field in schema.fields:
        size = size + _size_of(f.col(quoted(field.name)), field.dataType)
    return size


def _size_of(column: "Column", data_type: "DataType") -> "Column":
    if isinstance(data_type, t.StringType | t.CharType | t.VarcharType | t.BinaryType):
        return f.coalesce(f.octet_length(column), f.lit(0))
    if isinstance(data_type, t.ArrayType | t.MapType | t.StructType):
        return f.coalesce(f.octet_length(column.cast("string")), f.lit(0))
    return f.lit(_FIXED_BYTES)
