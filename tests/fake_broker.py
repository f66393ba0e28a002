"""A fake broker: a socket that speaks the part of Kafka's protocol that clients need, with answers that a test sets."""

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

METADATA: Final = 3
API_VERSIONS: Final = 18
LIST_OFFSETS: Final = 2
DESCRIBE_CONFIGS: Final = 32
INIT_PRODUCER_ID: Final = 22
FIND_COORDINATOR: Final = 10
OFFSET_FETCH: Final = 9
LIST_GROUPS: Final = 16
VERSIONS: Final[Mapping[int, tuple[int, int]]] = {
    0: (3, 7),
    1: (4, 11),
    LIST_OFFSETS: (1, 5),
    METADATA: (1, 8),
    OFFSET_FETCH: (1, 5),
    FIND_COORDINATOR: (0, 2),
    LIST_GROUPS: (0, 2),
    API_VERSIONS: (0, 3),
    19: (0, 4),
    20: (0, 3),
    INIT_PRODUCER_ID: (0, 1),
    DESCRIBE_CONFIGS: (0, 2),
    75: (0, 0),
}
"""By API key, the versions that this broker announces. None has tagged fields except ApiVersions."""


def text(value: str | None) -> bytes:
    """Encode a string, or null."""
    if value is None:
        return struct.pack(">h", -1)
    return struct.pack(">h", len(value)) + value.encode()


def metadata(
    brokers: Iterable[tuple[int, int]], topics: Mapping[str, Mapping[int, int]] | None = None, *, version: int
) -> bytes:
    """Encode a Metadata response, versions 1 to 8: the port of each broker, and the leader of each partition."""
    brokers = list(brokers)
    answer = b"" if version < 3 else struct.pack(">i", 0)
    answer += struct.pack(">i", len(brokers))
    for number, port in brokers:
        answer += struct.pack(">i", number) + text("127.0.0.1") + struct.pack(">i", port) + text(None)
    answer += (text("fake-cluster") if version >= 2 else b"") + struct.pack(">i", brokers[0][0] if brokers else -1)
    answer += struct.pack(">i", len(topics or {}))
    for topic, leaders in (topics or {}).items():
        answer += struct.pack(">h", 0) + text(topic) + b"\0" + struct.pack(">i", len(leaders))
        for partition, leader in leaders.items():
            answer += struct.pack(">hii", 0, partition, leader) + (struct.pack(">i", 0) if version >= 7 else b"")
            answer += struct.pack(">ii", 1, leader) * 2 + (struct.pack(">i", 0) if version >= 5 else b"")
        answer += struct.pack(">i", -2147483648) if version >= 8 else b""
    return answer + (struct.pack(">i", -2147483648) if version >= 8 else b"")


def _api_versions(version: int) -> bytes:
    if version < 3:
        listed = b"".join(struct.pack(">hhh", api, *VERSIONS[api]) for api in VERSIONS)
        return struct.pack(">hi", 0, len(VERSIONS)) + listed + (struct.pack(">i", 0) if version else b"")
    listed = b"".join(struct.pack(">hhh", api, *VERSIONS[api]) + b"\0" for api in VERSIONS)
    return struct.pack(">hB", 0, len(VERSIONS) + 1) + listed + struct.pack(">i", 0) + b"\0"


def _offsets(version: int, body: bytes, offset_of: Callable[[int], int], error: int) -> bytes:
    """Encode the ListOffsets response, versions 1 to 5, to a request without its header, with one error code."""
    at = 2 + max(0, struct.unpack_from(">h", body)[0]) + 4 + (1 if version >= 2 else 0)
    (topics,) = struct.unpack_from(">i", body, at)
    at += 4
    answer = (struct.pack(">i", 0) if version >= 2 else b"") + struct.pack(">i", topics)
    for _ in range(topics):
        (length,) = struct.unpack_from(">h", body, at)
        (partitions,) = struct.unpack_from(">i", body, at + 2 + length)
        answer += body[at : at + 6 + length]
        at += 6 + length
        for _ in range(partitions):
            (partition,) = struct.unpack_from(">i", body, at)
            (time_ms,) = struct.unpack_from(">q", body, at + (8 if version >= 4 else 4))
            at += 16 if version >= 4 else 12
            answer += struct.pack(">ihqq", partition, error, -1, offset_of(time_ms))
            answer += struct.pack(">i", 0) if version >= 4 else b""
    return answer


class FakeBroker:
    """A broker that answers requests about versions, metadata and offsets, and no other requests.

    `brokers` are the numbers of the brokers in its responses, all of them at its own port. `topics` holds the leader of
    each partition of each topic. `error` is the error code of each partition in responses about offsets. A test may
    change all of them while the broker runs. `requested` holds the requests that it received.
    """

    def __init__(self, brokers: Sequence[int] = (), topics: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self.brokers = brokers
        self.topics = topics or {}
        self.error = 0
        self.requested: list[int] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close all connections."""
        for held in (self._listener, *self._held):
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()

    def answer(self, api: int, version: int, body: bytes) -> bytes | None:
        """Return the response to a request, without its header; None for no response."""
        if api == API_VERSIONS:
            return _api_versions(version)
        if api == METADATA:
            return metadata([(number, self.port) for number in self.brokers], self.topics, version=version)
        if api == LIST_OFFSETS:
            return _offsets(version, body, self.offset_of, self.error)
        return None

    def offset_of(self, time_ms: int) -> int:
        """Return the offset for a time, which is -2 for the start and -1 for the end: here 3 and 68."""
        return {-2: 3, -1: 68}.get(time_ms, -1)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._held.append(connected)
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with suppress(OSError, struct.error), connected.makefile("rb") as requests:
            while True:
                (size,) = struct.unpack(">i", requests.read(4))
                request = requests.read(size)
                api, version, correlation = struct.unpack_from(">hhi", request)
                self.requested.append(api)
                answer = self.answer(api, version, request[8:])
                if answer is not None:
                    answer = struct.pack(">i", correlation) + answer
                    connected.sendall(struct.pack(">i", len(answer)) + answer)


@contextmanager
def fake_broker(
    brokers: Sequence[int] = (), topics: Mapping[str, Mapping[int, int]] | None = None
) -> Iterator[FakeBroker]:
    """Run a broker for the duration of the block."""
    broker = FakeBroker(brokers, topics)
    try:
        yield broker
    finally:
        broker.close()
