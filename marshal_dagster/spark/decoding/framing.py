"""The frame that Confluent's serializers put in front of a message: a zero byte and four of a schema id, big-endian."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.decoding.decoded import Nulls
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, Schemas

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_SCHEMAS: Final = 1_000
"""Of so many distinct schema ids in one batch most are surely no frames."""

_FRAME_BYTES = 5
_ALL = 2**31 - 1


def schema_id() -> "Column":
    """Give the schema id of a record, null where its value has no frame."""
    from pyspark.sql import functions as f

    is_framed = (f.length("value") >= _FRAME_BYTES) & (f.substring("value", 1, 1) == f.lit(b"\x00"))
    return f.when(is_framed, f.conv(f.hex(f.substring("value", 2, 4)), 16, 10).cast("long"))


def payload() -> "Column":
    """Give what stands behind the frame."""
    from pyspark.sql import functions as f

    return f.substring("value", _FRAME_BYTES + 1, _ALL)


def schemas_of(frame: "DataFrame", schemas: Schemas, kind: SchemaKind) -> Mapping[int, Schema | str]:
    """Give for each schema id in `frame` its schema, or why there is none of `kind`; one pass over the frame.

    Raises what `schemas` raises when it cannot be asked, and `ConfigurationError` for more ids than can be meant.
    """
    rows = frame.select(schema_id().alias("id")).where("id IS NOT NULL").distinct().limit(MOST_SCHEMAS + 1).collect()
    if len(rows) > MOST_SCHEMAS:
        raise ConfigurationError(
            f"the batch names more than {MOST_SCHEMAS} schema ids: its values hardly have Confluent's frame"
        )
    return {each: _told(each, schemas.by_id(each), kind) for each in sorted(row["id"] for row in rows)}


def frame_reason(found: Mapping[int, Schema | str], nulls: Nulls) -> "Column":
    """Say why a record cannot be decoded already by its frame, else null."""
    from pyspark.sql import functions as f

    number = schema_id()
    reason = (
        f.when(f.col("value").isNull(), f.lit("null value") if nulls is Nulls.BAD else f.lit(None))
        .when(f.length("value") == 0, f.lit("empty value"))
        .when(f.length("value") < _FRAME_BYTES, f.lit("shorter than a frame"))
        .when(number.isNull(), f.lit("no frame: it does not begin with a zero byte"))
    )
    for each, schema in found.items():
        if isinstance(schema, str):
            reason = reason.when(number == each, f.lit(schema))
    known = [each for each, schema in found.items() if not isinstance(schema, str)]
    return reason.when(~number.isin(known), f.lit("a schema id that was not there before"))


def _told(number: int, schema: Schema | None, kind: SchemaKind) -> Schema | str:
    if schema is None:
        return f"schema id {number} is not known"
    if schema.kind is not kind:
        return f"schema id {number} is of type {schema.kind}, not {kind}"
    return schema
