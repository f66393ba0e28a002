"""Check of whether a broker serves: one metadata request over a socket, because `devkafka` uses no Kafka client."""

import socket
import struct

from marshal_dagster._internal.ports import HOST

_CLIENT_ID = b"marshal-devkafka"
# A Metadata request, version 1, with correlation id 1 and no topics.
_REQUEST = struct.pack(">hhih", 3, 1, 1, len(_CLIENT_ID)) + _CLIENT_ID + struct.pack(">i", 0)
_LENGTH = struct.Struct(">i")
_LARGEST_ANSWER_BYTES = 1 << 20


def brokers_known_to(port: int, *, timeout_s: float = 2.0) -> frozenset[int]:
    """Return the ids of the live brokers that the broker at `port` reports; empty if it does not answer (yet)."""
    try:
        with socket.create_connection((HOST, port), timeout=timeout_s) as connection:
            connection.sendall(_LENGTH.pack(len(_REQUEST)) + _REQUEST)
            with connection.makefile("rb") as answer:
                (size_bytes,) = _LENGTH.unpack(answer.read(_LENGTH.size))
                if 0 < size_bytes <= _LARGEST_ANSWER_BYTES and len(body := answer.read(size_bytes)) == size_bytes:
                    return _broker_ids(body)
    except (OSError, struct.error):
        pass
    return frozenset()


def _broker_ids(answer: bytes) -> frozenset[int]:
    """Parse a Metadata response, version 1: correlation id, count, and each broker's id, host, port, rack."""
    _correlation_id, count = struct.unpack_from(">ii", answer)
    at = 8
    ids: list[int] = []
    for _ in range(count):
        ids += struct.unpack_from(">i", answer, at)
        at = _after_string(answer, at + 4) + 4
        at = _after_string(answer, at)
    return frozenset(ids)


def _after_string(answer: bytes, at: int) -> int:
    length: int = struct.unpack_from(">h", answer, at)[0]
    # Null has length -1.
    return at + 2 + max(length, 0)
