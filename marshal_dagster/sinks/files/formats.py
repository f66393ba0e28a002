"""The formats of a file output: which types and values each one stores, and with which options Spark writes and reads.

Spark's default options lose microseconds in JSON and CSV. In CSV they also lose line breaks, leading and trailing
spaces, and the difference between '' and null. So the file sink writes and reads these formats with fixed options.
Types and values that a format still cannot store unchanged are refused: a type before the rows are evaluated, a value
by the Spark job that writes it.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, skip_text
from marshal_dagster.sinks.files.partitioning import wrong_values
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
from marshal_dagster.spark.lazy_pyspark import has
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
_WITHOUT_COLLATIONS: Final = frozenset(
    {"orc", "avro"}
)  # Spark cannot read such an ORC file, or write such an Avro file
_NULL_IN_CSV: Final = "\0marshal-dagster null\0"
"""The string that stands for an unquoted empty field when Spark reads CSV; no value may be equal to it."""
_MOST_CSV_COLUMNS: Final = 20_480  # Spark's default limit, raised for rows with more columns
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
# Other options of Spark's formats that would change values on writing or reading.
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
# ORC's calendar lacks the days that were skipped between the Julian and the Gregorian calendar.
_NO_DAYS: Final = ("1582-10-05", "1582-10-14")
# Matches the message of `raise_error`. It does not match query plans in other errors: there the parts are separate.
_REFUSED: Final = re.compile(
    r"marshal-dagster refuses (column .+?, partition (-?\d+|null), offset (-?\d+|null|unknown)) ;"
)


def check_options(format_name: str, options: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` for options with which rows would not be read back unchanged."""
    fixed = {name.lower() for of in (_WRITE_OPTIONS, _READ_OPTIONS) for name in of.get(format_name, ())}
    own = _OF_ALL_FILES | fixed | _NOT_FOR_USERS.get(format_name, frozenset())
    wrong = sorted(name for name in options if name.lower() in own)
    if wrong:
        raise ConfigurationError(
            f"options {', '.join(wrong)}: a file sink sets these itself, so that {format_name} files are read back "
            "unchanged. Leave them out"
        )
    for name, value in options.items():
        if format_name == "csv" and name.lower() in _SEPARATORS and (not value or set(value) & set('"\r\n\0')):
            raise ConfigurationError(
                f"option {name} is {value!r}; it must be a separator without quotes and line breaks"
            )


def check_writable(spark: "SparkSession | None", format_name: str, schema: "StructType") -> None:
    """Raise `ConfigurationError` if rows of `schema`, written in this session, would not be read back unchanged."""
    check_settings(spark, _SETTINGS.get(format_name, {}), f"a file sink of {format_name}")
    case_sensitive = is_case_sensitive(spark)
    for column in schema.fields:
        check_nested_names(column.name, column.dataType, case_sensitive=case_sensitive)
        for what in _unkept(column.name, column.dataType, format_name):
            raise ConfigurationError(
                f"column {column.name!r}: {what}, which files of format {format_name} cannot store unchanged. Cast the "
                "column, or use another format"
            )


def check_readable(spark: "SparkSession", format_name: str) -> None:
    """Raise `ConfigurationError` if a setting of this session would change the values that are read."""
    if format_name in TEXT_FORMATS:
        check_settings(spark, _SETTINGS[format_name], f"reading {format_name} files")


def write_options(format_name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of Spark's writer: the user's and the fixed ones."""
    return {**options, **_WRITE_OPTIONS.get(format_name, {})}


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders `column=value` of files."""

    partition_by: tuple[str, ...]
    """The columns."""
    base: str
    """The path of the folder that contains all of these folders, as Hadoop takes it."""


def read_files(
    spark: "SparkSession",
    format_name: str,
    schema: "StructType",
    options: Mapping[str, str],
    files: Sequence[str],
    *,
    folders: Folders | None = None,
) -> "DataFrame":
    """Return the rows of files.

    Args:
        spark: The session that reads.
        format_name: The format of the files.
        schema: The columns with which the files were written, in this order.
        options: The user's options with which the files were written.
        files: The paths of the files, as Spark reads them.
        folders: The folders with the values of the columns that the files lack.
    """
    given = {**options, **_READ_ALL, **_READ_OPTIONS.get(format_name, {})}
    if format_name in TEXT_FORMATS:
        given["columnNameOfCorruptRecord"] = _unused_name(schema.names)
    if format_name == "csv":
        given["maxColumns"] = str(max(_MOST_CSV_COLUMNS, len(schema.names) + 1))
    if folders is not None:
        given["basePath"] = folders.base
    stored = _as_stored(schema, format_name)
    rows = spark.read.format(format_name).options(**given).schema(stored).load(list(files))
    if stored == schema and folders is None:
        return rows
    return rows.select(*(f.col(quoted(field.name)).cast(field.dataType).alias(field.name) for field in schema.fields))


def refusing(frame: "DataFrame", format_name: str, name: "Column", partition_by: Collection[str] = ()) -> "Column":
    """Return the column `name`, extended to raise an error for a row with a value that the format cannot store.

    `refusal_in` recognises this error.
    """
    wrong = f.lit(None).cast("string")
    has_offset = OFFSET_COLUMN in frame.columns
    offset = _number(OFFSET_COLUMN) if has_offset else f.lit("unknown")
    place = f.concat(f.lit(", partition "), _number(PARTITION_COLUMN), f.lit(", offset "), offset, f.lit(" ;"))
    checked = False
    first = next((each for each in frame.schema.names if each not in partition_by), None)
    for field in frame.schema.fields:
        own = wrong_values(field.name) if field.name in partition_by else ()
        for what, kinds, is_wrong in (*_wrong_values(format_name, is_first=field.name == first), *own):
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
    """Return the refusal of a value by `refusing` that caused Spark's error, or None for any other error."""
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
        f"{found[1]}: files of format {format_name} cannot store it unchanged, so nothing was written. Change the "
        f"value in the batch's function, use another format, or skip the message: {', '.join(skips)}"
    )


def lost_in(format_name: str, schema: str, options: Mapping[str, str] | None) -> str | None:
    """Return what files of a commit may have lost, or None. `options` is None in commits of older versions."""
    if format_name == "orc" and holds(t.StructType.fromJson(json.loads(schema)), (t.TimestampType,)):
        return "in which timestamps are other ones where a JVM has another time zone"
    if options is not None or format_name not in TEXT_FORMATS:
        return None
    if format_name == "csv":
        return "in which '' is read as null, and a line break ends a row"
    times = holds(t.StructType.fromJson(json.loads(schema)), (t.TimestampType, t.TimestampNTZType))
    return "in which times have no microseconds" if times else None


def as_nullable(data_type: "DataType") -> "DataType":
    """Return the type with all its parts nullable, as Spark's readers return it."""
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
    """Yield the reasons why the format cannot store a column unchanged, from its name and type."""
    if format_name == "avro" and not _AVRO_NAME.fullmatch(name):
        yield f"{name!r} is not a valid name in Avro"
    names_keys = format_name in {"json", "avro"}
    if names_keys and isinstance(data_type, t.MapType) and not isinstance(data_type.keyType, t.StringType):
        yield f"it has a map whose keys are of type {data_type.keyType.simpleString()}"
    if (
        format_name in _WITHOUT_COLLATIONS
        and isinstance(data_type, t.StringType)
        and not getattr(data_type, "isUTF8BinaryCollation", lambda: True)()  # Spark 3.5 has no other collation
    ):
        yield f"it has the type {data_type.simpleString()}"
    if isinstance(data_type, t.StructType) and not data_type.fields:
        yield "it has a struct without fields"
    if isinstance(data_type, t.UserDefinedType) and format_name != "parquet":
        yield "it has a user-defined type"
    inner = parts(name, data_type)
    if inner and format_name == "csv":
        yield f"it is of type {data_type.simpleString()}"
    for field, part in inner:
        yield from _unkept(field, part, format_name)
    if not inner and not isinstance(data_type, (*_leaves(format_name), t.StructType)):
        yield f"it has the type {data_type.simpleString()}"


def _leaves(format_name: str) -> tuple[type[Any], ...]:
    """Return the types without parts that a format stores unchanged.

    ORC stores a timestamp as the local time of the JVM that writes it. A JVM in another time zone reads another one.
    """
    common: tuple[type[Any], ...] = (
        t.BooleanType,
        t.NumericType,
        t.StringType,
        t.DateType,
        t.TimestampNTZType,
        t.DayTimeIntervalType,
        t.YearMonthIntervalType,
        *(() if format_name == "orc" else (t.TimestampType,)),
    )
    if format_name == "csv":
        return common
    others: Mapping[str, tuple[type[Any], ...]] = {
        "parquet": (t.VariantType,) if has("try_parse_json") else (),
        "json": (t.NullType,),
        "avro": (t.NullType,),
    }
    return (*common, t.BinaryType, *others.get(format_name, ()))


def _as_stored(schema: "StructType", format_name: str) -> "StructType":
    """Return the schema with which Spark must read the files: Avro has no integers of less than 32 bits."""
    if format_name != "avro" or not holds(schema, (t.ByteType, t.ShortType)):
        return schema
    stored = _widened(schema)
    assert isinstance(stored, t.StructType)  # noqa: S101 - a struct stays a struct
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
    """Yield the values that a column must not contain: description, types, and the condition for such a value."""
    if format_name in TEXT_FORMATS:
        yield "a string that is not valid UTF-8", text_kinds(), is_not_utf8
    if format_name == "csv":
        yield "the string that represents null", text_kinds(), lambda text: text == f.lit(_NULL_IN_CSV)
        if is_first:  # only there can it be the beginning of the file
            yield "a string that begins with a byte order mark", text_kinds(), _begins_with_bom
    if format_name == "orc":
        first, last = (f.lit(day).cast(t.DateType()) for day in _NO_DAYS)
        yield f"a date from {_NO_DAYS[0]} to {_NO_DAYS[1]}", (t.DateType,), lambda day: day.between(first, last)


def _begins_with_bom(text: "Column") -> "Column":
    return f.substring(text.cast("binary"), 1, 3) == f.lit("\ufeff".encode())


def _unused_name(names: Sequence[str]) -> str:
    """Return a name for Spark's column of corrupt records that differs from all columns, whatever their case."""
    longest = max(map(len, names), default=0)
    return "_" * (longest + 1)
