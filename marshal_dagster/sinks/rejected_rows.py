"""A row that an output cannot hold: found before it is written, and named with its message and column."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.sink import OFFSET_COLUMN, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, Row
    from pyspark.sql.types import DataType, StructType

NOT_UTF8 = "it has bytes that are not UTF-8, which would be replaced without a word"
NUL = "it has a NUL character (U+0000), which a text of PostgreSQL cannot hold"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be written, and why; `offset` and `column` are None where they are not known."""

    partition: int
    offset: int | None
    column: str | None
    reason: str

    def error(self, output: str, ranges: Sequence[ClaimedRange]) -> SinkRejectedError:
        """Return the error that names the row's message, and how to continue."""
        range_ = next(range_ for range_ in ranges if range_.partition == self.partition)
        if self.offset is None:
            message, following = f"offsets {range_.start} to {range_.end - 1} (the row has no offset)", range_.end
        else:
            message, following = f"offset {self.offset}", self.offset + 1
        column = "" if self.column is None else f", column {self.column!r}"
        return SinkRejectedError(
            f"{output} does not take the row of topic {range_.topic!r}, partition {self.partition}, {message}{column}: "
            f"{self.reason}; nothing was written. Correct the code that makes the row, or skip the message: "
            f"`marshal-dagster position reset {range_.group} {range_.topic} --to-offset {self.partition}={following}`"
        )


@dataclass(frozen=True, slots=True)
class TextCheck:
    """Finds, in Spark, rows with a text that an output cannot hold."""

    problem: "Column"
    """The row's offset and the problem's number, as a struct; null for a row without a problem."""
    _problems: Sequence[tuple[str, str]]

    def rejected(self, partition: int, problem: "Row") -> RejectedRow:
        """Return the row of this partition with this `problem`."""
        offset, number = problem
        return RejectedRow(partition, offset, *self._problems[number])


def text_check(schema: "StructType", *, refuse_nul: bool) -> TextCheck:
    """Return the check of all texts in the columns of `schema`, also of those within arrays, maps and structs."""
    problems: list[tuple[str, str]] = []
    number = f.lit(None).cast("int")
    for column in schema.fields:
        if not _has_text(column.dataType):
            continue
        for reason, is_bad in (
            ((NOT_UTF8, _is_not_utf8), (NUL, _has_nul)) if refuse_nul else ((NOT_UTF8, _is_not_utf8),)
        ):
            bad = _any_text(f.col(quoted(column.name)), column.dataType, is_bad)
            number = f.coalesce(number, f.when(bad, f.lit(len(problems))))
            problems.append((column.name, reason))
    offset = f.col(OFFSET_COLUMN) if OFFSET_COLUMN in schema.names else f.lit(None)
    struct = f.struct(offset.cast("bigint").alias("offset"), number.alias("number"))
    return TextCheck(f.when(number.isNotNull(), struct), problems)


def _is_not_utf8(text: "Column") -> "Column":
    return ~f.is_valid_utf8(text)


def _has_nul(text: "Column") -> "Column":
    return f.instr(text, "\0") > 0


def _has_text(data_type: "DataType") -> bool:
    if isinstance(data_type, t.ArrayType):
        return _has_text(data_type.elementType)
    if isinstance(data_type, t.MapType):
        return _has_text(data_type.keyType) or _has_text(data_type.valueType)
    if isinstance(data_type, t.StructType):
        return any(_has_text(column.dataType) for column in data_type.fields)
    return data_type.typeName() in {"string", "char", "varchar"}


def _any_text(value: "Column", data_type: "DataType", is_bad: Callable[["Column"], "Column"]) -> "Column":
    """Return whether `is_bad` holds for a text in `value`, which is of a type with texts."""

    def within(values: "Column", kind: "DataType") -> "Column":
        return f.exists(values, lambda item: _any_text(item, kind, is_bad))

    if isinstance(data_type, t.ArrayType):
        found = [within(value, data_type.elementType)]
    elif isinstance(data_type, t.MapType):
        keys, values = (f.map_keys(value), data_type.keyType), (f.map_values(value), data_type.valueType)
        found = [within(*side) for side in (keys, values) if _has_text(side[1])]
    elif isinstance(data_type, t.StructType):
        found = [
            _any_text(value.getField(column.name), column.dataType, is_bad)
            for column in data_type.fields
            if _has_text(column.dataType)
        ]
    else:
        found = [is_bad(value)]
    return reduce(operator.or_, (f.coalesce(bad, f.lit(False)) for bad in found))  # noqa: FBT003
