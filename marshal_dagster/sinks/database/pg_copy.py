"""Renders rows as lines of PostgreSQL's COPY text format in Spark.

`staged_rows` sends them to PostgreSQL. The values do not depend on settings of the Spark session.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marshal_dagster.sinks.database.frame_lines import FrameLines, evaluated_lines
from marshal_dagster.sinks.database.value_text import (
    JSON_OPTIONS,
    day_text,
    decimal_text,
    declared_type,
    in_utc,
    parts_of,
    time_text,
    with_times_as_text,
    without_collation,
)
from marshal_dagster.sinks.rejected_rows import NUL, text_check
from marshal_dagster.sinks.sink import quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

NULL = "\\N"
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))

_TYPES: Mapping[str, str] = {
    "byte": "smallint",
    "short": "smallint",
    "integer": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double precision",
    "decimal": "numeric",
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
    """Return the PostgreSQL type for a column. Raises `ConfigurationError` for a type that the sink does not write."""
    return declared_type(name, data_type, _TYPES, "PostgreSQL")


def copy_line(schema: "StructType", names: Sequence[str]) -> "Column":
    """Return one line of COPY text, without the line end, for the columns `names`."""
    fields = [f.coalesce(_field(name, schema[name].dataType), f.lit(NULL)) for name in names]
    return f.concat_ws("\t", *fields)


def _field(name: str, data_type: "DataType") -> "Column":
    text = column_text(name, data_type)
    return _escaped(text) if postgres_type(name, data_type) in {"text", "jsonb", "bytea"} else text


def column_text(name: str, data_type: "DataType") -> "Column":
    """Return a column's values as PostgreSQL parses them, whatever the settings of the Spark session."""
    column, target = f.col(quoted(name)), postgres_type(name, data_type)
    if target == "text":
        return without_collation(column)
    if target == "bytea":
        return f.concat(f.lit("\\x"), f.hex(column))
    if target == "jsonb":
        return f.to_json(with_times_as_text(column, data_type), JSON_OPTIONS)
    render = decimal_text if isinstance(data_type, t.DecimalType) else _TIMES.get(target, _plain_text)
    return render(column)


def _plain_text(column: "Column") -> "Column":
    return column.cast("string")


def _escaped(column: "Column") -> "Column":
    for plain, escaped in _ESCAPES:
        column = f.replace(column, f.lit(plain), f.lit(escaped))
    return column


def _date_text(date: "Column") -> "Column":
    """Render a date as PostgreSQL parses it, independent of the Spark session's settings."""
    return f.concat(day_text(date), _era(date))


def _timestamp_text(instant: "Column") -> "Column":
    """Render an instant in UTC from its number of microseconds, independent of the session's time zone."""
    date, time = in_utc(instant)
    return f.concat(day_text(date), f.lit(" "), time_text(time), f.lit("+00"), _era(date))


def _local_timestamp_text(local: "Column") -> "Column":
    date, time = parts_of(local)
    return f.concat(day_text(date), f.lit(" "), time_text(time), _era(date))


_TIMES: "Mapping[str, Callable[[Column], Column]]" = {
    "date": _date_text,
    "timestamptz": _timestamp_text,
    "timestamp": _local_timestamp_text,
}


def _era(date: "Column") -> "Column":
    return f.when(f.year(date) > 0, f.lit("")).otherwise(f.lit(" BC"))


@contextmanager
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameLines]:
    """Evaluate `frame` once on the executors, without the rows of the partitions `done`, and yield its lines."""
    line, check = copy_line(frame.schema, frame.columns), text_check(frame.schema, nul=NUL)
    with evaluated_lines(frame, done, line, check) as lines:
        yield lines
