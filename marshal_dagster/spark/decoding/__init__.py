"""What the bytes of a batch's records say: JSON, Avro and Protobuf, and what becomes of those that say nothing.

`decode_…` give a `DecodedBatch`, in which each record has a value or a reason why it has none. Plain DataFrame
functions only, so that it works in every kind of session. Schemas are fetched here, by the driver (`schemas`): no
secret of a registry reaches a plan.
"""

from marshal_dagster.spark.decoding.avro_codec import AVRO_PACKAGE as AVRO_PACKAGE
from marshal_dagster.spark.decoding.avro_codec import decode_avro as decode_avro
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
