"""Decoding of JSON values with a declared schema, and inference of a schema."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Literal

from marshal_dagster.errors import ConfigurationError, SchemaDriftError
from marshal_dagster.spark.conversion_settings import (
    DDL_SCHEMAS,
    JSON_SCHEMAS,
    JSON_VALUES,
    JSON_WITHOUT_VARIANTS,
    check_settings,
)
from marshal_dagster.spark.decoding.confluent_wire_format import frame_reason, payload, schemas_of
from marshal_dagster.spark.decoding.decoded_batch import DecodedBatch, NullPolicy, missing_value, read_once
from marshal_dagster.spark.decoding.schemas import SchemaKind, Schemas
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import has, parse_ddl
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.nested_values import any_value, holds, valid_utf8

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_OURS = frozenset({"mode", "columnnameofcorruptrecord", "enabledatetimeparsingfallback"})
_HUGE = r"[0-9][eE][+-]?0*[1-9][0-9]{4}"
_HUGE_IN_STRING = r"[eE][\p{Nd},+-]{5}"
_NAME_OR_TEXT = r'(?s)"(?:[^"\\]++|\\.)*+":|("(?:[^"\\]++|\\.)*+")'
_FAR = r"-?[0-9]{12}"
_FAR_SECONDS = 1e11
_TIME_OF_DAY = r'"(?:\\[bfnrt]|\\u00[01][0-9a-fA-F]|\s)*+(?:T[0-9]|[0-9]{1,2}:)'
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = rf"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}"
"""Half of a surrogate pair, in a text without escaped backslashes."""
_VALUE = "v"
_ENTRIES = "map<string, string>"
_CORRUPT = "corrupt"


def decode_json(
    frame: "DataFrame",
    schema: "StructType | str",
    *,
    options: Mapping[str, str] | None = None,
    nulls: NullPolicy = NullPolicy.BAD,
    new_fields: Literal["ignore", "fail"] = "ignore",
    schemas: Schemas | None = None,
) -> DecodedBatch:
    """Decode values that are one JSON object each.

    A value is bad in these cases:

    - It is null (see `nulls`), empty, not UTF-8, or not exactly one JSON object.
    - A field has another type than declared.
    - A field that is declared NOT NULL is missing or null, unless it is inside an array or a map.
    - `schema` has a decimal, and a number has an exponent of 10,000 or more.
    - A timestamp is a number with more than 11 digits. Numbers in timestamps are seconds; milliseconds have 13 digits.
    - A timestamp is a time without a date, such as `12:30`, and `options` has no `timestampFormat`.
    - A string has half of a surrogate pair, such as the escape `ud83d` alone, which is no character.
    - `schemas` is given, and the value does not begin with the schema id of a JSON schema.

    Other missing fields are null. Fields that are not declared are left out. A time without a zone is UTC, whatever the
    time zone of the session is.

    Args:
        frame: The frame of `batch.read`.
        schema: The fields of the object, as a `StructType` or as DDL such as `id bigint NOT NULL, shop string`.
        options: Options of Spark's `from_json`, such as `timeZone`.
        nulls: Whether a record with a null value is bad.
        new_fields: Whether fields that `schema` lacks are ignored, or fail the batch. `fail` costs an extra pass over
            the batch.
        schemas: The source of schemas, if Confluent's JSON Schema serializer wrote the values: each one begins with a
            schema id then. The columns are those of `schema`; the registered schemas are not validated.

    Returns:
        The decoded records.

    Raises:
        UnavailableError: `schemas` cannot be read.
        SchemaDriftError: With `new_fields="fail"`, objects have fields that `schema` lacks.
        ConfigurationError: Schema or options are invalid, or the session has settings with which Spark would read other
            values (docs/how-to/decoding.md). `tinyint` is invalid, because Spark reads 200 as -56.

    Example:
        ```python
        rows = decode_json(frame, "id bigint NOT NULL, shop string").or_fail()
        ```
    """
    needed = {**JSON_VALUES, **(DDL_SCHEMAS if isinstance(schema, str) else {})}
    if not has("try_parse_json"):
        needed |= JSON_WITHOUT_VARIANTS
    check_settings(frame.sparkSession, needed, "decode_json")
    declared = _declared(schema)
    given = dict(options or {})
    if "timezone" not in map(str.lower, given):
        given["timeZone"] = "UTC"
    wrong = [name for name in given if name.lower() in _OURS]
    if wrong:
        raise ConfigurationError(
            f"options {', '.join(wrong)} cannot be set, because decode_json separates bad records itself: remove them"
        )
    content = f.col("value") if schemas is None else payload()
    missing = missing_value(nulls)
    if schemas is not None:
        missing = frame_reason(schemas_of(frame, schemas, SchemaKind.JSON), nulls)
    text = valid_utf8(content.cast("string"))
    new = sorted(_new_fields(_inferred(frame, text), declared)) if new_fields == "fail" else []
    if new:
        raise SchemaDriftError(
            f"the batch has fields that the schema lacks: {', '.join(new)}. Declare them, or ignore them "
            "(new_fields='ignore')"
        )
    end = uuid.uuid4().hex
    wrapped = _wrapped(text, end)
    is_huge = _is_huge(text, wrapped, end, declared, given)
    is_far = _is_far(text, wrapped, end, declared, given)
    is_time = _is_time_of_day(text, wrapped, end, declared, given)
    is_half = _is_half(text, end, declared, given)
    parsed = _parse(f.when(~is_huge & ~is_far & ~is_time & ~is_half, wrapped), end, declared, given)
    read, parsed = read_once(frame, parsed)
    entries, corrupt = parsed[end], parsed[_CORRUPT]
    value = entries[_VALUE]
    is_one = (f.size(entries) == 2) & f.map_contains_key(entries, end)  # noqa: PLR2004
    reason = (
        missing.when(text.isNull(), f.lit("not UTF-8"))
        .when(is_huge, f.lit("a number with an exponent of 10,000 or more"))
        .when(is_far, f.lit("a number of more than 11 digits in a timestamp, which takes seconds"))
        .when(is_time, f.lit("a time without a date in a timestamp"))
        .when(is_half, f.lit("half of a surrogate pair in a string, which is no character"))
        .when(corrupt.isNotNull(), f.lit("not JSON, or another type in a field than declared"))
        .when(~f.coalesce(is_one, f.lit(False)), f.lit("not exactly one JSON value"))  # noqa: FBT003
        .when(value.isNull(), f.lit("JSON null"))
    )
    for path, is_missing in _missing(value, declared):
        reason = reason.when(is_missing, f.lit(f"field {path} is missing or null"))
    return DecodedBatch(read, value, reason, columns=frame.columns)


def infer_json_schema(frame: "DataFrame") -> "StructType":
    """Return the fields and types in the JSON objects of a batch, in one pass over it.

    Use the result to declare a schema, not to decode: each batch may have other fields, and so would have other
    columns.

    Args:
        frame: The frame of `batch.read`.

    Returns:
        The inferred schema. A field with several types is a `variant`, a field that is always null is `void`; Spark
        3.5 has no variants, so there both are a `string`. Values that are not a JSON object are ignored.

    Raises:
        ConfigurationError: The session has settings with which Spark would read other values.

    Example:
        ```python
        infer_json_schema(batch.read(spark)).printTreeString()
        ```
    """
    check_settings(frame.sparkSession, JSON_SCHEMAS, "infer_json_schema")
    return _inferred(frame, valid_utf8(f.col("value").cast("string")))


def _inferred(frame: "DataFrame", text: "Column") -> "StructType":
    if not has("try_parse_json"):
        return _infer_without_variants(frame.select(text.alias("text")))
    value = f.try_parse_json(text)
    is_object = f.schema_of_variant(value).startswith("OBJECT")
    row = frame.select(f.schema_of_variant_agg(f.when(is_object, value))).first()
    schema = str(row[0]) if row is not None else "VOID"
    if not schema.startswith("OBJECT<"):
        return t.StructType()
    inferred = parse_ddl(_as_struct(schema))
    assert isinstance(inferred, t.StructType)  # noqa: S101 - the text starts with STRUCT
    return inferred


def _declared(schema: "StructType | str") -> "StructType":
    from pyspark.errors import PySparkException

    try:
        declared = parse_ddl(schema) if isinstance(schema, str) else schema
    except PySparkException as error:
        raise ConfigurationError(f"schema is {schema!r}, which is not valid DDL ({first_line(error)})") from error
    if not isinstance(declared, t.StructType) or not declared.fields:
        raise ConfigurationError(f"schema is {schema!r}; pass the fields of an object, as a StructType or as DDL")
    if _holds(declared, t.ByteType):
        raise ConfigurationError(
            "schema has a tinyint, in which Spark reads the JSON number 200 as -56: declare a smallint"
        )
    return declared


def _holds(declared: "DataType", kind: "type[DataType]") -> bool:
    match declared:
        case t.StructType():
            return any(_holds(field.dataType, kind) for field in declared.fields)
        case t.ArrayType():
            return _holds(declared.elementType, kind)
        case t.MapType():
            return _holds(declared.valueType, kind)
    return isinstance(declared, kind)


def _is_huge(
    text: "Column", wrapped: "Column", end: str, declared: "StructType", options: Mapping[str, str]
) -> "Column":
    """Return whether a decimal has a huge exponent, for which Spark would write out up to a billion zeros.

    Spark does that for minutes, or until the memory is full. Decimals may be in strings too. Values with a possible
    huge exponent are examined: first the numbers outside strings, then the strings of decimal fields. A value that
    cannot be examined, or has two fields with the same name, counts as huge.
    """
    if not _holds(declared, t.DecimalType):
        return f.lit(False)  # noqa: FBT003
    bare = _without_strings(text)
    decimals = _parse(wrapped, end, _only(declared, t.DecimalType, t.StringType()), options)
    texts = f.regexp_replace(f.to_json(decimals), _NAME_OR_TEXT, "$1")
    is_huge = bare.rlike(_HUGE) | texts.rlike(_HUGE_IN_STRING)
    is_hidden = decimals[_CORRUPT].isNotNull() | _repeats_a_name(wrapped, end, declared)
    may_be = text.rlike(rf"{_HUGE_IN_STRING}|\\u")
    return f.coalesce(may_be & f.coalesce(is_huge | is_hidden, f.lit(True)), f.lit(False))  # noqa: FBT003


def _is_far(
    text: "Column", wrapped: "Column", end: str, declared: "StructType", options: Mapping[str, str]
) -> "Column":
    """Return whether a timestamp is a number of seconds after the year 5138, so it is probably in another unit.

    Spark would read milliseconds as a year far in the future. Microseconds overflow and become an arbitrary time.
    """
    if not _holds(declared, t.TimestampType):
        return f.lit(False)  # noqa: FBT003
    if has("try_parse_json"):
        timestamps = f.to_json(_parse(wrapped, end, _only(declared, t.TimestampType, t.VariantType()), options))
        is_far = _without_strings(timestamps).rlike(_FAR)
    else:
        is_far = _holds_far_number(wrapped, end, declared, options)
    return text.rlike(_FAR) & f.coalesce(is_far, f.lit(False))  # noqa: FBT003


def _holds_far_number(wrapped: "Column", end: str, declared: "StructType", options: Mapping[str, str]) -> "Column":
    """Return whether a timestamp is a number of more than 11 digits, in a Spark without variants.

    A timestamp in a struct is read as a double, which no string in quotes is. Arrays and maps of timestamps are read as
    their JSON text, where strings have quotes.
    """
    numbers = _numbers_of(declared, t.TimestampType)
    values, type_ = f.map_values(_parse(wrapped, end, numbers, options)[end]), t.ArrayType(numbers)
    in_struct = any_value(values, type_, (t.DoubleType,), lambda number: f.abs(number) >= f.lit(_FAR_SECONDS))
    in_text = any_value(values, type_, (t.StringType,), lambda text: _without_strings(text).rlike(_FAR))
    return in_struct | in_text


def _numbers_of(declared: "DataType", kind: "type[DataType]") -> "DataType":
    """Return the type reduced to its parts of type `kind`, with doubles and JSON texts as their types."""
    match declared:
        case t.StructType():
            held = (field for field in declared.fields if _holds(field.dataType, kind))
            return t.StructType([t.StructField(field.name, _numbers_of(field.dataType, kind)) for field in held])
        case t.ArrayType():
            return t.ArrayType(_numbers_of(declared.elementType, kind)) if _has_struct(declared) else t.StringType()
        case t.MapType():
            value = _numbers_of(declared.valueType, kind)
            return t.MapType(t.StringType(), value) if _has_struct(declared) else t.StringType()
    return t.DoubleType()


def _is_time_of_day(
    text: "Column", wrapped: "Column", end: str, declared: "StructType", options: Mapping[str, str]
) -> "Column":
    """Return whether a timestamp is a time without a date, which Spark would read as one of the current day."""
    if not _holds(declared, t.TimestampType) or "timestampformat" in map(str.lower, options):
        return f.lit(False)  # noqa: FBT003
    timestamps = f.to_json(_parse(wrapped, end, _only(declared, t.TimestampType, t.StringType()), options))
    texts = f.regexp_replace(timestamps, _NAME_OR_TEXT, "$1")
    may_be = text.rlike(rf"{_TIME_OF_DAY}|\\u")
    return may_be & f.coalesce(texts.rlike(_TIME_OF_DAY), f.lit(False))  # noqa: FBT003


def _is_half(text: "Column", end: str, declared: "StructType", options: Mapping[str, str]) -> "Column":
    """Return whether a string has half of a surrogate pair, in whose place Spark would read a question mark.

    The halves are replaced by the random name, which is then searched for in the strings that Spark reads.
    """
    halves = f.regexp_replace(f.regexp_replace(text, r"\\\\", r"\\u005c"), _HALF, end)
    read = f.to_json(f.map_values(_parse(_wrapped(halves, end), end, declared, options)[end]))
    may_be = text.rlike(r"\\u[dD][89a-fA-F]") & halves.contains(end)
    return f.coalesce(may_be & read.contains(end), f.lit(False))  # noqa: FBT003


def _without_strings(text: "Column") -> "Column":
    return f.regexp_replace(f.regexp_replace(text, r"(?s)\\.", ""), r'"[^"]*+"', "")


def _has_struct(declared: "DataType") -> bool:
    return holds(declared, (t.StructType,))


def _repeats_a_name(wrapped: "Column", end: str, declared: "StructType") -> "Column":
    """Return whether an object has two fields with the same name, of which a probe would show only the last one."""
    if has("try_parse_json"):
        return f.try_parse_json(wrapped).isNull()
    outer = t.StructType([t.StructField(end, t.MapType(t.StringType(), declared))])
    return f.coalesce(_repeats(wrapped, outer), f.lit(False))  # noqa: FBT003


def _repeats(text: "Column", declared: "DataType") -> "Column":
    """Return whether a struct with a decimal has a name twice in the JSON text; maps show each of their entries."""
    no = f.lit(False)  # noqa: FBT003
    if not _holds(declared, t.DecimalType):
        return no
    match declared:
        case t.StructType():
            entries = f.from_json(text, _ENTRIES)
            names = f.map_keys(entries)
            found = [f.size(names) > f.size(f.array_distinct(names))]
            found += [
                _repeats(f.element_at(f.map_values(f.map_filter(entries, _is_named(field.name))), 1), field.dataType)
                for field in declared.fields
                if _holds(field.dataType, t.DecimalType)
            ]
            return reduce(or_, (f.coalesce(one, no) for one in found))
        case t.ArrayType():
            items = f.from_json(text, "array<string>")
            return f.exists(items, lambda item: f.coalesce(_repeats(item, declared.elementType), no))
        case t.MapType():
            entries = f.from_json(text, _ENTRIES)
            return f.exists(f.map_values(entries), lambda item: f.coalesce(_repeats(item, declared.valueType), no))
    return no


def _is_named(name: str) -> "Callable[[Column, Column], Column]":
    return lambda key, _: key == f.lit(name)


def _infer_without_variants(texts: "DataFrame") -> "StructType":
    end = uuid.uuid4().hex
    entries = f.from_json(
        _wrapped(f.col("text"), end),
        t.StructType([t.StructField(end, t.MapType(t.StringType(), t.StringType()))]),
    )[end]
    is_object = (f.size(entries) == 2) & f.map_contains_key(entries, end) & entries[_VALUE].startswith("{")  # noqa: PLR2004
    objects = texts.where(is_object & f.ltrim(f.col("text")).startswith("{")).rdd.map(lambda row: row[0])
    options = {"prefersDecimal": "true", "columnNameOfCorruptRecord": end, "samplingRatio": "1.0"}
    inferred = texts.sparkSession.read.options(**options).json(objects).schema
    return t.StructType([field for field in inferred.fields if field.name != end])


def _only(declared: "DataType", kind: "type[DataType]", instead: "DataType") -> "DataType":
    """Return the type reduced to its parts of type `kind`, with `instead` as their type."""
    match declared:
        case t.StructType():
            held = (field for field in declared.fields if _holds(field.dataType, kind))
            return t.StructType([t.StructField(field.name, _only(field.dataType, kind, instead)) for field in held])
        case t.ArrayType():
            return t.ArrayType(_only(declared.elementType, kind, instead))
        case t.MapType():
            return t.MapType(declared.keyType, _only(declared.valueType, kind, instead))
    return instead


def _wrapped(text: "Column", end: str) -> "Column":
    """Wrap each text into a map: the text is the first entry, followed by an entry with the random name `end`.

    Spark's parser stops after the first value, and reads an array as several objects. If a text is not exactly one
    value, the map lacks its second entry or has a third one. A text cannot fake that, because it cannot contain the
    random name.
    """
    return f.concat(f.lit(f'{{"{end}":{{"{_VALUE}":'), text, f.lit(f'\n,"{end}":{{}}}}}}'))


def _parse(wrapped: "Column", end: str, declared: "DataType", options: Mapping[str, str]) -> "Column":
    outer = t.StructType(
        [t.StructField(end, t.MapType(t.StringType(), declared)), t.StructField(_CORRUPT, t.StringType())]
    )
    settings = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    settings["enableDateTimeParsingFallback"] = "false"  # it reads "7" as 1970-01-08
    return f.from_json(wrapped, outer, settings)


def _missing(value: "Column", declared: "StructType", above: str = "") -> Iterator[tuple[str, "Column"]]:
    """Yield each NOT NULL field with the condition that it is missing from an object that exists."""
    for field in declared.fields:
        path, inner = f"{above}{field.name}", value.getField(field.name)
        if not field.nullable:
            yield path, inner.isNull() & value.isNotNull()
        if isinstance(field.dataType, t.StructType):
            yield from _missing(inner, field.dataType, f"{path}.")


def _new_fields(inferred: "DataType", declared: "DataType", above: str = "") -> Iterator[str]:
    if isinstance(inferred, t.ArrayType) and isinstance(declared, t.ArrayType):
        yield from _new_fields(inferred.elementType, declared.elementType, f"{above}[].")
    if not isinstance(inferred, t.StructType) or not isinstance(declared, t.StructType):
        return
    known = {field.name: field.dataType for field in declared.fields}
    for field in inferred.fields:
        path = f"{above}.{field.name}".lstrip(".")
        if field.name not in known:
            yield path
        else:
            yield from _new_fields(field.dataType, known[field.name], path)


def _as_struct(schema: str) -> str:
    """Replace OBJECT by STRUCT, except inside the names of fields."""
    parts = schema.split("`")
    return "`".join(part if index % 2 else part.replace("OBJECT<", "STRUCT<") for index, part in enumerate(parts))
