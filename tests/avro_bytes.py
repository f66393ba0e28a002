"""Avro's binary encoding, written from its specification. Tests compare the decoder with it."""

import struct
from collections.abc import Mapping
from typing import Any


def long(number: int) -> bytes:
    """Encode a number: zigzag, then seven bits in each byte, the lowest bits first."""
    left, written = (number << 1) ^ (number >> 63), b""
    while left > 0x7F:
        written += bytes([left & 0x7F | 0x80])
        left >>= 7
    return written + bytes([left])


def string(text: str) -> bytes:
    """Encode a string: its length in bytes, then UTF-8."""
    raw = text.encode()
    return long(len(raw)) + raw


def encode(schema: Any, value: Any) -> bytes:  # noqa: ANN401
    """Encode a value of a schema: records, unions with null, arrays, and the primitive types that the tests use."""
    match schema:
        case "null":
            return b""
        case "int" | "long":
            return long(value)
        case "string":
            return string(value)
        case "double":
            return struct.pack("<d", value)
        case "boolean":
            return b"\x01" if value else b"\x00"
        case [*branches]:
            number = next(n for n, branch in enumerate(branches) if (branch == "null") == (value is None))
            return long(number) + encode(branches[number], value)
        case {"type": "array", "items": items}:
            return (long(len(value)) + b"".join(encode(items, each) for each in value) if value else b"") + b"\x00"
        case {"type": "record", "fields": fields}:
            return b"".join(encode(field["type"], value[field["name"]]) for field in fields)
    raise NotImplementedError(schema)


def framed(number: int, payload: bytes) -> bytes:
    """Prepend Confluent's header."""
    return struct.pack(">bI", 0, number) + payload


def record(name: str, fields: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of a record."""
    given = defaults or {}
    return {
        "type": "record",
        "name": name,
        "namespace": "shop",
        "fields": [
            {"name": each, "type": of, **({"default": given[each]} if each in given else {})}
            for each, of in fields.items()
        ],
    }
