"""How large the records of a topic are, told by a sample: for a limit in bytes, which decides nothing but a size."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaException, Message, TopicPartition

from marshal_dagster.errors import RightMissing, UnavailableError
from marshal_dagster.kafka.clients import Isolation, consumer, error_in, let_go, reach
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics

PARTITIONS: Final = 8
"""How many partitions are looked at: those with the most to read."""
RECORDS: Final = 200
"""How many records are read of each."""

_CLIENT_ID: Final = "marshal-dagster-sample"
_POLL_S: Final = 0.2


@dataclass(slots=True)
class _Sample:
    start: int
    end: int
    next: int
    records: int = 0
    size: int = 0

    @property
    def is_done(self) -> bool:
        return self.records >= RECORDS or self.next >= self.end

    def take(self, message: Message) -> None:
        if self.is_done:
            return
        self.next, self.records = (message.offset() or 0) + 1, self.records + 1
        self.size += _size(message)


def bytes_per_offset(topics: Topics, connection: KafkaConnection, group: str, topic: str) -> float | None:
    """Estimate the bytes of keys, values and headers, as a reader gets them, for each offset that `group` has to read.

    The first 200 records that are unread, by the group's offsets in Kafka, are read of each of the eight partitions
    that have the most; the largest mean of a partition counts. Offsets without a record count as empty. None where
    nothing is unread. Raises `TopicMissing`, `RightMissing`, `UnavailableError`.
    """
    samples = _to_sample(topics, group, topic)
    if samples:
        _read(connection, topic, samples)
    means = [each.size / (each.next - each.start) for each in samples.values() if each.next > each.start]
    return max(means, default=None)


def _to_sample(topics: Topics, group: str, topic: str) -> dict[int, _Sample]:
    bounds = topics.offsets(topic, topics.describe(topic).partitions)
    try:
        known: Mapping[int, int] = topics.group_offsets(group, topic)
    except RightMissing:
        known = {}
    unread = {}
    for number, at in bounds.items():
        start = max(at.start, known.get(number, at.start))
        if start < at.end:
            unread[number] = _Sample(start, at.end, start)
    most = sorted(unread, key=lambda number: (unread[number].start - unread[number].end, number))[:PARTITIONS]
    return {number: unread[number] for number in most}


def _read(connection: KafkaConnection, topic: str, samples: Mapping[int, _Sample]) -> None:
    client, log = consumer(connection, client_id=_CLIENT_ID, isolation=Isolation.READ_COMMITTED)
    deadline_s = time.monotonic() + connection.timeout_s
    try:
        reach(client, log, timeout_s=connection.timeout_s)
        client.assign([TopicPartition(topic, number, each.start) for number, each in samples.items()])
        while any(not each.is_done for each in samples.values()):
            if time.monotonic() >= deadline_s:
                return _if_any(samples, topic)
            for message in client.consume(RECORDS, timeout=_POLL_S):
                number = message.partition()
                if message.error() is None and number is not None and number in samples:
                    samples[number].take(message)
            _pass_over_gaps(client.position([TopicPartition(topic, number) for number in samples]), samples)
    except KafkaException as error:
        raise UnavailableError(f"a sample of topic {topic!r} cannot be read: {error_in(error).str()}") from error
    finally:
        let_go(client, log)


def _pass_over_gaps(positions: list[TopicPartition], samples: Mapping[int, _Sample]) -> None:
    """Move on to where the client is: what is compacted, aborted or a marker gives no message."""
    for each in positions:
        sample = samples[each.partition]
        if not sample.is_done:
            sample.next = max(sample.next, min(each.offset, sample.end))


def _if_any(samples: Mapping[int, _Sample], topic: str) -> None:
    """Do with what was read in time."""
    if not any(each.records for each in samples.values()):
        raise UnavailableError(f"no sample of topic {topic!r} could be read in time")


def _size(message: Message) -> int:
    headers = message.headers() or []
    parts = [message.key(), message.value(), *(part for header in headers for part in header)]
    return sum(len(part.encode() if isinstance(part, str) else part) for part in parts if part)
