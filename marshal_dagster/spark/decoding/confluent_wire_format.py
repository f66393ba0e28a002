"""The frame of Confluent's serializers: a zero byte and the schema id in four bytes (big-endian) before a message.

The decoders of Avro and Protobuf use it to find the schema of each record, that of JSON to check the schema's kind.
"""

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.spark.decoding.decoded_batch import NullPolicy, missing_value
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, Schemas
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_LOOKUPS: Final = 10_000
"""The maximum number of distinct schema ids of a batch. If there are more, most values have no frame."""
LOOKUPS_WITHIN_S: Final = 60.0
"""The maximum time for all look-ups of a batch, in seconds."""
MOST_SCHEMAS: Final = 1_000
"""The maximum number of schemas of a batch, because each one is a part of Spark's plan."""

_FRAME_BYTES = 5
_ALL = 2**31 - 1


def schema_id() -> "Column":
    """Return the schema id of a record; null if its value has no frame."""
    is_framed = (f.length("value") >= _FRAME_BYTES) & (f.substring("value", 1, 1) == f.lit(b"\x00"))
    return f.when(is_framed, f.conv(f.hex(f.substring("value", 2, 4)), 16, 10).cast("long"))


def payload() -> "Column":
    """Return the bytes after the frame."""
    return f.substring("value", _FRAME_BYTES + 1, _ALL)


def schemas_of(frame: "DataFrame", schemas: Schemas, kind: SchemaKind) -> Mapping[int, Schema | str]:
    """Return the schema of each schema id in `frame`, or a reason if it is not of `kind`, in one pass over it.

    Unknown ids are left out. Raises the errors of `load_schemas`.
    """
    ids = frame.select(schema_id().alias("id")).where(f.col("id") <= schemas.largest_id).distinct()
    return load_schemas([row["id"] for row in ids.limit(MOST_LOOKUPS + 1).collect()], schemas, kind)


def load_schemas(ids: Collection[int], schemas: Schemas, kind: SchemaKind) -> Mapping[int, Schema | str]:
    """Return the schema of each of `ids`, or a reason if it is not of `kind`. Unknown ids are left out.

    Raises the errors of `schemas` if a schema cannot be read, `UnavailableError` if all look-ups take too long, and
    `ConfigurationError` for too many ids.
    """
    if len(ids) > MOST_LOOKUPS:
        raise ConfigurationError(
            f"the batch has more than {MOST_LOOKUPS} schema ids, so probably most values have no Confluent frame. "
            f"Ids above {schemas.largest_id} are not looked up: set largest_id of the registry to its highest id"
        )
    known: dict[int, Schema | str] = {}
    end_s = time.monotonic() + LOOKUPS_WITHIN_S
    for count, number in enumerate(sorted(ids)):
        if time.monotonic() >= end_s:
            raise UnavailableError(
                f"{count} of the batch's {len(ids)} schema ids were looked up in {LOOKUPS_WITHIN_S:g} s: the registry "
                "is slow, or most values have no frame. Set largest_id of the registry to its highest id"
            )
        schema = schemas.by_id(number)
        if schema is not None:
            is_of_kind = schema.kind is kind
            known[number] = schema if is_of_kind else f"schema id {number} is of type {schema.kind}, not {kind}"
    if len(known) > MOST_SCHEMAS:
        raise ConfigurationError(
            f"the batch has records of {len(known)} schemas, but at most {MOST_SCHEMAS} can be decoded: limit the batch"
        )
    return known


def frame_reason(schemas_by_id: Mapping[int, Schema | str], nulls: NullPolicy) -> "Column":
    """Return the reason why a record cannot be decoded because of its frame or schema id, else null."""
    number = schema_id()
    reason = (
        missing_value(nulls)
        .when(f.length("value") < _FRAME_BYTES, f.lit("shorter than a frame"))
        .when(number.isNull(), f.lit("no frame: it does not begin with a zero byte"))
    )
    for schema_number, schema in schemas_by_id.items():
        if isinstance(schema, str):
            reason = reason.when(number == schema_number, f.lit(schema))
    known = [schema_number for schema_number, schema in schemas_by_id.items() if not isinstance(schema, str)]
    unknown = f.concat(f.lit("schema id "), number.cast("string"), f.lit(" is not known"))
    return reason.when(~number.isin(known), unknown)


def newest_schema(schemas: Schemas, subject: str, kind: SchemaKind) -> Schema:
    """Return the newest schema of a subject. Raises `ConfigurationError` unless it is of `kind`."""
    newest = schemas.latest(subject)
    if newest.kind is not kind:
        raise ConfigurationError(
            f"the newest schema of subject {subject!r} is of type {newest.kind}, not {kind}: name another subject, or "
            "use the function for that type"
        )
    return newest
