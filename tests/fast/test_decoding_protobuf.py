"""Check the decoding of Protobuf messages in Confluent's wire format, without Spark, as Spark's workers do it."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.decoding.protobuf_codec import _message, _names, _struct, read_message
from marshal_dagster.spark.decoding.protobuf_field_types import field_type_conflict, messages_of
from tests.avro_bytes import framed
from tests.protobuf_bytes import F, framed_message, map_entry, message_field, orders_file

NAMES = {9: _names(orders_file())}
READER = FileDescriptorSet(file=[orders_file(newer=True)]).SerializeToString()
# id 150, note "" (which is set), one line "a", at 1 s and 2,000 ns, serial 2**64 - 1, state PAID
PAYLOAD = bytes.fromhex("089601 1200 1a030a0161 2205080110d00f 28ffffffffffffffffff01 3001")
ORDER = (150, "", [("a",)], datetime(1970, 1, 1, 0, 0, 1, 2, tzinfo=UTC), Decimal(2**64 - 1), "PAID", 0.0)


def read(value: bytes) -> object:
    """Read a value as `shop.Order`."""
    return read_message(value, READER, "shop.Order", NAMES)


def test_names_of_messages_by_their_place_in_the_file() -> None:
    """Nested messages have names too."""
    assert NAMES[9] == {(0,): "shop.Other", (1,): "shop.Order", (1, 0): "shop.Order.Line"}


def test_a_message_is_read_by_a_newer_descriptor() -> None:
    """All kinds of fields are read; a field that the writer did not have gets its default."""
    assert read(framed_message(9, [1], PAYLOAD)) == (ORDER, None)
    assert read(framed_message(9, [1], b"")) == ((0, None, [], None, 0, "NEW", 0.0), None)
    assert read(framed_message(9, [1], bytes.fromhex("3007"))) == ((0, None, [], None, 0, "7", 0.0), None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (framed_message(9, [0], b""), "it is a shop.Other, not a shop.Order"),
        (framed(9, b"\x02\x00"), "it is a shop.Other, not a shop.Order"),
        (framed_message(9, [1, 0], b""), "it is a shop.Order.Line, not a shop.Order"),
        (framed_message(9, [2], b""), "schema id 9 has no message [2]"),
        (framed_message(9, [1, -1], b""), "schema id 9 has no message [1, -1]"),
        (framed(9, b""), "the message indexes of its frame end too early"),
        (framed(9, b"\x04\x02"), "the message indexes of its frame end too early"),
        (framed(9, b"\xff" * 12), "the message indexes of its frame end too early"),
        (framed(9, b"\x01"), "the message indexes of its frame end too early"),
    ],
)
def test_another_message_and_a_broken_frame_are_bad(value: bytes, reason: str) -> None:
    """The reason names the message that was found."""
    assert read(value) == (None, reason)


def test_a_message_that_is_cut_is_bad_wherever_it_can_be_seen() -> None:
    """A message that ends between two fields cannot be recognised as incomplete: what remains is a valid message."""
    whole = {0, 3, 5, 10, 17, 28, 30}
    for length in range(len(PAYLOAD) + 1):
        found = read_message(framed_message(9, [1], PAYLOAD[:length]), READER, "shop.Order", NAMES)
        assert (found[0] is not None, found[1] is None) == (length in whole, length in whole), length


@pytest.mark.parametrize("payload", [b"\x0a\x03M\xfcl", b"\x12\x01a\x12\x01\xff", b"\x1a\x06\x0a\x01\xff\x12\x01a"])
def test_a_proto2_string_that_is_not_utf8_is_bad(payload: bytes) -> None:
    """Proto2 does not check the text of a field, a repeated field or a map's key."""
    pairs = map_entry("PairsEntry", message_field("value", 2, FieldDescriptorProto.TYPE_STRING))
    fields = [
        message_field("name", 1, FieldDescriptorProto.TYPE_STRING),
        message_field("names", 2, FieldDescriptorProto.TYPE_STRING, repeated=True),
        message_field("pairs", 3, FieldDescriptorProto.TYPE_MESSAGE, repeated=True, of="Old.PairsEntry"),
        message_field("raw", 4, FieldDescriptorProto.TYPE_BYTES),
    ]
    message = DescriptorProto(name="Old", field=fields, nested_type=[pairs])
    files = FileDescriptorSet(file=[FileDescriptorProto(name="old.proto", syntax="proto2", message_type=[message])])

    def read_old(payload: bytes) -> tuple[object, str | None]:
        return read_message(framed_message(9, [0], payload), files.SerializeToString(), "Old", {9: {(0,): "Old"}})

    value, reason = read_old(payload)
    assert value is None
    assert reason is not None
    assert "a text that is not UTF-8" in reason
    assert read_old(b"\x0a\x03M\xc3\xbc\x22\x01\xff") == (("Mü", [], {}, b"\xff"), None)


PARTS = DescriptorProto(
    name="Parts",
    field=[
        message_field("state", 1, F.TYPE_ENUM, of="shop.State"),
        message_field("states", 2, F.TYPE_ENUM, repeated=True, of="shop.State"),
        message_field("count", 3, F.TYPE_INT32),
        message_field("name", 4, F.TYPE_STRING),
        message_field("at", 5, F.TYPE_MESSAGE, of="google.protobuf.Timestamp"),
        message_field("line", 6, F.TYPE_MESSAGE, of="shop.Order.Line"),
        message_field("named", 7, F.TYPE_MESSAGE, repeated=True, of="shop.Parts.NamedEntry"),
    ],
    nested_type=[map_entry("NamedEntry", message_field("value", 2, F.TYPE_ENUM, of="shop.State"))],
)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("0807", "state: a value that has another type or is not in the enum"),
        ("1001 1007 1000", "states: a value that has another type or is not in the enum"),
        ("3a050a01611007", "named: a value that has another type or is not in the enum"),
        ("1a0135", "count: a value that has another type"),
        ("2005", "name: a value that has another type"),
        ("32020805", "sku: a value that has another type"),
        ("2a020a00", "seconds: a value that has another type"),
        ("2a0b10ffffffffffffffffff01", "at: a timestamp with -1 nanoseconds"),
        ("2a061080a8d6b907", "at: a timestamp with 2000000000 nanoseconds"),
    ],
)
def test_a_value_that_protobuf_would_leave_out_is_bad(payload: str, reason: str) -> None:
    """In proto2 that is an unknown value of an enum. A value of another encoding would be the field's default."""
    file = orders_file()
    file.syntax = "proto2"
    del file.message_type[1].field[1], file.message_type[1].oneof_decl[:]  # an optional field of proto3
    file.message_type.append(PARTS)
    files = FileDescriptorSet(file=[file]).SerializeToString()
    value, found = read_message(
        framed_message(9, [2], bytes.fromhex(payload)), files, "shop.Parts", {9: {(2,): "shop.Parts"}}
    )
    assert value is None
    assert found is not None
    assert found.startswith(f"no valid shop.Parts: field {reason}")


def pair(written: FieldDescriptorProto, read: FieldDescriptorProto) -> str | None:
    """Return the conflict of a message with one field, which is in a message of its own, in a list."""

    def file(field: FieldDescriptorProto) -> FileDescriptorProto:
        inner = message_field("inner", 9, F.TYPE_MESSAGE, repeated=True, of="shop.Outer.Inner")
        enum = orders_file().enum_type
        nested = DescriptorProto(name="Inner", field=[field, message_field("sku", 2, F.TYPE_STRING)])
        outer = DescriptorProto(name="Outer", field=[inner], nested_type=[nested])
        return FileDescriptorProto(name="o.proto", package="shop", message_type=[outer], enum_type=enum)

    messages = messages_of([file(written)])
    reader = _message(FileDescriptorSet(file=[file(read)]).SerializeToString(), "shop.Outer")
    return field_type_conflict(messages["shop.Outer"], reader, messages)


def of_kind(name: str, *, repeated: bool = False) -> FieldDescriptorProto:
    """Return a field `a` with the number 1 of this type."""
    of = {"enum": "shop.State", "message": "shop.Outer.Inner"}.get(name, "")
    return message_field("a", 1, F.Type.Value(f"TYPE_{name.upper()}"), repeated=repeated, of=of)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *(("int32", kind) for kind in ("int64", "enum")),
        *(("uint32", kind) for kind in ("uint64", "int64")),
        ("sint32", "sint64"),
        *(("bool", kind) for kind in ("int32", "int64", "uint32", "uint64")),
        *(("enum", kind) for kind in ("int32", "int64")),
        *(("string", "bytes"), ("bytes", "string")),
        *((kind, kind) for kind in ("int32", "uint64", "double", "enum", "bytes", "sfixed64")),
    ],
)
def test_a_type_that_holds_all_values_of_the_writers_is_no_conflict(written: str, read: str) -> None:
    """A field that becomes a list has the one value."""
    assert pair(of_kind(written), of_kind(read)) is None
    assert pair(of_kind(written), of_kind(read, repeated=True)) is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *(("int64", kind) for kind in ("int32", "uint64", "sint64", "bool", "enum", "double", "string", "message")),
        *(("int32", kind) for kind in ("uint32", "uint64", "sint32", "sint64", "fixed32", "bool")),
        *(("uint64", "int64"), ("uint32", "int32"), ("sint32", "int32"), ("fixed32", "float"), ("double", "fixed64")),
        *(("fixed32", "sfixed32"), ("sfixed64", "fixed64"), ("enum", "bool"), ("float", "double"), ("string", "int64")),
    ],
)
def test_a_type_that_changes_values_of_the_writers_is_a_conflict(written: str, read: str) -> None:
    """The reason names the field and both types."""
    assert pair(of_kind(written), of_kind(read)) == (f"field inner.a is {written}, but {read} in the reader's schema")


def test_a_list_of_which_only_the_last_value_would_be_read_is_a_conflict() -> None:
    """Protobuf reads the last value into a field that is not repeated."""
    written, read = of_kind("string", repeated=True), of_kind("string")
    assert pair(written, read) == "field inner.a is repeated string, but string in the reader's schema"
    assert pair(written, of_kind("string", repeated=True)) is None


def test_descriptors_that_cannot_be_used_are_refused() -> None:
    """The message may be unknown, contain itself or lack an import; or the bytes are no descriptors."""
    with pytest.raises(ConfigurationError, match=r"no message 'shop\.None'"):
        _message(READER, "shop.None")
    lacking = FileDescriptorProto(name="a.proto", syntax="proto3", dependency=["money.proto"])
    with pytest.raises(ConfigurationError, match=r"lack an import: 'money\.proto'"):
        _message(FileDescriptorSet(file=[lacking]).SerializeToString(), "A")
    with pytest.raises(ConfigurationError):
        _message(b"\xff\xff", "A")
    node = DescriptorProto(name="A", field=[message_field("a", 1, FieldDescriptorProto.TYPE_MESSAGE, of="A")])
    tree = FileDescriptorProto(name="t.proto", syntax="proto3", message_type=[node])
    in_itself = _message(FileDescriptorSet(file=[tree]).SerializeToString(), "A")
    with pytest.raises(ConfigurationError, match="'A' contains itself"):
        _struct(in_itself)
