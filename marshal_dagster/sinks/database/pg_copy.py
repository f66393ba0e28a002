"""Rows as lines of PostgreSQL's COPY text format, rendered by Spark so that Python only passes them on."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.caching import persisted, without_partitions
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import DataType, StructType

_CHARACTERS_AT_ONCE = 4 * 1024 * 1024
_NULL = "\\N"
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
# The offset from UTC is written with each, so no session's time zone matters.
_TIMESTAMP = "yyyy-MM-dd HH:mm:ss.SSSSSSXXXXX"

_TYPES: Mapping[str, str] = {
    "byte": "smallint",
    "short": "smallint",
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    "boolean": "boolean",
    "string": "text",
    "char": "text",
    "varchar": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "array": "jsonb",
    "map": "jsonb",
    "struct": "jsonb",
}


def postgres_type(name: str, data_type: "DataType") -> str:
    """Return PostgreSQL's type for a column; raises `ConfigurationError` where there is none."""
    if isinstance(data_type, t.DecimalType):
        return f"numeric({data_type.precision},{data_type.scale})"
    target = _TYPES.get(data_type.typeName())
    if target is None:
        raise ConfigurationError(
            f"column {name!r} is of type {data_type.simpleString()}, which a Postgres sink does not write: cast it"
        )
    return target


def copy_line(schema: "StructType", names: Sequence[str]) -> "Column":
    """Return one line of COPY text, without its end, of the columns `names`."""
    fields = [f.coalesce(_text(name, schema[name].dataType)(f.col(quoted(name))), f.lit(_NULL)) for name in names]
    return f.concat_ws("\t", *fields)


def _text(name: str, data_type: "DataType") -> Callable[["Column"], "Column"]:
    target = postgres_type(name, data_type)
    if target == "text":
        return _escaped
    if target == "bytea":
        return lambda column: f.concat(f.lit("\\\\x"), f.hex(column))
    if target == "timestamptz":
        return lambda column: f.date_format(column, _TIMESTAMP)
    if target == "jsonb":
        return lambda column: _escaped(f.to_json(column, {"ignoreNullFields": "false"}))
    return lambda column: column.cast("string")


def _escaped(column: "Column") -> "Column":
    for plain, escaped in _ESCAPES:
        column = f.replace(column, f.lit(plain), f.lit(escaped))
    return column


@dataclass(frozen=True, slots=True)
class FrameLines:
    """An evaluated frame as COPY text, a line for each row with all its columns; it can be gone through repeatedly."""

    counts: Mapping[int | None, int]
    all_have_offsets: bool
    _lines: "DataFrame"
    _size: int

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield each row's partition and line; only some megabytes of them are in this process at a time."""
        pieces = math.ceil(self._size / _CHARACTERS_AT_ONCE)
        if pieces <= 1:
            rows: Iterable[Row] = self._lines.collect()
        else:
            rows = self._lines.coalesce(pieces).toLocalIterator(prefetchPartitions=True)
        for row in rows:
            yield row[0], row[1]


@contextmanager
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameLines]:
    """Evaluate `frame`, but for the rows of the partitions `done`, once and on all executors, and give its lines."""
    partition = f.col(PARTITION_COLUMN)
    has_offset = f.col(OFFSET_COLUMN).isNotNull() if OFFSET_COLUMN in frame.columns else f.lit(False)  # noqa: FBT003
    rendered = without_partitions(frame, done).select(
        partition.alias("partition"),
        copy_line(frame.schema, frame.columns).alias("line"),
        has_offset.alias("has_offset"),
    )
    with persisted(rendered) as lines:
        totals = (
            lines.groupBy("partition").agg(f.count("*"), f.sum(f.length("line")), f.bool_and("has_offset")).collect()
        )
        yield FrameLines(
            counts={row[0]: row[1] for row in totals},
            all_have_offsets=all(row[3] for row in totals),
            _lines=lines.select("partition", "line"),
            _size=sum(row[2] for row in totals),
        )
