"""The interface of the coordination log: the few operations that the rationalizer and the claimers need.

Two implementations pass the same tests: `kafka_log.KafkaLog` and `marshal_dagster.testing.MemoryLog`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from marshal_dagster.protocol.state import OffsetBounds

DEFAULT_COORDINATION_TOPIC: Final = "__marshal"
DEFAULT_COORDINATION_PARTITIONS: Final = 8
NO_TOPIC_ID: Final = "A" * 22
"""The id of all topics of a broker that does not support topic ids."""


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The identity of a log. A topic that was deleted and re-created has another topic id."""

    topic: str
    topic_id: str
    partitions: int


class Append(NamedTuple):
    """A record to append to one coordination partition."""

    partition: int
    value: bytes
    reason: str | None = None
    """Why a group is paused, for people; see `marshal_dagster.protocol.pause_reason`."""


class Ack(NamedTuple):
    """The result of one append. If `offset` is None, it is unknown whether the record is or will be in the log."""

    offset: int | None
    error: str | None = None


class Chunk(NamedTuple):
    """Records that were read from one coordination partition."""

    partition: int
    records: Sequence[tuple[int, int, bytes | None]]
    """Offset, timestamp in ms and value of each record."""
    position: int
    """The next offset to read."""
    sender_timed: Collection[int] = ()
    """Offsets of records that have their sender's timestamp, not the broker's (`LogAppendTime`)."""
    reasons: Mapping[int, str] = {}
    """The reason that the record at an offset gives for a pause, for people."""


class PositionLostError(Exception):
    """The next offset to read is not in the log: retention deleted it, or the log was truncated."""

    def __init__(self, partition: int) -> None:
        super().__init__(f"the next offset of coordination partition {partition} is no longer in the log")
        self.partition = partition


class CoordinationLog(Protocol):
    """An ordered log for each coordination partition. All calls are bounded in time; one thread uses it at a time."""

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a record may wait to be sent before it fails, in ms."""
        ...

    def identity(self) -> LogIdentity:
        """Return the present identity of the log. Raises `TopicNotFoundError`, `UnavailableError`."""
        ...

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present bounds of these coordination partitions. Raises `UnavailableError`."""
        ...

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read only these coordination partitions from now on, each from the given offset."""
        ...

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read until each partition in `ends` has been read up to that offset (exclusive).

        If an error is raised, the chunks that were yielded before it are not read again.

        Raises:
            PositionLostError: the next offset of a partition is not in the log.
            UnavailableError: no record came within `timeout_s`.
        """
        ...

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append `records`, in order within a partition, and wait until each is acknowledged or has failed."""
        ...

    def purge(self) -> None:
        """Drop the records that wait to be sent, so that they do not reach the log later."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class TimedLog(CoordinationLog, Protocol):
    """A coordination log whose records can be found by time."""

    def offsets_at(self, partitions: Collection[int], at_ms: int) -> Mapping[int, int]:
        """Return the offset of each partition's first record with the timestamp `at_ms` (unix ms) or a later one.

        A partition without such a record is not in the result. Raises `UnavailableError`.
        """
        ...
