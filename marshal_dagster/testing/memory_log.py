"""A coordination log in memory, for tests. It passes the same tests as the log over Kafka.

A `MemoryBroker` takes the place of the Kafka cluster. Each member opens its own `MemoryLog` on it.
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
    """A clock for members and brokers whose time passes only by `advance` and `sleep_ms`.

    Example:
        ```python
        clock = ManualClock()
        broker = MemoryBroker(now_ms=clock.wall_ms)
        clock.advance(30_000)  # half a minute passes at once
        ```
    """

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        """Start the clock.

        Args:
            wall_ms: The initial time in Unix milliseconds.
        """
        self._began_ms = wall_ms
        self._passed_ms = 0.0

    def lease_ms(self) -> float:
        """Return the milliseconds since the clock started."""
        return self._passed_ms

    def wall_ms(self) -> int:
        """Return the present time in Unix milliseconds."""
        return self._began_ms + int(self._passed_ms)

    def advance(self, passed_ms: float) -> None:
        """Move the clock forward.

        Args:
            passed_ms: The time that passes, in milliseconds.
        """
        self._passed_ms += passed_ms

    def sleep_ms(self, duration_ms: float) -> None:
        """Move the clock forward by `duration_ms` milliseconds, without waiting."""
        self.advance(duration_ms)


def _topic_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


class MemoryBroker:
    """A coordination topic in memory, shared by all `MemoryLog` objects that are opened on it.

    Example:
        ```python
        broker = MemoryBroker(partitions=2)
        log = MemoryLog(broker)
        ```
    """

    def __init__(
        self,
        partitions: int = DEFAULT_COORDINATION_PARTITIONS,
        *,
        topic: str = DEFAULT_COORDINATION_TOPIC,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """Create an empty topic.

        Args:
            partitions: The number of coordination partitions.
            topic: The topic's name.
            now_ms: Returns the broker's time for each appended record, in Unix milliseconds; by default the time of the
                system.
        """
        self.lock = threading.Lock()
        self.is_sender_timed = False
        """Whether records get the sender's timestamp, as in a topic with `message.timestamp.type=CreateTime`."""
        self.now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._topic = topic
        self._partitions = partitions
        self.recreate()

    def recreate(self, partitions: int | None = None) -> None:
        """Delete the topic and create it again, empty and with another topic id.

        Args:
            partitions: The new number of partitions; by default it stays.
        """
        self._partitions = partitions or self._partitions
        self._identity: LogIdentity | None = LogIdentity(self._topic, _topic_id(), self._partitions)
        self._records: list[list[tuple[int, int, bytes | None]]] = [[] for _ in range(self._partitions)]
        self.sender_timed: list[set[int]] = [set() for _ in range(self._partitions)]
        """The offsets of records with the sender's timestamp, for each coordination partition."""
        self.reasons: list[dict[int, str]] = [{} for _ in range(self._partitions)]
        """The reason that the record at an offset gives for a pause, for each coordination partition."""
        self._starts = [0] * self._partitions
        self._ends = [0] * self._partitions

    def delete(self) -> None:
        """Delete the topic. Members then get `TopicNotFoundError`."""
        self._identity = None

    @property
    def identity(self) -> LogIdentity:
        """The topic's name, id and number of partitions. Raises `TopicNotFoundError` after `delete`."""
        if self._identity is None:
            raise TopicNotFoundError(
                f"topic {self._topic!r} does not exist; create it with `marshal-dagster topic create`"
            )
        return self._identity

    def append(
        self, partition: int, value: bytes | None, timestamp_ms: int | None = None, reason: str | None = None
    ) -> int:
        """Append a record.

        Args:
            partition: The coordination partition.
            value: The record's value; None is a tombstone.
            timestamp_ms: The record's timestamp in Unix milliseconds; by default the broker's time.
            reason: The reason of a pause, which its header has.

        Returns:
            The record's offset.
        """
        with self.lock:
            offset = self._ends[partition]
            at_ms = self.now_ms() if timestamp_ms is None else timestamp_ms
            self._records[partition].append((offset, at_ms, value))
            if self.is_sender_timed:
                self.sender_timed[partition].add(offset)
            if reason is not None:
                self.reasons[partition][offset] = reason
            self._ends[partition] = offset + 1
            return offset

    def skip(self, partition: int, offsets: int = 1) -> None:
        """Skip offsets without a record, as the marker of a transaction does.

        Args:
            partition: The coordination partition.
            offsets: How many offsets are skipped.
        """
        with self.lock:
            self._ends[partition] += offsets

    def retain_from(self, partition: int, start: int) -> None:
        """Delete the records before an offset, as retention does.

        Args:
            partition: The coordination partition.
            start: The first offset that is kept.
        """
        with self.lock:
            kept = [record for record in self._records[partition] if record[0] >= start]
            self._records[partition] = kept
            self._starts[partition] = start
            self._ends[partition] = max(self._ends[partition], start)

    def truncate(self, partition: int, end: int) -> None:
        """Lose the records from an offset on, as in an unclean leader election.

        Args:
            partition: The coordination partition.
            end: The first offset that is lost, which is the new end.
        """
        with self.lock:
            self._records[partition] = [record for record in self._records[partition] if record[0] < end]
            self._starts[partition] = min(self._starts[partition], end)
            self._ends[partition] = end
            self.sender_timed[partition] = {offset for offset in self.sender_timed[partition] if offset < end}
            self.reasons[partition] = {at: text for at, text in self.reasons[partition].items() if at < end}

    def bounds(self, partition: int) -> OffsetBounds:
        """Return the present start and end offset of a coordination partition.

        Args:
            partition: The coordination partition.

        Returns:
            The offset of the first record and the offset after the last one.

        Raises:
            TopicNotFoundError: The topic has no such partition.
        """
        if partition >= self._partitions:
            raise TopicNotFoundError(f"topic {self._topic!r} has no partition {partition}; it has {self._partitions}")
        return OffsetBounds(self._starts[partition], self._ends[partition])

    def records(self, partition: int, start: int = 0, end: int | None = None) -> list[tuple[int, int, bytes | None]]:
        """Return the records in a range of offsets.

        Args:
            partition: The coordination partition.
            start: The first offset.
            end: The offset after the last one; by default the end of the partition.

        Returns:
            The offset, timestamp in Unix milliseconds and value of each record.
        """
        with self.lock:
            kept = self._records[partition]
            first = bisect_left(kept, (start,))
            return kept[first : None if end is None else bisect_left(kept, (end,))]


class MemoryLog:
    """A member's connection to a `MemoryBroker` (`marshal_dagster.coordination.log.CoordinationLog`).

    Example:
        ```python
        broker = MemoryBroker(partitions=2)
        east, west = MemoryLog(broker), MemoryLog(broker)  # two members
        ```
    """

    delivery_timeout_ms = 0

    def __init__(self, broker: MemoryBroker) -> None:
        """Open the log of a broker.

        Args:
            broker: The broker, which the members of a test share.
        """
        self.broker = broker
        self._positions: dict[int, int] = {}

    def identity(self) -> LogIdentity:
        """Return the name, id and partition count of the topic. Raises `TopicNotFoundError`."""
        return self.broker.identity

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present start and end offset of each partition. Raises `TopicNotFoundError`."""
        self.identity()
        return {partition: self.broker.bounds(partition) for partition in partitions}

    def offsets_at(self, partitions: Collection[int], at_ms: int) -> Mapping[int, int]:
        """Return the offset of each partition's first record with the timestamp `at_ms` (unix ms) or a later one.

        A partition without such a record is not in the result. Raises `TopicNotFoundError`.
        """
        self.identity()
        found: dict[int, int] = {}
        for partition in partitions:
            for offset, timestamp_ms, _ in self.broker.records(partition):
                if timestamp_ms >= at_ms:
                    found[partition] = offset
                    break
        return found

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from these positions on, an offset for each partition."""
        self._positions = dict(positions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:  # noqa: ARG002 - never waits
        """Yield the records up to `ends`, with those that are already there after the ends.

        It never waits: a partition that has not reached its end raises `UnavailableError` at once. Also raises
        `PositionLostError` and `TopicNotFoundError`.
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
            sender_timed, reasons = self.broker.sender_timed[partition], self.broker.reasons[partition]
            yield Chunk(partition, records, bounds.end, sender_timed, reasons)
            if bounds.end < end:
                raise UnavailableError(
                    f"coordination partition {partition} ends at offset {bounds.end}; offset {end} was never appended"
                )

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append records at once, and return the acknowledgement of each."""
        return [self._append(record) for record in records]

    def purge(self) -> None:
        """Do nothing, because no record ever waits to be sent."""

    def close(self) -> None:
        """Do nothing, because there is no connection."""

    def _append(self, record: Append) -> Ack:
        try:
            if record.partition < self.identity().partitions:
                return Ack(self.broker.append(record.partition, record.value, reason=record.reason))
        except TopicNotFoundError as missing:
            return Ack(None, str(missing))
        return Ack(None, f"the coordination topic has no partition {record.partition}")


class MemorySnapshotTopic:
    """A snapshot topic in memory (`marshal_dagster.coordination.snapshots.SnapshotTopic`).

    All members of a test share one object.
    """

    def __init__(self, partitions: int = 8) -> None:
        """Create an empty topic.

        Args:
            partitions: The number of partitions.
        """
        self._records: list[list[tuple[int, Record]]] = [[] for _ in range(partitions)]
        self._ends = [0] * partitions
        self._lock = threading.Lock()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present start and end offset of each partition; compaction does not change them.

        Raises `TopicNotFoundError`.
        """
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
        """Return the key and value of each record in these ranges of offsets."""
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
        """Append records at once."""
        with self._lock:
            for record in records:
                self._records[partition].append((self._ends[partition], record))
                self._ends[partition] += 1

    def compact(self) -> None:
        """Keep only the last record of each key, and remove tombstones, as log compaction does."""
        with self._lock:
            for partition, records in enumerate(self._records):
                last = {record.key: offset for offset, record in records}
                self._records[partition] = [
                    (offset, record)
                    for offset, record in records
                    if last[record.key] == offset and record.value is not None
                ]

    def close(self) -> None:
        """Do nothing, because there is no connection."""
