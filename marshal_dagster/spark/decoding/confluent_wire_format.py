"""The frame that Confluent's serializers put in front of a message: a zero byte and four of a schema id, big-endian."""

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
"""How many distinct schema ids of one batch are looked up; of so many, most are surely no frames."""
LOOKUPS_WITHIN_S: Final = 60.0
"""How long that may take in all."""
MOST_SCHEMAS: Final = 1_000
"""How many of them may be those of schemas: each is a part of Spark's plan."""

_FRAME_BYTES = 5
_ALL = 2**31 - 1


def schema_id() -> "Column":
    """Give the schema id of a record, null where its value has no frame."""
    is_framed = (f.length("value") >= _FRAME_BYTES) & (f.substring("value", 1, 1) == f.lit(b"\x00"))
    return f.when(is_framed, f.conv(f.hex(f.substring("value", 2, 4)), 16, 10).cast("long"))


def payload() -> "Column":
    """Give what stands behind the frame."""
    return f.substring("value", _FRAME_BYTES + 1, _ALL)


def schemas_of(frame: "DataFrame", schemas: Schemas, kind: SchemaKind) -> Mapping[int, Schema | str]:
    """Give for each schema id in `frame` that is known its schema, or why it is none of `kind`, in one pass over it.

    Raises what `load_schemas` raises.
    """
    ids = frame.select(schema_id().alias("id")).where(f.col("id") <= schemas.largest_id).distinct()
    return load_schemas([row["id"] for row in ids.limit(MOST_LOOKUPS + 1).collect()], schemas, kind)


def load_schemas(ids: Collection[int], schemas: Schemas, kind: SchemaKind) -> Mapping[int, Schema | str]:
    """Give for each of `ids` that is known its schema, or why it is none of `kind`.

    Raises what `schemas` raises when it cannot be asked, `UnavailableError` when that takes too long, and
    `ConfigurationError` for more ids than are looked up: of a record whose id was not, nothing can be said.
    """
    if len(ids) > MOST_LOOKUPS:
        raise ConfigurationError(
            f"the batch names more than {MOST_LOOKUPS} schema ids: most of its values hardly have Confluent's frame. "
            f"None above {schemas.largest_id} is looked up: if the registry has given no such ids yet, set its "
            "largest_id lower"
        )
    known: dict[int, Schema | str] = {}
    end_s = time.monotonic() + LOOKUPS_WITHIN_S
    for asked, number in enumerate(sorted(ids)):
        if time.monotonic() >= end_s:
            raise UnavailableError(
                f"{asked} of the batch's {len(ids)} schema ids were looked up in {LOOKUPS_WITHIN_S:g} s: the registry "
                "is slow, or most values have no frame; if it has given no ids so large yet, set its largest_id lower"
            )
        schema = schemas.by_id(number)
        if schema is not None:
            is_of_kind = schema.kind is kind
            known[number] = schema if is_of_kind else f"schema id {number} is of type {schema.kind}, not {kind}"
    if len(known) > MOST_SCHEMAS:
        raise ConfigurationError(f"the batch has records of {len(known)} schemas; {MOST_SCHEMAS} can be decoded")
    return known


def frame_reason(schemas_by_id: Mapping[int, Schema | str], nulls: NullPolicy) -> "Column":
    """Say why a record cannot be decoded already by its frame, else null."""
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
    """Return the newest schema of a subject. Raises `ConfigurationError` unless it is of `kind`, and as `schemas`."""
    newest = schemas.latest(subject)
    if newest.kind is not kind:
        raise ConfigurationError(f"the newest schema of subject {subject!r} is of type {newest.kind}, not {kind}")
    return newest
