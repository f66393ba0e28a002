"""JSON values: decoded with a declared schema, or looked at to find one."""

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from marshal_dagster.errors import ConfigurationError, SchemaDriftError
from marshal_dagster.spark.conversion_settings import DDL_SCHEMAS, JSON_SCHEMAS, JSON_VALUES, check_settings
from marshal_dagster.spark.decoding.decoded_batch import DecodedBatch, NullPolicy, missing_value, read_once
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_OURS = frozenset({"mode", "columnnameofcorruptrecord", "enabledatetimeparsingfallback"})
_HUGE = r"[0-9][eE][+-]?0*[1-9][0-9]{4}"
_HUGE_IN_STRING = r"[eE][\p{Nd},+-]{5}"
_NAME_OR_TEXT = r'(?s)"(?:[^"\\]++|\\.)*+":|("(?:[^"\\]++|\\.)*+")'
_FAR = r"-?[0-9]{12}"
_VALUE = "v"
_CORRUPT = "corrupt"


def decode_json(
    frame: "DataFrame",
    schema: "StructType | str",
    *,
    options: Mapping[str, str] | None = None,
    nulls: NullPolicy = NullPolicy.BAD,
    new_fields: Literal["ignore", "fail"] = "ignore",
) -> DecodedBatch:
    """Decode values that are each one JSON object, by `schema`: a `StructType`, or DDL such as `id bigint NOT NULL`.

    Bad is a value that is null (but see `nulls`), empty, not UTF-8, not exactly one JSON object, or has another type in
    a field than declared; a field that is declared NOT NULL and is missing or null makes it bad, too, unless that lies
    in an array or a map. Other missing fields are null, fields that were not declared are left out. `options` are those
    of Spark's `from_json`. A time without a zone is UTC, whatever the session's zone, unless `timeZone` is among them.
    Where `schema` has a decimal, a number with an exponent of 10,000 or more makes a value bad. A number in a timestamp
    is seconds, and bad if it has more than 11 digits, as milliseconds have.

    With `new_fields="fail"` the batch is looked at first, in a pass of its own: `SchemaDriftError` is raised where
    objects have fields that `schema` lacks. Raises `ConfigurationError` for a schema or options that cannot be,
    `tinyint` among them: Spark takes 200 for -56. So it does for a session with settings under which Spark would read
    other values (docs/decoding.md).
    """
    needed = {**JSON_VALUES, **(DDL_SCHEMAS if isinstance(schema, str) else {})}
    check_settings(frame.sparkSession, needed, "decode_json")
    declared = _declared(schema)
    given = dict(options or {})
    if "timezone" not in map(str.lower, given):
        given["timeZone"] = "UTC"
    wrong = [name for name in given if name.lower() in _OURS]
    if wrong:
        raise ConfigurationError(f"options: {', '.join(wrong)} cannot be chosen; bad records are told apart here")
    new = sorted(_new_fields(infer_json_schema(frame), declared)) if new_fields == "fail" else []
    if new:
        raise SchemaDriftError(
            f"the batch has fields that the schema lacks: {', '.join(new)}. Declare them, or have them left out "
            "(new_fields='ignore')"
        )
    text = f.try_validate_utf8(f.col("value").cast("string"))
    end = uuid.uuid4().hex
    wrapped = _wrapped(text, end)
    is_huge = _is_huge(text, wrapped, end, declared, given)
    is_far = _is_far(text, wrapped, end, declared, given)
    parsed = _parse(f.when(~is_huge & ~is_far, wrapped), end, declared, given)
    read, parsed = read_once(frame, parsed)
    entries, corrupt = parsed[end], parsed[_CORRUPT]
    value = entries[_VALUE]
    is_one = (f.size(entries) == 2) & f.map_contains_key(entries, end)  # noqa: PLR2004
    reason = (
        missing_value(nulls)
        .when(text.isNull(), f.lit("not UTF-8"))
        .when(is_huge, f.lit("a number with an exponent of 10,000 or more"))
        .when(is_far, f.lit("a number of more than 11 digits in a timestamp, which takes seconds"))
        .when(corrupt.isNotNull(), f.lit("not JSON, or another type in a field than declared"))
        .when(~f.coalesce(is_one, f.lit(False)), f.lit("not exactly one JSON value"))  # noqa: FBT003
        .when(value.isNull(), f.lit("JSON null"))
    )
    for path, is_missing in _missing(value, declared):
        reason = reason.when(is_missing, f.lit(f"field {path} is missing or null"))
    return DecodedBatch(read, value, reason, columns=frame.columns)


def infer_json_schema(frame: "DataFrame") -> "StructType":
    """Say what the JSON objects of a batch hold, in one pass over it: to declare a schema by, not to decode with.

    Each batch holds other fields, so a schema that each batch finds by itself gives each one other columns. Values that
    are no JSON object are left out. A field of several types is a `variant`, one that is always null is `void`.
    """
    check_settings(frame.sparkSession, JSON_SCHEMAS, "infer_json_schema")
    text = f.try_validate_utf8(f.col("value").cast("string"))
    value = f.try_parse_json(text)
    is_object = f.schema_of_variant(value).startswith("OBJECT")
    row = frame.select(f.schema_of_variant_agg(f.when(is_object, value))).first()
    schema = str(row[0]) if row is not None else "VOID"
    if not schema.startswith("OBJECT<"):
        return t.StructType()
    inferred = t.DataType.fromDDL(_as_struct(schema))
    assert isinstance(inferred, t.StructType)  # noqa: S101 - what begins with STRUCT is one
    return inferred


def _declared(schema: "StructType | str") -> "StructType":
    from pyspark.errors import PySparkException

    try:
        declared = t.DataType.fromDDL(schema) if isinstance(schema, str) else schema
    except PySparkException as error:
        raise ConfigurationError(f"schema: {schema!r} is no DDL ({first_line(error)})") from error
    if not isinstance(declared, t.StructType) or not declared.fields:
        raise ConfigurationError(f"schema: {schema!r}; give the fields of an object, as a StructType or as DDL")
    if _holds(declared, t.ByteType):
        raise ConfigurationError("schema: Spark takes 200 in a tinyint of JSON for -56; declare a smallint")
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
    """Tell whether Spark would write out all the zeros of a number, of which 13 bytes can ask for a billion.

    It does so for decimals, for minutes or until there is no memory left; they may stand in strings, too. What might
    hold one is looked at closely: numbers without the strings around them, then the strings of decimal fields. What
    cannot be looked at, or hides one field behind another of the same name, is taken for one that does.
    """
    if not _holds(declared, t.DecimalType):
        return f.lit(False)  # noqa: FBT003
    bare = _without_strings(text)
    decimals = _parse(wrapped, end, _only(declared, t.DecimalType, t.StringType()), options)
    texts = f.regexp_replace(f.to_json(decimals), _NAME_OR_TEXT, "$1")
    is_huge = bare.rlike(_HUGE) | texts.rlike(_HUGE_IN_STRING)
    is_hidden = decimals[_CORRUPT].isNotNull() | f.try_parse_json(wrapped).isNull()
    may_be = text.rlike(rf"{_HUGE_IN_STRING}|\\u")
    return f.coalesce(may_be & f.coalesce(is_huge | is_hidden, f.lit(True)), f.lit(False))  # noqa: FBT003


def _is_far(
    text: "Column", wrapped: "Column", end: str, declared: "StructType", options: Mapping[str, str]
) -> "Column":
    """Tell whether a timestamp is a number of seconds beyond the year 5138: most likely of another unit.

    Spark would give a far year for milliseconds, and any time at all for microseconds, whose product overflows.
    """
    if not _holds(declared, t.TimestampType):
        return f.lit(False)  # noqa: FBT003
    timestamps = f.to_json(_parse(wrapped, end, _only(declared, t.TimestampType, t.VariantType()), options))
    return text.rlike(_FAR) & f.coalesce(_without_strings(timestamps).rlike(_FAR), f.lit(False))  # noqa: FBT003


def _without_strings(text: "Column") -> "Column":
    return f.regexp_replace(f.regexp_replace(text, r"(?s)\\.", ""), r'"[^"]*+"', "")


def _only(declared: "DataType", kind: "type[DataType]", instead: "DataType") -> "DataType":
    """Give the type with what it holds of `kind` alone, and `instead` in the place of that."""
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
    """Make each text one entry of a map, with another entry behind it, in a field that has the name of that one.

    Spark's parser stops after the first value and takes an array for several objects; a text that is more or less than
    one value leaves this map without its second entry, or with a third. No text can write these by itself: it does not
    know their name.
    """
    return f.concat(f.lit(f'{{"{end}":{{"{_VALUE}":'), text, f.lit(f'\n,"{end}":{{}}}}}}'))


def _parse(wrapped: "Column", end: str, declared: "DataType", options: Mapping[str, str]) -> "Column":
    outer = t.StructType(
        [t.StructField(end, t.MapType(t.StringType(), declared)), t.StructField(_CORRUPT, t.StringType())]
    )
    settings = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    settings["enableDateTimeParsingFallback"] = "false"  # it takes "7" for 1970-01-08
    return f.from_json(wrapped, outer, settings)


def _missing(value: "Column", declared: "StructType", above: str = "") -> Iterator[tuple[str, "Column"]]:
    """Give each field that must be there, with when it is not: only an object that is there can lack one."""
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
    """Say STRUCT for OBJECT, but within the names of fields."""
    parts = schema.split("`")
    return "`".join(part if index % 2 else part.replace("OBJECT<", "STRUCT<") for index, part in enumerate(parts))
