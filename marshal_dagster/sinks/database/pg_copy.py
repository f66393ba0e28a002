"""Renders rows as lines of PostgreSQL's COPY text format in Spark, so that Python only forwards the lines.

`staged_rows` sends them to PostgreSQL. The values do not depend on settings of the Spark session.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.caching import persisted, without_partitions
from marshal_dagster.sinks.rejected_rows import RejectedRow, RowCheck, text_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.column_names import check_nested_names
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import DataType, StructType

_CHARACTERS_AT_ONCE = 4 * 1024 * 1024
NULL = "\\N"
_ESCAPES = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))
JSON_OPTIONS = {"ignoreNullFields": "false", "timeZone": "UTC"}  # the time zone is for times in variants
_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US

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
    """Return the PostgreSQL type for a column. Raises `ConfigurationError` for a type that the sink does not write."""
    if isinstance(data_type, t.DecimalType):
        return f"numeric({data_type.precision},{data_type.scale})"
    target = _TYPES.get(data_type.typeName())
    if target is None:
        raise ConfigurationError(
            f"column {name!r} has type {data_type.simpleString()}, which a PostgreSQL sink does not write. Cast the "
            "column"
        )
    if target == "jsonb":
        check_nested_names(name, data_type, case_sensitive=True)
        check_keys(name, data_type)
    return target


def check_keys(name: str, data_type: "DataType") -> None:
    """Raise `ConfigurationError` for maps whose keys cannot be converted to JSON strings unchanged."""
    if isinstance(data_type, t.MapType):
        key = data_type.keyType
        if not isinstance(key, t.DecimalType) and _TYPES.get(key.typeName()) in {None, "bytea", "jsonb"}:
            raise ConfigurationError(
                f"column {name!r} has maps with keys of type {key.simpleString()}, which cannot be keys in JSON. Cast "
                "the keys to string"
            )
        check_keys(name, data_type.valueType)
    elif isinstance(data_type, t.ArrayType):
        check_keys(name, data_type.elementType)
    elif isinstance(data_type, t.StructType):
        for column in data_type.fields:
            check_keys(f"{name}.{column.name}", column.dataType)


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
        return column
    if target == "bytea":
        return f.concat(f.lit("\\x"), f.hex(column))
    if target == "jsonb":
        return f.to_json(with_times_as_text(column, data_type), JSON_OPTIONS)
    render = decimal_text if isinstance(data_type, t.DecimalType) else _TIMES.get(target, _plain_text)
    return render(column)


def _plain_text(column: "Column") -> "Column":
    return column.cast("string")


def decimal_text(number: "Column") -> "Column":
    """Render a number with all its digits. Without ANSI mode, a cast would render small numbers and zeros as `0E-7`."""
    text = number.cast("string")
    digits = f.translate(f.substring_index(text, "E-", 1), "-.", "")
    exponent = f.when(text.contains("E-"), f.substring_index(text, "E-", -1)).otherwise(f.lit("1")).cast("int")
    zeros = f.call_function("repeat", f.lit("0"), exponent - 1)  # `f.repeat` takes a column from Spark 4.0 on
    sign = f.when(text.startswith("-"), f.lit("-")).otherwise(f.lit(""))
    return f.when(text.contains("E-"), f.concat(sign, f.lit("0."), zeros, digits)).otherwise(text)


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


def in_utc(instant: "Column") -> "tuple[Column, Column]":
    """Return the date in UTC and the microseconds since that day's midnight."""
    micros = f.unix_micros(instant)
    days = f.call_function("div", micros, f.lit(_DAY_US)) - (micros % _DAY_US < 0).cast("bigint")
    return f.date_from_unix_date(days.cast("int")), f.pmod(micros, f.lit(_DAY_US))


def parts_of(local: "Column") -> "tuple[Column, Column]":
    """Return the date and the microseconds since that day's midnight."""
    second_us = (f.extract(f.lit("SECOND"), local) * _SECOND_US).cast("bigint")
    minutes = (f.hour(local) * 60 + f.minute(local)).cast("bigint")
    return local.cast("date"), minutes * (60 * _SECOND_US) + second_us


def day_text(date: "Column") -> "Column":
    """Render a date with the year of its era, of four digits or more."""
    year = f.year(date)
    of_era = f.when(year > 0, year).otherwise(1 - year)
    return _with_month_and_day(of_era, date)


def _with_month_and_day(year: "Column", date: "Column") -> "Column":
    """Render a year above -1, of four digits or more, with the month and the day of `date`."""
    digits = f.when(year > 9999, year.cast("string")).otherwise(_padded(year, 4))  # noqa: PLR2004 - digits
    return f.concat(digits, f.lit("-"), _padded(f.month(date), 2), f.lit("-"), _padded(f.dayofmonth(date), 2))


def _era(date: "Column") -> "Column":
    return f.when(f.year(date) > 0, f.lit("")).otherwise(f.lit(" BC"))


def time_text(micros: "Column") -> "Column":
    """Render a time of day, given in microseconds since midnight."""

    def digits(unit_us: int, many: int, width: int) -> "Column":
        return _padded(f.call_function("div", micros, f.lit(unit_us)) % many, width)

    hour, minute = digits(3_600 * _SECOND_US, 24, 2), digits(60 * _SECOND_US, 60, 2)
    second, fraction = digits(_SECOND_US, 60, 2), _padded(micros % _SECOND_US, 6)
    return f.concat(hour, f.lit(":"), minute, f.lit(":"), second, f.lit("."), fraction)


def _padded(number: "Column", width: int) -> "Column":
    return f.lpad(number.cast("string"), width, "0")


def with_times_as_text(value: "Column", data_type: "DataType") -> "Column":
    """Return `value` with its dates and times as ISO 8601 strings for `to_json`, instants in UTC.

    What `to_json` itself renders depends on the session's time zone and settings, and has no microseconds.
    """
    if isinstance(data_type, t.DateType):
        return _iso_date(value)
    if isinstance(data_type, t.TimestampType):
        date, time = in_utc(value)
        return f.concat(_iso_date(date), f.lit("T"), time_text(time), f.lit("Z"))
    if isinstance(data_type, t.TimestampNTZType):
        date, time = parts_of(value)
        return f.concat(_iso_date(date), f.lit("T"), time_text(time))
    if not _has_time(data_type):
        return value
    if isinstance(data_type, t.ArrayType):
        return f.transform(value, lambda item: with_times_as_text(item, data_type.elementType))
    if isinstance(data_type, t.MapType):
        keys = f.transform_keys(value, lambda key, _: with_times_as_text(key, data_type.keyType))
        return f.transform_values(keys, lambda _, item: with_times_as_text(item, data_type.valueType))
    fields = [
        with_times_as_text(value.getField(column.name), column.dataType).alias(column.name)
        for column in data_type.fields  # type: ignore[attr-defined] # a struct
    ]
    return f.when(value.isNotNull(), f.struct(*fields))


def _has_time(data_type: "DataType") -> bool:
    if isinstance(data_type, t.ArrayType):
        return _has_time(data_type.elementType)
    if isinstance(data_type, t.MapType):
        return _has_time(data_type.keyType) or _has_time(data_type.valueType)
    if isinstance(data_type, t.StructType):
        return any(_has_time(column.dataType) for column in data_type.fields)
    return isinstance(data_type, t.DateType | t.TimestampType | t.TimestampNTZType)


def _iso_date(date: "Column") -> "Column":
    """Render a date as in ISO 8601: years before 0 and after 9999 have a sign."""
    year = f.year(date)
    sign = f.when(year < 0, f.lit("-")).when(year > 9999, f.lit("+")).otherwise(f.lit(""))  # noqa: PLR2004 - digits
    return f.concat(sign, _with_month_and_day(f.abs(year), date))


@dataclass(frozen=True, slots=True)
class FrameLines:
    """An evaluated frame as lines of COPY text, one for each row. It can be iterated repeatedly."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    all_have_offsets: bool
    rejected: RejectedRow | None
    """The first row with a string that PostgreSQL would change or reject, or None."""
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
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameLines]:
    """Evaluate `frame` once on the executors, without the rows of the partitions `done`, and yield its lines."""
    line, check = copy_line(frame.schema, frame.columns), text_check(frame.schema, refuse_nul=True)
    with evaluated_lines(frame, done, line, check) as lines:
        yield lines


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
