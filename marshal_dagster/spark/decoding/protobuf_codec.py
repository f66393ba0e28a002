"""Decoding of Protobuf values in Confluent's frame, with a Python function in Spark's workers.

The official `spark-protobuf` supports neither the message indexes of the frame nor several writers' files. Protobuf
reads older and newer messages with the reader's descriptor. So only the names of the messages matter in a writer's
file.
"""

import base64
import binascii
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.decoding import confluent_wire_format
from marshal_dagster.spark.decoding.decoded_batch import ADDED, NOT_UTF8, DecodedBatch, NullPolicy
from marshal_dagster.spark.decoding.protobuf_field_types import field_type_conflict, is_repeated, messages_of
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind, Schemas
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor
    from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

Place = tuple[int, ...]
Names = Mapping[int, Mapping[Place, str]]
"""The full names of the messages of each schema id, by their place in the file."""

_FRAME_BYTES: Final = 5
_VARINT_BITS: Final = 35
_MOST_INDEXES: Final = 100
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_NS: Final = 1_000_000_000
_LEFT_OUT: Final = "a value that has another type or is not in the enum, which Protobuf would leave out"


def decode_protobuf(
    frame: "DataFrame",
    schemas: Schemas,
    *,
    message: str,
    descriptors: str | os.PathLike[str] | bytes | None = None,
    subject: str | None = None,
    nulls: NullPolicy = NullPolicy.BAD,
) -> DecodedBatch:
    """Decode values that are one Protobuf message each, in Confluent's frame.

    An extra pass over the batch looks up its schema ids first. The indexes after the schema id identify the message in
    the writer's file.

    A value is bad in these cases:

    - It is null (see `nulls`), empty, or without a frame.
    - Its schema id is unknown, or belongs to another kind of schema.
    - It is another message than `message`, or not a valid encoding of it. A message that was truncated between two
      fields is valid in Protobuf.
    - Its schema and the reader's have different types in a field, unless the reader's holds all values of the writer's:
      an `int32` can be read as an `int64`, but not the other way round. So are fields that are repeated in the writer's
      schema only.
    - A field has a value that Protobuf would leave out: one of another encoding, or in proto2 an unknown value of an
      enum.

    A field that is not set is null; a field without presence has its default. An enum is the name of its value, or the
    number of an unknown value. A `uint64` is a decimal, and a `google.protobuf.Timestamp` is a timestamp, whose
    nanoseconds are cut off after the microsecond.

    The Python workers of Spark need marshal_dagster.

    Args:
        frame: The frame of `batch.read`.
        schemas: The writers' schemas, such as a `SchemaRegistry`.
        message: The full name of the message, such as `shop.Order`.
        descriptors: The path or the bytes of the file that `protoc --include_imports --descriptor_set_out=...` writes,
            with `message`. Pass either this or `subject`.
        subject: The subject whose newest schema has `message`.
        nulls: Whether a record with a null value is bad.

    Returns:
        The decoded records.

    Raises:
        UnavailableError: The registry cannot be reached. That makes no record bad.
        ConfigurationError: The descriptors or the registry's configuration are invalid, or the batch has too many
            schema ids.

    Example:
        ```python
        registry = SchemaRegistry(url="https://registry:8081")
        rows = decode_protobuf(frame, registry, message="shop.Order", subject="orders-value").or_fail()
        ```
    """
    files = _reader_files(schemas, descriptors, subject)
    descriptor = _message(files, message)
    fields = _struct(descriptor)
    known = confluent_wire_format.schemas_of(frame, schemas, SchemaKind.PROTOBUF)
    schemas_by_id = {number: _if_of_reader(number, schema, descriptor) for number, schema in known.items()}
    names = {
        number: _names(_main_file(schema, f"schema id {number}"))
        for number, schema in schemas_by_id.items()
        if isinstance(schema, Schema)
    }
    result = t.StructType([t.StructField("value", fields), t.StructField("reason", t.StringType())])

    def read_framed(value: bytes | None) -> tuple[Any, str | None] | None:
        return None if value is None else read_message(bytes(value), files, message, names)

    # Spark may call a deterministic function once for each use of its result. With Arrow, which a session can enable
    # for all functions, values would be converted by other rules.
    read = f.udf(read_framed, result, useArrow=False).asNondeterministic()
    early = confluent_wire_format.frame_reason(schemas_by_id, nulls)
    is_there = early.isNull() & f.col("value").isNotNull()
    framed = frame.withColumn(ADDED, read(f.when(is_there, f.col("value"))))
    return DecodedBatch(
        framed,
        f.when(is_there, f.col(ADDED).getField("value")),
        f.coalesce(early, f.when(is_there, f.col(ADDED).getField("reason"))),
        columns=frame.columns,
    )


# The descriptors, on the driver


def _reader_files(schemas: Schemas, descriptors: str | os.PathLike[str] | bytes | None, subject: str | None) -> bytes:
    require_extra(Extra.PROTOBUF, "decode_protobuf")
    if (descriptors is None) == (subject is None):
        raise ConfigurationError("pass either descriptors, or a subject whose newest schema has the message")
    if subject is not None:
        newest = confluent_wire_format.newest_schema(schemas, subject, SchemaKind.PROTOBUF)
        return _as_set(newest, f"subject {subject!r}")
    if isinstance(descriptors, bytes):
        return descriptors
    assert descriptors is not None  # noqa: S101 - one of both is set, see above
    try:
        return Path(descriptors).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"descriptors {os.fspath(descriptors)!r} cannot be read: {error}") from error


def _as_set(schema: Schema, source: str) -> bytes:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    files: dict[str, FileDescriptorProto] = {}
    for name, part in _with_references("", schema):
        file = _main_file(part, source)
        if name:
            file.name = name  # the name by which other files import it
        files[file.name] = file
    encoded: bytes = FileDescriptorSet(file=files.values()).SerializeToString()
    return encoded


def _with_references(name: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    for file, reference in schema.references.items():
        yield from _with_references(file, reference)
    yield name, schema


def _main_file(schema: Schema, source: str) -> "FileDescriptorProto":
    """Return the descriptor of a schema's file. The text of the schema has it in base64."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    try:
        return FileDescriptorProto.FromString(base64.b64decode(schema.text, validate=True))
    except (DecodeError, binascii.Error, ValueError) as error:
        raise ConfigurationError(
            f"{source}: its text is not a serialized descriptor, which the registry must support"
        ) from error


def _if_of_reader(number: int, schema: Schema | str, reader: "Descriptor") -> Schema | str:
    """Return `schema`, or a reason if the reader's message would read other values than its writers wrote."""
    if isinstance(schema, str):
        return schema
    messages = messages_of(_main_file(part, f"schema id {number}") for _, part in _with_references("", schema))
    writer = messages.get(reader.full_name)
    conflict = writer and field_type_conflict(writer, reader, messages)
    return f"schema id {number}: {conflict}" if conflict else schema


def _names(file: "FileDescriptorProto") -> dict[Place, str]:
    return dict(_nested(file.message_type, (), file.package))


def _nested(messages: "Iterable[DescriptorProto]", above: Place, prefix: str) -> Iterator[tuple[Place, str]]:
    for index, message in enumerate(messages):
        name = f"{prefix}.{message.name}".lstrip(".")
        yield (*above, index), name
        yield from _nested(message.nested_type, (*above, index), name)


def _message(files: bytes, message: str) -> "Descriptor":
    from google.protobuf.message import DecodeError

    try:
        return _descriptor(files, message)
    except (DecodeError, KeyError, TypeError, ImportError) as error:
        raise ConfigurationError(f"the descriptors have no message {message!r}, or lack an import: {error}") from error


@lru_cache(maxsize=16)
def _descriptor(files: bytes, message: str) -> "Descriptor":
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool, given = DescriptorPool(), {file.name: file for file in FileDescriptorSet.FromString(files).file}
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        file = given[name] if name in given else _well_known(name)
        for dependency in file.dependency:
            add(dependency)
        pool.Add(file)

    for name in given:
        add(name)
    return pool.FindMessageTypeByName(message)


def _well_known(name: str) -> "FileDescriptorProto":
    """Return a file that each installation of Protobuf has, but no registry."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    if not name.startswith("google/protobuf/"):
        raise KeyError(name)
    module = importlib.import_module(
        f"google.protobuf.{name.removeprefix('google/protobuf/').removesuffix('.proto')}_pb2"
    )
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)


# The types


def _struct(message: "Descriptor", above: frozenset[str] = frozenset()) -> "StructType":
    if message.full_name in above:
        raise ConfigurationError(f"message {message.full_name!r} contains itself, which no column type supports")
    below = above | {message.full_name}
    return t.StructType([t.StructField(field.name, _type(field, below)) for field in message.fields])


def _type(field: "FieldDescriptor", above: frozenset[str]) -> "DataType":
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return t.MapType(_single_type(entry["key"], above), _single_type(entry["value"], above))
    single = _single_type(field, above)
    return t.ArrayType(single) if is_repeated(field) else single


def _single_type(field: "FieldDescriptor", above: frozenset[str]) -> "DataType":
    if field.message_type is not None:
        return t.TimestampType() if field.message_type.full_name == _TIMESTAMP else _struct(field.message_type, above)
    if field.type == field.TYPE_BYTES:
        return t.BinaryType()
    return {
        field.CPPTYPE_INT32: t.IntegerType(),
        field.CPPTYPE_INT64: t.LongType(),
        field.CPPTYPE_UINT32: t.LongType(),
        field.CPPTYPE_UINT64: t.DecimalType(20, 0),
        field.CPPTYPE_DOUBLE: t.DoubleType(),
        field.CPPTYPE_FLOAT: t.FloatType(),
        field.CPPTYPE_BOOL: t.BooleanType(),
        field.CPPTYPE_ENUM: t.StringType(),
        field.CPPTYPE_STRING: t.StringType(),
    }[field.cpp_type]


def _is_map(field: "FieldDescriptor") -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


# The records, in Spark's workers


def read_message(value: bytes, files: bytes, message: str, names: Names) -> tuple[Any, str | None]:
    """Return the fields of a framed message and None; or None and the reason why it is bad."""
    from google.protobuf.message import DecodeError, EncodeError
    from google.protobuf.message_factory import GetMessageClass

    number = int.from_bytes(value[1:_FRAME_BYTES], "big")
    try:
        indexes, start = _indexes(value, _FRAME_BYTES)
    except (IndexError, ValueError):
        return None, "the message indexes of its frame end too early"
    name = names[number].get(indexes)
    if name is None:
        return None, f"schema id {number} has no message {list(indexes)}"
    if name != message:
        return None, f"it is a {name}, not a {message}"
    try:
        decoded = GetMessageClass(_descriptor(files, message)).FromString(value[start:])
        if not decoded.IsInitialized():
            return None, "a required field is missing"
        return _fields(decoded), None
    except (DecodeError, EncodeError, OverflowError, ValueError) as error:
        return None, f"no valid {message}: {error}"


def _indexes(value: bytes, at: int) -> tuple[Place, int]:
    """Return the path of a message in its file, and the next position; a single zero means the path [0]."""
    count, at = _varint(value, at)
    if count == 0:
        return (0,), at
    if not 0 < count <= _MOST_INDEXES:
        raise ValueError(count)
    indexes = []
    for _ in range(count):
        index, at = _varint(value, at)
        indexes.append(index)
    return tuple(indexes), at


def _varint(value: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, _VARINT_BITS, 7):
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004
            return (number >> 1) ^ -(number & 1), at
    raise ValueError(number)


def _fields(message: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a class built from a descriptor
    _check_is_whole(message)
    return tuple(_field(message, field) for field in message.DESCRIPTOR.fields)


def _check_is_whole(message: Any) -> None:  # noqa: ANN401 - a class built from a descriptor
    """Raise `ValueError` if Protobuf has put a value of one of the message's fields aside, as an unknown one."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    for unknown in UnknownFieldSet(message):
        if (field := message.DESCRIPTOR.fields_by_number.get(unknown.field_number)) is not None:
            raise ValueError(f"field {field.name}: {_LEFT_OUT}")


def _field(message: Any, field: "FieldDescriptor") -> object:  # noqa: ANN401 - a class built from a descriptor
    value = getattr(message, field.name)
    if _is_map(field):
        of_key, of_value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return {_single(key, of_key): _single(value[key], of_value) for key in value}
    if is_repeated(field):
        return [_single(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _single(value, field)


def _single(value: Any, field: "FieldDescriptor") -> object:  # noqa: ANN401 - a class built from a descriptor
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            _check_is_whole(value)
            if not 0 <= value.nanos < _SECOND_NS:
                raise ValueError(f"field {field.name}: a timestamp with {value.nanos} nanoseconds")
            return _EPOCH + timedelta(seconds=value.seconds, microseconds=value.nanos // 1_000)
        return _fields(value)
    if field.cpp_type == field.CPPTYPE_ENUM:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if field.cpp_type == field.CPPTYPE_UINT64:
        return Decimal(value)
    if field.cpp_type == field.CPPTYPE_STRING and field.type == field.TYPE_STRING and isinstance(value, bytes):
        # proto2 does not check strings, and Spark would write the address of these bytes as text.
        raise ValueError(f"field {field.name}: {NOT_UTF8}")
    return value
