"""The coordination log as a port: what the rationalizer and the claimer need of Kafka, and nothing more.

Two implementations pass the same tests: `kafka_log.KafkaLog` and `marshal_dagster.testing.MemoryLog`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from marshal_dagster.protocol.state import OffsetBounds

DEFAULT_COORDINATION_TOPIC: Final = "__marshal"
DEFAULT_COORDINATION_PARTITIONS: Final = 8


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Which log it is: a topic that was deleted and made anew has another id."""

    topic: str
    topic_id: str
    partitions: int


class Append(NamedTuple):
    """A record to append to one coordination partition."""

    partition: int
    value: bytes


class Ack(NamedTuple):
    """What became of one append. Without `offset` it is ambiguous: the record may be in the log, now or later."""

    offset: int | None
    error: str | None = None


class Chunk(NamedTuple):
    """Records read from one coordination partition: (offset, timestamp in ms, value); `position` is the next one.

    `sender_timed` are the offsets of records whose timestamp is not the broker's (`LogAppendTime`) but their sender's.
    """

    partition: int
    records: Sequence[tuple[int, int, bytes | None]]
    position: int
    sender_timed: Collection[int] = ()


class PositionLostError(Exception):
    """The next offset to read is not in the log: retention deleted it, or the log was truncated."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"coordination partition {partition}")
        self.partition = partition


class CoordinationLog(Protocol):
    """An ordered log per coordination partition. All calls are bounded in time; one thread uses it at a time."""

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a record may wait to be sent before it is given up, in milliseconds."""
        ...

    def identity(self) -> LogIdentity:
        """Ask which log it is now. Raises `TopicNotFoundError`, `UnavailableError`."""
        ...

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Ask for the present bounds of these coordination partitions. Raises `UnavailableError`."""
        ...

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read these coordination partitions, each from the given offset on, in place of any others."""
        ...

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read on, until each partition in `ends` has been read up to that offset (exclusive).

        Raises `PositionLostError`, and `UnavailableError` after `timeout_s`; what was given before that stays read.
        """
        ...

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append all of `records`, in order within a partition, and wait until each is acknowledged or has failed."""
        ...

    def purge(self) -> None:
        """Drop what waits to be sent: it must not reach the log any more."""
        ...

    def close(self) -> None:
        """Let go of all connections."""
        ...
