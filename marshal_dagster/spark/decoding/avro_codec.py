"""Avro values, in Confluent's frame or bare, read by one schema whatever schema they were written with."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.spark.conversion_settings import AVRO_VALUES, check_settings
from marshal_dagster.spark.decoding import confluent_wire_format
from marshal_dagster.spark.decoding.decoded_batch import NOT_UTF8, DecodedBatch, NullPolicy, missing_value, read_once
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, Schemas
from marshal_dagster.spark.error_text import first_line
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.nested_values import any_value, is_not_utf8, text_kinds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

AVRO_PACKAGE: Final = "org.apache.spark:spark-avro_2.13:4.0.0"
"""Maven coordinates of Spark's own Avro functions, which the session needs; `fetch_connector` fetches them."""

_READ_WHOLE = "_marshal_read_whole"
_ADVICE = f"start it with spark.jars.packages={AVRO_PACKAGE}"
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
    """Decode values that are each one Avro record, and read them by one schema.

    Each value has Confluent's frame, whose schema id says in `schemas` how it was written; with `schemas` None values
    have no frame and were all written by `schema`. They are read by `schema` (the text of a record's schema), else by
    the newest one of `subject`, in Avro's own way: fields are matched by name, missing ones get their default. The
    batch's schema ids are looked up first, in a pass of its own.

    Bad is a value that is null (but see `nulls`), empty, without a frame, of a schema id that `schemas` does not know
    or that is of another kind or another record than the one to read by (by its name without namespace, or its
    aliases) or has an array whose items take no bytes, that ends too early, has a string that is not UTF-8, or does not
    fit the schema to read by. A `schemas` that cannot be asked makes no record bad: `UnavailableError` or
    `ConfigurationError` is raised, the latter also for a schema that cannot be used, for more schema ids than are
    looked up, and for a session without `AVRO_PACKAGE`.
    """
    check_settings(frame.sparkSession, AVRO_VALUES, "decode_avro")
    reader = _reader(schemas, schema, subject)
    if schemas is None and _is_unbounded(reader):
        raise ConfigurationError(f"schema: it {_UNBOUNDED}")
    if schemas is None:
        schemas_by_id: Mapping[int, Schema | str] = {}
        value = _read(f.col("value"), reader, reader)
        reason = missing_value(nulls)
        not_whole: Column = f.lit("it ends too early, or is not of the schema")
    else:
        known = confluent_wire_format.schemas_of(frame, schemas, SchemaKind.AVRO)
        schemas_by_id = {number: _if_of_reader(number, schema, reader) for number, schema in known.items()}
        value = _read_by_id(schemas_by_id, reader)
        reason = confluent_wire_format.frame_reason(schemas_by_id, nulls)
        not_whole = f.concat(
            f.lit("it ends too early, or is not of schema id "),
            confluent_wire_format.schema_id().cast("string"),
            f.lit(", or that does not fit the schema to read by"),
        )
    try:
        read, value = read_once(frame, value)
        is_there, is_whole = f.col("value").isNotNull(), value.getField(_READ_WHOLE).isNotNull()
        decoded = f.when(is_there, value.dropFields(_READ_WHOLE))
        # Spark keeps the bytes of a string as they are, and readers replace them silently.
        has_bad_text = any_value(value, read.schema[-1].dataType, text_kinds(), is_not_utf8)
        reason = reason.when(is_there & ~is_whole, not_whole).when(is_there & has_bad_text, f.lit(NOT_UTF8))
        return DecodedBatch(read, decoded, reason, columns=frame.columns)
    except MarshalError:
        raise
    except Exception as error:  # the JVM's, about a schema or a function that is not there
        words = first_line(error)
        raise ConfigurationError(f"Avro cannot be read ({words}): check the schema to read by, or {_ADVICE}") from error


def _reader(schemas: Schemas | None, schema: str | None, subject: str | None) -> dict[str, Any]:
    if (schema is None) == (subject is None):
        raise ConfigurationError("give the schema to read by, or a subject whose newest one it is")
    if subject is None:
        return _record(str(schema), "schema")
    if schemas is None:
        raise ConfigurationError(f"subject {subject!r}: values without a frame need a schema")
    newest = confluent_wire_format.newest_schema(schemas, subject, SchemaKind.AVRO)
    return _record(whole(newest), f"subject {subject!r}")


def _record(text: str, source: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{source}: no Avro schema, it is not JSON ({error})") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record" or not isinstance(parsed.get("fields"), list):
        raise ConfigurationError(f"{source}: the schema to read by must be that of a record")
    return parsed


def _if_of_reader(number: int, schema: Schema | str, reader: Mapping[str, Any]) -> Schema | str:
    """Give `schema`, or why nothing written with it is of `reader`, by name: Java's Avro compares fields alone.

    Where fields have defaults it would take any other record of the topic for one of these.
    """
    if isinstance(schema, str):
        return schema
    try:
        written = json.loads(schema.text)
    except ValueError as error:
        raise ConfigurationError(f"schema id {number}: no Avro schema, it is not JSON ({error})") from error
    name = _short(written.get("name")) if isinstance(written, dict) else ""
    wanted = _short(reader.get("name"))
    if name in {wanted, *map(_short, reader.get("aliases", ()))}:
        return f"schema id {number} {_UNBOUNDED}" if _is_unbounded(json.loads(whole(schema))) else schema
    what = f"is of record {name}" if name else "is of no record"
    return f"schema id {number} {what}, and the schema to read by is of {wanted}, with no such alias"


def _short(name: object) -> str:
    return str(name or "").rpartition(".")[2]


def _is_unbounded(schema: object) -> bool:
    """Say whether it has an array whose items take no bytes: their count is all that a record says of them."""
    nodes = list(_nodes(schema))
    named = {_short(node["name"]): node for node in nodes if isinstance(node, dict) and "name" in node}
    arrays = (node for node in nodes if isinstance(node, dict) and node.get("type") == "array")
    return any(_takes_no_bytes(array.get("items"), named, frozenset()) for array in arrays)


def _nodes(node: object) -> Iterator[object]:
    yield node
    inner = list(node) if isinstance(node, list) else []
    if isinstance(node, dict):
        inner = [node[key] for key in ("type", "items", "values") if key in node]
        inner += [field["type"] for field in node.get("fields", ())]
    for part in inner:
        yield from _nodes(part)


def _takes_no_bytes(node: object, named: Mapping[str, Mapping[str, Any]], within: frozenset[str]) -> bool:
    match node:
        case str(name):
            known = _short(name) in named and _short(name) not in within
            return _takes_no_bytes(named[_short(name)], named, within) if known else name == "null"
        case {"type": "record" | "error", "name": name, "fields": fields}:
            inside = within | {_short(name)}
            return all(_takes_no_bytes(field["type"], named, inside) for field in fields)
        case {"type": "fixed", "size": size}:
            return bool(size == 0)
        case {"type": "array" | "map" | "enum"}:
            return False
        case {"type": inner}:
            return _takes_no_bytes(inner, named, within)
    return False


def _read_by_id(schemas_by_id: Mapping[int, Schema | str], reader: Mapping[str, Any]) -> "Column":
    number, value = confluent_wire_format.schema_id(), None
    for written, schema in schemas_by_id.items():
        if isinstance(schema, str):
            continue
        read = _read(confluent_wire_format.payload(), json.loads(whole(schema)), reader)
        value = f.when(number == written, read) if value is None else value.when(number == written, read)
    return _read(f.lit(None).cast("binary"), reader, reader) if value is None else value


def _read(data: "Column", writer: object, reader: Mapping[str, Any]) -> "Column":
    """Read `data`; what cannot be read has null even in the field `_READ_WHOLE`, which no writer has written.

    Spark gives nothing but a record of nulls for what it cannot read, and there may be such records.
    """
    from pyspark.sql.avro.functions import from_avro

    marked = {**reader, "fields": [*reader["fields"], {"name": _READ_WHOLE, "type": "boolean", "default": True}]}
    try:
        options = {"avroSchema": json.dumps(marked), "mode": "PERMISSIVE", "datetimeRebaseMode": "CORRECTED"}
        return from_avro(data, json.dumps(writer), options)
    except TypeError as error:  # the class is not in the JVM
        raise ConfigurationError(f"this session cannot read Avro: {_ADVICE}") from error


def whole(schema: Schema) -> str:
    """Give a schema's text with the types that it names from its references in their places."""
    if not schema.references:
        return schema.text
    return json.dumps(_placed(json.loads(schema.text), "", dict(_definitions(schema)), set()))


def _definitions(schema: Schema) -> Iterator[tuple[str, Any]]:
    for name, reference in schema.references.items():
        yield name, json.loads(reference.text)
        yield from _definitions(reference)


def _placed(node: object, namespace: str, definitions: Mapping[str, object], done: set[str]) -> object:
    """Put a definition where its name stands first; Avro knows it by its name from there on."""
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
