"""Protobuf files and messages for tests: descriptors built in code, and the header of Confluent's serializers."""

from collections.abc import Sequence

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from tests.avro_bytes import framed, long

F = FieldDescriptorProto


def message_field(
    name: str, number: int, kind: int, *, repeated: bool = False, of: str = "", optional: bool = False
) -> FieldDescriptorProto:
    """Return a field; `of` is the full name of its message or enum; `optional` gives it presence."""
    label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
    made = FieldDescriptorProto(name=name, number=number, type=kind, label=label, type_name=f".{of}" if of else None)
    if optional:
        made.proto3_optional, made.oneof_index = True, 0
    return made


def map_entry(name: str, value: FieldDescriptorProto) -> DescriptorProto:
    """Return the message of a map's entries, whose keys are strings."""
    entry = DescriptorProto(name=name, field=[message_field("key", 1, F.TYPE_STRING), value])
    entry.options.map_entry = True
    return entry


def orders_file(*, newer: bool = False) -> FileDescriptorProto:
    """Return a file with `shop.Other`, and `shop.Order` with `shop.Order.Line`; the newer one has one more field."""
    line = DescriptorProto(name="Line", field=[message_field("sku", 1, F.TYPE_STRING)])
    order = DescriptorProto(
        name="Order",
        field=[
            message_field("id", 1, F.TYPE_INT64),
            message_field("note", 2, F.TYPE_STRING, optional=True),
            message_field("lines", 3, F.TYPE_MESSAGE, repeated=True, of="shop.Order.Line"),
            message_field("at", 4, F.TYPE_MESSAGE, of="google.protobuf.Timestamp"),
            message_field("serial", 5, F.TYPE_UINT64),
            message_field("state", 6, F.TYPE_ENUM, of="shop.State"),
            *([message_field("total", 7, F.TYPE_DOUBLE)] if newer else []),
        ],
        nested_type=[line],
    )
    order.oneof_decl.add(name="_note")
    file = FileDescriptorProto(
        name="orders.proto",
        package="shop",
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto"],
        message_type=[DescriptorProto(name="Other", field=[message_field("a", 1, F.TYPE_INT32)]), order],
    )
    state = file.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="PAID", number=1)
    return file


def framed_message(number: int, indexes: Sequence[int], payload: bytes) -> bytes:
    """Prepend Confluent's header with message indexes; the path [0] is written as a single zero."""
    path = b"\x00" if list(indexes) == [0] else long(len(indexes)) + b"".join(map(long, indexes))
    return framed(number, path + payload)
