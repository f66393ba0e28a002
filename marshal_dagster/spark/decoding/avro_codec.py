"""Decoding of Avro values, with or without Confluent's frame.

All values are read with one reader schema, even if they were written with different schemas.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.spark.conversion_settings import AVRO_VALUES, check_settings
from marshal_dagster.spark.decoding import confluent_wire_format
from marshal_dagster.spark.decoding.avro_logical_types import (
    DIGITS_OF_A_LONG,
    logical_type_conflict,
    named_types,
    nodes,
    short_name,
    with_full_names,
    with_whole_decimals,
)
from marshal_dagster.spark.decoding.decoded_batch import NOT_UTF8, DecodedBatch, NullPolicy, missing_value, read_once
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, Schemas
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.nested_values import any_typed_value, any_value, is_not_utf8, text_kinds
from marshal_dagster.spark.packages import SparkBuild, avro_package, installed_build, session_build

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_VALUE, _END = "value", "end"
_NAMED = frozenset({"record", "error", "enum", "fixed"})
_UNBOUNDED = "has an array whose items take no bytes: a record of a few bytes could claim any number of them"


def decode_avro(
    frame: "DataFrame",
    schemas: Schemas | None,
    *,
    schema: str | None = None,
    subject: str | None = None,
    nulls: NullPolicy = NullPolicy.BAD,
) -> DecodedBatch:
    """Decode values that are one Avro record each, and read them with one schema.

    Each value has Confluent's frame with the id of its writer's schema. Avro matches fields by name, and fields that
    are missing in the writer's schema get their default. An extra pass over the batch looks up its schema ids first.

    A value is bad in these cases:

    - It is null (see `nulls`), empty, or without a frame.
    - Its schema id is unknown, or belongs to another kind of schema.
    - Its schema is of another record than the reader's schema, by name without namespace and by aliases.
    - Its schema has an array whose items take no bytes.
    - Its schema and the reader's have different logical types in a field, such as `timestamp-millis` and
      `timestamp-micros`, or decimals of different scales. Avro would read one as the other.
    - It is truncated, or followed by further bytes.
    - It has a string that is not UTF-8, a decimal with more digits than the reader's schema declares, or does not match
      the reader's schema in another way.

    Args:
        frame: The frame of `batch.read`.
        schemas: The writers' schemas, such as a `SchemaRegistry`. With None, values have no frame and were all written
            with `schema`.
        schema: The reader's schema, as JSON text of a record. Pass either this or `subject`.
        subject: The subject whose newest schema is the reader's schema.
        nulls: Whether a record with a null value is bad.

    Returns:
        The decoded records.

    Raises:
        UnavailableError: The registry cannot be reached. That makes no record bad.
        ConfigurationError: A schema or the registry's configuration is invalid, the batch has too many schema ids, or
            the session has no `avro_package()`.

    Example:
        ```python
        registry = SchemaRegistry(url="https://registry:8081")
        rows = decode_avro(frame, registry, subject="orders-value").or_dead_letter("orders-bad", connection)
        ```
    """
    check_settings(frame.sparkSession, AVRO_VALUES, "decode_avro")
    reader = _reader(schemas, schema, subject)
    if schemas is None and _is_unbounded(reader):
        raise ConfigurationError(f"the schema {_UNBOUNDED}")
    end = _end()
    if schemas is None:
        schemas_by_id: Mapping[int, Schema | str] = {}
        value = _read(f.col("value"), reader, reader, end)
        reason = missing_value(nulls)
        not_whole: Column = f.lit("it is truncated, or does not match the schema")
    else:
        known = confluent_wire_format.schemas_of(frame, schemas, SchemaKind.AVRO)
        schemas_by_id = {number: _if_of_reader(number, schema, reader) for number, schema in known.items()}
        value = _read_by_id(schemas_by_id, reader, end)
        reason = confluent_wire_format.frame_reason(schemas_by_id, nulls)
        not_whole = f.concat(
            f.lit("it is truncated, or is not of schema id "),
            confluent_wire_format.schema_id().cast("string"),
            f.lit(", or does not fit the reader's schema"),
        )
    try:
        declared = _declared(frame, reader)
        read, value = read_once(frame, value)
        is_there, found_end, value = f.col("value").isNotNull(), value.getField(_END), value.getField(_VALUE)
        # Spark keeps invalid bytes of a string, and readers replace them silently.
        has_bad_text = any_value(value, declared, text_kinds(), is_not_utf8)
        is_too_long = any_typed_value(value, declared, (t.DecimalType,), _has_more_digits)
        reason = (
            reason.when(is_there & found_end.isNull(), not_whole)
            .when(is_there & (found_end != f.lit(end)), f.lit("further bytes follow the record"))
            .when(is_there & has_bad_text, f.lit(NOT_UTF8))
            .when(is_there & is_too_long, f.lit("a decimal has more digits than the reader's schema declares"))
        )
        decoded = f.when(is_there & ~is_too_long, value.cast(declared))
        return DecodedBatch(read, decoded, reason, columns=frame.columns)
    except MarshalError:
        raise
    except Exception as error:  # an error of the JVM about a schema or a missing function
        text = first_line(error)
        advice = _advice(session_build(frame.sparkSession))
        raise ConfigurationError(f"Avro cannot be decoded ({text}): check the reader's schema, or {advice}") from error


def _reader(schemas: Schemas | None, schema: str | None, subject: str | None) -> dict[str, Any]:
    if (schema is None) == (subject is None):
        raise ConfigurationError("pass either schema, or a subject whose newest schema is the reader's schema")
    if subject is None:
        return _record(str(schema), "schema")
    if schemas is None:
        raise ConfigurationError(
            f"subject is {subject!r}, but without schemas values have no frame: pass schema instead"
        )
    newest = confluent_wire_format.newest_schema(schemas, subject, SchemaKind.AVRO)
    return _record(whole(newest), f"subject {subject!r}")


def _record(text: str, source: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{source}: no Avro schema, because it is not JSON ({error})") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record" or not isinstance(parsed.get("fields"), list):
        raise ConfigurationError(f"{source}: the reader's schema must be that of a record")
    return parsed


def _if_of_reader(number: int, schema: Schema | str, reader: Mapping[str, Any]) -> Schema | str:
    """Return `schema`, or a reason if its record has another name than that of `reader`.

    Java's Avro compares only fields. If fields have defaults, it would accept any other record of the topic.
    """
    if isinstance(schema, str):
        return schema
    try:
        written = json.loads(schema.text)
    except ValueError as error:
        raise ConfigurationError(f"schema id {number}: no Avro schema, because it is not JSON ({error})") from error
    name = short_name(written.get("name")) if isinstance(written, dict) else ""
    wanted = short_name(reader.get("name"))
    if name in {wanted, *map(short_name, reader.get("aliases", ()))}:
        return _refusal(number, json.loads(whole(schema)), reader) or schema
    what = f"is of record {name}" if name else "is of no record"
    return f"schema id {number} {what}, but the reader's schema is of {wanted}, without such an alias"


def _refusal(number: int, writer: object, reader: object) -> str | None:
    """Return why records with this schema cannot be decoded unchanged; None if they can."""
    if _is_unbounded(writer):
        return f"schema id {number} {_UNBOUNDED}"
    conflict = logical_type_conflict(writer, reader)
    return conflict and f"schema id {number}: {conflict}"


def _is_unbounded(schema: object) -> bool:
    """Return whether the schema has an array whose items take no bytes, so that their count is unlimited."""
    schema = with_full_names(schema)
    named = named_types(schema)
    arrays = (node for node in nodes(schema) if isinstance(node, dict) and node.get("type") == "array")
    return any(_takes_no_bytes(array.get("items"), named, frozenset()) for array in arrays)


def _takes_no_bytes(node: object, named: Mapping[str, Mapping[str, Any]], within: frozenset[str]) -> bool:
    match node:
        case str(name):
            known = name in named and name not in within
            return _takes_no_bytes(named[name], named, within) if known else name == "null"
        case {"type": "record" | "error", "name": name, "fields": fields}:
            inside = within | {name}
            return all(_takes_no_bytes(field["type"], named, inside) for field in fields)
        case {"type": "fixed", "size": size}:
            return bool(size == 0)
        case {"type": "array" | "map" | "enum"}:
            return False
        case {"type": inner}:
            return _takes_no_bytes(inner, named, within)
    return False


def _read_by_id(schemas_by_id: Mapping[int, Schema | str], reader: Mapping[str, Any], end: bytes) -> "Column":
    number, value = confluent_wire_format.schema_id(), None
    for written, schema in schemas_by_id.items():
        if isinstance(schema, str):
            continue
        read = _read(confluent_wire_format.payload(), json.loads(whole(schema)), reader, end)
        value = f.when(number == written, read) if value is None else value.when(number == written, read)
    return _read(f.lit(None).cast("binary"), reader, reader, end) if value is None else value


def _end() -> bytes:
    """Return random bytes. Each is a small number in Avro, so that no truncated record claims memory by them."""
    return bytes(number & 0x7F for number in uuid.uuid4().bytes)


def _read(data: "Column", writer: object, reader: Mapping[str, Any], end: bytes) -> "Column":
    """Return the decoded `data`, and the bytes that follow it if `end` is appended. They are null in unreadable data.

    Spark returns a record of nulls for unreadable data, but valid records may consist of nulls too. And it ignores what
    follows a record.
    """
    from pyspark.sql.avro.functions import from_avro

    try:
        schemas = [json.dumps(_with_end(schema, len(end))) for schema in (writer, with_whole_decimals(reader))]
        options = {"avroSchema": schemas[1], "mode": "PERMISSIVE", "datetimeRebaseMode": "CORRECTED"}
        return from_avro(f.concat(data, f.lit(end)), schemas[0], options)
    except TypeError as error:  # the JVM does not have the class
        raise ConfigurationError(f"this session cannot decode Avro: {_advice(installed_build())}") from error


def _with_end(schema: object, count: int) -> dict[str, Any]:
    end = {"type": "fixed", "name": "_marshal_end", "size": count}
    fields = [{"name": _VALUE, "type": schema}, {"name": _END, "type": end}]
    return {"type": "record", "name": "_marshal_framed", "fields": fields}


def _declared(frame: "DataFrame", reader: Mapping[str, Any]) -> "DataType":
    """Return Spark's type of the reader's schema."""
    from pyspark.sql.avro.functions import from_avro

    nothing = from_avro(f.lit(None).cast("binary"), json.dumps(reader), {"mode": "PERMISSIVE"})
    return frame.select(nothing).schema[0].dataType


def _has_more_digits(number: "Column", declared: "DataType") -> "Column":
    """Return whether a decimal, which was read with all its digits, has more of them than declared."""
    assert isinstance(declared, t.DecimalType)  # noqa: S101 - the kind that was looked for
    if declared.precision > DIGITS_OF_A_LONG:
        return f.lit(False)  # noqa: FBT003 - Spark itself has rejected it
    return f.abs(number) >= f.lit(Decimal(10) ** (declared.precision - declared.scale))


def whole(schema: Schema) -> str:
    """Return the text of a schema, with the definitions of the types that it references."""
    if not schema.references:
        return schema.text
    return json.dumps(_placed(json.loads(schema.text), "", dict(_definitions(schema)), set()))


def _definitions(schema: Schema) -> Iterator[tuple[str, Any]]:
    for name, reference in schema.references.items():
        yield name, json.loads(reference.text)
        yield from _definitions(reference)


def _placed(node: object, namespace: str, definitions: Mapping[str, object], done: set[str]) -> object:
    """Replace the first use of each referenced name by its definition; later uses keep the name."""
    if isinstance(node, list):
        return [_placed(part, namespace, definitions, done) for part in node]
    if isinstance(node, str):
        names = (f"{namespace}.{node}", node) if namespace and "." not in node else (node,)
        name = next((name for name in names if name in definitions), None)
        if name is None or name in done:
            return node
        done.add(name)
        return _placed(definitions[name], "", definitions, done)
    if not isinstance(node, dict):
        return node
    if node.get("type") not in _NAMED:
        inner = {
            key: _placed(node[key], namespace, definitions, done) for key in ("type", "items", "values") if key in node
        }
        return {**node, **inner}
    own = str(node.get("namespace", str(node.get("name", "")).rpartition(".")[0] or namespace))
    fields = [{**field, "type": _placed(field["type"], own, definitions, done)} for field in node.get("fields", ())]
    return {**node, "namespace": own, **({"fields": fields} if "fields" in node else {})}


def _advice(build: SparkBuild) -> str:
    return f"start it with spark.jars.packages={avro_package(build)}"
