"""For users' tests: a coordination log in memory that passes the same tests as the one over Kafka.

A `MemoryBroker` stands for the cluster; each member opens its own `MemoryLog` on it.
"""

import base64
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from marshal_dagster.coordination.log import (
    DEFAULT_COORDINATION_PARTITIONS,
    DEFAULT_COORDINATION_TOPIC,
    Ack,
    Append,
    Chunk,
    LogIdentity,
    PositionLostError,
)
from marshal_dagster.errors import TopicNotFoundError, UnavailableError
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.state import OffsetBounds


class ManualClock:
    """A member's clock, and a broker's, that moves only when told to."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        """Begin at `wall_ms`, unix time in milliseconds."""
        self._began_ms = wall_ms
        self._passed_ms = 0.0

    def lease_ms(self) -> float:
        """Milliseconds since it began."""
        return self._passed_ms

    def wall_ms(self) -> int:
        """Unix time in milliseconds."""
        return self._began_ms + int(self._passed_ms)

    def advance(self, passed_ms: float) -> None:
        """Let `passed_ms` milliseconds pass."""
        self._passed_ms += passed_ms

    def sleep_ms(self, duration_ms: float) -> None:
        """Let the time pass at once."""
        self.advance(duration_ms)


def _topic_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


class MemoryBroker:
    """One coordination topic, in this process. `now_ms` gives the broker's time for each appended record."""

    def __init__(
        self,
        partitions: int = DEFAULT_COORDINATION_PARTITIONS,
        *,
        topic: str = DEFAULT_COORDINATION_TOPIC,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """Make an empty topic with `partitions` coordination partitions."""
        self.lock = threading.Lock()
        self.is_sender_timed = False
        """Whether records get their sender's timestamp, as in a topic with `message.timestamp.type=CreateTime`."""
        self.now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._topic = topic
        self._partitions = partitions
        self.recreate()

    def recreate(self, partitions: int | None = None) -> None:
        """Delete the topic and create it again: another topic id, nothing in it, `partitions` if given."""
        self._partitions = partitions or self._partitions
        self._identity: LogIdentity | None = LogIdentity(self._topic, _topic_id(), self._partitions)
        self._records: list[list[tuple[int, int, bytes | None]]] = [[] for _ in range(self._partitions)]
        self.sender_timed: list[set[int]] = [set() for _ in range(self._partitions)]
        """The offsets of each coordination partition whose records have their sender's timestamp."""
        self._starts = [0] * self._partitions
        self._ends = [0] * self._partitions

    def delete(self) -> None:
        """Delete the topic."""
        self._identity = None

    @property
    def identity(self) -> LogIdentity:
        """Which topic it is now. Raises `TopicNotFoundError` once it was deleted."""
        if self._identity is None:
            raise TopicNotFoundError(
                f"topic {self._topic!r} does not exist; create it with `marshal-dagster topic create`"
            )
        return self._identity

    def append(self, partition: int, value: bytes | None, timestamp_ms: int | None = None) -> int:
        """Append a record and give its offset."""
        with self.lock:
            offset = self._ends[partition]
            at_ms = self.now_ms() if timestamp_ms is None else timestamp_ms
            self._records[partition].append((offset, at_ms, value))
            if self.is_sender_timed:
                self.sender_timed[partition].add(offset)
            self._ends[partition] = offset + 1
            return offset

    def skip(self, partition: int, offsets: int = 1) -> None:
        """Let `offsets` offsets pass that hold no record, as a transaction's marker does."""
        with self.lock:
            self._ends[partition] += offsets

    def retain_from(self, partition: int, start: int) -> None:
        """Delete what lies before offset `start`, as retention does."""
        with self.lock:
            kept = [record for record in self._records[partition] if record[0] >= start]
            self._records[partition] = kept
            self._starts[partition] = start
            self._ends[partition] = max(self._ends[partition], start)

    def truncate(self, partition: int, end: int) -> None:
        """Lose what lies at offset `end` and after, as an unclean leader election does."""
        with self.lock:
            self._records[partition] = [record for record in self._records[partition] if record[0] < end]
            self._starts[partition] = min(self._starts[partition], end)
            self._ends[partition] = end
            self.sender_timed[partition] = {offset for offset in self.sender_timed[partition] if offset < end}

    def bounds(self, partition: int) -> OffsetBounds:
        """Give the present bounds of one coordination partition. Raises `TopicNotFoundError` where there is none."""
        if partition >= self._partitions:
            raise TopicNotFoundError(f"topic {self._topic!r} has no partition {partition}; it has {self._partitions}")
        return OffsetBounds(self._starts[partition], self._ends[partition])

    def records(self, partition: int, start: int = 0, end: int | None = None) -> list[tuple[int, int, bytes | None]]:
        """Give the (offset, timestamp in ms, value) records from offset `start` up to `end` (exclusive)."""
        with self.lock:
            kept = self._records[partition]
            first = bisect_left(kept, (start,))
            return kept[first : None if end is None else bisect_left(kept, (end,))]


class MemoryLog:
    """One member's view of a `MemoryBroker`, as a `marshal_dagster.coordination.log.CoordinationLog`."""

    delivery_timeout_ms = 0

    def __init__(self, broker: MemoryBroker) -> None:
        """Open it."""
        self.broker = broker
        self._positions: dict[int, int] = {}

    def identity(self) -> LogIdentity:
        """Tell which log it is now."""
        return self.broker.identity

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Tell the present bounds. Raises `TopicNotFoundError`."""
        self.identity()
        return {partition: self.broker.bounds(partition) for partition in partitions}

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from `positions` on."""
        self._positions = dict(positions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:  # noqa: ARG002 - never waits
        """Give what there is up to `ends`, and whatever lies there behind it.

        Raises `PositionLostError`; `TopicNotFoundError`, and `UnavailableError` for an end that is not there: nobody
        else appends while this thread waits.
        """
        self.identity()
        for partition, end in ends.items():
            position, bounds = self._positions[partition], self.broker.bounds(partition)
            if position >= end:
                continue
            if not bounds.start <= position <= bounds.end:
                raise PositionLostError(partition)
            self._positions[partition] = bounds.end
            records = self.broker.records(partition, position, bounds.end)
            yield Chunk(partition, records, bounds.end, self.broker.sender_timed[partition])
            if bounds.end < end:
                raise UnavailableError(f"coordination partition {partition} ends at {bounds.end}, not at {end}")

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append at once."""
        return [self._append(record) for record in records]

    def purge(self) -> None:
        """Nothing ever waits to be sent."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _append(self, record: Append) -> Ack:
        try:
            if record.partition < self.identity().partitions:
                return Ack(self.broker.append(record.partition, record.value))
        except TopicNotFoundError as missing:
            return Ack(None, str(missing))
        return Ack(None, f"there is no coordination partition {record.partition}")


class MemorySnapshotTopic:
    """The topic that holds snapshots, in this process; all members use the one object.

    It is a `marshal_dagster.coordination.snapshots.SnapshotTopic`.
    """

    def __init__(self, partitions: int = 8) -> None:
        """Make an empty topic."""
        self._records: list[list[tuple[int, Record]]] = [[] for _ in range(partitions)]
        self._ends = [0] * partitions
        self._lock = threading.Lock()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Tell the present bounds; compaction leaves them as they are. Raises `TopicNotFoundError`."""
        with self._lock:
            missing = [partition for partition in partitions if not 0 <= partition < len(self._ends)]
            if missing:
                raise TopicNotFoundError(f"the snapshot topic has no partitions {missing}")
            return {partition: OffsetBounds(0, self._ends[partition]) for partition in partitions}

    def read(
        self,
        ranges: Mapping[int, OffsetBounds],
        timeout_s: float,  # noqa: ARG002 - never waits
    ) -> Mapping[int, Sequence[tuple[bytes | None, bytes | None]]]:
        """Give what there is in these offsets."""
        with self._lock:
            return {
                partition: [
                    (record.key, record.value)
                    for offset, record in self._records[partition]
                    if at.start <= offset < at.end
                ]
                for partition, at in ranges.items()
            }

    def append(self, partition: int, records: Sequence[Record]) -> None:
        """Append at once."""
        with self._lock:
            for record in records:
                self._records[partition].append((self._ends[partition], record))
                self._ends[partition] += 1

    def compact(self) -> None:
        """Keep the last record of each key, and none that only deletes."""
        with self._lock:
            for partition, records in enumerate(self._records):
                last = {record.key: offset for offset, record in records}
                self._records[partition] = [
                    (offset, record)
                    for offset, record in records
                    if last[record.key] == offset and record.value is not None
                ]

    def close(self) -> None:
        """Nothing to let go of."""
