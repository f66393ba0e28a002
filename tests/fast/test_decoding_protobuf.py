"""Check the decoding of Protobuf messages in Confluent's wire format, without Spark, as Spark's workers do it."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.decoding.protobuf_codec import _message, _names, _struct, read_message
from tests.avro_bytes import framed
from tests.protobuf_bytes import framed_message, message_field, orders_file

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
    pairs = DescriptorProto(
        name="PairsEntry",
        field=[
            message_field(name, number, FieldDescriptorProto.TYPE_STRING) for name, number in (("key", 1), ("value", 2))
        ],
    )
    pairs.options.map_entry = True
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
