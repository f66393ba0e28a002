"""The Kafka side of a harvester: publishes each batch in one transaction, with a note of the published rows.

The newest note shows a later session which batch was published last. The notes are in a compacted topic.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeGuard

from marshal_dagster._internal.number_runs import merged
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka import transactions
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.partitioner import Partitioner
from marshal_dagster.kafka.transactions import (
    CHOSEN_PARTITION,
    NOW,
    Headers,
    NotesReader,
    RecordRejectedError,
    Transaction,
    UnnamedRecord,
)
from marshal_dagster.outbox.backoff import MOST_IN_FLIGHT_RECORDS
from marshal_dagster.outbox.interfaces import (
    ID_HEADER,
    BatchUnsettledError,
    PublishedBatch,
    PublisherFencedError,
    Row,
    RowRange,
    RowRejectedError,
    TopicRejectedError,
)
from marshal_dagster.outbox.options import DEFAULT_OPTIONS

NOTE_VERSION: Final = 1
ID_PREFIX: Final = "marshal-outbox-"
TOPIC_PREFIX: Final = "__marshal_outbox_"
"""The beginning of the names of the harvesters' own topics. A row there could be a note that makes one skip rows."""
NOTES_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.1",
    "unclean.leader.election.enable": "false",
}
_LOOKED_AT: Final = 1_000
"""How many of the last offsets of the notes topic are read first to find the newest note."""
_TOPIC_HOLDS_S: Final = 60.0
_NOTE: Final = "note"
_NEWEST_VERSION: Final = 1_000
"""A note with a larger version is damaged, not newer."""
_NUMBERS_BELOW: Final = 2**63


class KafkaPublisher:
    """The publisher of one outbox's rows (`marshal_dagster.outbox.interfaces.Publisher`). Not thread-safe."""

    def __init__(
        self,
        connection: KafkaConnection,
        uid: str,
        notes_topic: str,
        *,
        transaction_timeout_s: float = DEFAULT_OPTIONS.transaction_timeout_s,
        partitioner: Partitioner | str = DEFAULT_OPTIONS.partitioner,
    ) -> None:
        """Configure the publisher; it connects in `begin`.

        Args:
            connection: The cluster with the notes topic and the output topics.
            uid: The unique id of the outbox.
            notes_topic: The topic of the notes.
            transaction_timeout_s: After this time, in seconds, the brokers abort a transaction whose process is gone.
                Until then, consumers wait for it.
            partitioner: A partitioner of librdkafka; by default the one that Kafka's Java clients use.

        Raises:
            ConfigurationError: The client library has no such partitioner.
        """
        self._connection = connection
        self._uid = uid
        self._notes_topic = notes_topic
        self._timeout_s = transaction_timeout_s
        self._partitioner = Partitioner.of(partitioner)
        self._topics: Topics | None = None
        self._transaction: Transaction | None = None
        self._known: dict[str, float] = {}
        """Until when each topic is assumed to exist, by the monotonic clock."""

    def begin(self) -> None:
        """Start a session (`Publisher.begin`)."""
        self._end()
        transaction = Transaction(
            self._connection,
            f"{ID_PREFIX}{self._uid}",
            id_prefix=ID_PREFIX,
            topics=[self._notes_topic],
            timeout_s=self._timeout_s,
            partitioner=self._partitioner,
        )
        try:
            transaction.__enter__()
        except transactions.ProducerFencedError as fenced:
            raise PublisherFencedError(str(fenced)) from None
        self._transaction = transaction

    def noted(self) -> PublishedBatch:
        """Return the rows of the newest note (`Publisher.noted`)."""
        with NotesReader(
            self._connection,
            self._notes_topic,
            self._topics_client,
            last=_LOOKED_AT,
            is_note=lambda key, value: key == self._uid and is_note(value),
        ) as notes:
            note = notes.newest(self._timeout_s).get(self._uid)
        return read_note(note)

    def refused(self, topics: Collection[str]) -> dict[str, str]:
        """Return the topics that cannot be written to, with the reasons (`Publisher.refused`)."""
        now_s = time.monotonic()
        found = {}
        for topic in topics:
            if self._known.get(topic, 0.0) > now_s:
                continue
            reason = self._why_not(topic)
            if reason is None:
                self._known[topic] = now_s + _TOPIC_HOLDS_S
            else:
                found[topic] = reason
        return found

    def publish(self, rows: Sequence[Row], settle: Callable[[], None]) -> None:
        """Publish rows in one transaction (`Publisher.publish`)."""
        transaction = self._transaction
        if transaction is None:
            raise BatchUnsettledError("no session has started; call `begin` first")
        try:
            transaction.begin()
            # The note comes first, so that the client adds its partition to the transaction together with the others.
            transaction.send(
                self._notes_topic,
                render_note(PublishedBatch.of(rows)),
                self._uid.encode(),
                name=_NOTE,
                partition=transactions.NOTES_PARTITION,
            )
            transaction.send_many(self._records(rows))
            transaction.flush()
        except RecordRejectedError as refused:
            if refused.name == _NOTE and len(rows) == 1:
                self._end()
                raise BatchUnsettledError(
                    f"topic {self._notes_topic!r} refuses the note of row {rows[0].id}: {refused.reason}; correct the "
                    "settings of that topic"
                ) from None
            self.begin()
            raise RowRejectedError(refused.reason, None if refused.index is None else rows[refused.index].id) from None
        except transactions.ProducerFencedError as fenced:
            self._end()
            raise PublisherFencedError(str(fenced)) from None
        except MarshalError as error:
            self._end()
            self._known.clear()
            self._raise_for_topic(rows, error)
            raise BatchUnsettledError(f"a batch of outbox rows was not published; it is retried: {error}") from None
        except BaseException:
            self._end()
            raise
        try:
            settle()
        except BaseException:
            self._end()
            raise
        self._commit(transaction)

    def _records(self, rows: Iterable[Row]) -> Iterator[UnnamedRecord]:
        for row_id, topic, key, value, headers, _ in rows:
            content = f"{self._uid}-{row_id}".encode()
            all_headers: Headers = [*headers, (ID_HEADER, content)] if headers else {ID_HEADER: content}
            yield topic, value, key, CHOSEN_PARTITION, NOW, all_headers

    def close(self) -> None:
        """Close the connections; an open transaction is aborted."""
        self._end()
        if self._topics is not None:
            self._topics.close()
            self._topics = None

    def _commit(self, transaction: Transaction) -> None:
        try:
            transaction.commit()
        except transactions.ProducerFencedError as fenced:
            self._end()
            raise PublisherFencedError(str(fenced)) from None
        except (MarshalError, RecordRejectedError) as error:
            self._end()
            raise BatchUnsettledError(f"it is unknown whether rows were published: {error}") from None
        except BaseException:
            self._end()
            raise

    def _raise_for_topic(self, rows: Iterable[Row], error: MarshalError) -> None:
        """Raise `TopicRejectedError` if a topic of these rows can no longer be written to, which may be the cause."""
        if not isinstance(error, TopicNotFoundError | AuthorizationError | UnavailableError):
            return
        for topic in dict.fromkeys(row.topic for row in rows):
            reason = self._why_not(topic)
            if reason is not None:
                self.begin()
                raise TopicRejectedError(topic, reason)

    def _why_not(self, topic: str) -> str | None:
        if topic.startswith(TOPIC_PREFIX):
            return f"topic {topic!r} is for harvesters alone: write the record to another topic"
        try:
            self._topics_client.require(on_topic(topic, Right.WRITE))
        except (TopicNotFoundError, AuthorizationError) as error:
            return str(error)
        return None

    @property
    def _topics_client(self) -> Topics:
        if self._topics is None:
            self._topics = Topics(self._connection)
        return self._topics

    def _end(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.__exit__(None, None, None)


def render_note(batch: PublishedBatch) -> bytes:
    """Return the note about these rows, as JSON with runs of consecutive ids."""
    note = {
        "version": NOTE_VERSION,
        "rows": merged([first, last] for first, last, _, _ in batch.ranges),
        "created_from_us": min(rows.created_from_us for rows in batch.ranges),
        "created_until_us": max(rows.created_until_us for rows in batch.ranges),
    }
    return json.dumps(note, separators=(",", ":")).encode()


def is_note(value: bytes | None) -> bool:
    """Return whether a value is a note of a harvester, of this or a newer version."""
    return _parsed(value) is not None


def read_note(value: bytes | None) -> PublishedBatch:
    """Parse a note of `render_note`; any other value has no rows.

    Raises `MarshalError` for a note of a newer version.
    """
    note = _parsed(value)
    if note is None:
        return PublishedBatch()
    if note["version"] > NOTE_VERSION:
        raise MarshalError(
            f"the notes topic of this outbox has a note of version {note['version']}, which a newer marshal-dagster "
            "wrote: update this one"
        )
    from_us, until_us = note.get("created_from_us", -_NUMBERS_BELOW), note["created_until_us"]
    return PublishedBatch([RowRange(first, last, from_us, until_us) for first, last in merged(sorted(note["rows"]))])


def _parsed(value: bytes | None) -> dict[str, Any] | None:
    """Return the fields of a note; None if the value is not one. In a newer note only the version is checked."""
    try:
        note = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    version = note.get("version") if isinstance(note, dict) else None
    if not _is_number(version) or not NOTE_VERSION <= version <= _NEWEST_VERSION:
        return None
    return note if version > NOTE_VERSION or _is_of_this_version(note) else None


def _is_of_this_version(note: dict[str, Any]) -> bool:
    runs = note.get("rows")
    if not isinstance(runs, list) or not all(map(_is_run, runs)):
        return False
    times = note.get("created_from_us", 0), note.get("created_until_us")
    return all(map(_is_number, times)) and sum(last - first + 1 for first, last in runs) <= MOST_IN_FLIGHT_RECORDS


def _is_run(run: object) -> bool:
    return isinstance(run, list) and len(run) == 2 and all(map(_is_number, run)) and run[0] <= run[1]  # noqa: PLR2004


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is an integer that fits into a bigint. A boolean is not an integer here."""
    return type(value) is int and -_NUMBERS_BELOW <= value < _NUMBERS_BELOW
