"""Estimate the size of a topic's records from a sample, so that a batch can be limited by bytes.

The estimate decides only how many offsets a batch takes. It affects no rule of the protocol.
"""

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
    headers_of,
    reach,
)
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import PASSING, Request, failure

PARTITIONS: Final = 8
"""How many partitions are sampled: those with the most unread offsets."""
RECORDS: Final = 200
"""How many records are read at the start, and at the end, of the unread offsets of a partition."""
FEW: Final = 20
"""How many records are read of a partition if there is no unread record."""

_CLIENT_ID: Final = "marshal-dagster-sample"
_POLL_S: Final = 0.2
# Errors after which nothing more can be read of a partition: its end was reached, or retention deleted the next record.
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
    """Estimate the size of the records that `group` has not read, in bytes for each offset.

    The size is that of key, value and headers after decompression. The sample is taken from the eight partitions with
    the most unread offsets, by the group's offsets in Kafka. Each sample has the first 200 unread records of a
    partition, or the records at its last 200 offsets. The result is the largest mean of the samples. Offsets without a
    record (because of compaction or transactions) count like a record, because later offsets may all have one.

    If the sample is empty, because all records are read, a few of the last 200 offsets of the eight largest partitions
    are sampled. The next records may be similar to them, or an operator may move the group back.

    Args:
        topics: The client for requests about topics.
        connection: How to reach the cluster.
        group: The consumer group.
        topic: The data topic.

    Returns:
        Bytes for each offset; 0.0 if no record could be found, and None if the topic has no offsets.

    Raises:
        TopicNotFoundError: The topic does not exist.
        AuthorizationError: A right on the topic is missing.
        UnavailableError: The brokers did not answer in time.
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
        raise UnavailableError(
            f"cannot read a sample of topic {topic!r}: {error_in(error).str()}; check the brokers, then try again"
        ) from error
    finally:
        close_client(client, log)
    means = [sample.size / sample.records for sample in samples if sample.records]
    if not means and time.monotonic() >= deadline_s:
        raise UnavailableError(
            f"no record of topic {topic!r} could be read within {connection.timeout_s:g} s; check the brokers, or set "
            "a longer timeout_s"
        )
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
    """Read all samples. Records that were not read by the deadline are omitted."""
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
        # Offsets of compacted records, aborted records and markers have no message: continue at the client's position.
        for position in client.position(reading):
            sample = samples[position.partition]
            sample.next = max(sample.next, min(position.offset, sample.end))


def _judge(error: KafkaError | None, sample: _Sample | None, topic: str, log: ClientLog) -> None:
    """Ignore temporary errors and those that do not concern a reader by position; raise any other one."""
    if error is None or error.retriable() or error.code() in PASSING | HARMLESS_TO_A_READER:
        return
    if error.code() not in _NO_MORE:
        raise failure(Request(f"read a sample of topic {topic!r}", on_topic(topic, Right.READ), topic), error, log, 0.0)
    if sample is not None:
        sample.end = sample.next


def _size(message: Message) -> int:
    parts = [message.key(), message.value(), *(part for header in headers_of(message) for part in header)]
    return sum(len(part.encode() if isinstance(part, str) else part) for part in parts if part)
