"""How long the coordination log waits for its broker; other tests use a real one (`tests/real`)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    KafkaError,
    TopicPartition,
)

from marshal_dagster.coordination import kafka_log
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import PositionLostError
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.record_size import _size
from marshal_dagster.protocol.messages import ReleaseGroup, render
from marshal_dagster.protocol.pause_reason import REASON_HEADER

HEARTBEAT_S = 0.1
"""How long a member with a short heartbeat interval waits for an answer."""
CONNECTING_S = 0.5


@dataclass(frozen=True, slots=True)
class End:
    """The event that the client returns when a partition was read to its end."""

    at: int

    def partition(self) -> int:
        """Return the only partition."""
        return 0

    def offset(self) -> int:
        """Return the end offset."""
        return self.at

    def error(self) -> KafkaError:
        """Return the error that marks the end of a partition."""
        return KafkaError(KafkaError._PARTITION_EOF)


class SlowConsumer:
    """A client that needs a while to connect. Then it is at offset 3, the end of the partition, and returns no more."""

    def __init__(self) -> None:
        self._connected_s = time.monotonic() + CONNECTING_S
        self._due = [End(3)]

    def assign(self, at: list[TopicPartition]) -> None:
        """Accept the assignment."""

    def consume(self, count: int, timeout_s: float) -> list[End]:
        """Return the end-of-partition event once the client is connected."""
        time.sleep(timeout_s)
        if time.monotonic() < self._connected_s:
            return []
        given, self._due = self._due[:count], self._due[count:]
        return given


@pytest.mark.thorough
def test_the_first_answer_may_take_as_long_as_the_connection_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read may take the connection's timeout, because the client has to connect.

    Later reads use their own.
    """
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (SlowConsumer(), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=300))
    log.follow({0: 0})

    (chunk,) = log.read_until({0: 3}, HEARTBEAT_S)
    with pytest.raises(UnavailableError, match=r"not read up to \{0: 4\} .* within 0.1 s"):
        list(log.read_until({0: 4}, HEARTBEAT_S))

    assert chunk.position == 3


class Parts:
    """A client that returns the ends of parts of a log, one after another."""

    def __init__(self, *ends: int) -> None:
        self._due = [[End(end)] for end in ends]

    def assign(self, at: list[TopicPartition]) -> None:
        """Accept the assignment."""

    def consume(self, count: int, _: float) -> list[End]:
        """Return the next part; a second call for the same part has nothing more."""
        return self._due.pop(0) if count == 1 and self._due else []


def test_the_time_that_a_reader_takes_for_a_part_is_not_that_of_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy process may take longer for some thousand records than a broker may take for an answer."""
    now_s = [0.0]
    monkeypatch.setattr(kafka_log, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (Parts(3, 7), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=1))
    log.follow({0: 0})
    positions = []
    for chunk in log.read_until({0: 7}, HEARTBEAT_S):
        positions.append(chunk.position)
        now_s[0] += 20
    assert positions == [3, 7]


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The event of an error; most concern no reader by position, or pass by themselves."""

    code: int
    of_partition: int = 0
    at: int = -1001

    def partition(self) -> int:
        """Return the partition that the client names, which may be none that it reads."""
        return self.of_partition

    def offset(self) -> int:
        """Return the offset that the client names."""
        return self.at

    def error(self) -> KafkaError:
        """Return the error."""
        return KafkaError(self.code)


class Events:
    """A client that returns batches of messages, one after another."""

    def __init__(self, *batches: list[Any]) -> None:
        self._due = list(batches)

    def assign(self, at: list[TopicPartition]) -> None:
        """Accept the assignment."""

    def consume(self, count: int, _: float) -> list[Any]:
        """Return the next batch; a second call for the same batch has nothing more."""
        return self._due.pop(0) if count == 1 and self._due else []


@pytest.mark.parametrize("of_partition", [-1, 0])
def test_an_error_of_a_partition_that_is_not_read_is_ignored(
    monkeypatch: pytest.MonkeyPatch, of_partition: int
) -> None:
    """The client reports errors of its group without a partition."""
    error = ErrorEvent(KafkaError.GROUP_AUTHORIZATION_FAILED, of_partition)
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (Events([error], [error, UnreadableHeaders(3, 7)]), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=1))
    log.follow({3: 7})
    (chunk,) = log.read_until({3: 8}, HEARTBEAT_S)
    assert (chunk.partition, chunk.records, chunk.position) == (3, [(7, 7, PAUSE)], 8)


def test_errors_that_pass_do_not_extend_the_time_that_a_reader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that is down for long causes many of them, and the reader gives up in time."""
    now_s = [0.0]

    def monotonic() -> float:
        now_s[0] += HEARTBEAT_S
        return now_s[0]

    errors = [[ErrorEvent(KafkaError._TRANSPORT)] for _ in range(50)]
    monkeypatch.setattr(kafka_log, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (Events(*errors, [End(3)]), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=1))
    log.follow({0: 0})
    with pytest.raises(UnavailableError, match=r"not read up to \{0: 3\}"):
        list(log.read_until({0: 3}, HEARTBEAT_S))


PAUSE = render(ReleaseGroup(instance="jane", client="jane@host", group="flights", time_s=0, expiry_s=9))


@dataclass(frozen=True, slots=True)
class UnreadableHeaders:
    """A pause of another client, with a header whose name is not UTF-8. confluent-kafka then raises this error."""

    of_partition: int = 0
    at: int = 0

    def partition(self) -> int:
        """Return the partition."""
        return self.of_partition

    def offset(self) -> int:
        """Return the offset."""
        return self.at

    def timestamp(self) -> tuple[int, int]:
        """Return the broker's timestamp."""
        return TIMESTAMP_LOG_APPEND_TIME, 7

    def key(self) -> None:
        """Return no key."""

    def value(self) -> bytes:
        """Return the pause."""
        return PAUSE

    def headers(self) -> list[tuple[str, bytes]]:
        """Fail as confluent-kafka does."""
        raise SystemError("<method 'headers'> returned a result with an exception set")

    def error(self) -> None:
        """Return that this is a record."""


class Reader:
    """A client that returns one record, and the end of its partition."""

    def __init__(self) -> None:
        self._due: list[UnreadableHeaders | End] = [UnreadableHeaders(), End(1)]

    def assign(self, at: list[TopicPartition]) -> None:
        """Accept the assignment."""

    def consume(self, count: int, _: float) -> list[UnreadableHeaders | End]:
        """Return the next record."""
        given, self._due = self._due[:count], self._due[count:]
        return given


def test_a_pause_with_unreadable_headers_is_read_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one record of another client would stop each reader of the log."""
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (Reader(), None))
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1"))
    log.follow({0: 0})

    chunks = list(log.read_until({0: 1}, HEARTBEAT_S))

    assert [record for chunk in chunks for record in chunk.records] == [(0, 7, PAUSE)]
    assert not any(chunk.reasons for chunk in chunks)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (KafkaError._AUTO_OFFSET_RESET, PositionLostError),
        (KafkaError.OFFSET_OUT_OF_RANGE, PositionLostError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, UnavailableError),
    ],
)
def test_an_error_among_records_is_raised(code: int, error: type[Exception]) -> None:
    """No record is returned then: the caller follows the log again from its own position."""
    log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1"))
    log._positions = {0: 0, 1: 0}
    messages: Any = [UnreadableHeaders(), UnreadableHeaders(1), ErrorEvent(code, 1), UnreadableHeaders(1, 1)]
    with pytest.raises(error):
        next(log._chunks(messages))


@dataclass(frozen=True, slots=True)
class Record:
    """A record, as the client returns it."""

    of_partition: int
    at: int
    times: tuple[int, int]
    content: bytes | None
    reason: bytes | None

    def partition(self) -> int:
        """Return the partition."""
        return self.of_partition

    def offset(self) -> int:
        """Return the offset."""
        return self.at

    def timestamp(self) -> tuple[int, int]:
        """Return the type of the timestamp, and the timestamp in ms."""
        return self.times

    def value(self) -> bytes | None:
        """Return the value."""
        return self.content

    def headers(self) -> list[tuple[str, bytes]] | None:
        """Return the reason, if there is one."""
        return None if self.reason is None else [(REASON_HEADER, self.reason)]

    def error(self) -> None:
        """Return that this is a record."""


def random_messages(rng: Random, ends: dict[int, int]) -> Iterator[Any]:
    """Yield messages of three partitions in runs, with gaps of transactions, ends and errors that pass."""
    for _ in range(rng.randrange(1, 12)):
        partition = rng.choice(list(ends))
        for _ in range(rng.randrange(1, 5)):
            roll, end = rng.random(), ends[partition]
            if roll < 0.1:
                ends[partition] += 1
            elif roll < 0.2:
                yield ErrorEvent(KafkaError._PARTITION_EOF, partition, rng.choice((end, end, max(0, end - 3))))
            elif roll < 0.3:
                yield ErrorEvent(KafkaError._TRANSPORT, rng.choice((partition, -1, 9)), max(0, end - 1))
            else:
                kind = rng.choice((TIMESTAMP_LOG_APPEND_TIME,) * 6 + (TIMESTAMP_CREATE_TIME, TIMESTAMP_NOT_AVAILABLE))
                value = rng.choice((None, b"", b"R", b"ReleaseGroup", PAUSE, PAUSE, b"Heartbeat/1"))
                yield Record(partition, end, (kind, rng.choice((-1, end))), value, rng.choice((None, b"upgrade")))
                ends[partition] += 1


@pytest.mark.slow
def test_chunks_have_every_record_time_reason_and_end() -> None:
    """Whatever the order of partitions, ends and errors in what the client returns, nothing is lost."""
    for seed in range(300):
        rng, starts = Random(seed), {0: 3, 1: 0, 5: 100}
        ends = dict(starts)
        log = KafkaLog(KafkaConnection(bootstrap_servers="127.0.0.1:1"))
        log._positions = dict(starts)
        for _ in range(3):
            messages = list(random_messages(rng, ends))
            before, chunks = dict(log._positions), list(log._chunks(messages))
            for partition in starts:
                ours = [chunk for chunk in chunks if chunk.partition == partition]
                sent = [m for m in messages if isinstance(m, Record) and m.of_partition == partition]
                eofs = [
                    m.at
                    for m in messages
                    if m.partition() == partition and isinstance(m, ErrorEvent) and m.code == KafkaError._PARTITION_EOF
                ]
                records = [record for chunk in ours for record in chunk.records]
                assert records == [(m.at, m.times[1], m.content) for m in sent]
                assert {offset for chunk in ours for offset in chunk.sender_timed} == {
                    m.at for m in sent if m.times[0] != TIMESTAMP_LOG_APPEND_TIME
                }
                assert {offset: why for chunk in ours for offset, why in chunk.reasons.items()} == {
                    m.at: "upgrade" for m in sent if m.content == PAUSE and m.reason is not None
                }
                positions = [before[partition], *(chunk.position for chunk in ours)]
                assert positions == sorted(positions)
                assert positions[-1] == log._positions[partition]
                assert positions[-1] == max([before[partition], *eofs, *(m.at + 1 for m in sent)])
            assert {chunk.partition for chunk in chunks} <= starts.keys()


def test_the_size_of_a_record_with_unreadable_headers_is_that_of_the_rest() -> None:
    """A topic with such records can be sampled, too."""
    record: Any = UnreadableHeaders()
    assert _size(record) == len(PAUSE)
