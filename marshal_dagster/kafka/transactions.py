"""Write records in Kafka transactions, and read the notes that such transactions leave in a compacted topic.

A `Transaction` fences every producer that used its transactional id before. It then carries out one transaction after
another, each only after the commit of the previous one was acknowledged. So a record that a broker or the network
delays has an older producer epoch, and cannot get into a later transaction. The Kafka sink and the outbox use it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""The only partition that is used. With several, adding a partition would move notes to one that no reader expects."""

_MAX_BYTES: Final = 1_048_588
"""The largest record that the client accepts by default: the brokers' own default. Without it, the limit is lower."""
_SLICE_S: Final = 0.5
_PAUSE_S: Final = 0.05
_ABORT_WITHIN_S: Final = 5.0
_RECORDS_BETWEEN_POLLS: Final = 1_000
_READ_BATCH: Final = 10_000
_FEW_OFFSETS: Final = 1_000
"""So few offsets are read one message at a time, because a read of a batch lasts until the batch is full."""
_LONGEST_SHOWN: Final = 100

Header = tuple[str, str | bytes | None]
Headers = list[Header] | dict[str, str | bytes | None]
"""The headers of a record. The client library takes a dictionary in two thirds of the time."""
UnnamedRecord = tuple[str, bytes | None, bytes | None, int, int, Headers | None]
"""Topic, value, key, partition, timestamp in unix ms, and headers of a record."""
CHOSEN_PARTITION: Final = -1
"""The partitioner chooses the partition."""
NOW: Final = 0
"""The client sets the timestamp."""

_FENCED: Final = frozenset(
    {
        KafkaError._FENCED,  # noqa: SLF001 - a public code of the client library
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
        KafkaError.INVALID_TXN_STATE,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._FATAL,  # noqa: SLF001
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    }
)
_FOR_ANOTHER: Final = KafkaError._INVALID_DIFFERENT_RECORD  # noqa: SLF001
"""The broker refused a batch of records because of another record in it."""
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_ITS_FAULT: Final = _TOO_LARGE | {KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001


class ProducerFencedError(Exception):
    """Another producer with this transactional id started later, or the broker has aborted the transaction.

    `took_s` is how long the transaction was open, in seconds.
    """

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        super().__init__(f"another producer fenced this one, or the transaction was aborted, after {took_s:.1f} s")


class TransactionStillOpenError(UnavailableError):
    """A topic of notes was not read to its end in time, usually because a transaction there is open."""


class RecordRejectedError(Exception):
    """The broker or the client rejects a record. `name` is the sender's name for the record.

    `index` is the index of a record that the client rejected in `send_many`, otherwise None. `is_sure` is whether the
    record itself was rejected. A broker may also reject a whole batch because of another record in it.
    """

    def __init__(
        self, name: str, reason: str, *, is_too_large: bool, is_sure: bool = False, index: int | None = None
    ) -> None:
        self.name, self.reason, self.is_too_large, self.is_sure = name, reason, is_too_large, is_sure
        self.index = index
        super().__init__(f"{name}: {reason}")


class Transaction:
    """A transactional producer that carries out one transaction after another.

    Use it as a context manager. At the end of the block an open transaction is aborted, and the producer is closed.
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

        Args:
            connection: How to reach the cluster.
            transactional_id: The id under which other producers are fenced.
            id_prefix: The beginning of the transactional ids on which a right is granted, for error messages.
            topics: The topics to write to; the first one is known to exist.
            timeout_s: The broker aborts a transaction this many seconds after its first record.
            partitioner: How the partition of a record is chosen; see `Partitioner`.
            sends_alone: Send each record in a request of its own, so that a rejected record is known exactly.

        Raises:
            ConfigurationError: The client library rejects the settings.
        """
        self._connection = connection
        self._timeout_s = timeout_s
        self._sends_alone = sends_alone
        self._topics = tuple(topics)
        self._rights = Needed((Right.WRITE,), transactional_ids=id_prefix)
        self._began_s: float | None = None
        self._is_open = False
        self._refused: tuple[str, KafkaError, str] | None = None
        """The name of the first rejected record, its error and its topic."""
        self._has_times = False
        """Whether any record had a timestamp of the sender, and not one of the client."""
        self._sent = 0
        timeout_ms = round(timeout_s * 1000)
        settings = {
            # The client does not accept a longer timeout for an answer than for the transaction.
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
        defaults = {
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "message.max.bytes": _MAX_BYTES,
            "queue.buffering.max.kbytes": 65_536,
        }
        self._producer: Producer | None
        self._producer, self._log = make_client(Producer, connection, CLIENT_ID, settings, defaults)

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise RuntimeError("this transaction was closed; create another one")
        return self._producer

    def __enter__(self) -> Self:
        """Fence earlier producers: their open transaction is aborted, and the brokers refuse what they still send."""
        try:
            self._fence()
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Abort an open transaction, if that is possible within a few seconds; otherwise the broker aborts it later."""
        try:
            if self._is_open:
                self._abort()
        finally:
            self._let_go()

    def begin(self) -> None:
        """Begin a transaction. The broker measures its timeout from the first record."""
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
        """Send a record. This waits while the queue is full.

        Args:
            topic: The topic.
            value: The value.
            key: The key.
            name: The sender's name for the record, for errors.
            partition: The partition; None: the partitioner chooses it.
            headers: The headers.
            timestamp_ms: The timestamp in unix ms; None: the client sets it.

        Raises:
            RecordRejectedError: The client or the broker rejects this record or an earlier one.
            ProducerFencedError: Another producer has fenced this one, or the transaction has timed out.
            UnavailableError: The brokers did not answer in time.
        """
        if self._began_s is None:
            self._began_s = time.monotonic()
        given: dict[str, Any] = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
        self._has_times = self._has_times or timestamp_ms is not None
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
            except (TypeError, ValueError) as wrong:  # for example headers of a type that the client does not take
                raise RecordRejectedError(name, str(wrong), is_too_large=False, is_sure=True) from None
            except KafkaException as raised:
                raise self._produce_error(name, error_in(raised), is_sure=True) from None
        self._sent += 1
        if self._sent % _RECORDS_BETWEEN_POLLS == 0:
            self._poll(0)

    def send_many(self, records: Iterable[UnnamedRecord]) -> int:
        """Send many records fast. They have no names, so an error names a record only by its index, if at all.

        Args:
            records: For each record topic, value, key, partition (`CHOSEN_PARTITION` or a number), timestamp in unix
                ms (or `NOW`) and headers.

        Returns:
            The number of records.

        Raises:
            RecordRejectedError: The client or the broker rejects a record; `is_sure` is false.
            ProducerFencedError: Another producer has fenced this one, or the transaction has timed out.
            UnavailableError: The brokers did not answer in time.
        """
        if self._began_s is None:
            self._began_s = time.monotonic()
        produce, report = self._client.produce, partial(self._note, "")
        sent = 0
        for topic, value, key, partition, timestamp_ms, headers in records:
            while True:
                try:
                    if headers is None and timestamp_ms == NOW:  # arguments without names save a fifth of the time
                        produce(topic, value, key, partition, report)
                    else:
                        self._has_times = self._has_times or timestamp_ms != NOW
                        produce(topic, value, key, partition, report, timestamp=timestamp_ms, headers=headers)
                    break
                except BufferError:
                    self._poll(_PAUSE_S)
                    self._check_time()
                except (TypeError, ValueError) as wrong:
                    raise RecordRejectedError("", str(wrong), is_too_large=False, index=sent) from None
                except KafkaException as raised:
                    raise self._produce_error("", error_in(raised), is_sure=False, index=sent) from None
            sent += 1
            if sent % _RECORDS_BETWEEN_POLLS == 0:
                self._poll(0)
        self._sent += sent
        return sent

    def _produce_error(self, name: str, error: KafkaError, *, is_sure: bool, index: int | None = None) -> Exception:
        """Return the exception for a record that the client did not take."""
        if error.code() in _ITS_FAULT:
            is_too_large = error.code() in _TOO_LARGE
            return RecordRejectedError(name, error.str(), is_too_large=is_too_large, is_sure=is_sure, index=index)
        self._await_refusal()
        return self._failure(error)

    def flush(self) -> None:
        """Wait until the brokers have acknowledged all records. Raises as `send`."""
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
        """Commit the transaction.

        If this raises, the transaction may be committed or not: read the topic to find out.
        """
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
                with contextlib.suppress(KafkaException), _unwrapped():  # the poll raises the same error again
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
        """Release the client by deleting the last reference to it.

        Its `close` is not called, because that aborts an open transaction without a time limit.
        """
        client, self._producer = self._producer, None
        if client is None:
            return
        with contextlib.suppress(KafkaException):
            client.purge()
        if self._log.reason is not None:
            # The client may be looking up a host name, which takes seconds. So a thread gets the last reference.
            threading.Thread(target=id, args=(client,), name=f"close {CLIENT_ID}", daemon=True).start()

    def _note(self, name: str, error: KafkaError | None, message: Any) -> None:  # noqa: ANN401 - the client's
        """Keep the first record that was rejected, not those that were purged or rejected because of it."""
        if error is None or error.code() in _PURGED:
            return
        if self._refused is None or self._refused[1].code() == _FOR_ANOTHER != error.code():
            self._refused = name, error, message.topic()

    def _poll(self, timeout_s: float) -> None:
        try:
            with _unwrapped():
                self._client.poll(timeout_s)
        except KafkaException as raised:
            raise self._failure(error_in(raised)) from None
        self._check_refused()

    def _await_refusal(self) -> None:
        """Raise the error of the earlier record because of which the client accepts no more records."""
        deadline = time.monotonic() + _SLICE_S
        while time.monotonic() < deadline:
            self._poll(_PAUSE_S)

    def _check_refused(self) -> None:
        """Raise if a record was rejected: `RecordRejectedError` if the record is the cause, another error if not."""
        if self._refused is None:
            return
        name, error, topic = self._refused
        code = error.code()
        if code == KafkaError.INVALID_TIMESTAMP and not self._has_times:
            raise UnavailableError(
                f"topic {topic!r} refuses records with the present time of this machine. Set the clocks of this "
                "machine and of the brokers, or raise message.timestamp.before.max.ms of the topic"
            )
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
                "(transaction.max.timeout.ms); set a smaller value"
            )
        request = Request(doing, on_topic(self._topics[0], Right.WRITE), self._topics[0])
        return failure(request, error, self._log, max(self._took_s, self._connection.timeout_s))


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the client's fatal error itself instead of the `SystemError` that hides it.

    The error is pending while further callbacks run in the same poll. Python then raises a `SystemError` for the first
    of these callbacks, or the client loses the error; in that case this raises a fatal error without a reason.
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
    """Check that a topic of notes is compacted, so that it keeps them. Pass if this user may not see its settings.

    Raises:
        ConfigurationError: The cleanup policy is not `compact` alone.
        TopicNotFoundError: The topic does not exist.
        UnavailableError: The brokers did not answer in time.
    """
    try:
        policy = topics.settings(topic).get("cleanup.policy")
    except AuthorizationError as missing:
        logger.info("the settings of topic %r are not checked: %s", topic, missing)
        return
    if policy != "compact":
        raise ConfigurationError(
            f"topic {topic!r} has cleanup.policy {policy}, so it deletes notes after some time, and records would then "
            "be written twice: set it to compact alone"
        )


def _is_end(message: Any) -> bool:  # noqa: ANN401 - the client library's type hints omit the offset of an error
    """Return whether a message reports the end of a partition: for committed records, the first open transaction."""
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF  # noqa: SLF001 - a public code


class NotesReader:
    """A reader of the notes that transactions wrote to a compacted topic: the newest committed value of each key.

    Only one thread may use it. At the end of the `with` block its connections are closed.
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
        """Set the reader up. It connects when it is first needed.

        Args:
            connection: How to reach the cluster.
            topic: The topic of notes.
            topics: The client for requests about topics of the same cluster.
            last: Read only this number of offsets at the end; if they contain no note, read the whole topic. That is
                enough for a topic with few keys. None: always read the whole topic.
            is_note: Returns whether a record with this key and value is a note. A record that is not a note does not
                replace the note of its key. If the key has no note, the record counts as its newest value, so that the
                caller sees that a note may have been lost.
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
        """Close the connections."""
        if self._client is not None:
            close_client(*self._client)
        self._client = None

    def resume(self, newest: Mapping[str, bytes], next_offset: int) -> None:
        """Continue where another reader of the same topic was, which had these newest values."""
        self._newest, self._next, self._has_note = dict(newest), next_offset, True

    @property
    def next_offset(self) -> int:
        """The offset up to which the topic was read."""
        return self._next

    def newest(self, patience_s: float) -> Mapping[str, bytes]:
        """Read up to the present end, including open transactions, and return the newest value of each key.

        If a transaction is open there, this waits for its end, because its notes count if it is committed.

        Args:
            patience_s: How long to wait for an open transaction, in seconds since the last record was read. For an
                answer of the broker this waits for the timeout of the connection if that is longer.

        Raises:
            TransactionStillOpenError: A transaction has not ended in that time.
            CoordinationLogChangedError: The topic was re-created or truncated since the last call.
        """
        at = self._topics.offsets(self.topic, [NOTES_PARTITION], committed_only=False)[NOTES_PARTITION]
        if at.end < self._next:
            raise CoordinationLogChangedError(
                f"topic {self.topic!r}, partition {NOTES_PARTITION}, ends at offset {at.end}, but was read up to "
                f"{self._next} before: it was re-created or truncated, and notes may be lost. Keep this topic while it "
                "is in use"
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
        progress_s, readable_end = time.monotonic(), None
        at_once = _READ_BATCH if end - start > _FEW_OFFSETS else 1
        try:
            while start < end:
                before = start
                for message in consumer.consume(at_once, _PAUSE_S):
                    start = max(start, self._take(message, log))
                    if _is_end(message):
                        readable_end = message.offset()
                if start > before:
                    progress_s = time.monotonic()
                is_at_open = start == readable_end
                # Until the broker has answered, it may be the connection that takes long, and no transaction.
                within_s = patience_s if is_at_open else max(patience_s, self._connection.timeout_s)
                if start < end and time.monotonic() - progress_s > within_s:
                    raise self._unread(start, end, within_s, is_at_open=is_at_open)
        finally:
            consumer.unassign()

    def _unread(self, start: int, end: int, within_s: float, *, is_at_open: bool) -> TransactionStillOpenError:
        if is_at_open:
            return TransactionStillOpenError(
                f"topic {self.topic!r} has an open transaction at offset {start}, which has not ended within "
                f"{within_s:g} s. Try again; `kafka-transactions find-hanging` finds one that never ends"
            )
        return TransactionStillOpenError(
            f"topic {self.topic!r}, partition {NOTES_PARTITION}, was read only up to offset {start} of {end} within "
            f"{within_s:g} s, because the broker did not answer in time. Check the brokers, then try again"
        )

    def _take(self, message: Any, log: ClientLog) -> int:  # noqa: ANN401 - the client library's type hints omit the offset of an error
        """Process a message, and return the next offset."""
        error, offset = message.error(), message.offset()
        if error is None:
            key, value = (message.key() or b"").decode(errors="replace"), message.value()
            if self._is_note(key, value):
                self._newest[key], self._has_note = value or b"", True
            else:
                self._newest.setdefault(key, value or b"")
                logger.warning(
                    "topic %r, partition %d, offset %d: the record with key %r is not a note of this library, and does "
                    "not replace one. Revoke the right of its sender to write to this topic",
                    self.topic,
                    NOTES_PARTITION,
                    offset,
                    key[:_LONGEST_SHOWN],
                )
            return int(offset) + 1
        if _is_end(message):
            return int(offset)
        if not error.retriable() and error.code() not in clients.HARMLESS_TO_A_READER:
            request = Request(f"read topic {self.topic!r}", on_topic(self.topic, Right.READ), self.topic)
            raise failure(request, error, log, self._connection.timeout_s)
        return 0
