"""Renders values in Spark as text that each database parses, whatever the settings of the Spark session."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.column_names import check_nested_names
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

JSON_OPTIONS: Final = {"ignoreNullFields": "false", "timeZone": "UTC"}  # the time zone is for times in variants
_KEYS: Final = frozenset(
    (
        *("byte", "short", "integer", "long", "float", "double", "boolean"),
        *("string", "char", "varchar", "date", "timestamp", "timestamp_ntz"),
    )
)
"""The types of keys of maps that JSON's strings name exactly, besides decimals."""
_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US


def declared_type(name: str, data_type: "DataType", types: Mapping[str, str], database: str) -> str:
    """Return the type with which a table declares a column.

    Args:
        name: The column.
        data_type: Its Spark type.
        types: The database's types by the names of Spark's.
        database: The database's name, for errors.

    Raises:
        ConfigurationError: A sink does not write the type, or it has names or keys that JSON cannot express.
    """
    declared = types.get(data_type.typeName())
    if declared is None:
        raise ConfigurationError(
            f"column {name!r} has type {data_type.simpleString()}, which a {database} sink does not write. Cast the "
            "column"
        )
    check_nested_names(name, data_type, case_sensitive=True)
    _check_keys(name, data_type)
    if isinstance(data_type, t.DecimalType):
        return f"{declared}({data_type.precision},{data_type.scale})"
    return declared


def _check_keys(name: str, data_type: "DataType") -> None:
    """Raise `ConfigurationError` for maps whose keys cannot be converted to JSON strings unchanged."""
    if isinstance(data_type, t.MapType):
        key = data_type.keyType
        if not isinstance(key, t.DecimalType) and key.typeName() not in _KEYS:
            raise ConfigurationError(
                f"column {name!r} has maps with keys of type {key.simpleString()}, which cannot be keys in JSON. Cast "
                "the keys to string"
            )
        _check_keys(name, data_type.valueType)
    elif isinstance(data_type, t.ArrayType):
        _check_keys(name, data_type.elementType)
    elif isinstance(data_type, t.StructType):
        for column in data_type.fields:
            _check_keys(f"{name}.{column.name}", column.dataType)


def without_collation(text: "Column") -> "Column":
    """Return a text whose characters are compared byte by byte.

    With a collation such as UNICODE, `replace` finds no character that a combining accent follows, and no control
    character.
    """
    return text.cast("string")


def decimal_text(number: "Column") -> "Column":
    """Render a number with all its digits. Without ANSI mode, a cast would render small numbers and zeros as `0E-7`."""
    text = number.cast("string")
    digits = f.translate(f.substring_index(text, "E-", 1), "-.", "")
    exponent = f.when(text.contains("E-"), f.substring_index(text, "E-", -1)).otherwise(f.lit("1")).cast("int")
    zeros = f.call_function("repeat", f.lit("0"), exponent - 1)  # `f.repeat` takes a column from Spark 4.0 on
    sign = f.when(text.startswith("-"), f.lit("-")).otherwise(f.lit(""))
    return f.when(text.contains("E-"), f.concat(sign, f.lit("0."), zeros, digits)).otherwise(text)


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
