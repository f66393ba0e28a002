"""The coordination log as a topic of a Kafka cluster (protocol.md, section 6: idempotent, acks=all, read by position).

It implements `marshal_dagster.coordination.log.CoordinationLog` with confluent-kafka.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final, cast

from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from marshal_dagster.coordination.log import (
    DEFAULT_COORDINATION_TOPIC,
    Ack,
    Append,
    Chunk,
    LogIdentity,
    PositionLostError,
)
from marshal_dagster.coordination.topic_settings import require_usable
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.leases import delivery_timeout_ms
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS
from marshal_dagster.protocol.pause_reason import REASON_HEADER, decode_reason, encode_reason
from marshal_dagster.protocol.state import OffsetBounds

READ_BATCH: Final = 2_000
"""How many messages are read with one call. More would cost more time in the garbage collector than they save."""
CLIENT_ID: Final = "marshal-dagster"
_SLICE_S: Final = 0.5
_SHORT_PART: Final = 0.2
"""How long to wait for the connection of a later producer, as a part of the delivery timeout.

This is less than the margin of a lease.
"""
Headers = list[tuple[str, str | bytes | None]]
_PAUSE: Final = b"ReleaseGroup/"
_PAUSE_INITIAL: Final = _PAUSE[0]
_TIMESTAMP_TYPES: Final = frozenset({TIMESTAMP_NOT_AVAILABLE, TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME})
_POSITION_LOST: Final = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001

_PASSING: Final = clients.HARMLESS_TO_A_READER | {
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
}


class KafkaLog:
    """A coordination topic of a Kafka cluster, as a `marshal_dagster.coordination.log.CoordinationLog`.

    Each client connects when it is first needed; a reader never opens a producer. `heartbeat_interval_ms` bounds how
    long a record may wait to be sent.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str = DEFAULT_COORDINATION_TOPIC,
        heartbeat_interval_ms: int = GO_HEARTBEAT_INTERVAL_MS,
    ) -> None:
        """Set the cluster, the topic and the heartbeat interval of the members that use the log."""
        self.topic = topic
        self._connection = connection
        self._delivery_timeout_ms = delivery_timeout_ms(heartbeat_interval_ms)
        self._topics: Topics | None = None
        self._consumer: Consumer | None = None
        self._has_read = False
        self._producer: Producer | None = None
        self._producer_log: clients.ClientLog | None = None
        self._is_reached = False
        self._positions: dict[int, int] = {}
        self.usable_id: str | None = None
        """The id of the topic whose settings were found usable, here or by the caller."""

    @property
    def delivery_timeout_ms(self) -> int:
        """How long a record may wait to be sent, in ms."""
        return self._delivery_timeout_ms

    def identity(self) -> LogIdentity:
        """Return the present identity of the log; the first call raises if the topic is unusable (`require_usable`)."""
        described = self._admin().describe(self.topic)
        if described.topic_id != self.usable_id:
            require_usable(self._admin(), described)
            self.usable_id = described.topic_id
        return LogIdentity(self.topic, described.topic_id, len(described.partitions))

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the present bounds of these coordination partitions."""
        return self._admin().offsets(self.topic, partitions, committed_only=False)

    def offsets_at(self, partitions: Collection[int], at_ms: int) -> Mapping[int, int]:
        """Return the offset of each partition's first record with the timestamp `at_ms` (unix ms) or a later one.

        A partition without such a record is not in the result. Raises `UnavailableError`.
        """
        return self._admin().offsets_at(self.topic, partitions, at_ms, committed_only=False)

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read from `positions` on, with a new client.

        A client that was in use can still return errors that belong to its earlier positions, and they cannot be
        recognised: the client library compares the version of such an error, but leaves it at 0.
        """
        self._positions = dict(positions)
        former, self._consumer = self._consumer, None
        if former is not None:
            former.close()
        self._consumer = clients.consumer(self._connection, client_id=CLIENT_ID)[0]
        self._consumer.assign([TopicPartition(self.topic, number, offset) for number, offset in positions.items()])

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read up to `ends` in chunks, even if there is no record at an end (a transaction marker, for example).

        The first answer may take as long as the connection's timeout, because the client has to connect. No claim is
        held before that.
        """
        if self._consumer is None:
            raise RuntimeError("call follow() before read_until()")
        if not self._has_read:
            timeout_s = max(timeout_s, self._connection.timeout_s)
        due = {partition: end for partition, end in ends.items() if self._positions[partition] < end}
        deadline = time.monotonic() + timeout_s
        while due:
            for chunk in self._chunks(self._consume(self._consumer, min(_SLICE_S, timeout_s))):
                self._has_read = True
                if due.get(chunk.partition, chunk.position + 1) <= chunk.position:
                    del due[chunk.partition]
                yield chunk
                deadline = time.monotonic() + timeout_s  # without the time that the caller took for the chunk
            if due and time.monotonic() > deadline:
                raise UnavailableError(
                    f"the coordination topic {self.topic!r} was not read up to {due} (partition: offset) within "
                    f"{timeout_s:g} s; check that its leaders are up and that this principal has READ on it"
                )

    @staticmethod
    def _consume(consumer: Consumer, timeout_s: float) -> Sequence[Message]:
        """Wait for one message, then read all that are available: `consume(n)` alone would wait for n messages."""
        first = consumer.consume(1, timeout_s)
        return [*first, *consumer.consume(READ_BATCH, 0)] if first else first

    def _chunks(self, messages: Sequence[Message]) -> Iterator[Chunk]:
        """Sort messages by partition. A partition's end moves the position too, as an offset may have no record."""
        chunks, begin = [], 0
        for partition, run in groupby([message.partition() for message in messages]):
            end = begin + len(list(run))
            chunk = self._chunk(cast("int", partition), messages[begin:end])
            if chunk is not None:
                chunks.append(chunk)
            begin = end
        del messages  # so that they are not in memory while their records are applied
        yield from chunks

    def _chunk(self, partition: int, messages: Sequence[Message]) -> Chunk | None:
        """Return the records of messages of one partition, and raise for an error among them (`_judge`).

        Nearly always all are records with the broker's timestamp, so one pass over them is enough. An error that does
        not matter is no answer of the broker, and its partition may be one that is not read: without a record or an end
        there is no chunk.
        """
        records = _records(messages, {TIMESTAMP_LOG_APPEND_TIME})
        ends: list[int] = []
        sender_timed: Collection[int] = ()
        if len(records) < len(messages):
            events = [message for message in messages if message.error() is not None]
            ends = self._ends_among(partition, events)
            if len(records) + len(events) < len(messages):
                broker_timed = {offset for offset, _, _ in records}
                records = _records(messages, _TIMESTAMP_TYPES)
                sender_timed = {offset for offset, _, _ in records if offset not in broker_timed}
        if records:
            ends.append(records[-1][0] + 1)
        if not ends:
            return None
        self._positions[partition] = position = max(self._positions[partition], *ends)
        return Chunk(partition, records, position, sender_timed, _reasons(messages, records))

    def _ends_among(self, partition: int, events: Iterable[Message]) -> list[int]:
        """Return the ends of the partition that `events` report."""
        ends = []
        for event in events:
            error = event.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's own name
                ends.append(cast("int", event.offset()))
            else:
                self._judge(error, partition)
        return ends

    def _judge(self, error: KafkaError, partition: int) -> None:
        """Raise for an error, unless it is temporary or does not concern a reader by position."""
        if error.code() in _POSITION_LOST:
            raise PositionLostError(partition)
        if not error.retriable() and error.code() not in _PASSING:
            raise UnavailableError(
                f"coordination partition {partition} of topic {self.topic!r} cannot be read: {error.str()}. Check the "
                "broker and this principal's rights on the topic"
            )

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append `records` and wait; a record fails if it is not acknowledged within `delivery_timeout_ms`."""
        producer = self._open_producer()
        acks: list[Ack | None] = [None] * len(records)
        try:
            self._produce(producer, records, acks)
            self._wait_for(producer)
        except BaseException:
            self.purge()  # after an interrupt the caller gives up, so none of its records may be sent later
            raise
        unanswered = Ack(None, self._why_unanswered())
        if self._producer_log is not None and self._producer_log.fatal:
            self._producer = None
        return [ack or unanswered for ack in acks]

    def _produce(self, producer: Producer, records: Sequence[Append], acks: list[Ack | None]) -> None:
        produce, topic = producer.produce, self.topic
        for index, (partition, value, reason) in enumerate(records):
            note = partial(_note, acks, index)
            try:
                if reason is None:
                    produce(topic, value, partition=partition, on_delivery=note)
                else:
                    headers: Headers = [(REASON_HEADER, encode_reason(reason))]
                    produce(topic, value, partition=partition, headers=headers, on_delivery=note)
            except (BufferError, KafkaException) as error:
                acks[index] = Ack(None, str(error))

    def purge(self) -> None:
        """Drop the records that wait to be sent, and the producer.

        A purge can continue after the call has returned, and drop records that are produced next, because the client
        library inverts its `blocking` argument. So a producer is not used again after a purge.
        """
        producer = self._producer
        if producer is not None and len(producer):
            self._producer = None
            producer.purge()
            producer.flush(0)

    def close(self) -> None:
        """Close all clients."""
        self.purge()
        self._producer = None
        if self._consumer is not None:
            self._consumer.close()
        if self._topics is not None:
            self._topics.close()
        self._consumer = self._topics = None

    def _why_unanswered(self) -> str:
        log = self._producer_log
        if log is None:
            return "no acknowledgement came"
        return log.fatal or (log.reason.text if log.reason else "no acknowledgement came")

    def _admin(self) -> Topics:
        if self._topics is None:
            self._topics = Topics(self._connection)
        return self._topics

    def _open_producer(self) -> Producer:
        """Return the producer; wait for its connection before the first record.

        A later producer waits only briefly, because records of held keys must not wait.
        """
        if self._producer is None:
            self._producer, self._producer_log = clients.producer(
                self._connection,
                delivery_timeout_ms=self._delivery_timeout_ms,
                client_id=CLIENT_ID,
                compression="none",  # Go consumers stop at lz4 and zstd (protocol.md, section 1)
            )
            if self._is_reached:
                with suppress(UnavailableError):
                    self._reach(self._delivery_timeout_ms * _SHORT_PART / 1_000)
        if not self._is_reached:
            self._reach(self._connection.timeout_s)
            self._is_reached = True
        return self._producer

    def _reach(self, timeout_s: float) -> None:
        if self._producer is not None and self._producer_log is not None:
            clients.reach(self._producer, self._producer_log, timeout_s=timeout_s, topic=self.topic)

    def _wait_for(self, producer: Producer) -> None:
        """Wait for the acknowledgements in short slices, so that signals are handled."""
        deadline = time.monotonic() + 2 * self._delivery_timeout_ms / 1_000 + 1
        unsent = 1
        with suppress(KafkaException):  # an idempotent producer without the right to write; the acks have the error
            while unsent and time.monotonic() < deadline:
                unsent = producer.flush(_SLICE_S)
        if unsent:
            self.purge()


def _records(messages: Iterable[Message], timestamp_types: Collection[int]) -> list[tuple[int, int, bytes | None]]:
    """Return offset, timestamp in ms and value of the records that have one of these types of timestamp."""
    return [
        (message.offset(), timestamp[1], message.value())  # type: ignore[misc] # a record has an offset
        for message in messages
        if message.error() is None and (timestamp := message.timestamp())[0] in timestamp_types
    ]


def _reasons(messages: Iterable[Message], records: Iterable[tuple[int, int, bytes | None]]) -> Mapping[int, str]:
    """Return the reasons of the pauses among `records`, by log offset."""
    pauses = {
        offset
        for offset, _, value in records
        if value and value[0] == _PAUSE_INITIAL and value.startswith(_PAUSE)  # two steps, because a call is slow
    }
    if not pauses:
        return {}
    found = {
        offset: _reason_of(message)
        for message in messages
        if (offset := message.offset()) in pauses and message.error() is None
    }
    return {offset: reason for offset, reason in found.items() if reason is not None}


def _reason_of(message: Message) -> str | None:
    """Return the reason in the headers of a pause."""
    return decode_reason(next((value for name, value in clients.headers_of(message) if name == REASON_HEADER), None))


def _note(acks: list[Ack | None], index: int, error: KafkaError | None, message: Message) -> None:
    if error is not None:
        acks[index] = Ack(None, error.str())
        return
    offset = message.offset()
    if offset is None or offset < 0:  # a retry that the broker recognises, without the offset of the first record
        acks[index] = Ack(None, "acknowledged without an offset")
        return
    acks[index] = Ack(offset)
