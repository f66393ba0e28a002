"""Data topics in memory, with records that a test gives as dicts, texts, bytes or tuples."""

import json
import math
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.state import OffsetBounds

AnyRecord = Mapping[str, Any] | str | bytes | tuple[Any, Any] | None
"""A record of a test: its value, its key and value, or a dict of its parts. None is a record without a value."""

RECORD_FIELDS: Final = ("key", "value", "partition", "timestamp", "headers")
"""The fields of a record that is given as a dict."""

_START: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A record of a data topic in memory."""

    topic: str
    """The data topic."""
    partition: int
    """The partition."""
    offset: int
    """The offset in the partition."""
    key: bytes | None
    """The key."""
    value: bytes | None
    """The value."""
    timestamp: datetime
    """The record's time, in UTC."""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    """Name and value of each header."""

    def as_row(self) -> dict[str, Any]:
        """Return the record as a row with the columns of a batch's frame."""
        headers = [{"key": name, "value": value} for name, value in self.headers]
        row: dict[str, Any] = {"key": self.key, "value": self.value, "topic": self.topic, "partition": self.partition}
        return {**row, "offset": self.offset, "timestamp": self.timestamp, "headers": headers or None}


class TopicDescription(NamedTuple):
    """The id and the partitions of a topic in memory."""

    topic_id: str
    partitions: tuple[int, ...]


@dataclass(slots=True)
class _Partition:
    records: list[MemoryRecord] = field(default_factory=list)
    start: int = 0
    end: int = 0


class MemoryTopics:
    """Data topics in memory, in place of a Kafka cluster's.

    Example:
        ```python
        topics = MemoryTopics()
        topics.create("orders", partitions=2)
        topics.append("orders", [{"key": "north", "value": {"price": 5}}, "a value", ("a key", b"a value")])
        ```
    """

    def __init__(self, now_ms: Callable[[], int] | None = None) -> None:
        """Start without topics.

        Args:
            now_ms: Returns the timestamp of records that have none, in Unix milliseconds; by default the system's time.
        """
        self.committed: dict[str, dict[str, dict[int, int]]] = {}
        """The offsets that consumer groups have committed, by group, topic and partition."""
        self._now_ms = now_ms or SystemClock().wall_ms
        self._topics: dict[str, tuple[str, list[_Partition]]] = {}
        self._created = 0
        self._lock = threading.Lock()

    # Methods for tests

    def create(self, topic: str, partitions: int = 1) -> None:
        """Create a topic; a topic of that name is replaced, as if it were deleted and created again.

        Args:
            topic: The topic's name.
            partitions: The number of partitions.

        Raises:
            ConfigurationError: Kafka allows no topic of this name, or `partitions` is below 1.
        """
        require_topic_name("topic", topic)
        if partitions < 1:
            raise ConfigurationError(f"topic {topic!r}: partitions is {partitions}; it must be at least 1")
        with self._lock:
            self._created += 1
            self._topics[topic] = (f"memory{self._created:016d}", [_Partition() for _ in range(partitions)])

    def append(self, topic: str, records: Iterable[AnyRecord]) -> Sequence[MemoryRecord]:
        """Append records. Records with the same key go to the same partition, others to one partition after another.

        Args:
            topic: The topic.
            records: Each record is a value (text, bytes, None), a tuple of key and value, or a dict with some of the
                fields key, value, partition, timestamp and headers. A text is encoded in UTF-8, and a dict or list as a
                value is encoded as JSON. A timestamp is a `datetime` with a time zone, or Unix milliseconds. Its
                microseconds are cut off, as Kafka's clients do. Headers are a dict.

        Returns:
            The records as they are in the topic.

        Raises:
            TopicNotFoundError: The topic does not exist.
            ConfigurationError: A record has another form, or the topic does not have its partition.
        """
        if isinstance(records, str | bytes | Mapping):
            raise ConfigurationError(f"topic {topic!r}: {records!r} is no list of records: put it into a list")
        partitions = self._found(topic)[1]
        return [self._append(topic, partitions, record) for record in records]

    def skip(self, topic: str, partition: int, offsets: int = 1) -> None:
        """Skip offsets, as a transaction's marker does: there is never a record at them.

        Args:
            topic: The topic.
            partition: The partition.
            offsets: How many offsets are skipped.
        """
        self._found(topic)[1][partition].end += offsets

    def retain_from(self, topic: str, partition: int, start: int) -> None:
        """Delete the records before an offset, as retention does.

        Args:
            topic: The topic.
            partition: The partition.
            start: The first offset that is kept.
        """
        at = self._found(topic)[1][partition]
        at.records = [record for record in at.records if record.offset >= start]
        at.start, at.end = start, max(at.end, start)

    def read(self, ranges: Iterable[ClaimedRange]) -> list[MemoryRecord]:
        """Return the records of claimed ranges, for functions that read their batch themselves.

        Args:
            ranges: The ranges, usually `batch.ranges`.

        Returns:
            The records, by partition and offset.
        """
        return [
            record
            for range_ in ranges
            for record in self.read_offsets(range_.topic, {range_.partition: (range_.first_readable, range_.end)})
        ]

    def read_offsets(self, topic: str, offsets: Mapping[int, tuple[int, int]]) -> list[MemoryRecord]:
        """Return the records of a topic.

        Args:
            topic: The topic.
            offsets: The first offset and the next offset after the last one, by partition.

        Returns:
            The records, by partition and offset.
        """
        partitions = self._found(topic)[1]
        return [
            record
            for partition, (start, end) in sorted(offsets.items())
            for record in partitions[partition].records
            if start <= record.offset < end
        ]

    # Methods of `marshal_dagster.kafka.admin_client.Topics` that batches call

    def describe(self, topic: str) -> TopicDescription:
        """Return a topic's id and partitions. Raises `TopicNotFoundError`."""
        topic_id, partitions = self._found(topic)
        return TopicDescription(topic_id, tuple(range(len(partitions))))

    def partition_numbers(self, topic: str) -> tuple[int, ...]:
        """Return the numbers of a topic's partitions. Raises `TopicNotFoundError`."""
        return tuple(range(len(self._found(topic)[1])))

    def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions of each topic."""
        return {topic: len(partitions) for topic, (_, partitions) in self._topics.items()}

    def offsets(
        self,
        topic: str,
        partitions: Iterable[int],
        *,
        committed_only: bool = True,  # noqa: ARG002 - there are no transactions
    ) -> dict[int, OffsetBounds]:
        """Return the first and the next offset of partitions. Raises `TopicNotFoundError`."""
        found = self._found(topic)[1]
        return {number: OffsetBounds(found[number].start, found[number].end) for number in partitions}

    def offsets_at(self, topic: str, partitions: Iterable[int], at_ms: int) -> dict[int, int]:
        """Return the offset of each partition's first record with this timestamp (Unix ms) or a later one."""
        found, at = self._found(topic)[1], _time(at_ms)
        firsts = {
            number: next((record.offset for record in found[number].records if record.timestamp >= at), None)
            for number in partitions
        }
        return {number: offset for number, offset in firsts.items() if offset is not None}

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets of a group. Raises `TopicNotFoundError`."""
        self._found(topic)
        return dict(self.committed.get(group, {}).get(topic, {}))

    def commit_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Set the committed offsets of a group."""
        self.committed.setdefault(group, {}).setdefault(topic, {}).update(offsets)

    def close(self) -> None:
        """Do nothing, because there is no connection."""

    def _found(self, topic: str) -> tuple[str, list[_Partition]]:
        if topic not in self._topics:
            named = ", ".join(map(repr, sorted(self._topics))) or "no topic"
            raise TopicNotFoundError(f"topic {topic!r} does not exist in memory; there is {named}")
        return self._topics[topic]

    def _append(self, topic: str, partitions: Sequence[_Partition], record: AnyRecord) -> MemoryRecord:
        parts = _parts(topic, record)
        key = _bytes(topic, "key", parts.get("key"))
        with self._lock:
            number = _partition_of(topic, parts.get("partition"), key, partitions)
            at = partitions[number]
            given = _timestamp(topic, parts.get("timestamp"))
            headers = _headers(topic, parts.get("headers"))
            made = MemoryRecord(
                topic,
                number,
                at.end,
                key,
                _bytes(topic, "value", parts.get("value")),
                _time(self._now_ms() if given is None else given),
                tuple((name, _bytes(topic, f"header {name!r}", value)) for name, value in headers.items()),
            )
            at.records.append(made)
            at.end += 1
        return made


def _parts(topic: str, record: AnyRecord) -> Mapping[str, Any]:
    """Return the fields of a record."""
    if record is None or isinstance(record, str | bytes):
        return {"value": record}
    if isinstance(record, tuple) and len(record) == 2:  # noqa: PLR2004 - key and value
        return {"key": record[0], "value": record[1]}
    if not isinstance(record, Mapping):
        raise ConfigurationError(
            f"topic {topic!r}: {record!r} is no record: give a text, bytes, a tuple of key and value, or a dict with "
            f"some of {', '.join(RECORD_FIELDS)}"
        )
    unknown = sorted(map(str, record.keys() - set(RECORD_FIELDS)))
    if unknown:
        raise ConfigurationError(
            f"topic {topic!r}: a record has no field {', '.join(unknown)}; its fields are {', '.join(RECORD_FIELDS)}. "
            'To send a dict as JSON, make it the value: {"value": {...}}'
        )
    return record


def _bytes(topic: str, what: str, value: object) -> bytes | None:
    """Return a key or value as bytes: a text in UTF-8, a dict or list as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping | list):
        try:
            return json.dumps(value).encode()
        except TypeError as error:
            raise ConfigurationError(
                f"topic {topic!r}: the {what} of a record is no JSON ({error}): give texts, numbers, lists and dicts, "
                "or encode it to bytes"
            ) from error
    raise ConfigurationError(
        f"topic {topic!r}: the {what} of a record is a {type(value).__name__}: give a text, bytes, or a dict or list, "
        "which becomes JSON"
    )


def _timestamp(topic: str, given: object) -> int | None:
    """Return a timestamp in one of the forms of a test as Unix milliseconds, None if it has none."""
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool):
        return math.floor(given)
    if isinstance(given, datetime) and given.tzinfo is not None:
        return (given - _START) // timedelta(milliseconds=1)
    raise ConfigurationError(
        f"topic {topic!r}: the timestamp of a record is {given!r}: give a datetime with a time zone, or Unix "
        "milliseconds"
    )


def _headers(topic: str, given: object) -> Mapping[str, object]:
    """Return the headers of a record by name."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise ConfigurationError(f"topic {topic!r}: the headers of a record are {given!r}: give a dict with texts as names")


def _partition_of(topic: str, wanted: object, key: bytes | None, partitions: Sequence[_Partition]) -> int:
    if wanted is not None:
        if not isinstance(wanted, int):
            raise ConfigurationError(f"topic {topic!r}: the partition of a record is {wanted!r}: give its number")
        if not 0 <= wanted < len(partitions):
            raise ConfigurationError(
                f"topic {topic!r} has no partition {wanted}; it has {len(partitions)} partitions, numbered from 0"
            )
        return wanted
    if key is not None:
        return zlib.crc32(key) % len(partitions)
    return min(range(len(partitions)), key=lambda number: (partitions[number].end, number))


def _time(at_ms: int) -> datetime:
    return _START + timedelta(milliseconds=at_ms)
