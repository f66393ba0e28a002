"""Rows that an output cannot store: finds the first one, also during the write, and names its message and column."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, skip_text
from marshal_dagster.sinks.sink import OFFSET_COLUMN, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.nested_values import any_value, has_nul, holds, is_not_utf8, text_kinds

if TYPE_CHECKING:
    from pyspark.sql import Column, Row
    from pyspark.sql.types import StructType

_Error = TypeVar("_Error", bound=Exception)

NOT_UTF8 = "it has bytes that are not UTF-8, which would be replaced silently"
NUL = "it has a NUL character (U+0000), which PostgreSQL cannot store in a string"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be written, and the reason."""

    partition: int
    """The partition of the row's message."""
    offset: int | None
    """The offset of the row's message, None if unknown."""
    column: str | None
    """The column with the wrong value, None if unknown."""
    reason: str

    def error(self, output: str, ranges: Sequence[ClaimedRange]) -> SinkRejectedError:
        """Return the error that names the row's message and how to continue."""
        range_ = next(range_ for range_ in ranges if range_.partition == self.partition)
        if self.offset is None:
            message = f"offsets {range_.start} to {range_.end - 1} (the row has no offset)"
            skip = skip_text(range_, range_.start, range_.end)
        else:
            message, skip = f"offset {self.offset}", skip_text(range_, self.offset, self.offset + 1)
        column = "" if self.column is None else f", column {self.column!r}"
        return SinkRejectedError(
            f"{output} cannot store the row of topic {range_.topic!r}, partition {self.partition}, {message}{column}: "
            f"{self.reason}; nothing was written. Correct the code that makes the row, or skip the message: {skip}"
        )


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A Spark expression that finds rows with a value that an output cannot store."""

    problem: "Column"
    """A struct of the row's offset and the index of its problem; null for a row without a problem."""
    _problems: Sequence[tuple[str, str]]

    def first(self, found: Iterable[tuple[int | None, "Row | None"]]) -> RejectedRow | None:
        """Return the first rejected row of the lowest partition, or None.

        Args:
            found: Partition and lowest `problem` of some of its rows, None for rows without problems.
        """
        rows = [(partition, *problem) for partition, problem in found if partition is not None and problem is not None]
        if not rows:
            return None
        partition, offset, number = min(rows, key=lambda row: (row[0], row[1] is not None, row[1] or 0, row[2]))
        return RejectedRow(partition, offset, *self._problems[number])


def text_check(schema: "StructType", *, nul: str | None) -> RowCheck:
    """Return the check of all strings in the columns of `schema`, including those in arrays, maps and structs.

    Args:
        schema: The schema of the rows.
        nul: Why strings with a NUL character are refused, None if they are not.
    """
    return row_check(schema, text_problems(schema, nul=nul))


def text_problems(schema: "StructType", *, nul: str | None) -> "list[tuple[str, str, Column]]":
    """Return the problems of strings for `row_check` (`text_check`)."""
    texts = text_kinds()
    reasons = [(NOT_UTF8, is_not_utf8)] + ([] if nul is None else [(nul, has_nul)])
    return [
        (column.name, reason, any_value(f.col(quoted(column.name)), column.dataType, texts, is_bad))
        for column in schema.fields
        if holds(column.dataType, texts)
        for reason, is_bad in reasons
    ]


def row_check(schema: "StructType", problems: "Sequence[tuple[str, str, Column]]") -> RowCheck:
    """Return the check of rows for problems; the first problem of a row is reported.

    Args:
        schema: The schema of the rows.
        problems: For each problem its column, the reason for the error, and the condition for a row that has it.
    """
    numbers = (f.when(is_bad, f.lit(index)) for index, (_, _, is_bad) in enumerate(problems))
    # One flat expression: Spark's optimizer takes minutes for nested ones of some dozen columns.
    number = f.coalesce(*numbers, f.lit(None).cast("int"))
    offset = f.col(OFFSET_COLUMN) if OFFSET_COLUMN in schema.names else f.lit(None)
    struct = f.struct(offset.cast("bigint").alias("offset"), number.alias("number"))
    return RowCheck(f.when(number.isNotNull(), struct), [(column, reason) for column, reason, _ in problems])


def first_rejected(count: int, error_of: Callable[[int, int], _Error | None]) -> tuple[int, _Error] | None:
    """Find the first row that a table rejects by a binary search, and return its index and the error.

    Args:
        count: The number of rows.
        error_of: Moves the rows from one index up to another one, and returns the error with which the table rejects
            them. Rows that it accepts must stay, so that a duplicate key is found too.

    Returns:
        None if the table accepts all rows this time.
    """
    first, end = 0, count
    while first < end:
        middle = (first + end + 1) // 2
        error = error_of(first, middle)
        if error is None:
            first = middle
        elif middle - first == 1:
            return first, error
        else:
            end = middle
    return None
