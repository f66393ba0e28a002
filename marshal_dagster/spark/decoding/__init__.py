"""Decoding of a batch's records from JSON, Avro and Protobuf, and handling of records that cannot be decoded.

The functions `decode_...` return a `DecodedBatch`, in which each record has a value, or a reason why it has none. They
use only DataFrame functions, so they work in every kind of session. The driver fetches the schemas (`schemas`), so no
secret of a registry gets into a Spark plan.
"""

from marshal_dagster.spark.decoding.avro_codec import decode_avro as decode_avro
from marshal_dagster.spark.decoding.confluent_schemas import ConfluentSchemas as ConfluentSchemas
from marshal_dagster.spark.decoding.decoded_batch import DecodedBatch as DecodedBatch
from marshal_dagster.spark.decoding.decoded_batch import NullPolicy as NullPolicy
from marshal_dagster.spark.decoding.json_codec import decode_json as decode_json
from marshal_dagster.spark.decoding.json_codec import infer_json_schema as infer_json_schema
from marshal_dagster.spark.decoding.protobuf_codec import decode_protobuf as decode_protobuf
from marshal_dagster.spark.decoding.schemas import Schema as Schema
from marshal_dagster.spark.decoding.schemas import SchemaFiles as SchemaFiles
from marshal_dagster.spark.decoding.schemas import SchemaKind as SchemaKind
from marshal_dagster.spark.decoding.schemas import SchemaRegistry as SchemaRegistry
from marshal_dagster.spark.decoding.schemas import Schemas as Schemas
