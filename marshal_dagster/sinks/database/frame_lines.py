"""An evaluated frame as one line of text for each row, so that Python only forwards the lines to a database."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marshal_dagster.sinks.caching import persisted, without_partitions
from marshal_dagster.sinks.rejected_rows import RejectedRow, RowCheck
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_CHARACTERS_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrameLines:
    """An evaluated frame as lines of text, one for each row. It can be iterated repeatedly."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    all_have_offsets: bool
    rejected: RejectedRow | None
    """The first row with a value that the database would change or reject, or None."""
    _lines: "DataFrame"
    _size: int

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield each row's partition and line; this process holds a few megabytes of them at a time."""
        pieces = math.ceil(self._size / _CHARACTERS_AT_ONCE)
        if pieces <= 1:
            rows: Iterable[Row] = self._lines.collect()
        else:
            rows = self._lines.coalesce(pieces).toLocalIterator(prefetchPartitions=True)
        for row in rows:
            yield row[0], row[1]


@contextmanager
def evaluated_lines(frame: "DataFrame", done: Sequence[int], line: "Column", check: RowCheck) -> Iterator[FrameLines]:
    """Evaluate `frame` once, with each row as `line`, and yield the lines and the first row that fails `check`."""
    partition = f.col(PARTITION_COLUMN)
    has_offset = f.col(OFFSET_COLUMN).isNotNull() if OFFSET_COLUMN in frame.columns else f.lit(False)  # noqa: FBT003
    rendered = without_partitions(frame, done).select(
        partition.alias("partition"),
        line.alias("line"),
        has_offset.alias("has_offset"),
        check.problem.alias("problem"),
    )
    with persisted(rendered) as lines:
        totals = (
            lines.groupBy("partition")
            .agg(f.count("*"), f.sum(f.length("line")), f.bool_and("has_offset"), f.min("problem"))
            .collect()
        )
        yield FrameLines(
            counts={row[0]: row[1] for row in totals},
            all_have_offsets=all(row[3] for row in totals),
            rejected=check.first((row[0], row[4]) for row in totals),
            _lines=lines.select("partition", "line"),
            _size=sum(row[2] for row in totals),
        )
