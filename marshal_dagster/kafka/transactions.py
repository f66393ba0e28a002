"""Transactions of a producer that fences whoever wrote under its transactional id before, and a topic of its notes.

A producer carries out one transaction, or several of which each has been acknowledged as committed: what a broker or a
network holds back of another has an older epoch, and can get into no later one.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    CoordinationLogChangedError,
    MarshalError,
    UnavailableError,
)
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.acls import Needed, Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.clients import ClientLog, close_client, error_in, make_client, reach
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import MISSING, Request, failure, right_missing

logger = logging.getLogger(__name__)

CLIENT_ID: Final = "marshal-dagster-sink"
NOTES_PARTITION: Final = 0
"""The one partition that is used: if more were, adding partitions would move notes to where nobody looks."""

_SLICE_S: Final = 0.5
_PAUSE_S: Final = 0.05
_ABORT_WITHIN_S: Final = 5.0
_RECORDS_BETWEEN_POLLS: Final = 1_000
_READ_BATCH: Final = 10_000
_LONGEST_SHOWN: Final = 100

Header = tuple[str, bytes | None]

_FENCED: Final = frozenset(
    {
        KafkaError._FENCED,  # noqa: SLF001 - the library's own name
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.PRODUCER_FENCED,
    }
)
_PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001
_NOT_ITS_FAULT: Final = frozenset(
    {
        *_FENCED,
        *MISSING,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._FATAL,  # noqa: SLF001
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    }
)
_FOR_ANOTHER: Final = KafkaError._INVALID_DIFFERENT_RECORD  # noqa: SLF001
"""The broker refused a batch of records for another one of them."""
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_ITS_FAULT: Final = _TOO_LARGE | {KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001


class ProducerFencedError(Exception):
    """Another producer with this transactional id was begun since, or the broker has aborted the transaction.

    `took_s` is how long the transaction had been open, in seconds.
    """

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        super().__init__(f"fenced after {took_s:.1f} s")


class TransactionStillOpenError(UnavailableError):
    """A transaction that is open in a topic of notes has not ended in time."""


class RecordRejectedError(Exception):
    """The broker or the client does not take a record; `name` is its sender's name for it.

    The client means this very record (`is_sure`), the broker the batch that it came in.
    """

    def __init__(self, name: str, reason: str, *, is_too_large: bool, is_sure: bool = False) -> None:
        self.name, self.reason, self.is_too_large, self.is_sure = name, reason, is_too_large, is_sure
        super().__init__(f"{name}: {reason}")


class Transaction:
    """A transaction, and another once it is committed.

    The producer is gone behind the `with` block, and what was not committed is aborted.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        transactional_id: str,
        *,
        id_prefix: str,
        topics: Sequence[str],
        timeout_s: float,
        partitioner: str,
        sends_alone: bool = False,
    ) -> None:
        """Connect in the background.

        With `sends_alone` each record is a request of its own, so that the one is known that a broker refuses. The
        broker aborts the transaction `timeout_s` seconds after its first record. `topics` are those that it writes
        to, the first of which is known to exist; `id_prefix` is what ids for which a right is granted begin with.
        Raises `ConfigurationError` when the client library refuses the settings.
        """
        self._connection = connection
        self._timeout_s = timeout_s
        self._sends_alone = sends_alone
        self._topics = tuple(topics)
        self._rights = Needed((Right.WRITE,), transactional_ids=id_prefix)
        self._began_s: float | None = None
        self._is_open = False
        self._refused: tuple[str, KafkaError] | None = None
        self._sent = 0
        timeout_ms = round(timeout_s * 1000)
        settings = {
            # The client refuses to wait longer for an answer than the transaction may take.
            "socket.timeout.ms": min(timeout_ms, round(connection.timeout_s * 1000)),
            "acks": "all",
            "enable.idempotence": True,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "message.timeout.ms": timeout_ms,
            "partitioner": partitioner,
            "delivery.report.only.error": True,
            **({"batch.num.messages": 1} if sends_alone else {}),
        }
        defaults = {"linger.ms": 20, "batch.size": 1_000_000, "queue.buffering.max.kbytes": 65_536}
        self._producer: Producer | None
        self._producer, self._log = make_client(Producer, connection, CLIENT_ID, settings, defaults)

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise RuntimeError("this transaction is over")
        return self._producer

    def __enter__(self) -> Self:
        """Fence: end what was written under this id before, and refuse what its writers still send."""
        try:
            self._fence()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what is open, as far as that can be done soon; else the broker does it in time."""
        try:
            if self._is_open:
                self._abort()
        finally:
            self._let_go()

    def begin(self) -> None:
        """Begin; the broker's time runs from the first record on."""
        self._client.begin_transaction()
        self._began_s = None
        self._is_open = True

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        *,
        name: str,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Send a record; it waits while the queue is full.

        Raises `RecordRejectedError`, of this record or an earlier one, `ProducerFencedError`, `UnavailableError`.
        """
        if self._began_s is None:
            self._began_s = time.monotonic()
        given: dict[str, Any] = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
        report = partial(self._note, name)
        while True:
            try:
                self._client.produce(
                    topic,
                    value,
                    key,
                    -1 if partition is None else partition,
                    on_delivery=report,
                    headers=None if headers is None else list(headers),
                    **given,
                )
                break
            except BufferError:
                self._poll(_PAUSE_S)
                self._check_time()
            except (TypeError, ValueError) as wrong:  # such as headers that are not what the client takes
                raise RecordRejectedError(name, str(wrong), is_too_large=False, is_sure=True) from None
            except KafkaException as raised:
                error = error_in(raised)
                if error.code() in _ITS_FAULT:
                    is_too_large = error.code() in _TOO_LARGE
                    raise RecordRejectedError(name, error.str(), is_too_large=is_too_large, is_sure=True) from None
                self._await_refusal()
                raise self._failure(error) from None
        self._sent += 1
        if self._sent % _RECORDS_BETWEEN_POLLS == 0:
            self._poll(0)

    def flush(self) -> None:
        """Wait until the brokers have all that was sent. Raises as `send`."""
        left = 1
        while left:
            try:
                with _unwrapped():
                    left = self._client.flush(_SLICE_S)
            except KafkaException as raised:
                raise self._failure(error_in(raised)) from None
            self._check_refused()
            if left:
                self._check_time()

    def commit(self) -> None:
        """Commit. Whatever is raised, it may have been committed: ask the topic."""
        deadline = time.monotonic() + max(self._connection.timeout_s, _SLICE_S)
        while True:
            try:
                with _unwrapped():
                    self._client.commit_transaction(_SLICE_S)
            except KafkaException as raised:
                error = error_in(raised)
                if error.retriable() and time.monotonic() < deadline:
                    continue
                self._is_open = False
                if error.txn_requires_abort():
                    self._abort()
                    self._check_refused()
                raise self._failure(error) from None
            else:
                self._is_open = False
                return

    def _fence(self) -> None:
        reach(self._client, self._log, timeout_s=self._connection.timeout_s, topic=self._topics[0])
        deadline = time.monotonic() + self._connection.timeout_s
        while True:
            try:
                with _unwrapped():
                    self._client.init_transactions(_SLICE_S)
            except KafkaException as raised:
                error = error_in(raised)
                with contextlib.suppress(KafkaException), _unwrapped():  # the same, once more
                    self._client.poll(0)
                if not error.retriable() or time.monotonic() >= deadline:
                    raise self._failure(error) from None
            else:
                return

    def _abort(self) -> None:
        self._is_open = False
        deadline = time.monotonic() + _ABORT_WITHIN_S
        with contextlib.suppress(KafkaException), _unwrapped():
            self._client.purge()
        while time.monotonic() < deadline:
            try:
                with _unwrapped():
                    self._client.abort_transaction(_SLICE_S)
            except KafkaException as raised:
                if not error_in(raised).retriable():
                    return
            else:
                return

    def _let_go(self) -> None:
        """Give up the client.

        Its own `close` aborts what is open, without a bound in time; giving up the last reference to it does not.
        """
        client, self._producer = self._producer, None
        if client is None:
            return
        with contextlib.suppress(KafkaException):
            client.purge()
        if self._log.reason is not None:
            # It may be in the midst of looking up a name, which takes seconds: the thread has the last reference.
            threading.Thread(target=id, args=(client,), name=f"close {CLIENT_ID}", daemon=True).start()

    def _note(self, name: str, error: KafkaError | None, _: object) -> None:
        """Keep the first record that was not taken; those purged behind it, or refused for it, are no news."""
        if error is None or error.code() in _PURGED:
            return
        if self._refused is None or self._refused[1].code() == _FOR_ANOTHER != error.code():
            self._refused = name, error

    def _poll(self, timeout_s: float) -> None:
        try:
            with _unwrapped():
                self._client.poll(timeout_s)
        except KafkaException as raised:
            raise self._failure(error_in(raised)) from None
        self._check_refused()

    def _await_refusal(self) -> None:
        """Raise what a record before this one came to, which is why the client takes none any more."""
        deadline = time.monotonic() + _SLICE_S
        while time.monotonic() < deadline:
            self._poll(_PAUSE_S)

    def _check_refused(self) -> None:
        """Raise for a record that was not taken: by its own fault, or by what keeps all of them away."""
        if self._refused is None:
            return
        name, error = self._refused
        code = error.code()
        if code not in _ITS_FAULT and (code in _NOT_ITS_FAULT or error.retriable()):
            raise self._failure(error) from None
        is_too_large, is_sure = code in _TOO_LARGE, self._sends_alone
        raise RecordRejectedError(name, error.str(), is_too_large=is_too_large, is_sure=is_sure) from None

    def _check_time(self) -> None:
        if self._took_s > self._timeout_s:
            raise ProducerFencedError(self._took_s)

    @property
    def _took_s(self) -> float:
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def _failure(self, error: KafkaError) -> MarshalError | ProducerFencedError:
        code = error.code()
        if code in _FENCED or "fenced" in (self._log.fatal or ""):
            return ProducerFencedError(self._took_s)
        doing = f"write to topic {self._topics[0]!r} in a transaction"
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return right_missing(f"cannot {doing} on {self._log.servers}", self._rights, self._log)
        if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return ConfigurationError(
                f"transaction_timeout_s: {self._timeout_s:g} is more than the brokers allow "
                "(transaction.max.timeout.ms); give less"
            )
        request = Request(doing, on_topic(self._topics[0], Right.WRITE), self._topics[0])
        return failure(request, error, self._log, max(self._took_s, self._connection.timeout_s))


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the client's fatal error as it is, or as far as it is known.

    It is pending while further callbacks run in the same poll, and Python makes a SystemError of the first one, or the
    client loses it on the way.
    """
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if cause is None:
            raise KafkaException(KafkaError(KafkaError._FATAL, "the client failed", fatal=True)) from None  # noqa: SLF001
        if not isinstance(cause, KafkaException):
            raise
        raise cause from None


def check_notes_are_kept(topics: Topics, topic: str) -> None:
    """Raise `ConfigurationError` if a topic of notes loses them in time; passes if its settings may not be seen.

    Raises `TopicNotFoundError`, `UnavailableError`.
    """
    try:
        policy = topics.settings(topic).get("cleanup.policy")
    except AuthorizationError as missing:
        logger.info("the settings of topic %s are not checked: %s", topic, missing)
        return
    if policy != "compact":
        raise ConfigurationError(
            f"topic {topic!r} has cleanup.policy {policy}, so it forgets in time what was written, which would be "
            "written twice: set it to compact alone"
        )


class NotesReader:
    """What transactions have noted in a compacted topic: the newest committed value of each key.

    For one thread; its connections are gone behind the `with` block.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        topics: Topics,
        *,
        last: int | None = None,
        is_note: Callable[[str, bytes | None], bool] = lambda _key, _value: True,
    ) -> None:
        """Name the topic; nothing is connected before it is needed. `topics` are those of the same cluster.

        Of a topic with few keys it is enough to read the `last` offsets, unless these hold no note. `is_note` judges a
        record by key and value. A record that is not a note does not replace the note of its key. If the key has no
        note, the record counts as its newest value, so that the caller sees that a note may have been lost.
        """
        self.topic = topic
        self._last = last
        self._is_note = is_note
        self._connection = connection
        self._topics = topics
        self._newest: dict[str, bytes] = {}
        self._has_note = False
        self._next = 0
        self._client: tuple[Consumer, ClientLog] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the connections."""
        if self._client is not None:
            close_client(*self._client)
        self._client = None

    def newest(self, patience_s: float) -> Mapping[str, bytes]:
        """Read up to the present end, be it committed or not, and give the newest value of each key.

        A transaction that is open there is waited for, `patience_s` seconds at the most: what comes of it counts.
        Raises `TransactionStillOpenError` beyond that.
        """
        at = self._topics.offsets(self.topic, [NOTES_PARTITION], committed_only=False)[NOTES_PARTITION]
        if at.end < self._next:
            raise CoordinationLogChangedError(
                f"topic {self.topic!r} ends at {at.end}, and was read up to {self._next}: it was made anew or truncated"
            )
        start = max(at.start, self._next)
        near = start if self._last is None else max(start, at.end - self._last)
        if near < at.end:
            self._read(near, at.end, patience_s)
        if not self._has_note and start < near:
            self._read(start, near, patience_s)
        self._next = at.end
        return self._newest

    def _read(self, start: int, end: int, patience_s: float) -> None:
        if self._client is None:
            self._client = clients.consumer(
                self._connection, client_id=CLIENT_ID, committed_only=True, fetch_wait_ms=10
            )
        consumer, log = self._client
        consumer.assign([TopicPartition(self.topic, NOTES_PARTITION, start)])
        deadline = time.monotonic() + patience_s
        try:
            while start < end:
                for message in consumer.consume(_READ_BATCH, _PAUSE_S):
                    start = max(start, self._take(message, log))
                if start < end and time.monotonic() > deadline:
                    raise TransactionStillOpenError(
                        f"topic {self.topic!r} has an open transaction at offset {start}, which has not ended within "
                        f"{patience_s:g} s: try again; `kafka-transactions find-hanging` tells of one that never ends"
                    )
        finally:
            consumer.unassign()

    def _take(self, message: Any, log: ClientLog) -> int:  # noqa: ANN401 - the library's hints say that an error's message has no place
        """Take a message in, and give the next offset."""
        error, offset = message.error(), message.offset()
        if error is None:
            key, value = (message.key() or b"").decode(errors="replace"), message.value()
            if self._is_note(key, value):
                self._newest[key], self._has_note = value or b"", True
            else:
                self._newest.setdefault(key, value or b"")
                logger.warning(
                    "topic %r, partition %d, offset %d: the record with key %r is not a note of this library, and "
                    "replaces none. Revoke the right of its sender to write to this topic",
                    self.topic,
                    NOTES_PARTITION,
                    offset,
                    key[:_LONGEST_SHOWN],
                )
            return int(offset) + 1
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's own name
            return int(offset)
        if not error.retriable() and error.code() not in clients.HARMLESS_TO_A_READER:
            request = Request(f"read topic {self.topic!r}", on_topic(self.topic, Right.READ), self.topic)
            raise failure(request, error, log, self._connection.timeout_s)
        return 0
