"""What the bytes of a batch's records say: JSON, Avro and Protobuf, and what becomes of those that say nothing.

`decode_…` give a `DecodedBatch`, in which each record has a value or a reason why it has none. Plain DataFrame
functions only, so that it works in every kind of session. Schemas are fetched here, by the driver (`schemas`): no
secret of a registry reaches a plan.
"""

from marshal_dagster.spark.decoding.avro_codec import AVRO_PACKAGE, decode_avro
from marshal_dagster.spark.decoding.decoded_batch import DecodedBatch, NullPolicy
from marshal_dagster.spark.decoding.json_codec import decode_json, infer_json_schema
from marshal_dagster.spark.decoding.protobuf_codec import decode_protobuf
from marshal_dagster.spark.decoding.schemas import Schema, SchemaFiles, SchemaKind, SchemaRegistry, Schemas

__all__ = [
    "AVRO_PACKAGE",
    "DecodedBatch",
    "NullPolicy",
    "Schema",
    "SchemaFiles",
    "SchemaKind",
    "SchemaRegistry",
    "Schemas",
    "decode_avro",
    "decode_json",
    "decode_protobuf",
    "infer_json_schema",
]
