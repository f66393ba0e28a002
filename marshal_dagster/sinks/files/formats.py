"""What each format of a file output keeps: types, values, and the options with which rows are written and read.

Spark's defaults lose microseconds in JSON and CSV; in CSV also line breaks, spaces at the ends of a text, and the
difference between '' and null. So these files are written and read with fixed options. What a format cannot give back
even so is refused: a type before anything is evaluated, a value by the job that writes it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, skip_text
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.column_names import check_nested_names, is_case_sensitive
from marshal_dagster.spark.conversion_settings import (
    AVRO_FILES,
    CSV_FILES,
    JSON_FILES,
    PARQUET_FILES,
    Settings,
    check_settings,
)
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.nested_values import Condition, Kinds, any_value, holds, is_not_utf8, parts, text_kinds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

FORMATS: Final = ("parquet", "orc", "json", "csv", "avro")
TEXT_FORMATS: Final = frozenset({"json", "csv"})

_SETTINGS: Final[Mapping[str, Settings]] = {
    "parquet": PARQUET_FILES,
    "json": JSON_FILES,
    "csv": CSV_FILES,
    "avro": AVRO_FILES,
}
_TEXT_OPTIONS: Final = {
    "encoding": "UTF-8",
    "locale": "en-US",
    "timeZone": "UTC",
    "dateFormat": "yyyy-MM-dd",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "lineSep": "\n",
}
_CSV_OPTIONS: Final = {
    "quote": '"',
    "escape": '"',
    "ignoreLeadingWhiteSpace": "false",
    "ignoreTrailingWhiteSpace": "false",
}
_NULL_IN_CSV: Final = "\0marshal-dagster null\0"
"""The text that Spark's reader gives for an unquoted empty field; no value may be equal to it."""
_MOST_CSV_COLUMNS: Final = 20_480  # Spark's own limit, where a row has no more
_WRITE_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "json": {**_TEXT_OPTIONS, "ignoreNullFields": "true"},
    "csv": {**_TEXT_OPTIONS, **_CSV_OPTIONS, "emptyValue": '""'},
}
_READ_ALL: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
_READ_TEXT: Final = {"mode": "FAILFAST", "enableDateTimeParsingFallback": "false"}
_READ_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "json": {**_TEXT_OPTIONS, **_READ_TEXT, "multiLine": "false", "maxStringLen": str(2**31 - 1)},
    "csv": {
        **_TEXT_OPTIONS,
        **_CSV_OPTIONS,
        **_READ_TEXT,
        "multiLine": "true",
        "nullValue": _NULL_IN_CSV,
        "emptyValue": "",
        "enforceSchema": "true",
    },
}
# Other options of Spark's formats that would change the values that are written or read.
_NOT_FOR_USERS: Final[Mapping[str, frozenset[str]]] = {
    "json": frozenset({"charset", "columnnameofcorruptrecord", "primitivesasstring", "pretty", "singlevariantcolumn"}),
    "csv": frozenset(
        {"charset", "chartoescapequoteescaping", "columnnameofcorruptrecord", "comment", "escapequotes", "quoteall"}
        | {"maxcharspercolumn", "maxcolumns", "nanvalue", "negativeinf", "positiveinf", "singlevariantcolumn"}
        | {"unescapedquotehandling"}
    ),
    "avro": frozenset({"avroschema", "avroschemaurl", "datetimerebasemode", "mode", "positionalfieldmatching"}),
    "parquet": frozenset({"datetimerebasemode", "int96rebasemode"}),
}
_OF_ALL_FILES: Final = frozenset(
    {"basepath", "ignorecorruptfiles", "ignoremissingfiles", "modifiedafter", "modifiedbefore", "path"}
    | {"pathglobfilter", "recursivefilelookup"}
)
_SEPARATORS: Final = frozenset({"sep", "delimiter"})
_AVRO_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Between the Julian and the Gregorian calendar there are days that ORC's own calendar does not have. Of the second
# before 1970 it loses the sign.
_NO_DAYS: Final = ("1582-10-05", "1582-10-14")
_NO_TIMES: Final = (
    ("1582-10-04T00:00:00Z", "1582-10-16T00:00:00Z"),  # in whatever zone the executor's JVM is
    ("1969-12-31T23:59:59.000001Z", "1969-12-31T23:59:59.999999Z"),
)
# As an error's message has it; in a query plan, which other errors show, the parts of the text are separate.
_REFUSED: Final = re.compile(
    r"marshal-dagster refuses (column .+?, partition (-?\d+|null), offset (-?\d+|null|unknown)) ;"
)


def check_options(format_name: str, options: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` for options with which rows would not be read back as they were written."""
    fixed = {name.lower() for of in (_WRITE_OPTIONS, _READ_OPTIONS) for name in of.get(format_name, ())}
    own = _OF_ALL_FILES | fixed | _NOT_FOR_USERS.get(format_name, frozenset())
    wrong = sorted(name for name in options if name.lower() in own)
    if wrong:
        raise ConfigurationError(
            f"options: {', '.join(wrong)}: a file sink chooses these itself, so that what was written as {format_name} "
            "can be read back; leave them out"
        )
    for name, value in options.items():
        if format_name == "csv" and name.lower() in _SEPARATORS and (not value or set(value) & set('"\r\n\0')):
            raise ConfigurationError(f"options: {name} is {value!r}; give a separator without quotes and line breaks")


def check_writable(spark: "SparkSession | None", format_name: str, schema: "StructType") -> None:
    """Raise `ConfigurationError` where rows of `schema`, written in this session, could not be read back."""
    check_settings(spark, _SETTINGS.get(format_name, {}), f"a file sink of {format_name}")
    case_sensitive = is_case_sensitive(spark)
    for column in schema.fields:
        check_nested_names(column.name, column.dataType, case_sensitive=case_sensitive)
        for what in _unkept(column.name, column.dataType, format_name):
            raise ConfigurationError(
                f"column {column.name!r}: {what}, which files of format {format_name} cannot give back: cast it, or "
                "write another format"
            )


def check_readable(spark: "SparkSession", format_name: str) -> None:
    """Raise `ConfigurationError` where this session would read other values than were written."""
    if format_name in TEXT_FORMATS:
        check_settings(spark, _SETTINGS[format_name], f"reading {format_name} files")


def write_options(format_name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of Spark's writer: the user's, and the fixed ones."""
    return {**options, **_WRITE_OPTIONS.get(format_name, {})}


def read_files(
    spark: "SparkSession", format_name: str, schema: "StructType", options: Mapping[str, str], files: Sequence[str]
) -> "DataFrame":
    """Return the rows of files that were written with these columns, in this order, and these options of the user's."""
    given = {**options, **_READ_ALL, **_READ_OPTIONS.get(format_name, {})}
    if format_name in TEXT_FORMATS:
        given["columnNameOfCorruptRecord"] = _unused_name(schema.names)
    if format_name == "csv":
        given["maxColumns"] = str(max(_MOST_CSV_COLUMNS, len(schema.names) + 1))
    stored = _as_stored(schema, format_name)
    rows = spark.read.format(format_name).options(**given).schema(stored).load(list(files))
    if stored == schema:
        return rows
    return rows.select(*(f.col(quoted(field.name)).cast(field.dataType).alias(field.name) for field in schema.fields))


def refusing(frame: "DataFrame", format_name: str, name: "Column") -> "Column":
    """Return `name`; it raises an error for a row with a value that the format cannot give back (`refusal_in`)."""
    wrong = f.lit(None).cast("string")
    has_offset = OFFSET_COLUMN in frame.columns
    offset = _number(OFFSET_COLUMN) if has_offset else f.lit("unknown")
    place = f.concat(f.lit(", partition "), _number(PARTITION_COLUMN), f.lit(", offset "), offset, f.lit(" ;"))
    checked = False
    for index, field in enumerate(frame.schema.fields):
        for what, kinds, is_wrong in _wrong_values(format_name, is_first=not index):
            if not holds(field.dataType, kinds):
                continue
            is_there = any_value(f.col(quoted(field.name)), field.dataType, kinds, is_wrong)
            wrong = f.coalesce(wrong, f.when(is_there, f.lit(f"column {field.name!r}: {what}")))
            checked = True
    if not checked:
        return name
    text = f.concat(f.lit("marshal-dagster refuses "), wrong, place)
    return f.when(wrong.isNull(), name).otherwise(f.raise_error(text))


def _number(column: str) -> "Column":
    return f.coalesce(f.col(column).cast("string"), f.lit("null"))


def refusal_in(error: Exception, format_name: str, ranges: Sequence[ClaimedRange]) -> SinkRejectedError | None:
    """Return the refusal of a value (`refusing`) that caused Spark's error; None for another error."""
    found = _REFUSED.search(str(error))
    if found is None:
        return None
    offset = int(found[3]) if found[3].isdigit() else None
    skips = [
        skip_text(range_, *((range_.start, range_.end) if offset is None else (offset, offset + 1)))
        for range_ in ranges
        if found[2] == str(range_.partition)
    ]
    return SinkRejectedError(
        f"{found[1]}: files of format {format_name} cannot give it back, so nothing was written. Clean the value in "
        f"the batch's function, write another format, or skip the message: {', '.join(skips)}"
    )


def lost_in(format_name: str, schema: str, options: Mapping[str, str] | None) -> str | None:
    """Return what files of a commit may have lost; None if nothing. `options` is None in commits of older versions."""
    if options is not None or format_name not in TEXT_FORMATS:
        return None
    if format_name == "csv":
        return "in which '' is null, and a line break ends a row"
    times = holds(t.StructType.fromJson(json.loads(schema)), (t.TimestampType, t.TimestampNTZType))
    return "in which times have no microseconds" if times else None


def as_nullable(data_type: "DataType") -> "DataType":
    """Return the type with null allowed within it at each place, as Spark's readers give it."""
    match data_type:
        case t.StructType():
            return t.StructType(
                [t.StructField(field.name, as_nullable(field.dataType), nullable=True) for field in data_type.fields]
            )
        case t.ArrayType():
            return t.ArrayType(as_nullable(data_type.elementType), containsNull=True)
        case t.MapType():
            key, value = as_nullable(data_type.keyType), as_nullable(data_type.valueType)
            return t.MapType(key, value, valueContainsNull=True)
    return data_type


def _unkept(name: str, data_type: "DataType", format_name: str) -> Iterator[str]:
    """Yield what the format cannot give back of a column."""
    if format_name == "avro" and not _AVRO_NAME.fullmatch(name):
        yield f"{name!r} is not a valid name in Avro"
    names_keys = format_name in {"json", "avro"}
    if names_keys and isinstance(data_type, t.MapType) and not isinstance(data_type.keyType, t.StringType):
        yield f"it has a map whose keys are of type {data_type.keyType.simpleString()}"
    if isinstance(data_type, t.StructType) and not data_type.fields:
        yield "it has a struct without fields"
    if isinstance(data_type, t.UserDefinedType) and format_name != "parquet":
        yield "it has a type of the user's own"
    inner = parts(name, data_type)
    if inner and format_name == "csv":
        yield f"it is of type {data_type.simpleString()}"
    for field, part in inner:
        yield from _unkept(field, part, format_name)
    if not inner and not isinstance(data_type, (*_leaves(format_name), t.StructType)):
        yield f"it has the type {data_type.simpleString()}"


def _leaves(format_name: str) -> tuple[type[Any], ...]:
    common: tuple[type[Any], ...] = (
        t.BooleanType,
        t.NumericType,
        t.StringType,
        t.DateType,
        t.TimestampType,
        t.TimestampNTZType,
        t.DayTimeIntervalType,
        t.YearMonthIntervalType,
    )
    if format_name == "csv":
        return common
    others: Mapping[str, tuple[type[Any], ...]] = {
        "parquet": (t.VariantType,),
        "json": (t.NullType,),
        "avro": (t.NullType,),
    }
    return (*common, t.BinaryType, *others.get(format_name, ()))


def _as_stored(schema: "StructType", format_name: str) -> "StructType":
    """Return the columns as Spark must ask for them: Avro has no integers of less than 32 bits."""
    if format_name != "avro" or not holds(schema, (t.ByteType, t.ShortType)):
        return schema
    stored = _widened(schema)
    assert isinstance(stored, t.StructType)  # noqa: S101 - what was one is one
    return stored


def _widened(data_type: "DataType") -> "DataType":
    match data_type:
        case t.StructType():
            return t.StructType(
                [t.StructField(field.name, _widened(field.dataType), field.nullable) for field in data_type.fields]
            )
        case t.ArrayType():
            return t.ArrayType(_widened(data_type.elementType), data_type.containsNull)
        case t.MapType():
            return t.MapType(data_type.keyType, _widened(data_type.valueType), data_type.valueContainsNull)
        case t.ByteType() | t.ShortType():
            return t.IntegerType()
    return data_type


def _wrong_values(format_name: str, *, is_first: bool) -> Iterator[tuple[str, Kinds, Condition]]:
    """Yield what a column may not hold: as text, the kinds of value, and the condition of such a value."""
    if format_name in TEXT_FORMATS:
        yield "a text that is not UTF-8", text_kinds(), is_not_utf8
    if format_name == "csv":
        yield "the text that represents null", text_kinds(), lambda text: text == f.lit(_NULL_IN_CSV)
        if is_first:  # of a file that begins with it
            yield "a text that begins with a byte order mark", text_kinds(), _begins_with_bom
    if format_name == "orc":
        first, last = (f.lit(day).cast(t.DateType()) for day in _NO_DAYS)
        yield f"a day from {_NO_DAYS[0]} to {_NO_DAYS[1]}", (t.DateType,), lambda day: day.between(first, last)
        yield "a time of October 1582 or of the second before 1970", (t.TimestampType,), _is_no_time


def _is_no_time(time: "Column") -> "Column":
    spans = [[f.lit(bound).cast(t.TimestampType()) for bound in bounds] for bounds in _NO_TIMES]
    return reduce(or_, (time.between(start, end) for start, end in spans))


def _begins_with_bom(text: "Column") -> "Column":
    return f.substring(text.cast("binary"), 1, 3) == f.lit("\ufeff".encode())


def _unused_name(names: Sequence[str]) -> str:
    """Return a name for Spark's column of unreadable records that no column has, however names are compared."""
    longest = max(map(len, names), default=0)
    return "_" * (longest + 1)
