"""Kafka transactions: which settings the client receives, how its errors are mapped, and how notes are read."""

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from marshal_dagster.errors import AuthorizationError, ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka import clients, transactions
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.transactions import (
    NotesReader,
    ProducerFencedError,
    RecordRejectedError,
    Transaction,
    TransactionStillOpenError,
    check_notes_are_kept,
)
from marshal_dagster.protocol.state import OffsetBounds


class Client:
    """A producer that only raises the error that a test sets."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings: dict[str, Any]) -> None:
        Client.settings = settings
        self.raises: BaseException | None = None

    def flush(self, _: float) -> int:
        """Raise the error if one is set."""
        if self.raises is not None:
            raise self.raises
        return 0

    poll = commit_transaction = abort_transaction = flush

    def purge(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the producer class of the transactions."""
    monkeypatch.setattr(transactions, "Producer", Client)


def transaction(connection_timeout_s: float = 10.0, timeout_s: float = 10.0) -> Transaction:
    """Return a transaction that is not connected."""
    connection = KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=connection_timeout_s)
    return Transaction(
        connection, "id", id_prefix="id", topics=["topic"], timeout_s=timeout_s, partitioner="murmur2_random"
    )


def behind(error: BaseException) -> SystemError:
    """Return the exception that Python builds if two more callbacks run while `error` is pending."""
    wrapped = error
    for _ in range(2):
        after = SystemError("a callback returned a result with an exception set")
        after.__cause__ = wrapped
        wrapped = after
    assert isinstance(wrapped, SystemError)
    return wrapped


@pytest.mark.parametrize("call", ["flush", "commit"])
def test_a_fatal_error_that_comes_amid_callbacks_is_reported_as_what_it_is(call: str) -> None:
    """A fencing error that is wrapped by callbacks is still raised as ProducerFencedError."""
    one = transaction()
    cast("Client", one._producer).raises = behind(
        KafkaException(KafkaError(KafkaError._FENCED, "fenced by a newer one", fatal=True))
    )
    with pytest.raises(ProducerFencedError):
        getattr(one, call)()


@pytest.mark.parametrize(("said", "expected"), [(None, UnavailableError), ("Producer was fenced", ProducerFencedError)])
def test_a_fatal_error_that_the_client_loses_is_reported(said: str | None, expected: type[Exception]) -> None:
    """If the client loses a fatal error, its log determines which error is raised."""
    one = transaction()
    cast("Client", one._producer).raises = SystemError("returned NULL without setting an exception")
    one._log.fatal = said
    with pytest.raises(expected):
        one.flush()


def test_another_error_of_the_interpreter_is_left_alone() -> None:
    """A SystemError that does not come from Kafka is passed on."""
    one = transaction()
    cast("Client", one._producer).raises = behind(ValueError("of a callback"))
    with pytest.raises(SystemError, match="result with an exception set"):
        one.flush()


@pytest.mark.parametrize(("of_connection_s", "wanted_ms"), [(60.0, 10_000), (5.0, 5_000)])
def test_no_request_waits_longer_than_its_transaction_lasts(of_connection_s: float, wanted_ms: int) -> None:
    """The request timeout does not exceed the transaction timeout, because the client rejects such settings."""
    transaction(of_connection_s)
    assert Client.settings["transaction.timeout.ms"] == 10_000
    assert Client.settings["socket.timeout.ms"] == wanted_ms


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError.INVALID_RECORD, RecordRejectedError),
        (KafkaError.MSG_SIZE_TOO_LARGE, RecordRejectedError),
        (KafkaError.UNKNOWN, MarshalError),
        (KafkaError.INVALID_TXN_STATE, MarshalError),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, MarshalError),
        (KafkaError.UNSUPPORTED_COMPRESSION_TYPE, MarshalError),
    ],
)
def test_only_a_record_at_fault_is_rejected(code: int, expected: type[Exception]) -> None:
    """An outbox sets rejected rows aside, so an error of the brokers or of the producer must not count as a row's."""
    one = transaction()
    one._note("row", KafkaError(code), SimpleNamespace(topic=lambda: "orders"))
    with pytest.raises(expected):
        one.flush()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_time_of_the_client_is_not_the_fault_of_a_record(monkeypatch: pytest.MonkeyPatch, is_given: bool) -> None:
    """A wrong clock would otherwise reject each record. A time that the sender gave is the record's own."""
    one = transaction()
    monkeypatch.setattr(Client, "produce", lambda *_, **__: None, raising=False)
    one.send("orders", b"", None, name="row", timestamp_ms=None)
    one.send_many([("orders", b"", None, -1, 1 if is_given else transactions.NOW, {})])
    one._note("row", KafkaError(KafkaError.INVALID_TIMESTAMP), SimpleNamespace(topic=lambda: "orders"))
    expected = RecordRejectedError if is_given else UnavailableError
    with pytest.raises(expected, match="timestamp" if is_given else "topic 'orders' refuses records with the present"):
        one.flush()


class NotesConsumer:
    """A consumer of a notes topic that returns the records from an offset on."""

    def __init__(self, records: list[tuple[bytes | None, bytes | None]]) -> None:
        self.records = records
        self.reads: list[int] = []
        self._at = 0

    def assign(self, places: list[TopicPartition]) -> None:
        """Start at an offset."""
        self._at = places[0].offset
        self.reads.append(self._at)

    def unassign(self) -> None:
        """Do nothing."""

    def consume(self, *_: object) -> list[SimpleNamespace]:
        """Return the remaining records."""
        found = [
            SimpleNamespace(
                error=lambda: None,
                key=lambda key=key: key,
                value=lambda value=value: value,
                offset=lambda offset=offset: offset,
            )
            for offset, (key, value) in enumerate(self.records)
            if offset >= self._at
        ]
        self._at = len(self.records)
        return found


def noted(
    monkeypatch: pytest.MonkeyPatch, *records: tuple[bytes | None, bytes | None], last: int | None = None
) -> tuple[dict[str, bytes], list[int]]:
    """Return the notes that a reader finds in such a topic, and the offsets at which it started to read."""
    consumer = NotesConsumer(list(records))
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (consumer, None))
    bounds = {0: OffsetBounds(0, len(records))}
    topics = cast("Any", SimpleNamespace(offsets=lambda *_, **__: bounds))
    connection = KafkaConnection(bootstrap_servers="127.0.0.1:1")
    reader = NotesReader(
        connection,
        "notes",
        topics,
        last=last,
        is_note=lambda key, value: key != "x" and value is not None and value.isdigit(),
    )
    return dict(reader.newest(1.0)), consumer.reads


FOREIGN = (None, b"", b"{}", b"no note")


@pytest.mark.parametrize("value", FOREIGN)
def test_a_record_that_is_not_a_note_replaces_no_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: bytes | None
) -> None:
    """The warning names the offset of the foreign record.

    If a key has no note, its foreign value is returned, so the caller sees that a note may have been lost.
    """
    found, _ = noted(monkeypatch, (b"a", b"1"), (b"a", value), (b"b", value), (None, value), (b"b", b"2"))
    assert (found["a"], found["b"], found[""]) == (b"1", b"2", value or b"")
    assert "topic 'notes', partition 0, offset 1: the record with key 'a' is not a note" in caplog.text
    assert len(caplog.records) == 3


def test_the_note_is_looked_for_before_the_last_offsets_if_those_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the last offsets contain no note, the whole topic is read."""
    found, reads = noted(monkeypatch, (b"a", b"1"), *[(b"a", b"no note"), (b"x", b"2")] * 5, last=4)
    assert found["a"] == b"1"
    assert reads == [7, 0]


class _Topics:
    """A stand-in for `Topics`."""

    def __init__(self, policy: str | None) -> None:
        self.policy = policy

    def settings(self, _: str) -> dict[str, str]:
        """Return the policy. Without one, raise the error for missing rights."""
        if self.policy is None:
            raise AuthorizationError("grant DESCRIBE_CONFIGS")
        return {"cleanup.policy": self.policy}


def topics_with(policy: str | None) -> Topics:
    """Return topics with this cleanup policy."""
    return cast("Topics", _Topics(policy))


@pytest.mark.parametrize("policy", ["compact", None])
def test_a_topic_of_notes_that_keeps_them_passes(policy: str | None) -> None:
    """A topic that is only compacted passes. So does one whose settings may not be read."""
    check_notes_are_kept(topics_with(policy), "notes")


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_of_notes_that_forgets_in_time_is_refused(policy: str) -> None:
    """A topic that deletes old notes is rejected, because what they record would be written again."""
    with pytest.raises(ConfigurationError, match=rf"'notes' has cleanup.policy {policy}, .* set it to compact alone"):
        check_notes_are_kept(topics_with(policy), "notes")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([KafkaError._PARTITION_EOF], "has an open transaction at offset 0"),
        ([KafkaError._PARTITION_EOF, KafkaError.COORDINATOR_NOT_AVAILABLE], "has an open transaction at offset 0"),
        ([KafkaError.COORDINATOR_NOT_AVAILABLE], "read only up to offset 0 of 1 .* the broker did not answer"),
        ([], "read only up to offset 0 of 1 .* the broker did not answer"),
    ],
)
def test_an_open_transaction_is_not_a_silent_broker(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], message: str
) -> None:
    """A broker reports the end of what is committed; without that report nothing is known of a transaction."""
    events = [SimpleNamespace(error=lambda code=code: KafkaError(code), offset=lambda: 0) for code in codes]

    def consume(*_: object) -> list[SimpleNamespace]:
        return [events.pop(0)] if events else []

    consumer = NotesConsumer([])
    monkeypatch.setattr(consumer, "consume", consume)
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (consumer, None))
    topics = cast("Any", SimpleNamespace(offsets=lambda *_, **__: {0: OffsetBounds(0, 1)}))
    reader = NotesReader(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=0.05), "notes", topics)
    with pytest.raises(TransactionStillOpenError, match=message):
        reader.newest(0.05)


def test_a_broker_that_answers_slowly_has_no_open_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is that for a transaction: neither a slow connection nor many records in turn count."""
    now_s, records = [0.0], [(0, b"a", b"1"), (1, b"b", b"2"), (2, b"c", b"3")]

    def consume(*_: object) -> list[SimpleNamespace]:
        now_s[0] += 3
        if now_s[0] < 9:
            return []
        (offset, key, value), *records[:] = records
        found = {"offset": offset, "key": key, "value": value, "error": None}
        return [SimpleNamespace(**{name: lambda given=given: given for name, given in found.items()})]

    consumer = NotesConsumer([])
    monkeypatch.setattr(consumer, "consume", consume)
    monkeypatch.setattr(clients, "consumer", lambda *_, **__: (consumer, None))
    monkeypatch.setattr(transactions, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    topics = cast("Any", SimpleNamespace(offsets=lambda *_, **__: {0: OffsetBounds(0, 3)}))
    reader = NotesReader(KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=10), "notes", topics)
    assert reader.newest(2) == {"a": b"1", "b": b"2", "c": b"3"}
