"""How large the records of a topic are, told by a sample: for a limit in bytes, which decides nothing but a size."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from marshal_dagster.errors import AuthorizationError, UnavailableError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import (
    HARMLESS_TO_A_READER,
    ClientLog,
    close_client,
    consumer,
    error_in,
    reach,
)
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import PASSING, Request, failure

PARTITIONS: Final = 8
"""How many partitions are looked at: those with the most to read."""
RECORDS: Final = 200
"""How many records are read at each end of what is unread of one."""
FEW: Final = 20
"""How many are read of one where nothing is unread, or no record of what is."""

_CLIENT_ID: Final = "marshal-dagster-sample"
_POLL_S: Final = 0.2
# What says that there is no more to read of a partition: its end, or that retention took what was next.
_NO_MORE: Final = frozenset(
    {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}  # noqa: SLF001
)


@dataclass(slots=True)
class _Sample:
    end: int
    next: int
    most: int = RECORDS
    records: int = 0
    size: int = 0

    @property
    def is_done(self) -> bool:
        return self.records >= self.most or self.next >= self.end

    def take(self, message: Message) -> None:
        if self.is_done:
            return
        self.next, self.records = (message.offset() or 0) + 1, self.records + 1
        self.size += _size(message)


def bytes_per_offset(topics: Topics, connection: KafkaConnection, group: str, topic: str) -> float | None:
    """Estimate the bytes of keys, values and headers, as a reader gets them, for each offset that `group` has to read.

    Of each of the eight partitions with the most unread offsets, by the group's offsets in Kafka, the first 200 records
    that are unread and those of the last 200 offsets are read; the largest mean of these counts. It is one of records:
    offsets without one, which compaction took or transactions use, count as if they had one, as those further on may.
    Where that gives no record (all is read, as far as Kafka knows), a few of the last 200 offsets of the eight with the
    most offsets are read: what comes next may be like them, or the group be set back. None of a topic without offsets.
    Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`.
    """
    bounds = topics.offsets(topic, topics.describe(topic).partitions)
    there = {partition: _Sample(at.end, at.start) for partition, at in bounds.items() if at.start < at.end}
    if not there:
        return None
    client, log = consumer(connection, client_id=_CLIENT_ID, committed_only=True)
    deadline_s = time.monotonic() + connection.timeout_s
    try:
        reach(client, log, timeout_s=connection.timeout_s)
        firsts = _longest(_unread(there, topics, group, topic))
        ends = {partition: first.end for partition, first in firsts.items()}
        _read(client, log, topic, firsts, deadline_s)
        lasts = {partition: _Sample(end, max(firsts[partition].next, end - RECORDS)) for partition, end in ends.items()}
        _read(client, log, topic, lasts, deadline_s)
        samples = [*firsts.values(), *lasts.values()]
        if not any(sample.records for sample in samples):
            longest = _longest(there).items()
            few = {partition: _Sample(at.end, max(at.next, at.end - RECORDS), FEW) for partition, at in longest}
            _read(client, log, topic, few, deadline_s)
            samples = [*few.values()]
    except KafkaException as error:
        raise UnavailableError(f"a sample of topic {topic!r} cannot be read: {error_in(error).str()}") from error
    finally:
        close_client(client, log)
    means = [sample.size / sample.records for sample in samples if sample.records]
    if not means and time.monotonic() >= deadline_s:
        raise UnavailableError(f"no sample of topic {topic!r} could be read in time")
    return max(means, default=0.0)


def _unread(there: Mapping[int, _Sample], topics: Topics, group: str, topic: str) -> dict[int, _Sample]:
    try:
        known: Mapping[int, int] = topics.group_offsets(group, topic)
    except AuthorizationError:
        known = {}
    unread = {
        partition: _Sample(at.end, max(at.next, known.get(partition, at.next))) for partition, at in there.items()
    }
    return {partition: sample for partition, sample in unread.items() if not sample.is_done}


def _longest(samples: Mapping[int, _Sample]) -> dict[int, _Sample]:
    longest_first = sorted(samples.items(), key=lambda item: (item[1].next - item[1].end, item[0]))
    return dict(longest_first[:PARTITIONS])


def _read(client: Consumer, log: ClientLog, topic: str, samples: Mapping[int, _Sample], deadline_s: float) -> None:
    """Read all samples; what is not read by the deadline is left out."""
    undone = [(partition, sample) for partition, sample in samples.items() if not sample.is_done]
    client.assign([TopicPartition(topic, partition, sample.next) for partition, sample in undone])
    while any(not sample.is_done for sample in samples.values()) and time.monotonic() < deadline_s:
        for message in client.consume(RECORDS, timeout=_POLL_S):
            sample = samples[message.partition() or 0] if message.partition() in samples else None
            if message.error() is not None:
                _judge(message.error(), sample, topic, log)
            elif sample is not None:
                sample.take(message)
        reading = [TopicPartition(topic, partition) for partition, sample in samples.items() if not sample.is_done]
        # What is compacted, aborted or a marker gives no message: move on to where the client is.
        for position in client.position(reading):
            sample = samples[position.partition]
            sample.next = max(sample.next, min(position.offset, sample.end))


def _judge(error: KafkaError | None, sample: _Sample | None, topic: str, log: ClientLog) -> None:
    """Pass over what mends itself or does not concern a reader by position."""
    if error is None or error.retriable() or error.code() in PASSING | HARMLESS_TO_A_READER:
        return
    if error.code() not in _NO_MORE:
        raise failure(Request(f"read a sample of topic {topic!r}", on_topic(topic, Right.READ), topic), error, log, 0.0)
    if sample is not None:
        sample.end = sample.next


def _size(message: Message) -> int:
    headers = message.headers() or []
    parts = [message.key(), message.value(), *(part for header in headers for part in header)]
    return sum(len(part.encode() if isinstance(part, str) else part) for part in parts if part)
